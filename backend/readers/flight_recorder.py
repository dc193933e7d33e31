"""PyTorch Flight Recorder dumps: pickle or JSON, record versions 2.1 to 2.10 and the older 1.x, NCCL and gloo.

A dump does not name its rank. It comes from the file name, else from the groups the dump is a member of
(their common member), else from the order of the files, which is said in the notes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lanterne.backend.readers import plain_pickle
from lanterne.backend.readers.gather import Gather
from lanterne.backend.readers.source import Source, read_all
from lanterne.errors import UnreadableInput
from lanterne.nouns import Collective

CALLS_MAX, CALLS_EACH_MIN = 300_000, 64
"""Calls kept over all dumps of a job: a hang is told by the last ones."""
_BYTES = {"float": 4, "int": 4, "double": 8, "long": 8, "half": 2, "bfloat16": 2, "byte": 1, "char": 1, "bool": 1}
_P2P = re.compile(r"\b(send|recv)\b\s*(\d+)\s*(?:->|<-)\s*(\d+)")
_COUNT = re.compile(r"-?\d{1,18}")
_NUMBERS = re.compile(r"\d+")


@dataclass
class Dump:
    """One parsed dump: ``config`` maps a group's name to its rank set."""

    source: Source
    version: str
    entries: Sequence[Mapping[str, Any]]
    config: dict[str, tuple[int, ...]] = field(default_factory=dict)
    described: dict[str, str] = field(default_factory=dict)
    status: Mapping[str, Any] = field(default_factory=dict)
    rank: int = -1
    first: int = 0  # entries before it were left out


def trim(dumps: Sequence[Dump]) -> int:
    """Keep the last calls of each dump, ``CALLS_MAX`` in all; the answer is how many each may keep."""
    keep = max(CALLS_EACH_MIN, CALLS_MAX // max(1, len(dumps)))
    for dump in dumps:
        out = len(dump.entries) - keep
        if out > 0:
            dump.entries, dump.first = dump.entries[out:], dump.first + out
    return keep


def sniff(source: Source) -> bool:
    """A pickle (protocol 2 and up) or JSON with the recorder's keys near its start."""
    head = source.head
    if head[:1] == b"\x80" and len(head) > 2 and head[1] <= 5:
        return any(key in head for key in (b"entries", b"pg_config", b"nccl_version", b"collective_seq_id"))
    text = head.lstrip()[:1] in (b"{", b"[")
    keys = (b'"pg_config"', b'"pg_status"', b'"collective_seq_id"', b'"record_id"')
    known = any(key in head for key in keys) or (b'"nccl_version"' in head and b'"entries"' in head)
    return text and known and b"traceEvents" not in head[:4096]


def parse(source: Source, fast: plain_pickle.FastReader | None = None) -> Dump:
    """Parse one dump. Raises UnreadableInput (file and offset) on content that is not one."""
    data = read_all(source)
    if data[:1] == b"\x80":
        value = (fast or plain_pickle).loads(data, source.name)
    else:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise UnreadableInput(source.name, f"not JSON: {error}", offset=getattr(error, "pos", -1)) from error
    if isinstance(value, list):  # version 1.x: a bare list of entries
        value = {"version": "1", "entries": value}
    if not isinstance(value, dict) or not isinstance(value.get("entries", []), (list, tuple)):
        raise UnreadableInput(source.name, "no 'entries' list: not a Flight Recorder dump")
    entries = [e for e in value.get("entries", []) if isinstance(e, dict)]
    dump = Dump(source, str(value.get("version", "")), entries, rank=source.rank)
    if isinstance(value.get("rank"), int):
        dump.rank = value["rank"]
    status = value.get("pg_status")
    dump.status = status if isinstance(status, dict) else {}
    _config(dump, value.get("pg_config"))
    return dump


def _config(dump: Dump, config: Any) -> None:
    """Versions differ: ``{name: {name, desc, ranks}}``, ranks as text or list, or one level deeper."""
    if not isinstance(config, dict):
        return
    for key, value in config.items():
        if not isinstance(value, dict):
            continue
        ranks = value.get("ranks")
        found = tuple(int(n) for n in _NUMBERS.findall(str(ranks)[:1_000_000])) if ranks else ()
        if found:
            name = str(value.get("name", key))
            dump.config[name] = found
            dump.described[name] = str(value.get("desc", ""))


def _group_of(entry: Mapping[str, Any]) -> str:
    group = entry.get("process_group")
    if isinstance(group, (list, tuple)) and group:
        return str(group[0])
    return str(entry.get("pg_name", entry.get("pg_id", "0")))


def infer_ranks(dumps: Sequence[Dump], gather: Gather) -> None:
    """Give every dump a rank of its own, by name, by common member of its groups, else by order."""
    names = [d.rank for d in dumps]
    if len(set(names)) != len(names):  # several files claim one rank: names are no guide
        for dump in dumps:
            if names.count(dump.rank) > 1:
                dump.rank = -1
    taken = {d.rank for d in dumps if d.rank >= 0}
    for dump in (d for d in dumps if d.rank < 0):
        members = [set(ranks) for ranks in dump.config.values()]
        common = set.intersection(*members) if members else set()
        own = _own_p2p(dump)
        candidates = (common & {own} if own is not None else common) - taken
        if len(candidates) == 1:
            dump.rank = candidates.pop()
            taken.add(dump.rank)
    rest = [d for d in dumps if d.rank < 0]
    for dump in rest:
        dump.rank = min(r for r in range(len(taken) + 1) if r not in taken)
        taken.add(dump.rank)
        gather.gap(f"{dump.source.name}: the dump does not say its rank; taken as rank {dump.rank} by file order")


def _own_p2p(dump: Dump) -> int | None:
    for entry in dump.entries:
        found = _P2P.search(str(entry.get("profiling_name", "")))
        ranks = dump.config.get(_group_of(entry), ())
        if found and int(found.group(2)) < len(ranks):
            return ranks[int(found.group(2))]
    return None


def _numel(sizes: Any) -> int:
    total = 0
    for shape in sizes if isinstance(sizes, (list, tuple)) else ():
        n = 1
        for dim in shape if isinstance(shape, (list, tuple)) else ():
            n *= dim if isinstance(dim, int) and 0 <= dim < 1 << 40 else 1
            if n > 1 << 62:
                return 1 << 62
        total += n
    return total


def _stamp(value: Any) -> int:
    return value if isinstance(value, int) and 0 < value < 1 << 63 else 0


def _site(entry: Mapping[str, Any]) -> str:
    frames = entry.get("frames")
    for frame in frames if isinstance(frames, (list, tuple)) else ():
        if isinstance(frame, dict) and "torch/distributed" not in str(frame.get("filename", "")):
            return f"{frame.get('filename', '?')}:{frame.get('line', '?')} {frame.get('name', '')}"[:300]
    return ""


def collective(entry: Mapping[str, Any], rank: int, group: str) -> Collective:
    """One entry as a Collective. ``shape`` holds ``inputs->outputs``; a completed entry without a time gets entry+1."""
    created = _stamp(entry.get("time_created_ns")) or 1
    done = _stamp(entry.get("time_discovered_completed_ns"))
    name = str(entry.get("profiling_name", ""))
    silent = name.startswith("gloo:") and entry.get("retired") is True  # gloo leaves the state at "scheduled"
    if not done and (str(entry.get("state")) == "completed" or silent):
        done = created + 1
    dtypes = entry.get("input_dtypes") or []
    dtype = str(dtypes[0]) if isinstance(dtypes, (list, tuple)) and dtypes else str(entry.get("dtype", ""))
    numel = _numel(entry.get("input_sizes"))
    sequence = entry.get("collective_seq_id", entry.get("seq_id", entry.get("op_id", 0)))
    op = str(entry.get("profiling_name", entry.get("name", "")))
    return Collective(
        rank=rank,
        group=group,
        sequence=sequence if isinstance(sequence, int) else 0,
        op=op.rpartition(":")[2].strip()[:120],
        bytes=min(numel * _BYTES.get(dtype.lower(), 4), 1 << 62),
        dtype=dtype[:40],
        shape=f"{str(entry.get('input_sizes', ''))[:200]}->{str(entry.get('output_sizes', ''))[:200]}",
        entered_ns=created,
        completed_ns=done,
        site=_site(entry),
    )


def _status_names(dump: Dump) -> dict[str, str]:
    """Map the local ids of ``pg_status`` to group names: by the entries, else by order of creation."""
    known = {str(e["pg_id"]): _group_of(e) for e in dump.entries if "pg_id" in e}
    try:
        names = sorted(dump.config, key=int)
        ids = sorted(dump.status, key=int)
    except (ValueError, TypeError):
        return known
    if len(names) == len(ids):
        by_order = dict(zip(map(str, ids), names, strict=True))
        if all(by_order.get(k) == v for k, v in known.items()):
            return by_order
    return known


def _group_names(dump: Dump, gather: Gather) -> dict[str, str]:
    """Local name -> rank set. A second group over the same ranks (in order of creation) gets ``#2``, and so on."""
    count: dict[str, int] = {}
    names: dict[str, str] = {}
    numeric = all(name.isdigit() for name in dump.config)
    for local in sorted(dump.config, key=int) if numeric else dump.config:
        base = gather.group(dump.config[local])
        count[base] = count.get(base, 0) + 1
        names[local] = base if count[base] == 1 else f"{base}#{count[base]}"
        gather.groups[names[local]] = gather.groups[base]
    return names


def add(dumps: Sequence[Dump], gather: Gather) -> None:
    """Put all dumps of one job into ``gather``; groups are named by rank set, whatever their local names."""
    infer_ranks(dumps, gather)
    seen = sorted(d.rank for d in dumps)
    keep = trim(dumps)
    if cut := sum(d.first > 0 for d in dumps):
        gather.gap(f"{cut} dumps hold more than {keep} calls: the last {keep} of each are used")
    for dump in dumps:
        gather.sources.add("flight_recorder")
        gather.ranks.add(dump.rank)
        names = _group_names(dump, gather)
        gather.event(
            "flight_recorder_dump",
            rank=dump.rank,
            ref=dump.source.name,
            entries=dump.first + len(dump.entries),
            version=dump.version,
        )
        mixed: set[str] = set()
        for number, entry in enumerate(dump.entries, dump.first):
            local = _group_of(entry)
            if local not in names and len(names) == 1:  # gloo leaves the name in pg_config empty
                names[local] = next(iter(names.values()))
            elif local not in names:
                names[local] = gather.group(tuple(seen))
                gather.gap(f"{dump.source.name}: group {local} has no rank list; taken as all dumped ranks")
            _entry(entry, dump, names[local], number, mixed, gather)
        gloo = any(str(e.get("profiling_name", "")).startswith("gloo:") for e in dump.entries)
        status = {str(k): v for k, v in dump.status.items()}
        for key, local in _status_names(dump).items():
            row = status.get(key)
            group = names.get(local)
            if isinstance(row, dict) and group and group not in mixed and not gloo:
                counts = {k: int(v) for k, v in row.items() if isinstance(k, str) and _COUNT.fullmatch(str(v)[:20])}
                gather.event("group_status", rank=dump.rank, ref=dump.source.name, extra={**counts, "group": group})
        gather.used += 1
    _reopen(gather)


def _reopen(gather: Gather) -> None:
    """A symmetric call cannot complete before all members entered it: a retired one that lacks a member had failed."""
    entered: dict[tuple[str, int], set[int]] = {}
    for call in gather.collectives:
        entered.setdefault((call.group, call.sequence), set()).add(call.rank)
    last: dict[tuple[str, int], int] = {}
    for call in gather.collectives:
        key = (call.group, call.rank)
        last[key] = max(last.get(key, 0), call.sequence)
    for i, call in enumerate(gather.collectives):
        guessed = call.completed_ns == call.entered_ns + 1 and last[(call.group, call.rank)] == call.sequence
        members = set(gather.groups.get(call.group, ()))
        if guessed and members - entered[(call.group, call.sequence)]:
            gather.collectives[i] = replace(call, completed_ns=0)


def _entry(entry: Mapping[str, Any], dump: Dump, group: str, number: int, mixed: set[str], gather: Gather) -> None:
    name = str(entry.get("profiling_name", ""))
    p2p = _P2P.search(name)
    if p2p is None and not entry.get("is_p2p"):
        gather.collectives.append(collective(entry, dump.rank, group))
        return
    mixed.add(group)
    call = collective(entry, dump.rank, group)
    if call.completed_ns or p2p is None:
        return
    ranks = gather.groups.get(group, ())
    peer = int(p2p.group(3))
    gather.event(
        "p2p_pending",
        rank=dump.rank,
        at_ns=call.entered_ns,
        ref=f"{dump.source.name}#entry{number}",
        group=group,
        op=p2p.group(1),
        peer=ranks[peer] if peer < len(ranks) else peer,
        sequence=entry.get("p2p_seq_id", 0) if isinstance(entry.get("p2p_seq_id", 0), int) else 0,
    )
