"""Real public files: the answers that were published with them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lanterne.backend.readers import read, traces
from lanterne.backend.readers.source import probe
from lanterne.backend.readers.straggler import operations
from lanterne.causal.counterfactual import what_if
from tests.cases.evidence import categories, first, hedged, judge, named_ranks

DATA = Path(__file__).parents[1] / "data" / "cases"


def test_two_ranks_with_a_device_error() -> None:
    report = judge(DATA / "flight-recorder" / "gpu_error_1st")
    assert named_ranks(report) == {12, 14}
    assert set(categories(report)) == {"device_fault"}
    assert first(report).subject.group == "12-15"
    assert any("all_to_all number 20537" in e.says for e in first(report).evidence)


def test_two_ranks_with_the_lock_held() -> None:
    report = judge(DATA / "flight-recorder" / "lock_gil_1st")
    assert named_ranks(report) == {9, 14}
    assert set(categories(report)) == {"rank_hung"}
    assert first(report).subject.group == "8-15"
    assert any("py-spy" in n for n in first(report).needs)
    assert any("zero entries" in e.says for e in first(report).evidence)


@pytest.mark.parametrize(("run", "ranks"), [("gpu_error_1st", {12, 14}), ("lock_gil_1st", {9, 14})])
def test_the_same_with_names_that_say_nothing(tmp_path: Path, run: str, ranks: set[int]) -> None:
    for i, path in enumerate(sorted((DATA / "flight-recorder" / run).iterdir(), reverse=True)):
        shutil.copy(path, tmp_path / f"{chr(97 + i)}.bin.dat")
    assert named_ranks(judge(tmp_path)) == ranks


def test_a_heavy_stage_is_not_a_worker() -> None:
    report = judge(DATA / "straggler" / "trace-ST.parquet")
    assert first(report).category == "partition_imbalance"
    assert named_ranks(report) == set()
    result = what_if(operations(DATA / "straggler" / "trace-ST.parquet")[0])
    assert result.slowdown == pytest.approx(1.1787, rel=0.013)  # published with the trace
    assert result.stage == 3


def test_a_pair_of_traces_loads() -> None:
    for rank in (0, 1):
        trace = traces.load(probe(DATA / "kineto" / f"sampled_rank-{rank}.json.gz"))
        assert (trace.rank, trace.world_size, trace.backend, trace.cut_at) == (rank, 128, "nccl", -1)
        assert trace.calls
        assert trace.kernel_us > 0
    assert judge(DATA / "kineto").healthy


def test_a_cut_trace_is_used_and_said_to_be_cut(tmp_path: Path) -> None:
    whole = (DATA / "kineto" / "sampled_rank-0.json.gz").read_bytes()
    (tmp_path / "rank3.json.gz").write_bytes(whole[: len(whole) // 2])
    facts = read([tmp_path])
    assert facts.ranks == (0,) or facts.ranks == (3,)
    assert any("cut off" in note for note in facts.quality.notes)


def test_an_xid_names_the_device() -> None:
    cause = first(judge(DATA / "node-health" / "dmesg-with-xid-119.log"))
    assert (cause.category, cause.subject.device) == ("device_fault", "PCI:0000:9b:00")


@pytest.mark.parametrize(
    "file", ["node-health/nccl_allreduce.log", "loss-curves/llama3_cuda.txt", "dlrover/xpu_timer_metric_0"]
)
def test_healthy_files_raise_nothing(file: str) -> None:
    assert judge(DATA / file).healthy


def test_a_crash_without_a_rank_is_no_device_fault() -> None:
    report = judge(DATA / "node-health" / "dmesg.decode.iso.log")
    assert "device_fault" not in categories(report)
    assert named_ranks(report) == set()


def test_hang_gauges_name_nobody() -> None:
    report = judge(DATA / "dlrover" / "xpu_timer_metric_some")
    assert not report.healthy
    assert named_ranks(report) == set()
    assert hedged(report)


def test_one_long_step_of_an_event_log() -> None:
    report = judge(DATA / "dlrover" / "events_0.log")
    assert first(report).category == "unknown"
    assert first(report).evidence[0].value == pytest.approx(1346, abs=30)
    assert first(report).needs


def test_a_store_error_reports_a_victim() -> None:
    report = judge(DATA / "dlrover" / "training.log")
    assert 43 not in named_ranks(report)
