"""What a session tells beyond the plain loop: rates by group, the order of calls around a scaler, compilations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lanterne
from lanterne.blackbox import BlackBox
from lanterne.collector.sources.schedule import Plan
from lanterne.nouns import Event, Kind


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[dict[str, Any]]:
    yield {"shipper": "none", "commands": False, "tap": "off", "dir": str(tmp_path), "job": "unit"}
    lanterne.attach(disabled=True).close()


def events(session: lanterne.Session) -> list[Event]:
    box, out = BlackBox(session.folder, 0), []
    while found := box.drain():
        out += found
    return out


def batches(n: int, size: int = 4) -> list[torch.Tensor]:
    return list(torch.randn(n, size, 6, generator=torch.Generator().manual_seed(1)))


def test_every_parameter_group_tells_its_rate_and_drift(settings: dict[str, Any]) -> None:
    body, head = torch.nn.Linear(6, 8), torch.nn.Linear(8, 1)
    groups = [{"params": body.parameters(), "lr": 0.1}, {"params": head.parameters(), "lr": 0.02}]
    optimizer = torch.optim.SGD(groups)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    model = torch.nn.Sequential(body, head)
    session = lanterne.attach(model, optimizer, scheduler=scheduler, **settings)
    for step, x in enumerate(session.steps(batches(31))):
        model(x).pow(2).mean().backward()
        optimizer.step()
        scheduler.step()
        if step == 14:
            optimizer.param_groups[1]["lr"] *= 3
    session.close()
    told = [e for e in events(session) if e.attributes.get("lanterne.label") == "group 1"]
    drift = {e.step: e.value for e in told if e.name == "training.lr_drift"}
    assert drift == {0: pytest.approx(0), 10: pytest.approx(0), 20: pytest.approx(2), 30: pytest.approx(2)}
    rates = {e.step: e.value for e in told if e.name == "training.lr"}
    assert rates[0] == 0.02
    assert {e.step for e in told if e.name == "training.lr_planned"} == {0, 10, 20, 30}


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 7, eta_min=0.01),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda s: min(1.0, s / 10)),
        lambda o: torch.optim.lr_scheduler.PolynomialLR(o, 12, 2.0),
        lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.1, 1.0, 9),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 5),
        lambda o: torch.optim.lr_scheduler.MultiplicativeLR(o, lambda s: 0.97),
    ],
)
def test_a_closed_form_gives_what_stepping_gives(make: Any) -> None:
    optimizer = torch.optim.SGD([{"params": [torch.ones(1)], "lr": 0.5}, {"params": [torch.ones(1)], "lr": 0.2}])
    scheduler = make(optimizer)
    for _ in range(5):  # attached in the middle of a run
        optimizer.step()
        scheduler.step()
    plan = Plan(scheduler, optimizer)
    for _ in range(40):
        assert plan.rates() == pytest.approx([g["lr"] for g in optimizer.param_groups])
        optimizer.step()
        scheduler.step()


def scaled_run(settings: dict[str, Any], *, unscale: bool) -> list[Event]:
    model = torch.nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    session = lanterne.attach(model, optimizer, scaler=scaler, **settings)
    for x in session.steps(batches(6)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x).pow(2).mean()
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    session.close()
    return events(session)


@pytest.mark.parametrize(
    ("unscale", "order"),
    [(True, "scale,backward,unscale,clip,step,update"), (False, "scale,backward,clip,step,update")],
)
def test_the_order_of_calls_around_the_scaler_is_told_once(settings: dict[str, Any], unscale: bool, order: str) -> None:
    told = [(e.step, e.attributes["calls"]) for e in scaled_run(settings, unscale=unscale) if e.name == "amp_calls"]
    assert told == [(1, order)]


def test_a_frame_that_compiles_again_and_again_is_told(settings: dict[str, Any]) -> None:
    torch._dynamo.reset()
    model = torch.nn.Linear(6, 1)
    compiled = torch.compile(lambda x, word: model(x) * len(word), backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = lanterne.attach(model, optimizer, **settings)
    for step, x in enumerate(session.steps(batches(5))):
        compiled(x, "x" * (step + 1)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    session.close()
    found = events(session)
    assert [e.step for e in found if e.kind is Kind.PHASE and e.name == "compile"] == [0, 1, 2, 3, 4]
    told = [(e.step, e.attributes["times"]) for e in found if e.name == "recompile"]
    assert told == [(2, 3), (3, 4), (4, 5)]
    torch._dynamo.reset()


@pytest.mark.parametrize("given", ["model", "compiled", "nothing"])
def test_a_compiled_model_trains_as_without_us(settings: dict[str, Any], given: str) -> None:
    torch._dynamo.reset()
    losses: dict[bool, list[float]] = {}
    for attached in (False, True):
        torch.manual_seed(2)
        model: Any = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = torch.compile(model, backend="eager", fullgraph=True)
        named = {"model": model, "compiled": run, "nothing": None}[given]
        session = lanterne.attach(named, **settings, disabled=not attached)
        losses[attached] = []
        for x in session.steps(batches(6)):
            loss = run(x).pow(2).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses[attached].append(loss.item())
        session.close()
        torch._dynamo.reset()
    assert losses[True] == losses[False]
    found = events(session)
    assert [e.step for e in found if e.name == "backward"] == list(range(6))
    forward = [e.step for e in found if e.name == "forward"]
    assert forward == {"model": [], "compiled": list(range(6)), "nothing": list(range(1, 6))}[given]


def test_a_compiled_optimizer_step_is_left_alone(settings: dict[str, Any]) -> None:
    torch._dynamo.reset()
    model = torch.nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = lanterne.attach(model, optimizer, **settings)
    step = torch.compile(optimizer.step, backend="eager")
    for x in batches(4):
        loss = model(x).pow(2).mean()
        loss.backward()
        step()
        session.log(loss=loss)
        session.step()
        optimizer.zero_grad()
    session.close()
    assert [e.step for e in events(session) if e.kind is Kind.STEP] == list(range(4))
    torch._dynamo.reset()
