"""NCCL's own files: RAS and Inspector JSON, nccl-tests tables, and the InfiniBand loop-back test."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lanterne.backend.readers.gather import Gather
from lanterne.backend.readers.source import Source, lines

_TABLE = re.compile(
    r"^\s*(?P<bytes>\d+)\s+\d+\s+\w+\s+\w+(?:\s+-?\d+)?\s+(?P<us>[\d.]+)\s+(?P<alg>[\d.]+)\s+(?P<bus>[\d.]+)\s+(?P<wrong>\S+)"
)
_RANK = re.compile(r"^#\s+Rank\s+(?P<rank>\d+) .*?on\s+(?P<host>\S+)\s+device\s+(?P<device>\d+)")
_IB = re.compile(r"^\s*(?P<bytes>\d{3,})\s+(?P<n>\d+)\s+(?P<peak>[\d.]+)\s+(?P<average>[\d.]+)\s+[\d.]+\s*$")


def is_ras(value: Mapping[str, Any]) -> bool:
    """NCCL RAS (``ncclras -f json``) or Inspector documents."""
    keys = {str(k).lower() for k in value}
    return bool(keys & {"communicators", "ras", "nccl_version"} and keys & {"communicators", "comms", "jobs", "ranks"})


def add_ras(value: Mapping[str, Any], gather: Gather, where: str) -> int:
    """Counters by communicator and rank become ``group_status``; ranks reported missing become ``ras_missing``."""
    comms = value.get("communicators") or value.get("comms") or []
    count = 0
    for comm in comms if isinstance(comms, list) else []:
        if not isinstance(comm, dict):
            continue
        rows = [r for r in comm.get("ranks", []) if isinstance(r, dict)]
        numbers = {int(r.get("rank", i)): r for i, r in enumerate(rows) if str(r.get("rank", i)).isdigit()}
        missing = [int(r) for r in comm.get("missing_ranks", []) if str(r).isdigit()]
        size = comm.get("size", comm.get("nranks", 0))
        if isinstance(size, int) and 0 < size <= 131_072:
            missing += [r for r in range(size) if r not in numbers and r not in missing] if numbers else []
        members = tuple(sorted({*numbers, *missing}))
        if not members:
            continue
        group = gather.group(members)
        for rank, row in numbers.items():
            counts = [
                v
                for k, v in row.items()
                if isinstance(v, int) and re.search(r"op_?count|coll|seq", str(k), re.IGNORECASE)
            ]
            gather.event(
                "ras_rank",
                rank=rank,
                ref=where,
                group=group,
                count=max(counts, default=-1),
                status=str(row.get("status", ""))[:80],
            )
            count += 1
        for rank in missing:
            gather.event("ras_missing", rank=-1, ref=where, group=group, missing=rank)
            count += 1
    if count:
        gather.sources.add("nccl_ras")
    return count


def is_tests(source: Source) -> bool:
    """Output of nccl-tests or of perftest's ib_write_bw."""
    head = source.text_head
    return ("# nThread" in head and "busbw" in head) or "RDMA_Write BW Test" in head


def read_tests(source: Source, gather: Gather) -> int:
    """Bandwidth by size; wrong results become a fact. No level is judged without a baseline."""
    found, best, best_bytes = 0, 0.0, 0
    for number, line in lines(source):
        rank = _RANK.match(line)
        if rank:
            gather.ranks.add(int(rank["rank"]))
            gather.place(int(rank["rank"]), host=rank["host"], device=rank["device"])
            found += 1
            continue
        row = _TABLE.match(line)
        if row:
            found += 1
            if float(row["bus"]) > best:
                best, best_bytes = float(row["bus"]), int(row["bytes"])
            wrong = row["wrong"]
            if wrong.isdigit() and int(wrong) > 0:
                gather.event(
                    "wrong_results",
                    ref=f"{source.name}:{number}",
                    bytes=int(row["bytes"]),
                    count=int(wrong),
                    body=line.strip(),
                )
            continue
        ib = _IB.match(line)
        if ib:
            found += 1
            best, best_bytes = max(best, float(ib["average"]) / 1000), int(ib["bytes"])
    if found:
        gather.event("bandwidth_test", ref=source.name, best_gbps=best, bytes=best_bytes)
        gather.sources.add("node_health")
    return found
