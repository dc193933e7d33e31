"""Which part of the parameters a checksum covers, and when."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lanterne.collector import core as cores
from lanterne.collector.overhead import OverheadMeter
from lanterne.collector.ring import Ring
from lanterne.collector.sources import gradients
from lanterne.collector.sources.collectives import TapFile
from lanterne.collector.sources.gradients import CHECKSUM_EVERY, Gradients, turn_of
from lanterne.collector.steps import Recorder

Make = Callable[[torch.nn.Module], Gradients]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    ring, tap = Ring(tmp_path, 0, 1024), TapFile(tmp_path, 0)

    def made(model: torch.nn.Module) -> Gradients:
        core = cores.make(ring, tap, first_step=0, window=50)
        meter = OverheadMeter(ring, core, 0.005)
        return Gradients(Recorder(ring, core, meter), meter, tap, model, every=10, replicated=True)

    return made


def checksum(source: Gradients, step: int) -> int | None:
    source.core.checksum = None
    source.before_close(step)
    found = source.core.checksum
    return None if found is None else int(found)


@pytest.mark.parametrize("every", [CHECKSUM_EVERY, 4 * CHECKSUM_EVERY, 64 * CHECKSUM_EVERY])
@pytest.mark.parametrize("parts", [2, 7, 64, 100])
def test_whoever_looks_seldom_sees_every_part_all_the_same(every: int, parts: int) -> None:
    assert {turn_of(step) % parts for step in range(0, every * parts * 12, every)} == set(range(parts))


def test_ranks_that_look_at_different_paces_compare_the_same_part(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "CHECKSUM_ELEMENTS", 64)
    model = torch.nn.Linear(32, 32)
    found = []
    for pace in (1, 2, 4):
        source = make(model)
        source.sums.every = CHECKSUM_EVERY * pace
        found.append(checksum(source, CHECKSUM_EVERY * 4))
    assert len(set(found)) == 1


def test_a_recheck_compares_at_the_next_boundary_and_once(make: Make) -> None:
    source = make(torch.nn.Linear(4, 4))
    assert checksum(source, 5) is None
    source.recheck()
    assert checksum(source, 6) is not None
    assert checksum(source, 7) is None
