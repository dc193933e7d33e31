"""One process, one real training loop: what is seen, and that nothing is felt."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lanterne
from lanterne.blackbox import BlackBox
from lanterne.errors import UsageError
from lanterne.nouns import Event, Kind

QUIET: dict[str, Any] = {"shipper": "none", "commands": False, "tap": "off"}


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[dict[str, Any]]:
    yield {**QUIET, "dir": str(tmp_path), "job": "unit"}
    lanterne.attach(disabled=True).close()


def events(session: lanterne.Session) -> list[Event]:
    box, out = BlackBox(session.folder, 0), []
    while found := box.drain():
        out += found
    return out


def series(found: list[Event], name: str) -> dict[int, float]:
    return {e.step: e.value for e in found if e.name == name and e.value is not None and not e.attributes}


def parts(lr: float = 0.1) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    return model, torch.optim.SGD(model.parameters(), lr=lr)


def loader(samples: int = 80, batch: int = 4) -> torch.utils.data.DataLoader[Any]:
    data = torch.utils.data.TensorDataset(torch.randn(samples, 6, generator=torch.Generator().manual_seed(1)))
    return torch.utils.data.DataLoader(data, batch_size=batch)


def test_a_plain_loop_shows_steps_phases_loss_and_rate(settings: dict[str, Any]) -> None:
    model, optimizer = parts()
    session = lanterne.attach(model, optimizer, **settings, grad_norm_every=5)
    assert lanterne.attach(model, optimizer) is session
    kept = []
    for (x,) in session.steps(loader()):
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        session.log(loss=loss)
        kept.append(loss.item())
    session.close()
    session.close()
    found = events(session)
    spans = [e for e in found if e.kind is Kind.STEP]
    assert [e.step for e in spans] == list(range(20))
    for phase in ("data_wait", "forward", "backward", "optimizer"):
        assert [e.step for e in found if e.kind is Kind.PHASE and e.name == phase][:20] == list(range(20)), phase
    assert list(series(found, "training.loss").values()) == pytest.approx(kept, rel=1e-6)
    assert set(series(found, "training.lr").values()) == {0.1}
    norms = series(found, "training.grad_norm")  # every fifth step, or rarer: steps of this toy are very short
    assert 0 in norms
    assert all(step % 5 == 0 and norm > 0 for step, norm in norms.items())
    assert series(found, "training.samples")[3] == 4
    batches = [e for e in found if e.name == "batch"]
    assert batches[1].attributes["sample_ids"] == "4,5,6,7"
    assert len({e.attributes["fingerprint"] for e in batches}) == 20
    assert {"attached", "seed", "closed"} <= {e.name for e in found}
    assert session.folder.joinpath("rank-0.json").stat().st_mode & 0o077 == 0
    assert BlackBox(session.folder, 0).counts() == {}


def test_a_loop_that_marks_nothing_ends_its_steps_at_the_optimizer(settings: dict[str, Any]) -> None:
    model, optimizer = parts()
    session = lanterne.attach(**settings)
    for (x,) in loader():
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    session.close()
    found = events(session)
    assert [e.step for e in found if e.kind is Kind.STEP] == list(range(20))
    assert len([e for e in found if e.name == "forward"]) == 19  # the model was found in the first step
    assert len(series(found, "training.loss")) == 20


def test_accumulated_micro_batches_are_one_step(settings: dict[str, Any]) -> None:
    model, optimizer = parts()
    session = lanterne.attach(model, optimizer, **settings)
    for i, (x,) in enumerate(session.steps(loader())):
        (model(x).mean() / 4).backward()
        if i % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    session.close()
    found = events(session)
    assert [e.step for e in found if e.kind is Kind.STEP] == list(range(5))
    assert set(series(found, "training.samples").values()) == {16}
    assert len([e for e in found if e.name == "backward"]) == 20


def test_a_rate_that_was_tampered_with_drifts_from_the_plan(settings: dict[str, Any]) -> None:
    model, optimizer = parts(lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 0.9**s)
    session = lanterne.attach(model, optimizer, scheduler=scheduler, **settings)
    for i, (x,) in enumerate(session.steps(loader())):
        model(x).mean().backward()
        optimizer.step()
        scheduler.step()
        if i == 9:
            scheduler.base_lrs = [12.0]
            optimizer.param_groups[0]["lr"] *= 12.0
    session.close()
    found = events(session)
    assert series(found, "training.lr_planned")[19] == pytest.approx(0.9**19)
    drift = series(found, "training.lr_drift")
    assert all(drift[s] == pytest.approx(0.0, abs=1e-9) for s in range(10))
    assert all(drift[s] == pytest.approx(11.0) for s in range(10, 20))


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 15),
        lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [3, 11]),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.3, total_steps=40),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o, [torch.optim.lr_scheduler.LinearLR(o, 0.1, 1.0, 5), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [5]
        ),
    ],
)
def test_the_plan_follows_torchs_own_schedulers(settings: dict[str, Any], make: Any) -> None:
    model, optimizer = parts()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *a, **k: None)  # SequentialLR warns about its own inner calls
        scheduler = make(optimizer)
    session = lanterne.attach(model, optimizer, scheduler=scheduler, **settings)
    for (x,) in session.steps(loader()):
        model(x).mean().backward()
        optimizer.step()
        scheduler.step()
    session.close()
    found = events(session)
    planned, used = series(found, "training.lr_planned"), series(found, "training.lr")
    assert len(planned) == 20
    assert planned == pytest.approx(used)


def test_an_overflow_is_told_with_both_scales(settings: dict[str, Any]) -> None:
    model, optimizer = parts()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    session = lanterne.attach(model, optimizer, scaler=scaler, **settings)
    for i, (x,) in enumerate(session.steps(loader())):
        loss = model(x).mean() * (float("inf") if i == 7 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    session.close()
    found = events(session)
    (overflow,) = [e for e in found if e.name == "overflow"]
    assert (overflow.step, overflow.attributes) == (7, {"scale_before": 1024, "scale_after": 512})
    assert [e.step for e in found if e.kind is Kind.STEP] == list(range(20))
    assert abs(series(found, "training.loss")[3]) < 10  # the loss, not the scaled one


def test_a_checkpoint_that_was_damaged_is_found(settings: dict[str, Any], tmp_path: Path) -> None:
    model, optimizer = parts()
    session = lanterne.attach(model, optimizer, **settings)
    good, bad = tmp_path / "good.pt", tmp_path / "bad.pt"
    for path in (good, bad):
        torch.save({"x": torch.randn(50_000)}, path)
    with bad.open("r+b") as file:
        file.seek(bad.stat().st_size // 2)
        file.write(b"\xff" * 4096)
    session.close()
    found = events(session)
    saved = {e.attributes["path"]: e.attributes["bytes"] for e in found if e.name == "checkpoint_saved"}
    assert saved == {str(good): good.stat().st_size, str(bad): bad.stat().st_size}
    verified = {e.attributes["path"]: e.attributes["ok"] for e in found if e.name == "checkpoint_verified"}
    assert verified == {str(good): True, str(bad): False}
    assert [e.name for e in found if e.kind is Kind.PHASE] == ["checkpoint", "checkpoint"]


def test_disabled_costs_nothing_and_changes_nothing(settings: dict[str, Any], tmp_path: Path) -> None:
    before = (torch.autograd.backward, torch.save, torch.nn.utils.clip_grad_norm_)
    session = lanterne.attach(**settings, disabled=True)
    assert list(session.steps([1, 2])) == [1, 2]
    session.log(loss=1.0)
    with session.phase("eval"):
        session.step()
    session.close()
    assert (torch.autograd.backward, torch.save, torch.nn.utils.clip_grad_norm_) == before
    assert not list(tmp_path.iterdir())


def test_close_gives_every_hook_back(settings: dict[str, Any]) -> None:
    before = (torch.autograd.backward, torch.save, torch.nn.utils.clip_grad_norm_, sys.excepthook)
    model, optimizer = parts()
    session = lanterne.attach(model, optimizer, **settings)
    assert torch.autograd.backward is not before[0]
    session.close()
    assert (torch.autograd.backward, torch.save, torch.nn.utils.clip_grad_norm_, sys.excepthook) == before
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_a_folder_that_cannot_be_made_is_no_reason_to_stop(
    settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    session = lanterne.attach(**{**settings, "dir": str(tmp_path / "file")})
    assert list(session.steps([1])) == [1]
    assert "not attached" in capsys.readouterr().err


@pytest.mark.parametrize(("endpoint", "told"), [("collector:4317", True), ("http://", True), ("http://h:4318", False)])
def test_an_endpoint_that_is_none_is_told_and_the_run_is_recorded(
    settings: dict[str, Any], capsys: pytest.CaptureFixture[str], endpoint: str, told: bool
) -> None:
    session = lanterne.attach(**settings, endpoint=endpoint)
    session.step()
    session.close()
    assert ("is no http(s)://host:port" in capsys.readouterr().err) is told
    assert events(session)


def test_wrong_settings_are_told(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="ring_record_count"):
        lanterne.attach(**settings, ring_record_count=1)


LOOP = """
import json, sys, torch, lanterne
torch.manual_seed(3)
if sys.argv[1] == "on":
    quiet = {"job": "same", "shipper": "none", "commands": False, "tap": "off"}
    session_of = lambda m, o: lanterne.attach(m, o, dir=sys.argv[2], grad_norm_every=1, **quiet)
else:
    session_of = lambda m, o: lanterne.attach(disabled=True)
model = torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(640, 6)), batch_size=4, shuffle=True)
session = session_of(model, optimizer)
for (x,) in session.steps(data):
    loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    session.log(loss=loss)
print([p.detach().numpy().tobytes().hex() for p in model.parameters()], torch.rand(1).item())
"""


def test_training_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    def run(mode: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", LOOP, mode, str(tmp_path)], capture_output=True, text=True, check=True, timeout=120
        )
        return done.stdout

    assert run("on") == run("off")
    assert (tmp_path / "same" / "0" / "rank-0.ring").exists()


def test_an_exception_ends_the_process_as_before_and_is_kept(tmp_path: Path) -> None:
    script = (
        "import lanterne, sys\n"
        "lanterne.attach(dir=sys.argv[1], job='boom', shipper='none', commands=False, tap='off')\n"
        "raise RuntimeError('DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes')\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "RuntimeError" in done.stderr
    notes = [json.loads(x) for x in (tmp_path / "boom" / "0" / "rank-0.notes").read_text("utf-8").splitlines()]
    by_name = {note["name"]: note for note in notes}
    assert by_name["exception"]["attributes"]["type"] == "builtins.RuntimeError"
    assert "allocate 9 bytes" in by_name["out_of_memory"]["attributes"]["message"]
    assert by_name["closed"]["attributes"]["failed"] is True
