"""What other tools leave behind: NCCL RAS and Inspector, nvidia-smi and DCGM, TensorBoard, seeds and samplers."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest

from lanterne.backend.readers import read
from lanterne.backend.readers.tensorboard import masked_crc
from tests.cases.evidence import first, judge, named_ranks

OPS = {"broadcast": 3, "all_reduce": 4120, "all_gather": 900}


def ras(ranks: int, behind: int = -1, missing: int = -1, *, nested: bool = True) -> dict[str, Any]:
    """A RAS status of one communicator, counters in one object or as one number."""
    rows = []
    for r in range(ranks):
        ops = {**OPS, "all_reduce": 4120 - (r == behind)}
        counts = {"coll_op_counts": ops} if nested else {"op_count": sum(ops.values())}
        if r != missing:
            rows.append({"rank": r, "node_addr": f"10.0.0.{r // 8}:4711", "pid": 900 + r, "cuda_dev": r % 8, **counts})
    comm = {"hash": "0x1f", "size": ranks, "ranks": rows, "missing_ranks": [missing] if missing >= 0 else []}
    return {"nccl_version": "2.28.3", "communicators": [comm]}


@pytest.mark.parametrize("nested", [True, False])
def test_ras_names_the_rank_behind_and_the_rank_that_is_gone(tmp_path: Path, nested: bool) -> None:
    for name, status in (("behind", ras(16, behind=11, nested=nested)), ("gone", ras(16, missing=5, nested=nested))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "ras.json").write_text(json.dumps(status))
    behind, gone = first(judge(tmp_path / "behind")), first(judge(tmp_path / "gone"))
    assert (behind.category, behind.subject.rank) == ("rank_hung", 11)
    assert (gone.category, gone.subject.rank) == ("rank_missing", 5)


def test_ras_of_a_healthy_job(tmp_path: Path) -> None:
    (tmp_path / "ras.json").write_text(json.dumps(ras(8)))
    assert not judge(tmp_path).incidents


def inspect(folder: Path, ranks: int, *, behind: int = -1, slow: int = -1, calls: int = 60) -> None:
    """Inspector files of one rank each: a communicator of all, and one of the two ranks of a pair."""
    noise = random.Random(4)
    for r in range(ranks):
        lines = []
        for size, ident, own in ((ranks, "0xall", r), (2, f"0xpair{r // 2}", r % 2)):
            for number in range(calls - (r == behind and size == ranks)):
                took = 61_000 if slow >= 0 and r != slow else 900
                header = {"id": ident, "rank": own, "n_ranks": size, "nnodes": 1}
                about = {"hostname": f"n{r // 4}", "pid": 100 + r, "dump_timestamp_us": 1748030377748202 + number}
                perf = {"coll": "AllReduce", "coll_sn": number, "coll_exec_time_us": took + noise.randrange(90)}
                lines.append(json.dumps({"header": header, "metadata": about, "coll_perf": perf}))
        (folder / f"n{r // 4}-pid{100 + r}.log").write_text("\n".join(lines) + "\n")


def test_inspector_names_the_rank_behind(tmp_path: Path) -> None:
    inspect(tmp_path, 8, behind=6)
    cause = first(judge(tmp_path))
    assert (cause.category, cause.subject.rank) == ("rank_hung", 6)


def test_inspector_names_the_rank_with_the_shortest_calls(tmp_path: Path) -> None:
    inspect(tmp_path, 8, slow=3)
    cause = first(judge(tmp_path))
    assert (cause.category, cause.subject.rank) == ("slow_compute", 3)
    assert cause.needs


def test_inspector_of_a_healthy_job(tmp_path: Path) -> None:
    inspect(tmp_path, 8)
    assert not judge(tmp_path).incidents


@pytest.mark.parametrize("flag", ["clocks_throttle_reasons.hw_thermal_slowdown", "clocks_event_reasons.active"])
@pytest.mark.parametrize("hot", [None, 3])
def test_nvidia_smi_over_time(tmp_path: Path, flag: str, hot: int | None) -> None:
    cool, warm = ("0x0000000000000004", "0x0000000000000044") if "active" in flag else ("Not Active", "Active")
    rows = [f"timestamp, index, uuid, clocks.sm [MHz], temperature.gpu, clocks_throttle_reasons.sw_power_cap, {flag}"]
    for t in range(40):
        for gpu in range(8):
            bad = gpu == hot and t > 20
            value = f"{870 if bad else 1755} MHz, {91 if bad else 62}, Active, {warm if bad else cool}"
            rows.append(f"2025/07/01 10:{t:02d}:00.000, {gpu}, GPU-{gpu}a, {value}")
    (tmp_path / "smi.csv").write_text("\n".join(rows) + "\n")
    report = judge(tmp_path)
    if hot is None:
        assert report.healthy
    else:
        assert (first(report).category, first(report).subject.device) == ("thermal_throttle", "3")


def test_dcgm_names_host_and_device(tmp_path: Path) -> None:
    rows = ["# TYPE DCGM_FI_DEV_SM_CLOCK gauge"]
    for gpu in range(8):
        labels = f'{{gpu="{gpu}",UUID="GPU-{gpu}",Hostname="node-4"}}'
        rows += [
            f"DCGM_FI_DEV_SM_CLOCK{labels} {705 if gpu == 2 else 1980}",
            f"DCGM_FI_DEV_CLOCK_THROTTLE_REASONS{labels} {72 if gpu == 2 else 0}",
        ]
    (tmp_path / "dcgm.prom").write_text("\n".join(rows) + "\n")
    subject = first(judge(tmp_path)).subject
    assert (subject.host, subject.device) == ("node-4", "2")


def test_a_dcgm_xid(tmp_path: Path) -> None:
    (tmp_path / "m.prom").write_text('# TYPE x gauge\nDCGM_FI_DEV_XID_ERRORS{gpu="1",Hostname="n7"} 79\n')
    cause = first(judge(tmp_path))
    assert (cause.category, cause.subject.host, cause.subject.device) == ("device_fault", "n7", "1")


def _varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def _event(step: int, tag: str, value: float) -> bytes:
    """One TFRecord with a scalar summary (tensorflow/core/util/event.proto)."""
    scalar = b"\x0a" + _varint(len(tag)) + tag.encode() + b"\x15" + struct.pack("<f", value)
    summary = b"\x0a" + _varint(len(scalar)) + scalar
    event = (
        b"\x09" + struct.pack("<d", 1.7e9 + step) + b"\x10" + _varint(step) + b"\x2a" + _varint(len(summary)) + summary
    )
    size = struct.pack("<Q", len(event))
    return size + struct.pack("<I", masked_crc(size)) + event + struct.pack("<I", masked_crc(event))


def test_the_checksum_is_castagnoli() -> None:
    check = 0xE3069283  # CRC-32C of "123456789", the check value of its definition
    assert masked_crc(b"123456789") == ((check >> 15 | check << 17) + 0xA282EAD8) & 0xFFFFFFFF


def test_tensorboard_event_files(tmp_path: Path) -> None:
    name = "events.out.tfevents.1700000000.node1.42.0"
    rows = [
        _event(step, tag, value)
        for step in range(80)
        for tag, value in (
            ("train/loss", 3.0 - 0.01 * step if step < 60 else float("nan")),
            ("train/learning_rate", 3e-4),
        )
    ]
    (tmp_path / name).write_bytes(b"".join(rows))
    assert {"loss", "lr"} <= set(read([tmp_path]).series)
    assert first(judge(tmp_path)).category == "nonfinite_values"
    (tmp_path / name).write_bytes(b"".join(rows)[: len(rows) * 40])  # cut off in a record, before the NaN
    assert {"loss", "lr"} <= set(read([tmp_path]).series)


def test_seeds(tmp_path: Path) -> None:
    for name, seeds in (("odd", (42, 42, 43, 42)), ("by_rank", (42, 43, 44, 45)), ("same", (7, 7, 7, 7))):
        (tmp_path / name).mkdir()
        for rank, seed in enumerate(seeds):
            text = f"[rank {rank}] initial seed: {seed}\n" + "".join(
                f"step {i} loss {3 - i / (90 + rank)}\n" for i in range(9)
            )
            (tmp_path / name / f"rank{rank}.log").write_text(text)
    cause = first(judge(tmp_path / "odd"))
    assert (cause.category, cause.subject.rank) == ("seed_mismatch", 2)
    assert not judge(tmp_path / "by_rank").incidents
    assert not judge(tmp_path / "same").incidents


@pytest.mark.parametrize("alone", [True, False])
def test_samplers(tmp_path: Path, alone: bool) -> None:
    rows = [
        f"rank {r}: DistributedSampler(rank={0 if alone else r}, num_replicas={1 if alone else 4}, shuffle=True)"
        for r in range(4)
    ]
    (tmp_path / "job.log").write_text("\n".join([*rows, *(f"step {i} loss {3 - i / 100}" for i in range(20))]) + "\n")
    report = judge(tmp_path)
    assert (first(report).category == "data_order") if alone else report.healthy
    assert named_ranks(report) == set()
