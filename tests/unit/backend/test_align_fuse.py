"""Trace, graph replays and recorded calls of the same ranks become one event set on one clock, or stay apart."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import _traces
from lanterne.backend.align import fuse, traces
from lanterne.backend.readers import read
from lanterne.backend.readers.source import probe
from lanterne.backend.readers.traces import Call, Trace, load
from lanterne.nouns import Collective

START = 1_760_000_000_000_000
STEP_US = 100_000
OPS = ("all_reduce", "_allgather_base", "reduce_scatter")
KERNELS = {
    "all_reduce": "AllReduce_Sum_bf16_RING_LL",
    "_allgather_base": "AllGather_RING",
    "reduce_scatter": "ReduceScatter_Sum",
}


def told(name: str, where: str, ts: float, dur: float, elements: int) -> Call:
    return Call(
        name=name, where=where, ts_us=ts, dur_us=dur, elements=elements, dtype="bf16", group="0", group_size=2, stream=7
    )


def job(
    rng: np.random.Generator, steps: int, ranks: int, replays: int, ahead_us: list[float], late: int = -1
) -> tuple[list[Trace], list[Collective]]:
    """Traces of steps 2 and later, records of all: numbers from 1, host times ``ahead_us`` ahead of the trace's.

    Calls of a step are drawn at random, so that only one shift of the order fits.
    """
    plan = [[OPS[i] for i in rng.integers(0, 3, 6)] for _ in range(steps)]
    found = [Trace(rank=r, world_size=ranks, groups={"0": tuple(range(ranks))}, host="one") for r in range(ranks)]
    records: list[Collective] = []
    number = 0
    for step, ops in enumerate(plan):
        begin = START + step * STEP_US
        for n, op in enumerate(ops):
            number += 1
            ready = begin + 5_000 + n * 10_000
            for rank, trace in enumerate(found):
                host = ready - 2_000 + float(rng.uniform(0, 200))
                starts = ready + (4_000 if rank == late else float(rng.uniform(0, 50)))
                if step >= 2:
                    trace.calls.append(told(op, "host", host, 50, 1024 + n))
                    trace.calls.append(told(KERNELS[op], "device", starts, ready + 6_000 - starts, 1024 + n))
                at = int((host + ahead_us[rank] + float(rng.uniform(0, 30))) * 1e3)
                records.append(
                    Collective(
                        rank=rank, group=f"0-{ranks - 1}", sequence=number, op=op, bytes=2048 + n, entered_ns=at,
                        completed_ns=at + 10**8, shape=f"[[{1024 + n}]]", site=f"train.py:{n}",
                    )
                )  # fmt: skip
        for rank, trace in enumerate(found):
            if step >= 2:
                trace.graph_launches += replays
                trace.steps[step] = (begin, STEP_US)
                trace.calls += [
                    told("AllReduce_Sum_bf16_RING_LL", "device", begin + 70_000 + 5_000 * i + rank, 900, 77)
                    for i in range(replays)
                ]
    return found, records


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6), replays=st.sampled_from([0, 3]), ahead=st.sampled_from([0.0, 1_500.0, 90_000_000.0]),
    lost=st.integers(0, 30),
)  # fmt: skip
def test_calls_meet_their_records_whatever_the_clocks(seed: int, replays: int, ahead: float, lost: int) -> None:
    rng = np.random.default_rng(seed)
    found, records = job(rng, 8, 2, replays, [ahead, ahead / 2])
    records = records[2 * lost :]  # the recorder's ring forgot the oldest
    fused = fuse.fuse(found, records, {0: "one", 1: "one"})
    assert fused.notes == []
    calls = fused.aligned.calls
    assert fused.replayed == 6 * replays * 2
    plain = [i for i in range(len(calls)) if not calls.groups[calls.group[i]].endswith(fuse.GRAPH)]
    assert sorted({int(calls.sequence[i]) for i in plain}) == list(range(13, 49))
    assert len(plain) == 2 * 36
    assert fused.both == 2 * min(36, 48 - lost)
    for rank, by in ((0, ahead), (1, ahead / 2)):
        shift = fused.shifts[rank]
        assert abs(shift.offset_ns - by * 1e3) <= 30_000 + shift.error_ns
    sizes = {(int(calls.sequence[i]), int(calls.bytes[i])) for i in plain if calls.sequence[i] > max(12, lost)}
    assert sizes == {(n, 2048 + (n - 1) % 6) for n in range(max(12, lost) + 1, 49)}


def test_the_late_rank_is_named_by_device_times_and_records_stand_on_the_job_clock() -> None:
    found, records = job(np.random.default_rng(3), 8, 3, 0, [0.0, 90_000_000.0, 0.0], late=1)
    fused = fuse.fuse(found, records, dict.fromkeys(range(3), "one"))
    assert set(fused.aligned.attribution.last.tolist()) == {1}
    times = {r: [c.entered_ns for c in fused.records if c.rank == r] for r in range(3)}
    assert max(abs(a - b) for a, b in zip(times[0], times[1], strict=True)) < 1_000_000


def test_a_shift_that_is_not_the_only_one_is_not_guessed() -> None:
    """Every call is the same and the clocks are far apart: the records could start anywhere."""
    found, records = job(np.random.default_rng(1), 8, 2, 0, [90_000_000.0] * 2)
    for trace in found:
        same_name = {"host": "all_reduce", "device": KERNELS["all_reduce"]}
        times = enumerate(trace.calls)
        trace.calls = [replace(c, name=same_name[c.where], ts_us=START + 1e6 + 10_000 * n) for n, c in times]
    same = [replace(r, op="all_reduce", entered_ns=(START + 90_000_000 + 20_000 * r.sequence) * 1000) for r in records]
    fused = fuse.fuse(found, same, {0: "one", 1: "one"})
    assert fused.both == 0
    assert len(fused.notes) == 2
    assert fused.records == same


def test_where_one_rank_has_no_records_all_go_by_steps() -> None:
    found, records = job(np.random.default_rng(5), 6, 2, 0, [0.0, 0.0])
    fused = fuse.fuse(found, [r for r in records if r.rank == 0], {0: "one", 1: "one"})
    assert int(fused.aligned.calls.sequence.min()) >= traces.PER_STEP
    assert (fused.aligned.calls.sizes == 2).all()


def test_diagnose_fuses_the_traces_and_dumps_that_lie_together(tmp_path: Path) -> None:
    """A real trace (two ranks of a job, no graphs) and made-up dumps of the same calls, read as files."""
    _traces.write(tmp_path, 2, 2, straggler=1)
    for rank in range(2):
        trace = traces.collectives(load(probe(tmp_path / f"rank-{rank}.json.gz")))
        entries = [
            {
                "collective_seq_id": 100 + n, "profiling_name": f"nccl:{call.op}", "process_group": ["0", "default"],
                "time_created_ns": int(call.entered_ns) + 3_000_000, "state": "completed", "input_sizes": [[8]],
                "time_discovered_completed_ns": int(call.completed_ns) + 90_000_000, "input_dtypes": ["Float"],
            }
            for n, call in enumerate(trace)
        ]  # fmt: skip
        group = {"name": "0", "desc": "default", "ranks": "[0, 1]"}
        dump = {"version": "2.5", "pg_config": {"0": group}, "entries": entries}
        (tmp_path / f"nccl_trace_rank_{rank}").write_text(json.dumps(dump))
    facts = read([tmp_path])
    assert {"kineto", "flight_recorder"} <= set(facts.sources)
    late = np.nanmax(facts.get("lateness_ms"), axis=0)
    assert late[1] > late[0]
    assert len(facts.waits.rank) > 0
    assert not any("replays" in note for note in facts.quality.notes)
