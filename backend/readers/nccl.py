"""NCCL's own files: RAS and Inspector JSON, nccl-tests tables, and the InfiniBand loop-back test."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lanterne import limits
from lanterne.backend.readers.gather import Gather
from lanterne.backend.readers.source import Source, lines

_TABLE = re.compile(
    r"^\s*(?P<bytes>\d+)\s+\d+\s+\w+\s+\w+(?:\s+-?\d+)?\s+(?P<us>[\d.]+)\s+(?P<alg>[\d.]+)\s+(?P<bus>[\d.]+)\s+(?P<wrong>\S+)"
)
_RANK = re.compile(r"^#\s+Rank\s+(?P<rank>\d+) .*?on\s+(?P<host>\S+)\s+device\s+(?P<device>\d+)")
_IB = re.compile(r"^\s*(?P<bytes>\d{3,})\s+(?P<n>\d+)\s+(?P<peak>[\d.]+)\s+(?P<average>[\d.]+)\s+[\d.]+\s*$")


def is_ras(value: Mapping[str, Any]) -> bool:
    """NCCL RAS (``ncclras -f json``)."""
    keys = {str(k).lower() for k in value}
    return bool(keys & {"communicators", "ras", "nccl_version"} and keys & {"communicators", "comms", "jobs", "ranks"})


def add_ras(value: Mapping[str, Any], gather: Gather, where: str) -> int:
    """Counters by communicator and rank become ``ras_rank``; ranks reported missing become ``ras_missing``."""
    comms = value.get("communicators") or value.get("comms") or []
    count = 0
    for comm in comms if isinstance(comms, list) else []:
        if isinstance(comm, dict):
            count += _communicator(comm, gather, where)
    if count:
        gather.sources.add("nccl_ras")
    return count


def _rank_of(row: Any) -> int | None:
    """The rank of a row, or the rank that a list names itself."""
    number = next((row[k] for k in ("rank", "comm_rank") if k in row), None) if isinstance(row, dict) else row
    text = str(number)
    return int(text) if text.isdecimal() and len(text) < 8 and int(text) < limits.RANKS_MAX else None


def _communicator(comm: Mapping[str, Any], gather: Gather, where: str) -> int:
    listed = comm.get("ranks")
    rows = [r for r in listed if isinstance(r, dict)] if isinstance(listed, list) else []
    numbers = {rank: row for row in rows if (rank := _rank_of(row)) is not None}
    absent = comm.get("missing_ranks")
    missing = {r for row in absent if (r := _rank_of(row)) is not None} if isinstance(absent, list) else set()
    size = next((comm[k] for k in ("size", "total_ranks", "nranks", "n_ranks") if isinstance(comm.get(k), int)), 0)
    if numbers and 0 < size <= limits.RANKS_MAX:
        missing |= set(range(size)) - set(numbers)
    members = tuple(sorted({*numbers, *missing}))
    if not members:
        return 0
    group = gather.group(members)
    for rank, row in numbers.items():
        host = str(row.get("host") or row.get("node_addr") or "").partition(":")[0]
        gather.place(rank, host=host, device=str(row.get("cuda_dev", "")))
        counts = _op_counts(row)
        gather.event("ras_rank", rank=rank, ref=where, group=group, count=sum(counts) if counts else -1, host=host)
    for rank in sorted(missing):
        gather.event("ras_missing", ref=where, group=group, missing=rank)
    return len(members)


def _op_counts(row: Mapping[str, Any]) -> list[int]:
    """Operation counters of a rank: one number, or one an operation in an object of its own."""
    found: list[int] = []
    for key, value in row.items():
        if re.search(r"op_?count|coll|seq", str(key), re.IGNORECASE):
            inner = value.values() if isinstance(value, dict) else (value,)
            found += [v for v in inner if isinstance(v, int) and not isinstance(v, bool)]
    return found


def is_inspector(row: Mapping[str, Any]) -> bool:
    """A record of NCCL's Inspector plug-in: one collective of one rank of one communicator."""
    return isinstance(row.get("coll_perf"), dict)


class Inspector:
    """Records of one file. From format 5 on, the header stands once and the records after it belong to it."""

    def __init__(self, gather: Gather, where: str) -> None:
        self.gather, self.where = gather, where
        self.about: dict[str, Any] = {}
        self.last: dict[tuple[str, int], dict[str, Any]] = {}
        self.found = 0

    def row(self, row: Mapping[str, Any]) -> None:
        """Take one record."""
        for part in (row, row.get("metadata"), row.get("header")):
            if isinstance(part, Mapping):
                self.about.update({k: v for k, v in part.items() if isinstance(v, (str, int))})
        call, rank = row["coll_perf"], _rank_of(self.about)
        number, took = call.get("coll_sn"), call.get("coll_exec_time_us")
        if rank is None or not isinstance(number, int) or not 0 <= number < 1 << 53:
            return
        self.found += 1
        size = self.about.get("n_ranks")
        size = size if isinstance(size, int) and 0 < size <= limits.RANKS_MAX else rank + 1
        key = (str(self.about.get("id", "")), rank)
        old = self.last.get(key)
        if old is None or number > old["sequence"]:
            self.last[key] = {
                "comm": key[0], "comm_rank": rank, "size": size, "sequence": number,
                "op": str(call.get("coll", "")), "pid": str(self.about.get("pid", "")),
                "where": str(self.about.get("hostname", "")),
            }  # fmt: skip
        if isinstance(took, (int, float)) and size == max(r["size"] for r in self.last.values()):
            self.gather.sample("collective_ms", number, rank, float(took) / 1000)

    def close(self) -> int:
        """Leave the last call of each communicator and rank; the answer is how many records were known."""
        for call in self.last.values():
            self.gather.event("inspector_last", ref=self.where, extra=call)
            self.gather.expected = max(self.gather.expected, call["size"])
        if self.found:
            self.gather.sources.add("nccl_inspector")
        return self.found


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
