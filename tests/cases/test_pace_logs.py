"""Trainer logs with step times per rank: one slower rank is named, a slowness of all ranks is not put on one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.cases.evidence import Logs, first, judge, metrics_file, named_ranks


def _write(folder: Path, layout: str, slow: int | None, since: int, steps: int, everybody: bool = False) -> Path:
    rng = random.Random(4)
    logs = Logs(4)
    for rank in range(4):
        rows = []
        for step in range(steps):
            ms = 100 + 3 * rng.random()
            ms *= 1.5 if step >= since and (everybody or rank == slow) else 1.0
            loss = 2.5 - 0.01 * step + 0.05 * rng.random()
            rows.append({"step": step, "rank": rank, "step_time": ms / 1000, "loss": loss})
            text = {k: round(v, 4) for k, v in rows[-1].items() if k != "rank"}
            logs.say(rank, str(text))
        if layout == "jsonl":
            metrics_file(folder / f"rank{rank}.jsonl", rows)
    if layout == "text":
        logs.write(folder)
    return folder


@pytest.mark.parametrize("layout", ["jsonl", "text"])
@pytest.mark.parametrize(("since", "steps"), [(0, 60), (30, 60), (0, 8)])
def test_the_slower_rank_of_trainer_logs_is_named(layout: str, since: int, steps: int, tmp_path: Path) -> None:
    report = judge(_write(tmp_path, layout, 2, since, steps))
    cause = first(report)
    assert (cause.category, cause.subject.rank, cause.since_step) == ("slow_compute", 2, since)
    assert named_ranks(report) == {2}
    assert cause.needs
    assert cause.cost.saving_ms_per_step == pytest.approx(50, rel=0.1)


@pytest.mark.parametrize("layout", ["jsonl", "text"])
def test_a_slowness_of_all_ranks_names_none(layout: str, tmp_path: Path) -> None:
    report = judge(_write(tmp_path, layout, None, 30, 60, everybody=True))
    assert not report.healthy
    assert named_ranks(report) == set()


@pytest.mark.parametrize("layout", ["jsonl", "text"])
def test_even_ranks_are_healthy(layout: str, tmp_path: Path) -> None:
    assert judge(_write(tmp_path, layout, None, 0, 60)).healthy


@pytest.mark.parametrize("steps", [6, 12, 60])
def test_ranks_that_are_slow_by_turns_are_not_blamed(steps: int, tmp_path: Path) -> None:
    rng = random.Random(7)
    for rank in range(4):
        rows = [{"step": s, "rank": rank, "step_time": 0.1 * (1 + 0.4 * rng.random())} for s in range(steps)]
        metrics_file(tmp_path / f"rank{rank}.jsonl", rows)
    assert named_ranks(judge(tmp_path)) == set()
