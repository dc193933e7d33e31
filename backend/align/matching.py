"""Match the calls of all ranks into collectives: by group (rank set) and order, never by time.

A *slot* is one collective, (group, sequence). Rows are sorted by slot, then rank, so that everything
about a slot is one ``reduceat`` away. A slot may miss members (a rank that died, hung or reports late),
and members may disagree about what they call (a mismatch).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lanterne.backend.align.frame import Floats, Frame, Ints
from lanterne.nouns import Collective, group_ranks

EVEN_OPS = ("allreduce", "all_reduce", "broadcast", "reduce_scatter", "reducescatter", "barrier")
"""Ops in which all members must bring the same size; gathers, scatters and point-to-point may differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """Collective calls sorted by (group, sequence, rank): arrays [N]; times in each rank's own Unix ns.

    ``completed_ns`` 0 = pending. ``first`` [S] is the first row of each slot, ``slot`` [N] the slot of each row.
    ``monotonic_ns`` stands at the entry (0 = not known).
    """

    groups: tuple[str, ...]
    ops: tuple[str, ...]
    signatures: tuple[str, ...]  # dtype|shape
    group: Ints
    sequence: Ints
    rank: Ints
    step: Ints
    bytes: Ints
    op: Ints
    signature: Ints
    entered_ns: Ints
    completed_ns: Ints
    monotonic_ns: Ints
    slot: Ints
    first: Ints

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def sizes(self) -> Ints:
        """Members seen of each slot, [S]."""
        return np.diff(np.append(self.first, len(self.rank)))

    def expected(self) -> Ints:
        """Members that each slot's group has by its name, [S]; 0 where the name is no rank set."""
        members = np.array([len(members_of(g)) for g in self.groups] or [0], np.int64)
        return members[self.group[self.first]] if len(self.first) else np.zeros(0, np.int64)

    def reporting(self) -> Ints:
        """Members of each slot's group that made any call in this window, [S]; the rest are silent."""
        span = int(self.rank.max(initial=0)) + 1
        count = np.bincount(np.unique(self.group * span + self.rank) // span, minlength=len(self.groups))
        return count[self.group[self.first]] if len(self.first) else np.zeros(0, np.int64)

    def by_slot(self, values: Any, how: Any) -> Any:
        """``how.reduceat`` of a row array over slots, [S]."""
        return how.reduceat(values, self.first) if len(self.first) else values[:0]


def members_of(group: str) -> tuple[int, ...]:
    """Ranks of a group name; empty where the name is not a rank set."""
    try:
        return group_ranks(group)
    except ValueError:
        return ()


def arrange(
    *, groups: Sequence[str], ops: Sequence[str], signatures: Sequence[str],
    group: Ints, sequence: Ints, rank: Ints, step: Ints, bytes_: Ints,
    op: Ints, signature: Ints, entered_ns: Ints, completed_ns: Ints, monotonic_ns: Ints,
) -> Calls:  # fmt: skip
    """Sort rows into slots. Of a call reported twice the completed row stays, then the one that entered first."""
    keep = (sequence >= 0) & (entered_ns > 0)
    order = np.lexsort((rank, sequence, group))
    order = order[keep[order]]
    new = _changes(group[order], sequence[order], rank[order])
    if not new.all():
        pending = completed_ns <= 0
        order = np.lexsort((completed_ns, entered_ns, pending, rank, sequence, group))
        order = order[keep[order]]
        order = order[_changes(group[order], sequence[order], rank[order])]
    g, s = group[order], sequence[order]
    edge = _changes(g, s)
    return Calls(
        groups=tuple(groups),
        ops=tuple(ops),
        signatures=tuple(signatures),
        group=g,
        sequence=s,
        rank=rank[order],
        step=step[order],
        bytes=bytes_[order],
        op=op[order],
        signature=signature[order],
        entered_ns=entered_ns[order],
        completed_ns=completed_ns[order],
        monotonic_ns=monotonic_ns[order],
        slot=np.cumsum(edge) - 1,
        first=np.flatnonzero(edge),
    )


def _changes(*columns: Ints) -> np.ndarray:
    """Rows that differ from the row before in any column; the first row does."""
    new = np.ones(len(columns[0]), bool)
    if len(new):
        new[1:] = np.any([c[1:] != c[:-1] for c in columns], axis=0)
    return new


ROWS = ("rank", "step", "sequence", "bytes", "entered_ns", "completed_ns", "monotonic_ns")
"""Columns that stand for themselves; the others are codes of a table of names."""


def _columns(parts: Sequence[Calls], rows: Sequence[Any]) -> tuple[dict[str, tuple[str, ...]], dict[str, Ints]]:
    """Tables in order of name with what the rows use of them, and all columns by name."""
    none = np.zeros(0, np.int64)
    tables: dict[str, tuple[str, ...]] = {}
    columns = {
        c: np.concatenate([getattr(p, c)[r] for p, r in zip(parts, rows, strict=True)]) if parts else none for c in ROWS
    }
    for table, column in (("groups", "group"), ("ops", "op"), ("signatures", "signature")):
        codes = [getattr(part, column)[picked] for part, picked in zip(parts, rows, strict=True)]
        names = [getattr(part, table) for part in parts]
        used = [np.flatnonzero(np.bincount(c, minlength=len(n))) for c, n in zip(codes, names, strict=True)]
        found = sorted({n[i] for n, u in zip(names, used, strict=True) for i in u.tolist()})
        index = {name: i for i, name in enumerate(found)}
        for i, (n, u) in enumerate(zip(names, used, strict=True)):
            to = np.zeros(max(len(n), 1), np.int64)
            to[u] = [index[n[k]] for k in u.tolist()]
            codes[i] = to[codes[i]]
        tables[table], columns[column] = tuple(found), np.concatenate(codes) if codes else none
    return tables, columns


def joined(parts: Sequence[Calls], rows: Sequence[Any] | None = None) -> Calls:
    """All rows (or ``rows[i]`` of part i, masks or indices) as one; tables in order of name, so that the same rows
    give the same arrays whatever parts they came in."""
    tables, columns = _columns(parts, [slice(None)] * len(parts) if rows is None else rows)
    size = columns.pop("bytes")
    return arrange(groups=tables["groups"], ops=tables["ops"], signatures=tables["signatures"], bytes_=size, **columns)


def picked(calls: Calls, keep: np.ndarray) -> Calls:
    """The rows of a mask [N], in their order."""
    found = {c: getattr(calls, c)[keep] for c in (*ROWS, "group", "op", "signature")}
    edge = _changes(calls.slot[keep])
    return replace(calls, slot=np.cumsum(edge) - 1, first=np.flatnonzero(edge), **found)


def stacked(parts: Sequence[Calls]) -> tuple[Calls, Ints]:
    """Parts that share no slot as one, and the order [N] that brings the parts' rows, end to end, into it."""
    tables, columns = _columns(parts, [slice(None)] * len(parts))
    sizes = np.concatenate([p.sizes for p in parts])
    first = np.cumsum(sizes) - sizes
    slots = np.lexsort((columns["sequence"][first], columns["group"][first]))
    moved = np.cumsum(sizes[slots]) - sizes[slots]
    order = np.repeat(first[slots] - moved, sizes[slots]) + np.arange(len(columns["rank"]))
    found = {name: values[order] for name, values in columns.items()}
    slot = np.repeat(np.arange(len(slots)), sizes[slots])
    calls = Calls(
        groups=tables["groups"], ops=tables["ops"], signatures=tables["signatures"], slot=slot, first=moved, **found
    )
    return calls, order


def from_frame(frame: Frame, extra: Iterable[Collective] = ()) -> Calls:
    """Calls of a frame's collective spans, and of ``extra`` (pending calls known from events)."""
    spans = frame.spans
    mask = spans.kind.where("training.collective")
    more = list(extra)
    groups, ops, signatures = (list(t.values) for t in (spans.group, spans.name, spans.signature))

    def code(values: list[str], text: str) -> int:
        if text not in values:
            values.append(text)
        return values.index(text)

    def joined(rows: Ints, extra_rows: Iterable[int]) -> Ints:
        return np.concatenate([rows[mask], np.fromiter(extra_rows, np.int64)])

    return arrange(
        group=joined(spans.group.codes, (code(groups, c.group) for c in more)),
        op=joined(spans.name.codes, (code(ops, c.op) for c in more)),
        signature=joined(spans.signature.codes, (code(signatures, f"{c.dtype}|{c.shape}") for c in more)),
        sequence=joined(spans.group_sequence, (c.sequence for c in more)),
        rank=joined(spans.rank, (c.rank for c in more)),
        step=joined(spans.step, (c.step for c in more)),
        bytes_=joined(spans.bytes, (c.bytes for c in more)),
        entered_ns=joined(spans.start_ns, (c.entered_ns for c in more)),
        completed_ns=joined(spans.end_ns, (c.completed_ns for c in more)),
        monotonic_ns=joined(spans.monotonic_ns, (0 for _ in more)),
        groups=groups,
        ops=ops,
        signatures=signatures,
    )


def from_collectives(rows: Sequence[Collective]) -> Calls:
    """Calls of plain Collective rows, as the file readers make them."""
    return from_frame(Frame(job="", attempt=0), rows)


def as_collective(calls: Calls, row: int) -> Collective:
    """Row ``row`` as the noun."""
    dtype, _, shape = calls.signatures[calls.signature[row]].partition("|")
    return Collective(
        dtype=dtype,
        shape=shape,
        rank=int(calls.rank[row]),
        group=calls.groups[calls.group[row]],
        sequence=int(calls.sequence[row]),
        op=calls.ops[calls.op[row]],
        step=int(calls.step[row]),
        bytes=int(calls.bytes[row]),
        entered_ns=int(calls.entered_ns[row]),
        completed_ns=int(calls.completed_ns[row]),
    )


def last_calls(calls: Calls, keep: int = 8) -> list[Collective]:
    """The last ``keep`` calls of each (rank, group), pending ones included, oldest first."""
    if not len(calls):
        return []
    order = np.lexsort((calls.sequence, calls.rank, calls.group))
    g, r = calls.group[order], calls.rank[order]
    end = np.ones(len(order), bool)
    end[:-1] = (g[1:] != g[:-1]) | (r[1:] != r[:-1])
    ends = np.flatnonzero(end)
    begins = np.concatenate([[0], ends[:-1] + 1])
    rows = [order[i] for b, e in zip(begins, ends, strict=True) for i in range(max(b, e - keep + 1), e + 1)]
    return [as_collective(calls, int(row)) for row in rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A slot that some members entered and others did not."""

    group: str
    sequence: int
    op: str
    present: tuple[int, ...]
    missing: tuple[int, ...]


def gaps(calls: Calls, last_only: bool = True) -> list[Gap]:
    """Slots with missing members; ``last_only`` keeps the last slot of each group, where a hang shows."""
    expected = calls.expected()
    short = np.flatnonzero((calls.sizes < expected) & (expected > 0))
    if last_only and len(calls.first):
        groups = calls.group[calls.first]
        final = np.ones(len(groups), bool)
        final[:-1] = groups[1:] != groups[:-1]
        short = short[final[short]]
    found = []
    bounds = np.append(calls.first, len(calls))
    for slot in short:
        rows = slice(int(bounds[slot]), int(bounds[slot + 1]))
        present = tuple(int(r) for r in calls.rank[rows])
        name = calls.groups[calls.group[rows.start]]
        found.append(
            Gap(
                group=name,
                sequence=int(calls.sequence[rows.start]),
                op=calls.ops[calls.op[rows.start]],
                present=present,
                missing=tuple(sorted(set(members_of(name)) - set(present))),
            )
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """A slot whose members call different things; ``odd`` are the ranks in the minority (empty when tied)."""

    group: str
    sequence: int
    step: int
    what: str  # op | size | type
    odd: tuple[int, ...]
    says: str


def mismatches(calls: Calls, limit: int = 8) -> list[Mismatch]:
    """Slots in which op, size (for ops that need equal sizes) or dtype/shape differ between members."""
    if not len(calls):
        return []
    even = np.array([any(op in name.lower() for op in EVEN_OPS) for name in calls.ops], bool)[calls.op]
    found: list[Mismatch] = []
    for what, values, relevant in (
        ("op", calls.op, np.ones(len(calls), bool)),
        ("size", calls.bytes, even),
        ("type", calls.signature, even),
    ):
        low = calls.by_slot(values, np.minimum)
        high = calls.by_slot(values, np.maximum)
        odd = np.flatnonzero((low != high) & calls.by_slot(relevant, np.logical_and))
        found = [_mismatch(calls, int(slot), what, values) for slot in odd[:limit]]
        if found:
            break
    return found


def _mismatch(calls: Calls, slot: int, what: str, values: Ints) -> Mismatch:
    end = int(calls.first[slot + 1]) if slot + 1 < len(calls.first) else len(calls)
    rows = np.arange(int(calls.first[slot]), end)
    kinds, counts = np.unique(values[rows], return_counts=True)
    usual = kinds[counts.argmax()]
    tied = (counts == counts.max()).sum() > 1
    odd = () if tied else tuple(int(r) for r in calls.rank[rows[values[rows] != usual]])
    detail = values if what != "op" else calls.op
    told = ", ".join(
        f"rank {int(calls.rank[row])}: {calls.ops[calls.op[row]]}" + ("" if what == "op" else f" {int(detail[row])}")
        for row in rows[:8]
    )
    unit = {"op": "", "size": " (bytes)", "type": " (type code)"}[what]
    first = int(rows[0])
    return Mismatch(
        group=calls.groups[calls.group[first]],
        sequence=int(calls.sequence[first]),
        step=int(calls.step[first]),
        what=what,
        odd=odd,
        says=f"{what} differs in slot {int(calls.sequence[first])}{unit}: {told}",
    )


def lost_share(calls: Calls) -> float:
    """Share of slots with a missing member, 0..1."""
    expected = calls.expected()
    known = expected > 0
    return float((calls.sizes[known] < expected[known]).mean()) if known.any() else 0.0


def completion_spread_ns(calls: Calls) -> Floats:
    """Completion of each row behind its slot's mean completion, ns [N]; NaN for pending rows."""
    done = calls.completed_ns > 0
    base = calls.entered_ns[calls.first].astype(np.int64) if len(calls) else np.zeros(0, np.int64)
    relative = np.where(done, (calls.completed_ns - base[calls.slot]).astype(np.float64), 0.0)
    total = calls.by_slot(relative, np.add)
    count = calls.by_slot(done.astype(np.float64), np.add)
    mean = np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)
    return np.where(done, relative - mean[calls.slot], np.nan)
