"""What an order does inside the trainer. Each action can refuse beforehand, says before and after, and most undo.

``Actions.check`` runs when the rank votes: what cannot be done on one rank is done on none. ``Actions.run``
runs at the agreed step boundary. Bounds live in ``lanterne.orders.ACTIONS``; the effects in docs/actions.md.
"""

from __future__ import annotations

import gc
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lanterne import limits
from lanterne.collector import rates
from lanterne.collector.devices import TRAINER_SIZES, current, measure
from lanterne.collector.guards import micro_batch, precision
from lanterne.collector.guards.io_weight import set_io_weight, weight_file
from lanterne.collector.guards.snapshots import Snapshots
from lanterne.errors import CommandRefused
from lanterne.nouns import EventName, Phase

if TYPE_CHECKING:
    import torch

    from lanterne.collector.commands import CommandAgent, Host

HOLD_POLL_S = 0.02


@dataclass(slots=True)
class Effect:
    """What an action changed. ``undo`` takes it back; ``then`` runs after the effect was told."""

    before: Any = None
    after: Any = None
    says: str = ""
    undo: Callable[[], None] | None = None
    then: Callable[[], None] | None = None


class Actions:
    """The actions of one session; ``agent`` is used by ``pause`` to go on taking orders while it holds."""

    def __init__(self, host: Host, agent: CommandAgent) -> None:
        self.host, self.agent = host, agent
        self.snapshots = Snapshots(host, keep=host.settings.snapshot_keep)
        self._effects: dict[str, Effect] = {}
        self._handles: list[Any] = []
        self._resume = threading.Event()
        self._savers: list[Callable[[int], None]] = []

    # --- what a trainer may add ------------------------------------------------------------------

    def on_save(self, saver: Callable[[int], None]) -> None:
        """Call ``saver(step)`` on every rank when ``save_checkpoint`` is ordered."""
        self._savers.append(saver)

    def snapshot(self, step: int) -> None:
        """At each step boundary: a snapshot every ``snapshot_every`` steps, unless a parameter is not finite."""
        if step % self.host.settings.snapshot_every == 0 and self.snapshots.finite():
            self.snapshots.take(step)

    # --- entry points ----------------------------------------------------------------------------

    def check(self, order: Mapping[str, Any]) -> str:
        """Raise CommandRefused when this rank cannot do it; returns the state that all ranks must share."""
        check = getattr(self, f"_check_{order['action']}", None)
        return "" if check is None else str(check(order["parameters"]) or "")

    def run(self, order: Mapping[str, Any], step: int) -> Effect:
        """Do it. Raises whatever the trainer's objects raise."""
        effect: Effect = getattr(self, f"_do_{order['action']}")(order["parameters"], step)
        self._effects[str(order["id"])] = effect
        return effect

    def close(self) -> None:
        self._resume.set()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # --- learning rate ---------------------------------------------------------------------------

    def _optimizer(self) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer | None = getattr(self.host, "optimizer", None)
        if optimizer is None:
            raise CommandRefused("no optimizer was given to attach")
        return optimizer

    def _check_set_lr(self, parameters: Mapping[str, Any]) -> None:
        self._wanted_lr(parameters, self.host.step_number)

    def _wanted_lr(self, parameters: Mapping[str, Any], step: int) -> float:
        current, planned = rates.current(self._optimizer()), self._planned(step)
        wanted = planned if parameters.get("planned") and planned is not None else parameters.get("lr")
        if wanted is None:
            raise CommandRefused("set_lr: the planned rate of the step is not known here and no lr was given")
        low, high = limits.LR_FACTOR_MIN, limits.LR_FACTOR_MAX
        references = [rate for rate in (current, planned) if rate]
        if not any(low * rate <= wanted <= high * rate for rate in references):
            told = ", ".join(f"{rate:.3g}" for rate in references)
            raise CommandRefused(f"set_lr: {wanted:.3g} is outside {low:g} to {high:g} times {told} (now, planned)")
        return float(wanted)

    def _planned(self, step: int) -> float | None:
        planned = getattr(self.host, "planned_lr", None)
        found = planned(step) if callable(planned) else None
        return None if found is None else float(found)

    def _do_set_lr(self, parameters: Mapping[str, Any], step: int) -> Effect:
        optimizer, scheduler = self._optimizer(), getattr(self.host, "scheduler", None)
        before = rates.current(optimizer)
        undo = rates.put(optimizer, scheduler, self._wanted_lr(parameters, step))
        return Effect({"lr": before}, {"lr": rates.current(optimizer)}, undo=undo)

    def _check_scale_lr(self, parameters: Mapping[str, Any]) -> None:
        self._optimizer()

    def _do_scale_lr(self, parameters: Mapping[str, Any], step: int) -> Effect:
        optimizer, scheduler = self._optimizer(), getattr(self.host, "scheduler", None)
        before = rates.current(optimizer)
        undo = rates.scale(optimizer, scheduler, float(parameters["factor"]))
        return Effect({"lr": before}, {"lr": rates.current(optimizer)}, undo=undo)

    # --- gradients -------------------------------------------------------------------------------

    def _hook(self, before_step: Callable[[list[torch.nn.Parameter]], bool]) -> Callable[[], None]:
        """Call ``before_step(parameters)`` ahead of each optimizer step while it returns True; returns the undo."""
        optimizer = self._optimizer()

        def hook(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
            if not before_step([p for g in optimizer.param_groups for p in g["params"]]):
                handle.remove()

        handle = optimizer.register_step_pre_hook(hook)
        self._handles.append(handle)
        return handle.remove

    def _check_clip_grad_norm(self, parameters: Mapping[str, Any]) -> None:
        self._optimizer()

    def _do_clip_grad_norm(self, parameters: Mapping[str, Any], step: int) -> Effect:
        import torch

        left = [int(parameters.get("steps", limits.STEP_MAX))]
        own = getattr(self.host.model, "clip_grad_norm_", None)  # FSDP clips over its shards

        def clip(found: list[torch.nn.Parameter]) -> bool:
            left[0] -= 1
            if callable(own):
                own(float(parameters["max_norm"]))
            else:
                torch.nn.utils.clip_grad_norm_(found, float(parameters["max_norm"]))
            return left[0] > 0

        return Effect(None, {"max_norm": parameters["max_norm"]}, undo=self._hook(clip))

    def _check_skip_batch(self, parameters: Mapping[str, Any]) -> None:
        self._optimizer()

    def _do_skip_batch(self, parameters: Mapping[str, Any], step: int) -> Effect:
        left = [int(parameters["steps"])]

        def skip(found: list[torch.nn.Parameter]) -> bool:
            left[0] -= 1
            for parameter in found:
                parameter.grad = None
            return left[0] > 0

        return Effect({"skip": 0}, {"skip": left[0]}, undo=self._hook(skip))

    def _module(self, parameters: Mapping[str, Any]) -> torch.nn.Module:
        model = self.host.model
        for name, module in () if model is None else model.named_modules():
            if name == parameters["module"] or name.removeprefix("module.") == parameters["module"]:
                found: torch.nn.Module = module
                return found
        raise CommandRefused(f"no module {parameters['module']!r} in the model")

    _check_freeze = _check_unfreeze = _module

    def _do_freeze(self, parameters: Mapping[str, Any], step: int) -> Effect:
        """The gradients still take part in the reduction (a frozen DDP bucket would hang); the step ignores them."""
        frozen = {id(p) for p in self._module(parameters).parameters()}

        def drop(found: list[torch.nn.Parameter]) -> bool:
            for parameter in found:
                if id(parameter) in frozen:
                    parameter.grad = None
            return True

        after = {"frozen": parameters["module"], "parameters": len(frozen)}
        effect = Effect(None, after, undo=self._hook(drop))
        self._effects[f"freeze:{parameters['module']}"] = effect
        return effect

    def _do_unfreeze(self, parameters: Mapping[str, Any], step: int) -> Effect:
        earlier = self._effects.pop(f"freeze:{parameters['module']}", None)
        if earlier is None or earlier.undo is None:
            return Effect(says=f"{parameters['module']} was not frozen by an order")
        earlier.undo()
        return Effect(earlier.after, None, undo=lambda: void(self._do_freeze(parameters, step)))

    # --- loss scale and precision ----------------------------------------------------------------

    def _check_set_loss_scale(self, parameters: Mapping[str, Any]) -> None:
        scaler = getattr(self.host, "scaler", None)
        if scaler is None or not scaler.is_enabled():
            raise CommandRefused("set_loss_scale: no enabled GradScaler was given to attach")

    def _do_set_loss_scale(self, parameters: Mapping[str, Any], step: int) -> Effect:
        scaler: Any = getattr(self.host, "scaler", None)
        before = scaler.state_dict()
        wanted = before | {"scale": float(parameters["scale"]), "_growth_tracker": 0}
        wanted["growth_interval"] = int(parameters.get("growth_interval", before["growth_interval"]))
        scaler.load_state_dict(wanted)
        return Effect(
            {"scale": before["scale"]}, {"scale": wanted["scale"]}, undo=lambda: scaler.load_state_dict(before)
        )

    def _check_set_precision(self, parameters: Mapping[str, Any]) -> None:
        if precision.active() is None:
            raise CommandRefused("set_precision: the loop does not use lanterne.collector.guards.precision.Precision")

    def _do_set_precision(self, parameters: Mapping[str, Any], step: int) -> Effect:
        guard = precision.active()
        if guard is None:
            raise CommandRefused("set_precision: the Precision guard is gone")
        before = guard.dtype_name
        guard.set(str(parameters["dtype"]))
        return Effect({"dtype": before}, {"dtype": guard.dtype_name}, undo=lambda: guard.set(before))

    def _check_set_micro_batch(self, parameters: Mapping[str, Any]) -> None:
        if micro_batch.active() is None:
            raise CommandRefused("set_micro_batch: the loop does not use lanterne.collector.guards.micro_batch")

    def _do_set_micro_batch(self, parameters: Mapping[str, Any], step: int) -> Effect:
        guard = micro_batch.active()
        if guard is None:
            raise CommandRefused("set_micro_batch: the MicroBatch guard is gone")
        before, guard.parts = guard.parts, int(parameters["parts"])
        return Effect({"parts": before}, {"parts": guard.parts}, undo=lambda: setattr(guard, "parts", before))

    # --- state -----------------------------------------------------------------------------------

    def _do_save_checkpoint(self, parameters: Mapping[str, Any], step: int) -> Effect:
        size = self.snapshots.take(step)
        for saver in self._savers:
            saver(step)
        return Effect(None, {"snapshot": step, "bytes": size})

    def _check_rollback(self, parameters: Mapping[str, Any]) -> str:
        found = self.snapshots.latest(int(parameters["before_step"]))
        if found is None:
            raise CommandRefused(f"rollback: no snapshot older than step {parameters['before_step']} on this rank")
        return f"snapshot of step {found}"

    def _do_rollback(self, parameters: Mapping[str, Any], step: int) -> Effect:
        found = self.snapshots.latest(int(parameters["before_step"]))
        if found is None:
            raise CommandRefused("rollback: the snapshot is gone")
        undo = self.snapshots.restore(found)
        if (gradients := getattr(self.host, "gradients", None)) is not None:
            gradients.recheck()
        return Effect({"state": f"step {step}"}, {"state": f"step {found}"}, undo=undo)

    def _check_set_io_weight(self, parameters: Mapping[str, Any]) -> None:
        weight_file()

    def _do_set_io_weight(self, parameters: Mapping[str, Any], step: int) -> Effect:
        before, undo = set_io_weight(int(parameters["weight"]))
        return Effect({"io_weight": before}, {"io_weight": int(parameters["weight"])}, undo=undo)

    # --- flow ------------------------------------------------------------------------------------

    def _do_pause(self, parameters: Mapping[str, Any], step: int) -> Effect:
        self._resume.clear()
        hold_ns = int(float(parameters["max_s"]) * 1e9)
        return Effect(
            {"paused": False}, {"paused": True}, undo=self._resume.set, then=lambda: self._hold(step, hold_ns)
        )

    def _pause(self, step: int, hold_ns: int) -> None:
        """Declared as a long phase, so that a pause is not taken for a hang."""
        with self.host.phase(Phase.EVAL):
            self._hold(step, hold_ns)

    def _hold(self, step: int, hold_ns: int) -> None:
        """Stay at this boundary; orders that arrive meanwhile are carried out here."""
        agent = self.agent
        participant, until = agent.participant, agent.clock.monotonic_ns() + hold_ns
        agent.position.paused_at = step
        try:
            while not self._resume.wait(HOLD_POLL_S) and agent.clock.monotonic_ns() < until:
                if participant is not None and participant.next_target <= step:
                    agent.carry_out(participant, step)
        finally:
            agent.position.paused_at = -1
        if participant is not None and participant.next_target <= step:
            agent.carry_out(participant, step)

    def _do_resume(self, parameters: Mapping[str, Any], step: int) -> Effect:
        paused = self.agent.position.paused_at >= 0
        self._resume.set()
        return Effect({"paused": paused}, {"paused": False})

    def _do_stop(self, parameters: Mapping[str, Any], step: int) -> Effect:
        code = int(parameters["exit_code"])

        def leave() -> None:
            raise SystemExit(code)

        return Effect(None, {"exit_code": code}, then=leave)

    def _check_undo(self, parameters: Mapping[str, Any]) -> None:
        earlier = self._effects.get(parameters["of"])
        if earlier is None or earlier.undo is None:
            raise CommandRefused(f"undo: nothing to take back of order {parameters['of']!r} on this rank")

    def _do_undo(self, parameters: Mapping[str, Any], step: int) -> Effect:
        earlier = self._effects[parameters["of"]]
        if earlier.undo is not None:
            earlier.undo()
        earlier.undo = None
        return Effect(earlier.after, earlier.before)

    # --- looking ---------------------------------------------------------------------------------

    def _do_empty_cache(self, parameters: Mapping[str, Any], step: int) -> Effect:
        cuda: Any = import_module("torch.cuda")
        used = cuda.is_available() and cuda.is_initialized()
        before = cuda.memory_reserved() if used else 0
        freed = gc.collect()
        if used:
            cuda.empty_cache()
        after = cuda.memory_reserved() if used else 0
        return Effect({"reserved_bytes": before}, {"reserved_bytes": after}, says=f"{freed} objects collected")

    def _do_tune_gc(self, parameters: Mapping[str, Any], step: int) -> Effect:
        before = gc.get_freeze_count()
        gc.freeze()
        return Effect({"frozen_objects": before}, {"frozen_objects": gc.get_freeze_count()}, undo=gc.unfreeze)

    def _do_profile(self, parameters: Mapping[str, Any], step: int) -> Effect:
        if self.host.trace_kernels(int(parameters["steps"])):
            return Effect(None, {"steps": int(parameters["steps"]), "with": "the kernel probe"})
        import torch

        optimizer, left = self._optimizer(), [int(parameters["steps"])]
        path = Path(self.host.folder) / f"profile-rank-{self.agent.identity.rank}-step-{step}.json"
        profiler = torch.profiler.profile()
        profiler.start()

        def count(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
            left[0] -= 1
            if left[0] == 0:
                handle.remove()
                profiler.stop()
                profiler.export_chrome_trace(str(path))

        handle = optimizer.register_step_post_hook(count)
        return Effect(None, {"path": str(path), "steps": left[0]})

    def _do_probe_device(self, parameters: Mapping[str, Any], step: int) -> Effect:
        """In this process, since the device may be its alone; tens of milliseconds once the device is idle."""
        found = asdict(measure(*current(), sizes=TRAINER_SIZES))
        said = {name: value for name, value in found.items() if name == "device" or value}
        self.host.put_event(EventName.DEVICE_PROBE, attributes=said)
        return Effect(None, said)

    def _do_collect_stacks(self, parameters: Mapping[str, Any], step: int) -> Effect:
        text = all_stacks(threading.enumerate())
        self.host.put_event(EventName.STACKS, text)
        return Effect(None, {"bytes": len(text)})


def all_stacks(threads: Iterable[threading.Thread]) -> str:
    """The Python stacks of ``threads``, at most STACK_BYTES_MAX characters."""
    frames = sys._current_frames()
    parts = []
    for thread in threads:
        frame = frames.get(thread.ident or -1)
        if frame is not None:
            parts.append(f"Thread {thread.name}\n" + "".join(traceback.format_stack(frame)))
    return "\n".join(parts)[: limits.STACK_BYTES_MAX]


def void(_: object) -> None:
    """Drop a value where a call must return nothing."""
