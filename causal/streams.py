"""Compare the streams of collectives of a group's members: where do they first differ, and how.

"Same slot, other shape, type or order" is a mismatch. When one member's stream equals the others' shifted
by a few calls, it skipped or added calls: a divergence.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from lanterne.nouns import Collective

SHIFT_MAX = 8
_SHAPE = re.compile(r"\[([\d,\s]*)\]")
_UNEQUAL_IS_FINE = ("all_to_all", "alltoall", "gather_object", "send", "recv", "gather", "scatter", "barrier")


@dataclass(frozen=True, slots=True)
class Divergence:
    """``ranks`` differ from the majority at ``sequence``. ``shift``: their stream is ahead (+) by so many calls."""

    group: str
    sequence: int
    ranks: tuple[int, ...]
    theirs: str
    majority: str
    what: str  # op | shape | dtype
    shift: int = 0
    tie: bool = False
    one_element: bool = False  # the odd side runs a one-element or barrier call: a boundary
    sizes: tuple[int, ...] = ()


def numel(shape: str) -> int:
    """Elements of the inputs of a ``[[4, 2]]->[[8, 2]]``, ``(4, 2)`` or ``8`` text; 0 where it does not say."""
    total = 0
    if shape.strip().isdigit():  # the live tap writes the number of elements alone
        return int(shape)
    for dims in _SHAPE.findall(shape.replace("(", "[").replace(")", "]").split("->")[0]):
        numbers = [int(n) for n in dims.split(",") if n.strip()]
        if numbers or dims.strip() == "":
            product = 1
            for n in numbers:
                product *= n
            total += product
    return total


@lru_cache(maxsize=4096)
def canonical(op: str) -> str:
    """One name for the spellings of an op: ``_all_gather_base`` and ``ALLGATHER`` are ``allgather``."""
    name = op.lower().rpartition(":")[2].replace("_", "").replace("base", "").replace("intotensor", "").strip()
    return name.replace("tensor", "")


_FREE = tuple(map(canonical, _UNEQUAL_IS_FINE))


def descriptor(call: Collective) -> tuple[str, int, str]:
    """What all members must agree on: op, elements (where sizes must agree), dtype."""
    op = canonical(call.op)
    free = op.startswith(_FREE)
    return op, 0 if free else numel(call.shape), call.dtype.lower()


def _majority(rows: Mapping[int, tuple[str, int, str]]) -> tuple[tuple[str, int, str], tuple[int, ...], bool]:
    counts = Counter(rows.values()).most_common()
    best = counts[0][0]
    tie = len(counts) > 1 and counts[0][1] == counts[1][1]
    return best, tuple(sorted(r for r, d in rows.items() if d != best)), tie


def _text(d: tuple[str, int, str]) -> str:
    return f"{d[0]}({d[1]} x {d[2] or '?'})" if d[1] else d[0]


def _shift(calls: Mapping[int, Mapping[int, Collective]], odd: int, peer: int, at: int) -> int:
    """How far the odd rank's stream is ahead of a peer's; 0 = no shift explains it."""
    ours = {s: descriptor(c) for s, c in calls[odd].items()}
    theirs = {s: descriptor(c) for s, c in calls[peer].items()}
    best, best_overlap = 0, 0
    for shift in [s for k in range(1, SHIFT_MAX + 1) for s in (k, -k)]:
        pairs = [(ours[s], theirs[s + shift]) for s in ours if s >= at and s + shift in theirs and s + shift >= at]
        if not pairs or any(a != b for a, b in pairs):
            continue
        if len(pairs) > best_overlap:
            best, best_overlap = shift, len(pairs)
    return best


def differ(group: str, members: tuple[int, ...], calls: Mapping[int, Mapping[int, Collective]]) -> Divergence | None:
    """The first slot of the group where members disagree, or None."""
    ranks = [r for r in members if calls.get(r)]
    if len(ranks) < 2:
        return None
    slots = sorted({s for r in ranks for s in calls[r]})
    for at in slots:
        present = {r: calls[r][at] for r in ranks if at in calls[r]}
        rows = {r: descriptor(c) for r, c in present.items()}
        if len(set(rows.values())) < 2:
            continue
        best, odd, tie = _majority(rows)
        first = rows[odd[0]]
        what = "op" if first[0] != best[0] else "shape" if first[1] != best[1] else "dtype"
        peer = next(r for r, d in rows.items() if d == best)
        shift = _shift(calls, odd[0], peer, at) if len({rows[r] for r in odd}) == 1 else 0
        boundary = first[0].startswith("barrier") or numel(present[odd[0]].shape) == 1
        return Divergence(
            group=group,
            sequence=at,
            ranks=odd,
            theirs=_text(first),
            majority=_text(best),
            what=what,
            shift=shift,
            tie=tie,
            one_element=boundary and numel(present[peer].shape) > 1,
            sizes=tuple(numel(present[r].shape) for r in sorted(present)),
        )
    return None
