"""Profiler traces of several ranks on one job clock: who is late in the kernels is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import _traces
from lanterne.backend.align import traces
from lanterne.backend.readers import traces as reader
from lanterne.backend.readers.source import probe

KINETO = Path(__file__).parents[2] / "data" / "cases" / "kineto"


def test_calls_of_a_real_trace_are_numbered_within_their_steps() -> None:
    found = traces.collectives(reader.load(probe(KINETO / "sampled_rank-0.json.gz")))
    assert found
    assert {c.step for c in found} <= {550, 551, 552, -1}
    keys = [(c.group, c.sequence) for c in found]
    assert len(set(keys)) == len(keys)
    assert all(0 < c.entered_ns < c.completed_ns for c in found)


def test_two_ranks_of_one_job_meet_in_the_same_slots() -> None:
    one, other = (traces.collectives(reader.load(probe(KINETO / f"sampled_rank-{r}.json.gz"))) for r in range(2))
    assert {(c.group, c.sequence, c.op) for c in one} == {(c.group, c.sequence, c.op) for c in other}


@pytest.mark.parametrize("straggler", [0, 2])
def test_the_late_rank_is_named(tmp_path: Path, straggler: int) -> None:
    _traces.write(tmp_path, 3, 1, straggler)
    assert _traces.lanterne(tmp_path)() == straggler


def test_a_missing_rival_is_told_as_missing(tmp_path: Path) -> None:
    figures, told = _traces.compare("", "it is not there", ranks=2, repeats=1)
    assert {(f["name"], f["value"], f["reason"]) for f in figures} == {
        ("hta_time_ratio", None, "it is not there"), ("hta_memory_ratio", None, "it is not there"),
    }  # fmt: skip
    assert told["lanterne"]["straggler"] == told["straggler"]
    figures, _ = _traces.compare(str(tmp_path / "python"), "", ranks=2, repeats=1)
    assert all("hta" in f["reason"] for f in figures)
