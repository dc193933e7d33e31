"""The two cores, compiled and in Python, write the same; hooked models can be copied and saved."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lanterne
from lanterne import native
from lanterne.blackbox import BlackBox
from lanterne.collector import core as cores
from lanterne.nouns import Event


def compiled_here() -> bool:
    try:
        cores.build()
    except (native.BuildFailed, OSError):
        return False
    return True


BOTH = ["python", pytest.param("off", marks=pytest.mark.skipif(not compiled_here(), reason="no C++ compiler here"))]


@pytest.fixture
def attach(tmp_path: Path) -> Iterator[Any]:
    def start(model: Any, optimizer: Any, tap: str, **given: Any) -> lanterne.Session:
        where = {"dir": str(tmp_path), "job": f"core-{tap}", "shipper": "none", "commands": False, "tap": tap}
        return lanterne.attach(model, optimizer, **where, **given)

    yield start
    lanterne.attach(disabled=True).close()


def events(session: lanterne.Session) -> list[Event]:
    box, out = BlackBox(session.folder, 0), []
    while found := box.drain():
        out += found
    return out


def train(attach: Any, tap: str) -> tuple[lanterne.Session, list[Event]]:
    """20 steps of two micro-batches, ten forward calls a step, integer tokens, clipping, eval, one infinite loss."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Embedding(10, 4), torch.nn.Flatten(), torch.nn.Linear(12, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    session = attach(model, optimizer, tap, scheduler=scheduler, flops_per_sample=1e6, peak_flops=1e9)
    batches = [torch.arange(i, i + 6).remainder(10).reshape(2, 3) for i in range(40)]
    for i, x in enumerate(session.steps(batches)):
        for _ in range(9):
            loss = model(x).pow(2).mean()
        if i == 20:
            loss = loss * float("inf")
        loss.backward()
        model.eval()
        model(x)
        model.train()
        if i % 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        session.log(perplexity=2.0)
    session.close()
    return session, events(session)


def told(found: list[Event]) -> list[tuple[Any, ...]]:
    """What does not depend on the clock."""
    timed = ("cpu.time", "throughput", "mfu", "gc.time", "collector.time", "update_ratio")
    keep = [e for e in found if not str(e.name).endswith(timed) and str(e.name) not in {"attached", "seed", "gc_pause"}]
    return sorted((e.step, str(e.kind), str(e.name), repr(e.value), repr(sorted(e.attributes.items()))) for e in keep)


@pytest.mark.skipif(not compiled_here(), reason="no C++ compiler here: there is only the core in Python")
def test_both_cores_tell_the_same(attach: Any) -> None:
    one, by_python = train(attach, "python")
    two, by_compiled = train(attach, "off")
    assert isinstance(one.core, cores.PythonCore)
    assert not isinstance(two.core, cores.PythonCore)
    ours, theirs = told(by_python), told([e for e in by_compiled if e.name != "source_absent"])
    ours = [line for line in ours if "source_absent" not in line]
    assert len(ours) > 400
    assert ours == theirs
    names = {str(e.name) for e in by_compiled}
    assert {"training.mfu", "training.tokens", "training.loss_spikeness", "training.lr_drift", "eval"} <= names


@pytest.mark.parametrize("tap", BOTH)
def test_a_hooked_model_can_be_copied_and_saved_whole(attach: Any, tap: str, tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = attach(model, optimizer, tap)
    averaged, saved = copy.deepcopy(model), io.BytesIO()
    torch.save(model, saved)
    for _ in session.steps(range(4)):
        model(torch.ones(2, 3)).mean().backward()
        averaged(torch.ones(2, 3))  # another model: no forward of this training
        optimizer.step()
    session.close()
    assert len([e for e in events(session) if e.name == "forward"]) == 4
    saved.seek(0)
    assert torch.load(saved, weights_only=False)(torch.ones(1, 3)).shape == (1, 1)
    path = tmp_path / "model.pt"
    path.write_bytes(saved.getvalue())
    code = "import sys, torch; print(torch.load(sys.argv[1], weights_only=False)(torch.ones(1, 3)).shape)"
    code += "; assert not any(m.startswith('lanterne') for m in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == 0


@pytest.mark.parametrize("tap", BOTH)
def test_hooks_leave_a_compiled_model_whole(attach: Any, tap: str) -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = attach(model, optimizer, tap)
    model.compile(backend="eager", fullgraph=True)
    for _ in session.steps(range(3)):
        model(torch.ones(2, 3)).mean().backward()
        optimizer.step()
    session.close()
    assert [e.step for e in events(session) if e.name == "training.loss"] == [0, 1, 2]
