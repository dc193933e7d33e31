"""Builds the files that a failed job leaves behind: logs, dumps, metrics."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lanterne.backend.readers import diagnose_paths
from lanterne.nouns import Cause, Report

BASE_NS = 1_760_000_000_000_000_000


def watchdog(
    rank: int,
    sequence: int = 1401,
    op: str = "ALLREDUCE",
    numel: int = 1,
    timeout_ms: int = 1_800_000,
    style: str = "new",
) -> str:
    """A watchdog line in the wording of several torch versions."""
    ran = timeout_ms + 231
    if style == "old":
        return (
            f"[E ProcessGroupNCCL.cpp:566] [Rank {rank}] Watchdog caught collective operation timeout: "
            f"WorkNCCL(OpType={op}, Timeout(ms)={timeout_ms}) ran for {ran} milliseconds before timing out."
        )
    head = {
        "new": f"[rank{rank}]:[E1114 02:12:33.412345678 ProcessGroupNCCL.cpp:616] [Rank {rank}] ",
        "pg": f"[PG ID 0 PG GUID 0(default_pg) Rank {rank}] ",
        "plain": f"[Rank {rank}] ",
    }[style]
    return (
        f"{head}Watchdog caught collective operation timeout: WorkNCCL(SeqNum={sequence}, OpType={op}, "
        f"NumelIn={numel}, "
        f"NumelOut={numel}, Timeout(ms)={timeout_ms}) ran for {ran} milliseconds before timing out."
    )


def store_timeout(timeout_ms: int = 1_800_000) -> str:
    return f"torch.distributed.DistStoreError: wait timeout after {timeout_ms}ms, keys: /default_pg/0//cuda//0"


@dataclass
class Logs:
    """Lines per rank; written as one file a rank, as one combined log, or in torchrun's folders."""

    ranks: int
    lines: dict[int, list[str]] = field(default_factory=dict)

    def say(self, rank: int, *text: str) -> Logs:
        self.lines.setdefault(rank, []).extend(text)
        return self

    def write(self, folder: Path, layout: str = "per_rank") -> list[Path]:
        folder.mkdir(parents=True, exist_ok=True)
        if layout == "combined":
            rows = [
                f"[default{r}]: {t}" if not t.startswith("[rank") else t
                for r in sorted(self.lines)
                for t in self.lines[r]
            ]
            (folder / "job.out").write_text("\n".join([f"world_size={self.ranks}", *rows]) + "\n")
            return [folder]
        for rank in range(self.ranks):
            text = "\n".join(self.lines.get(rank, [f"starting worker, WORLD_SIZE={self.ranks}"])) + "\n"
            if layout == "torchrun":
                target = folder / "none_abc" / "attempt_0" / str(rank) / "stderr.log"
            else:
                target = folder / f"rank_{rank}.log"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
        return [folder]


def metrics_file(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def entry(
    sequence: int,
    op: str = "all_reduce",
    shape: Sequence[int] = (1024,),
    *,
    done: bool = True,
    group: tuple[str, str] = ("0", "default_pg"),
    at: int = 0,
    dtype: str = "Float",
    p2p: bool = False,
) -> dict[str, Any]:
    """One Flight Recorder entry, version 2.9."""
    created = BASE_NS + sequence * 1_000_000 + at
    return {
        "record_id": sequence,
        "pg_id": int(group[0]) if group[0].isdigit() else 0,
        "process_group": group,
        "collective_seq_id": sequence,
        "p2p_seq_id": 0,
        "op_id": sequence,
        "profiling_name": f"nccl:{op}",
        "time_created_ns": created,
        "input_sizes": [list(shape)],
        "input_dtypes": [dtype],
        "output_sizes": [list(shape)],
        "output_dtypes": [dtype],
        "state": "completed" if done else "scheduled",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": created + 500_000 if done else None,
        "retired": done,
        "timeout_ms": 600_000,
        "is_p2p": p2p,
        "frames": [{"name": "train_step", "filename": "train.py", "line": 88}],
    }


def dump(
    entries: Sequence[Mapping[str, Any]],
    ranks: Sequence[int],
    *,
    groups: Mapping[str, Sequence[int]] | None = None,
    version: str = "2.9",
) -> dict[str, Any]:
    """A whole dump; ``groups`` maps local names to rank lists (default: one group of all ranks)."""
    config = groups if groups is not None else {"0": ranks}
    return {
        "version": version,
        "nccl_version": "2.21.5",
        "pg_config": {n: {"name": n, "desc": f"group_{n}", "ranks": str(list(r))} for n, r in config.items()},
        "pg_status": {},
        "entries": list(entries),
    }


def write_dump(
    folder: Path, rank: int, value: Mapping[str, Any], style: str = "pickle", name: str = "_dump_{rank}"
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name.format(rank=rank)
    path.write_bytes(pickle.dumps(value, protocol=2) if style == "pickle" else json.dumps(value).encode())
    return path


def first(report: Report) -> Cause:
    """The first cause of the first incident."""
    assert report.incidents, f"no incident: {report.verdict}"
    return report.incidents[0].causes[0]


def judge(folder: Path) -> Report:
    return diagnose_paths([folder])


def categories(report: Report) -> list[str]:
    return [str(c.category) for i in report.incidents for c in i.causes]


def named_ranks(report: Report) -> set[int]:
    return {c.subject.rank for i in report.incidents for c in i.causes if c.subject.rank is not None}


def hedged(report: Report) -> bool:
    """Abstains, or says how unsure it is, and what would settle it."""
    cause = first(report)
    return (cause.category == "unknown" or cause.confidence < 0.6) and bool(cause.needs)
