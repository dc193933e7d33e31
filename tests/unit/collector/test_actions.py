"""What each action does to a real model, optimizer, scheduler and scaler, and that its undo takes it back."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lanterne.clock import SystemClock
from lanterne.collector import rates
from lanterne.collector.actions import Actions
from lanterne.collector.agreement import Position
from lanterne.collector.guards.micro_batch import MicroBatch
from lanterne.collector.guards.precision import Precision
from lanterne.collector.guards.snapshots import Snapshots
from lanterne.errors import CommandRefused
from lanterne.nouns import Identity
from lanterne.settings import CollectorSettings


class Host:
    def __init__(self, folder: Path, *, scheduled: bool = False, scaled: bool = False) -> None:
        torch.manual_seed(1)
        self.settings = CollectorSettings()
        self.folder, self.step, self.events = folder, 0, []  # type: ignore[var-annotated]
        self.model: Any = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler: Any = None
        if scheduled:
            self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda s: 0.99**s)
        self.scaler: Any = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
        if self.scaler is not None:
            self.scaler.scale(torch.ones(1))

    @property
    def step_number(self) -> int:
        return self.step

    def put_event(self, name: Any, /, body: str = "", attributes: Any = None) -> None:
        self.events.append((str(name), body))

    def trace_kernels(self, steps: int = 1) -> bool:
        return False

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.randn(8, 4)).pow(2).mean().backward()
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
            self.step += 1

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten().clone() for p in self.model.parameters()])


def actions(host: Host) -> Actions:
    agent: Any = SimpleNamespace(
        clock=SystemClock(), participant=None, position=Position(), identity=Identity(job="j", rank=0)
    )
    return Actions(host, agent)  # type: ignore[arg-type]


def order(action: str, **parameters: Any) -> dict[str, Any]:
    return {"id": f"{action}-1", "action": action, "parameters": parameters}


def do(host: Host, found: Actions, action: str, **parameters: Any) -> Any:
    found.check(order(action, **parameters))
    return found.run(order(action, **parameters), host.step)


# --- learning rate -------------------------------------------------------------------------------

SCHEDULERS = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda s: 0.9**s),
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 3, gamma=0.5),
    "exponential": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 50),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o, 0.1, 1.0, 4), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
        milestones=[4],
    ),
}


def schedule(name: str, steps: int, change: Any = None, at: int = -1) -> list[float]:
    """The rates of ``steps`` steps under a scheduler, with ``change(optimizer, scheduler)`` after step ``at``."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler, seen = SCHEDULERS[name](optimizer), []
    for step in range(steps):
        optimizer.step()
        scheduler.step()
        if step == at:
            change(optimizer, scheduler)
        seen.append(float(optimizer.param_groups[0]["lr"]))
    return seen


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scaled_rate_keeps_the_shape_of_its_schedule(name: str) -> None:
    plain, halved = schedule(name, 20), schedule(name, 20, lambda o, s: rates.scale(o, s, 0.5), at=7)
    assert halved[:7] == plain[:7]
    assert halved[7:] == pytest.approx([0.5 * rate for rate in plain[7:]])


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_rate_that_jumped_in_group_and_schedule_is_set_back_for_good(name: str) -> None:
    plain = schedule(name, 20)

    def jump_and_mend(optimizer: Any, scheduler: Any) -> None:
        planned = optimizer.param_groups[0]["lr"]
        if hasattr(scheduler, "base_lrs"):
            scheduler.base_lrs = [12 * base for base in scheduler.base_lrs]
        optimizer.param_groups[0]["lr"] *= 12
        rates.put(optimizer, scheduler, planned)

    mended = schedule(name, 20, jump_and_mend, at=7)
    assert mended == pytest.approx(plain)


def test_a_schedule_that_was_right_is_left_alone() -> None:
    def jump_and_mend(optimizer: Any, scheduler: Any) -> None:
        planned = optimizer.param_groups[0]["lr"]
        optimizer.param_groups[0]["lr"] *= 12  # the schedule itself never jumped
        rates.put(optimizer, scheduler, planned)

    assert schedule("lambda", 20, jump_and_mend, at=7) == pytest.approx(schedule("lambda", 20))


@pytest.mark.parametrize("name", SCHEDULERS)
def test_undo_of_a_scaled_rate_gives_the_old_schedule_back(name: str) -> None:
    plain = schedule(name, 20)
    assert schedule(name, 20, lambda o, s: rates.scale(o, s, 0.5)(), at=7) == pytest.approx(plain)


def test_the_rates_of_other_groups_keep_their_ratio(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))], "lr": 0.002})
    effect = do(host, actions(host), "set_lr", lr=0.005)
    assert [g["lr"] for g in host.optimizer.param_groups] == pytest.approx([0.005, 0.001])
    effect.undo()
    assert [g["lr"] for g in host.optimizer.param_groups] == pytest.approx([0.01, 0.002])


def test_a_rate_far_from_present_and_plan_is_refused(tmp_path: Path) -> None:
    host = Host(tmp_path)
    with pytest.raises(CommandRefused, match="outside"):
        do(host, actions(host), "set_lr", lr=5.0)
    with pytest.raises(CommandRefused, match="not known"):
        do(host, actions(host), "set_lr", planned=True)


def test_the_planned_rate_is_taken_where_it_is_known(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.planned_lr = lambda step: 0.01  # type: ignore[attr-defined]
    host.optimizer.param_groups[0]["lr"] = 0.3
    effect = do(host, actions(host), "set_lr", planned=True, lr=0.011)
    assert effect.after == {"lr": pytest.approx(0.01)}


# --- gradients -----------------------------------------------------------------------------------


def test_skipped_steps_change_no_weight(tmp_path: Path) -> None:
    host = Host(tmp_path)
    before = host.weights()
    do(host, actions(host), "skip_batch", steps=2)
    host.train(2)
    assert torch.equal(host.weights(), before)
    host.train()
    assert not torch.equal(host.weights(), before)


def test_clipping_bounds_the_norm_that_the_optimizer_sees(tmp_path: Path) -> None:
    host, seen = Host(tmp_path), []
    found = actions(host)
    effect = do(host, found, "clip_grad_norm", max_norm=0.001)
    host.optimizer.register_step_pre_hook(
        lambda *_: seen.append(float(torch.nn.utils.get_total_norm([p.grad for p in host.model.parameters()])))
    )
    host.train(3)
    assert max(seen) <= 0.001 * 1.01
    effect.undo()
    host.train(3)
    assert max(seen[3:]) > 0.001 * 1.01


def test_a_frozen_module_stands_still_until_unfrozen(tmp_path: Path) -> None:
    host = Host(tmp_path)
    found = actions(host)
    before = host.model[0].weight.detach().clone()
    do(host, found, "freeze", module="0")
    host.train(3)
    assert torch.equal(host.model[0].weight, before)
    assert host.model[0].weight.requires_grad
    do(host, found, "unfreeze", module="0")
    host.train()
    assert not torch.equal(host.model[0].weight, before)
    with pytest.raises(CommandRefused, match="no module"):
        do(host, found, "freeze", module="nothing")


# --- scale, precision, micro-batch ---------------------------------------------------------------


def test_the_loss_scale_is_set_and_taken_back(tmp_path: Path) -> None:
    host = Host(tmp_path, scaled=True)
    effect = do(host, actions(host), "set_loss_scale", scale=64.0, growth_interval=10)
    assert (host.scaler.get_scale(), host.scaler.get_growth_interval()) == (64.0, 10)
    effect.undo()
    assert (host.scaler.get_scale(), host.scaler.get_growth_interval()) == (1024.0, 2000)


def test_without_a_scaler_the_order_is_refused(tmp_path: Path) -> None:
    host = Host(tmp_path)
    with pytest.raises(CommandRefused, match="no enabled GradScaler"):
        do(host, actions(host), "set_loss_scale", scale=64.0)


def test_precision_reaches_the_loop_through_its_guard(tmp_path: Path) -> None:
    host = Host(tmp_path)
    guard = Precision("cpu", "bfloat16")
    with guard.autocast():
        assert host.model[0](torch.ones(2, 4)).dtype is torch.bfloat16
    effect = do(host, actions(host), "set_precision", dtype="float32")
    with guard.autocast():
        assert host.model[0](torch.ones(2, 4)).dtype is torch.float32
    effect.undo()
    assert guard.dtype_name == "bfloat16"
    del guard, effect
    gc.collect()
    with pytest.raises(CommandRefused, match="does not use"):
        do(host, actions(host), "set_precision", dtype="float32")


@pytest.mark.parametrize("parts", [1, 2, 3, 8, 50])
def test_micro_batches_sum_to_the_gradient_of_the_whole(tmp_path: Path, parts: int) -> None:
    model, batch = torch.nn.Linear(4, 1), torch.randn(8, 4)
    model(batch).pow(2).mean().backward()
    whole = model.weight.grad.clone()
    model.zero_grad()
    guard = MicroBatch()
    if parts <= 64:
        do(Host(tmp_path), actions(Host(tmp_path)), "set_micro_batch", parts=parts)
    for part, share in guard.split({"x": batch}):
        (model(part["x"]).pow(2).mean() * share).backward()
    torch.testing.assert_close(model.weight.grad, whole)


# --- state ---------------------------------------------------------------------------------------


def test_rollback_gives_back_weights_moments_and_buffers_and_keeps_the_plan(tmp_path: Path) -> None:
    host = Host(tmp_path, scheduled=True)
    found = actions(host)
    host.train(3)
    do(host, found, "save_checkpoint")
    weights, mean = host.weights(), host.model[1].running_mean.clone()
    moment = host.optimizer.state[host.model[0].weight]["exp_avg"].clone()
    host.train(2)
    with torch.no_grad():
        host.model[0].weight.fill_(float("nan"))
    assert found.check(order("rollback", before_step=4)) == "snapshot of step 3"
    effect = do(host, found, "rollback", before_step=4)
    assert torch.equal(host.weights(), weights)
    assert torch.equal(host.model[1].running_mean, mean)
    assert torch.equal(host.optimizer.state[host.model[0].weight]["exp_avg"], moment)
    assert rates.current(host.optimizer) == pytest.approx(0.01 * 0.99**5)
    host.train()
    assert torch.isfinite(host.weights()).all()
    effect.undo()
    assert torch.isnan(host.model[0].weight).all()


def test_rollback_before_the_first_step_forgets_the_moments(tmp_path: Path) -> None:
    host = Host(tmp_path)
    found = Snapshots(host)
    found.take(0)
    host.train(2)
    found.restore(0)
    assert not host.optimizer.state


def test_rollback_without_a_snapshot_old_enough_is_refused(tmp_path: Path) -> None:
    host = Host(tmp_path)
    found = actions(host)
    host.train(5)
    do(host, found, "save_checkpoint")
    with pytest.raises(CommandRefused, match="no snapshot older than step 5"):
        do(host, found, "rollback", before_step=5)


def test_only_so_many_snapshots_are_held(tmp_path: Path) -> None:
    host = Host(tmp_path)
    found = Snapshots(host, keep=2)
    for step in (1, 2, 3):
        assert found.take(step) > 0
    assert (found.latest(1), found.latest(3), found.latest(9)) == (None, 1, 3)  # the oldest reaches far back


def test_savers_of_the_trainer_are_called(tmp_path: Path) -> None:
    host, saved = Host(tmp_path), []
    found = actions(host)
    found.on_save(saved.append)
    host.train(2)
    do(host, found, "save_checkpoint")
    assert saved == [2]


def test_the_device_is_measured_at_the_boundary_and_told(tmp_path: Path) -> None:
    host = Host(tmp_path)
    effect = do(host, actions(host), "probe_device")
    assert [name for name, _ in host.events] == ["device_probe"]
    assert effect.after["device"] == "cpu:0"
    assert effect.after["gemm_ms"] > 0
    assert effect.after["copy_gb_per_s"] > 0


def test_the_profiler_writes_a_trace_of_the_ordered_steps(tmp_path: Path) -> None:
    host = Host(tmp_path)
    effect = do(host, actions(host), "profile", steps=2)
    host.train(3)
    assert "Optimizer.step" in Path(effect.after["path"]).read_text()


def test_garbage_is_frozen_and_thawed(tmp_path: Path) -> None:
    host = Host(tmp_path)
    effect = do(host, actions(host), "tune_gc")
    assert gc.get_freeze_count() > 1000
    effect.undo()
    assert gc.get_freeze_count() == 0


def test_undo_needs_something_to_undo(tmp_path: Path) -> None:
    host = Host(tmp_path)
    found = actions(host)
    with pytest.raises(CommandRefused, match="nothing to take back"):
        do(host, found, "undo", of="never")
    do(host, found, "scale_lr", factor=0.5)
    do(host, found, "undo", of="scale_lr-1")
    assert rates.current(host.optimizer) == pytest.approx(0.01)
    with pytest.raises(CommandRefused, match="nothing to take back"):
        do(host, found, "undo", of="scale_lr-1")
