"""A few profiler steps of several ranks, nothing before them: who is late beyond its peers, and why."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.cases.evidence import BASE_NS, dump, entry, first, judge, named_ranks, write_dump

KERNELS, BUCKETS = 40, 4


@dataclass
class Job:
    """Data-parallel steps with ``BUCKETS`` all-reduces, 540 ms each; what ``slow`` ranks do beyond that."""

    ranks: int = 8
    steps: int = 4
    backend: str = "nccl"
    slow: Sequence[int] = (5,)
    data_ms: float = 0.0
    kernel_factor: float = 1.0
    gap_ms: float = 0.0
    gc_ms: float = 0.0
    extra_kernels: int = 0
    jitter_ms: float = 0.4
    clock_ms: dict[int, float] = field(default_factory=dict)
    pairwise: bool = False
    host: str = "node0"

    def write(self, folder: Path, seed: int = 1) -> Path:
        rng = random.Random(seed)
        rows: dict[int, list[dict[str, Any]]] = {r: [] for r in range(self.ranks)}
        start = 0.0
        for step in range(10, 10 + self.steps):
            at = {r: start + 1 + self._before(r, rows[r], start, rng) for r in rows}
            for bucket in range(BUCKETS):
                at = {r: self._compute(r, rows[r], at[r], rng) for r in rows}
                done = max(at.values()) + 3
                for r in rows:
                    self._call(rows[r], at[r], done)
                if self.pairwise:
                    for r in rows:
                        self._send(rows[r], done - 1)
                at = dict.fromkeys(rows, done)
                del bucket
            end = max(at.values()) + 20
            for r in rows:
                rows[r].append(span(f"ProfilerStep#{step}", "user_annotation", start, end - start))
            start = end
        folder.mkdir(parents=True, exist_ok=True)
        for r, events in rows.items():
            shift = BASE_NS / 1e6 + self.clock_ms.get(r, 0.0)
            for e in events:
                e["ts"] = (e["ts"] + shift) * 1e3
            info = {"backend": self.backend, "rank": r, "world_size": self.ranks, "pg_config": [self._group()]}
            host = self.host if "%" not in self.host else self.host % r
            value = {"schemaVersion": 1, "distributedInfo": info, "host_name": host, "traceEvents": events}
            (folder / f"rank{r}.pt.trace.json").write_text(json.dumps(value))
        return folder

    def _group(self) -> dict[str, Any]:
        return {"pg_name": "0", "pg_desc": "default_pg", "ranks": list(range(self.ranks))}

    def _before(self, r: int, rows: list[dict[str, Any]], at: float, rng: random.Random) -> float:
        spent = 5 + rng.random() * self.jitter_ms + (self.data_ms if r in self.slow else 0.0)
        rows.append(span("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", "user_annotation", at, spent))
        if r in self.slow and self.gc_ms:
            rows.append(span("Python GC", "user_annotation", at + spent, self.gc_ms))
            spent += self.gc_ms
        return spent + (self.gap_ms if r in self.slow else 0.0)

    def _compute(self, r: int, rows: list[dict[str, Any]], at: float, rng: random.Random) -> float:
        each = (125 + rng.random() * self.jitter_ms) / KERNELS * (self.kernel_factor if r in self.slow else 1.0)
        for _ in range(KERNELS + (self.extra_kernels if r in self.slow else 0)):
            kind = ("aten::mm", "cpu_op") if self.backend == "gloo" else ("sm90_gemm", "kernel")
            rows.append(span(*kind, at, each * 0.98))
            at += each
        return at

    def _call(self, rows: list[dict[str, Any]], at: float, done: float) -> None:
        args = {"Process Group Name": "0", "Collective name": "allreduce", "In msg nelems": 1024, "dtype": "Float"}
        if self.backend == "gloo":
            rows.append(span("gloo:all_reduce", "cpu_op", at, done - at))
            return
        rows.append({**span("nccl:all_reduce", "user_annotation", at - 0.02, 0.01), "args": args})
        rows.append({**span("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "kernel", at, done - at), "args": args})

    def _send(self, rows: list[dict[str, Any]], at: float) -> None:
        args = {"Process Group Name": "0", "Collective name": "send", "In msg nelems": 64, "dtype": "Float"}
        rows.append({**span("nccl:send", "user_annotation", at, 0.01), "args": args})


def span(name: str, category: str, at_ms: float, long_ms: float) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": category, "ts": at_ms, "dur": long_ms * 1e3, "pid": 1, "tid": 1}


@pytest.mark.parametrize(
    ("job", "category"),
    [
        (Job(data_ms=40), "data_stall"),
        (Job(data_ms=40, steps=2), "data_stall"),
        (Job(data_ms=300, ranks=4, slow=(2,), steps=6), "data_stall"),
        (Job(kernel_factor=1.1), "slow_compute"),
        (Job(kernel_factor=3, steps=3), "slow_compute"),
        (Job(kernel_factor=1.5, backend="gloo", ranks=4, slow=(3,)), "slow_compute"),
        (Job(gc_ms=60), "gc_pause"),
        (Job(gap_ms=50), "host_contention"),
        (Job(data_ms=80, ranks=2, slow=(1,)), "data_stall"),
        (Job(data_ms=60, jitter_ms=5, steps=40, ranks=4, slow=(2,)), "data_stall"),
        (Job(data_ms=60, host="node%d", clock_ms={1: 900.0, 5: -700.0}), "data_stall"),
    ],
)
def test_a_rank_that_is_late_in_all_steps_of_a_short_trace_is_named(job: Job, category: str, tmp_path: Path) -> None:
    report = judge(job.write(tmp_path))
    cause = first(report)
    assert (cause.category, cause.subject.rank, cause.since_step) == (category, job.slow[0], 10)
    assert report.incidents[0].kind == "straggler"
    assert named_ranks(report) == {job.slow[0]}
    assert cause.cost.slowdown is not None
    assert cause.cost.slowdown > 1.03
    assert all(e.unit for e in cause.evidence if e.value is not None)
    assert bool(cause.needs) == (category == "host_contention")


def test_the_cost_is_the_time_that_the_others_wait(tmp_path: Path) -> None:
    cost = first(judge(Job(kernel_factor=1.1).write(tmp_path))).cost
    assert cost.saving_ms_per_step == pytest.approx(50, rel=0.1)


def test_two_slow_ranks_of_eight_are_both_named(tmp_path: Path) -> None:
    assert named_ranks(judge(Job(slow=(2, 5), data_ms=60).write(tmp_path))) == {2, 5}


@pytest.mark.parametrize(
    "job",
    [
        Job(slow=()),
        Job(slow=(), ranks=2),
        Job(slow=(), jitter_ms=100, steps=2),
        Job(slow=(), jitter_ms=100, steps=3, ranks=2),
        Job(slow=(), backend="gloo", ranks=4),
        Job(slow=(), host="node%d", clock_ms={1: 40.0, 5: -700.0}),
        Job(slow=tuple(range(8)), data_ms=200),
        Job(data_ms=6),
        Job(kernel_factor=1.4, steps=1),
        Job(kernel_factor=1.3, pairwise=True),
    ],
    ids=["even", "pair", "jitter", "jitter of a pair", "gloo", "clocks", "all slow", "small", "one step", "pipeline"],
)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_neighbours_stay_quiet(job: Job, seed: int, tmp_path: Path) -> None:
    report = judge(job.write(tmp_path, seed))
    assert report.healthy, report.verdict


def test_a_rank_with_other_work_is_not_blamed(tmp_path: Path) -> None:
    report = judge(Job(extra_kernels=12, slow=(7,)).write(tmp_path))
    assert named_ranks(report) == set()
    assert first(report).category == "unknown"
    assert "by design" in " ".join(first(report).needs)


def _dumps(folder: Path, late_ms: float, ranks: int = 4, calls: int = 40) -> Path:
    rng = random.Random(3)
    for rank in range(ranks):
        rows = []
        for n in range(calls):
            row = entry(n)
            at = row["time_created_ns"] + n * 200_000_000
            mine = at + rng.randrange(500_000) + (round(late_ms * 1e6) if rank == 2 else 0)
            row |= {"time_created_ns": mine, "time_discovered_completed_ns": at + round(late_ms * 1e6) + 3_000_000}
            rows.append(row)
        write_dump(folder, rank, dump(rows, range(ranks)))
    return folder


def test_dumps_alone_name_a_rank_that_always_enters_late(tmp_path: Path) -> None:
    cause = first(judge(_dumps(tmp_path, 40)))
    assert cause.subject.rank == 2
    assert cause.needs


def test_dumps_of_ranks_that_enter_together_are_healthy(tmp_path: Path) -> None:
    report = judge(_dumps(tmp_path, 0))
    assert report.healthy, report.verdict
