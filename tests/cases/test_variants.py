"""The same kinds in other words: frameworks, versions and layouts that the rows of the field do not show."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lanterne.nouns import Report
from tests.cases.evidence import categories, dump, entry, first, judge, metrics_file, watchdog, write_dump

CALL = "CollectiveFingerPrint(SequenceNumber=21, OpType=ALLREDUCE, TensorShape=[{}], TensorDtypes=BFloat16)"
MISMATCH = "RuntimeError: Detected mismatch between collectives on ranks."


def _differ(rank: int, odd: int = 1) -> str:
    own, peer = (512, 64) if rank == odd else (64, 512)
    other = odd if rank != odd else 0
    return (
        f"[rank{rank}]: {MISMATCH} Rank {rank} is running collective: {CALL.format(own)}, but Rank {other} is running "
        f"collective: {CALL.format(peer)}.Collectives differ in the following aspects: \t Tensor shapes: {own}vs {peer}"
    )


LINES: dict[str, tuple[str, int | None, list[str]]] = {
    "evicted pod": ("external_termination", None, [
        "3m  Warning  Evicted  pod/worker-3  The node was low on resource: ephemeral-storage."]),
    "nccl shared memory": ("shared_memory_exhausted", None, [
        "n3:9:12 [0] misc/shmutils.cc:72 NCCL WARN Error: failed to extend /dev/shm/nccl-xk to 33030532 bytes",
        "[rank3]: torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:268, unhandled system error"]),
    "port error of a device": ("network_failure", None, [
        "[2025-08-01 10:00:00] dgx-09:34:41 [3] transport/net_ib.cc:206 NCCL WARN NET/IB : mlx5_3:1 Got async error "
        "event: port error"]),
    "plug-in failed": ("interface_misconfigured", None, [
        "ip-10-0-1-4:20:20 [0] NCCL INFO NET/Plugin: Failed to initialize; Using network Socket",
        "ip-10-0-1-4:20:20 [0] NCCL INFO Using network Socket"]),
    "mesh product": ("parallel_config_invalid", None, [
        "[rank0]: AssertionError: Invalid parallel dims: dp_shard(4) * cp(1) * tp(2) * pp(2) != WORLD_SIZE(8)"]),
    "batch product": ("parallel_config_invalid", None, [
        "AssertionError: Check batch related parameters. train_batch_size is not equal to micro_batch_per_gpu * "
        "gradient_acc_step * world_size 256 != 8 * 2 * 8"]),
    "iommu hint": ("host_misconfigured", None, [
        'box:1:2 [0] NCCL WARN Missing "iommu=pt" from kernel command line which can lead to system instability',
        watchdog(0, 1), watchdog(1, 1)]),
    "three against one": ("collective_mismatch", 1, [_differ(r) for r in range(4)]),
    "own split sizes": ("collective_mismatch", 1, [
        "[rank1]: RuntimeError: Split sizes doesn't match total dim 0 size",
        *(watchdog(r, 88, "ALLTOALL_BASE", 4096) for r in (0, 2, 3))]),
    "local and global rank": ("device_fault", 12, [
        "[default0]:[rank12]:[E817 17:40:34.227531918 ProcessGroupNCCL.cpp:1515] [PG 0 (default_pg) Rank 12] Process "
        "group watchdog thread terminated with exception: CUDA error: uncorrectable ECC error encountered",
        *(f"[default{r % 8}]:{watchdog(r, 200)}" for r in range(16) if r != 12)]),
    "kernel and rank": ("device_fault", 3, [
        "[rank3]: torch.AcceleratorError: CUDA error: unspecified launch failure",
        "[8812.1] NVRM: Xid (PCI:0000:4c:00): 95, pid=8812, name=python3, Uncontained: FBHUB. RST: Yes"]),
    "loader lengths": ("uneven_inputs", 2, [
        *(f"rank {r}: dataloader length {511 if r == 2 else 512}" for r in range(4)),
        *(watchdog(r, 1537) for r in (0, 1, 3))]),
    "scale at its floor": ("loss_scale_collapse", None, [
        *(f"[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: {2**i}, reducing to {2 ** (i - 1)}"
          for i in range(16, 0, -1)),
        "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run."]),
    "loader time in text": ("data_stall", 1, [
        f"[rank{r}] step {i} loss {2 + 3 * math.exp(-i / 80):.4f} step_time {1.31 if i > 50 else 0.41} s data_time "
        f"{0.9 if r == 1 and i > 50 else 0.01} s" for i in range(120) for r in range(4)]),
    "norms of replicas in text": ("replica_divergence", 2, [
        f"[rank{r}] step {i} layernorm param_norm {31.2 + 1e-4 * i + (2e-3 * (i - 50) if r == 2 and i > 50 else 0):.4f}"
        for i in range(0, 200, 5) for r in range(4)]),
    "throughput fell": ("unknown", None, [
        f"step: {i}  loss: {8 / (i + 9):.4f}  memory: 61.20GiB(64.42%)  tps: {7432 - (3400 if i > 180 else i % 40)}"
        for i in range(300)]),
    "memory grows": ("memory_leak", None, [
        f"step: {i}  loss: {2 + 8 / (i + 9):.4f}  memory: {40 + 0.12 * i:.2f}GiB(64.42%)" for i in range(300)]),
}  # fmt: skip


def said(folder: Path, rows: list[str]) -> Report:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.log").write_text("\n".join(rows) + "\n")
    return judge(folder)


@pytest.mark.parametrize("name", sorted(LINES))
def test_in_other_words(tmp_path: Path, name: str) -> None:
    category, rank, rows = LINES[name]
    cause = first(said(tmp_path, rows))
    assert cause.category == category
    if rank is not None:
        assert cause.subject.rank == rank
    if category == "unknown":
        assert cause.needs
        assert cause.subject.rank is None


def _descent(start: int, to: int) -> list[str]:
    return [
        f"[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: {2**i}, reducing to {2 ** (i - 1)}"
        for i in range(start, to, -1)
    ]


def _megatron() -> list[str]:
    rows = []
    for i in range(1, 200):
        skips = i <= 15
        measured = "" if skips else f" lm loss: {2 + 8 * math.exp(-i / 60):.6E} |"
        scale = 2.0 ** max(16, 32 - i)
        rows.append(
            f" iteration {i:8d}/ 250000 | learning rate: 3.000000E-04 |{measured} loss scale: {scale:.1f} |"
            f" number of skipped iterations: {int(skips):3d} | number of nan iterations: 0 |"
        )
    return rows


HEALTHY: dict[str, list[str]] = {
    "first descent of a scale": [
        *_descent(32, 18),
        *(f"[Rank 0] step={10 * i}, loss={9 / (i + 3):.4f}" for i in range(40)),
    ],
    "first skips of apex": [
        *(f"Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to {s}.0" for s in (4096, 2048, 1024)),
        *(f"Epoch: [0][{i}/5005] Loss {6.9 - i * 0.01:.4f}" for i in range(60)),
    ],
    "first skips of megatron": _megatron(),
    "one skip a growth period": [
        line
        for i in range(400)
        for line in ([*_descent(17, 16)] if i % 100 == 50 else []) + [f"step={10 * i}, loss={2 + 3 / (i + 1):.4f}"]
    ],
    "validation beside training": [
        line
        for i in range(300)
        for line in (
            f"iter {i}: loss {2.5 + 6 * math.exp(-i / 60):.4f}, time {412 + i % 3}ms",
            f"step {i}: train loss {2.5 + 6 * math.exp(-i / 60):.4f}, val loss {9.6:.4f}",
        )
    ],
    "a step schedule": [
        f"step {i} loss {2 + 3 * math.exp(-i / 60):.4f} lr {0.1 * 0.1 ** (i // 100):.5f}" for i in range(300)
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(HEALTHY))
def test_healthy_in_other_words(tmp_path: Path, name: str) -> None:
    report = said(tmp_path, HEALTHY[name])
    assert report.healthy, categories(report)


def _row(rank: int, i: int) -> dict[str, Any]:
    noise = random.Random(rank * 1000 + i)
    return {"step": i, "rank": rank, "loss": round(2 + 3 * math.exp(-i / 80) + 0.05 * noise.gauss(0, 1), 5), "lr": 3e-4}


def _uneven_tokens(rank: int, i: int) -> dict[str, Any]:
    heavy = (3 * i) % 8 == rank
    return {**_row(rank, i), "num_tokens": 4096 + 12_000 * heavy, "forward_time": 0.1 + 0.31 * heavy}


def _collects(rank: int, i: int) -> dict[str, Any]:
    return {**_row(rank, i), "gc_time_ms": 1450 if i % 130 == 11 * rank else 0, "step_time": 0.41}


def _reduced(rank: int, i: int) -> dict[str, Any]:
    return {**_row(0, i), "rank": rank, "grad_norm": 1.0 + i / 1000}


def _reduced_by_work(rank: int, i: int) -> dict[str, Any]:
    return {**_row(0, i), "rank": rank, "num_tokens": 4000 + 7 * rank + i % 5}


def _vanishing(rank: int, i: int) -> dict[str, Any]:
    return {**_row(rank, i), "grad_norm": 0.8 if i < 150 else 0.8 * 10 ** (-(i - 150) / 8)}


def _rate_zero(rank: int, i: int) -> dict[str, Any]:
    return {"step": i, "rank": rank, "loss": round(8.1 + 0.01 * random.Random(8 * i + rank).gauss(0, 1), 4), "lr": 0.0}


@pytest.mark.parametrize(
    ("row", "category"),
    [
        (_uneven_tokens, "sequence_imbalance"),
        (_collects, "gc_pause"),
        (_vanishing, "gradient_vanishing"),
        (_rate_zero, "lr_misconfigured"),
        (_reduced, None),
        (_reduced_by_work, None),
        (_row, None),
    ],
)
def test_series_of_eight_ranks(tmp_path: Path, row: Callable[[int, int], dict[str, Any]], category: str | None) -> None:
    for rank in range(8):
        metrics_file(tmp_path / f"rank{rank}.jsonl", (row(rank, i) for i in range(260)))
    report = judge(tmp_path)
    assert report.healthy if category is None else first(report).category == category, categories(report)


@pytest.mark.parametrize("name", ["host-a/fr.{rank}.bin", "comm_lib_trace_rank_{rank}", "dump_rank{rank}.pt"])
def test_content_not_the_name_tells_a_dump(tmp_path: Path, name: str) -> None:
    for rank in range(4):
        calls = [entry(s) for s in range(1, 9)] + ([] if rank == 1 else [entry(9, done=False)])
        (tmp_path / name.format(rank=rank)).parent.mkdir(exist_ok=True)
        write_dump(tmp_path, rank, dump(calls, range(4), version="2.10"), name=name)
    cause = first(judge(tmp_path))
    assert (cause.category, cause.subject.rank) == ("rank_hung", 1)


def test_a_limit_in_bytes_is_said_in_kbytes(tmp_path: Path) -> None:
    (tmp_path / "limits.txt").write_text("Max locked memory         65536         65536         bytes\n")
    (tmp_path / "n.log").write_text(
        "c07:1:2 [0] misc/ibvwrap.cc:262 NCCL WARN Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory\n"
    )
    cause = first(judge(tmp_path))
    assert (cause.category, cause.subject.host) == ("host_misconfigured", "c07")
    assert cause.evidence[0].value == 64


def test_a_json_array_of_rows_still_counts(tmp_path: Path) -> None:
    rows = [{"step": i, "loss": 3 - 0.01 * i if i < 60 else float("nan")} for i in range(80)]
    (tmp_path / "history.json").write_text(json.dumps(rows))
    assert first(judge(tmp_path)).category == "nonfinite_values"


@pytest.mark.parametrize("suffix", ["jsonl", "log"])
def test_a_file_that_ends_early_is_no_nan(tmp_path: Path, suffix: str) -> None:
    for rank in range(4):
        rows = [{**_row(rank, i), "grad_norm": 1.0} for i in range(120 if rank != 2 else 90)]
        lines = (f"step {r['step']} loss {r['loss']}" for r in rows)
        text = "\n".join(map(json.dumps, rows) if suffix == "jsonl" else lines)
        (tmp_path / f"rank{rank}.{suffix}").write_text(text + "\n")
    assert "nonfinite_values" not in categories(judge(tmp_path))


def test_a_rank_that_says_nan_is_named(tmp_path: Path) -> None:
    for rank in range(4):
        rows = [
            {**_row(rank, i), "loss": float("nan") if i >= 100 - (rank == 1) else 2.0 + 1 / (i + 1)} for i in range(120)
        ]
        metrics_file(tmp_path / f"rank{rank}.jsonl", rows)
    cause = first(judge(tmp_path))
    assert (cause.category, cause.subject.rank, cause.since_step) == ("nonfinite_values", 1, 99)
