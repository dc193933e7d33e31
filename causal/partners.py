"""Ranks of one copy of the model wait for each other inside every operation (tensor, pipeline, context parallel).

Where those waits were not recorded, a late rank makes its partners look as late as itself. What tells it apart are
the phases in which nobody waits for a partner; where they are silent, only the group can be named.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from lanterne.causal import stats
from lanterne.causal.facts import Place
from lanterne.causal.frame import Frame

if TYPE_CHECKING:
    from lanterne.causal.timing import Change

SHARED_AXES = frozenset({"pp", "tp", "cp"})
ALIKE_SHARE = 0.6
ALIKE_ROWS = 3
TELLS_SHARE = 0.2
"""Of the lateness, what the phases of the late rank must show beyond its partners' to tell it."""
LEAD = 2.0
FREE_PHASES = ("data_wait_ms", "h2d_ms", "forward_ms", "optimizer_ms")


def groups(frame: Frame, found: Sequence[Change]) -> list[list[Change]]:
    """Changes that began together by as much, within one copy of the model; only those of two and more."""
    if not frame.parallel:
        return []
    copies: dict[tuple[tuple[str, int], ...], list[Change]] = {}
    for change in found:
        mesh = frame.facts.places.get(frame.ranks[change.column], Place()).mesh
        copies.setdefault(tuple(sorted((k, v) for k, v in mesh.items() if k not in SHARED_AXES)), []).append(change)
    out = []
    for members in copies.values():
        top = max(members, key=lambda c: c.shift_ms)
        alike = [c for c in members if c.shift_ms > ALIKE_SHARE * top.shift_ms and abs(c.row - top.row) <= ALIKE_ROWS]
        if len(alike) > 1:
            out.append(alike)
    return out


def told(frame: Frame, found: Sequence[Change]) -> tuple[list[Change], dict[int, list[Change]]]:
    """The changes less those of partners that wait; and by column of the rank that made them late, whom it held up."""
    followers: dict[int, list[Change]] = {}
    for members in groups(frame, found):
        shown = np.array([excess(frame, c) for c in members])
        order = np.argsort(-shown)
        first, second = float(shown[order[0]]), float(shown[order[1]])
        if first > TELLS_SHARE * members[order[0]].shift_ms and first > LEAD * max(second, 0.0):
            followers[members[order[0]].column] = [members[i] for i in order[1:]]
    held = {c.column for members in followers.values() for c in members}
    return [c for c in found if c.column not in held], followers


def silent(frame: Frame, members: Sequence[Change]) -> bool:
    """No phase without waits shows why any of these ranks is late."""
    return all(excess(frame, c) < TELLS_SHARE * c.shift_ms for c in members)


def excess(frame: Frame, change: Change) -> float:
    """Rise of the phases without waits, beyond the role peers, ms."""
    before = frame.usable & (np.arange(len(frame.usable)) < change.row)
    total = 0.0
    for name in FREE_PHASES:
        if name in frame.facts.series:
            y = frame.beyond_peers(name, change.column)
            was = stats.rows_median(y[before]) if before.any() else 0.0
            total += float(np.nan_to_num(stats.rows_median(y[change.rows & frame.usable]) - np.nan_to_num(was)))
    return total
