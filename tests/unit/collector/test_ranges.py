"""Shares of narrow formats, and the optimizer's settings, as the hooks of a real loop tell them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import lanterne
from lanterne.blackbox import BlackBox
from lanterne.collector.sources.ranges import NARROW, scaled_to, settings_of, shares

DTYPES = {"fp16": torch.float16, "e4m3": torch.float8_e4m3fn}


@pytest.mark.parametrize("name", list(NARROW))
def test_shares_are_what_the_cast_does(name: str) -> None:
    top, least = NARROW[name]
    assert top == torch.finfo(DTYPES[name]).max
    assert least == torch.finfo(DTYPES[name]).smallest_normal * torch.finfo(DTYPES[name]).eps
    x = torch.tensor([least * 0.5, least * 0.51, least, 1.0, 0.0])
    kept = x.to(DTYPES[name]).float()
    under, over = shares(x, name).tolist()
    assert under == pytest.approx(float(((kept == 0) & (x > 0)).float().mean()))
    assert over == 0.0
    assert shares(torch.tensor([1.0, top, top * 1.5, torch.inf]), name)[1] == 0.5


def test_each_tensor_is_scaled_to_fp8() -> None:
    assert scaled_to(448.0, torch.tensor([1e-6, -2e-6])).tolist() == pytest.approx([224.0, -448.0], rel=1e-5)
    assert scaled_to(448.0, torch.zeros(3)).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        ("AdamW", {"betas": "0.9,0.999", "eps": "1e-08", "weight_decay": "0.01", "step_count": 2}),
        ("SGD", {"weight_decay": "0.0", "momentum": "0.0"}),
    ],
)
def test_settings_of_an_optimizer(optimizer: str, said: dict[str, Any]) -> None:
    model = torch.nn.Linear(4, 2)
    found = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(3, 4)).sum().backward()
        found.step()
    assert settings_of(found) == said


def test_a_loop_tells_them(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = lanterne.attach(
        model, optimizer, shipper="none", commands=False, tap="off", dir=str(tmp_path), job="ranges"
    )
    for _ in session.steps(range(40)):
        (1e-8 * model(torch.randn(8, 64)).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    session.close()
    box, found = BlackBox(session.folder, 0), []
    while more := box.drain():
        found += more
    lanterne.attach(disabled=True).close()
    shares = {e.name: e.value for e in found if e.name.startswith("training.") and e.step == 32}
    assert shares["training.fp16_underflow"] is not None
    assert shares["training.fp16_underflow"] > 0.5  # gradients of 1e-9
    assert shares["training.fp16_overflow"] == shares["training.e4m3_overflow"] == 0.0
    (told,) = [e for e in found if e.name == "optimizer_state"]
    assert told.attributes["step_count"] == 4
    assert told.attributes["betas"] == "0.9,0.999"
