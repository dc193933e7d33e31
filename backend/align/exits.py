"""Tighten clock intervals by the fact that members leave a synchronising collective together.

The causal bounds of ``clocks`` are as wide as the shortest transfer (milliseconds for a large all-reduce).
Exits say more: in a window, own exit time = finish of the slot + offset of the clock + exit noise. Finishes
and offsets are fitted in turn (means), which leaves one free constant ``c`` for each connected set of clocks;
``c`` is bounded by the causal bounds of all its members at once (the reference clock pins it to 0, each
ping/pong bounds it), so the best bound of anyone serves all.

The noise is read off the residuals and never averaged away: two clocks compared keep the 90% quantile of
``|residual|`` between them, so a constant bias up to the spread of the exits stays inside. Where the
causal bounds contradict the fit, or there is too little to judge the noise by, the causal bounds stand alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from lanterne.backend.align.frame import Floats, Ints

TOGETHER = ("allreduce", "all_reduce", "barrier", "allgather", "all_gather", "reduce_scatter", "reducescatter")
"""Ops that no member can leave before all have brought their part; roots of broadcast and reduce can."""
QUANTILE = 0.9
BIAS = 0.5  # share of the quantile kept by each of the two clocks compared, however many exits there are
SPARE_MIN = 20  # exits beyond one a window, at least, to judge the noise of a clock
FLOOR_NS = 5_000.0
ROUNDS = 12


@dataclass(frozen=True, slots=True)
class Exits:
    """Exits that count: own time (ns), slot and key (clock x segment x window) of each; arrays [N]."""

    at: Floats
    slot: Ints
    key: Ints


def of(completed: Floats, slot: Ints, key: Ints, together: NDArray[np.bool_]) -> Exits:
    """Exits of completed rows of synchronising ops whose slot has two of them at least."""
    use = together & np.isfinite(completed)
    count = np.bincount(slot[use], minlength=int(slot.max(initial=-1)) + 1)
    use &= count[slot] > 1
    return Exits(completed[use], slot[use], key[use])


def tighten(
    exits: Exits, line: Ints, low: Floats, high: Floats, point: Floats, blur: Floats
) -> tuple[Floats, Floats, Floats]:
    """(low, high, point) of each key, ns [K]; ``line`` [K] is its clock x segment, ``blur`` [K] its drift in a window.

    Linear in the exits but for one sort.
    """
    if not len(exits.at):
        return low, high, point
    fitted, residual = _fit(exits, point)
    noise = _noise(exits, line, residual, blur)
    use = np.isfinite(noise)
    if not use.any():
        return low, high, point
    part = _parts(exits, len(low))
    count = int(part.max()) + 1
    below, above = np.full(count, -np.inf), np.full(count, np.inf)
    np.maximum.at(below, part[use], (low - fitted - noise)[use])
    np.minimum.at(above, part[use], (high - fitted + noise)[use])
    sure = use & np.isfinite(below[part]) & np.isfinite(above[part]) & (below[part] <= above[part])
    with np.errstate(invalid="ignore"):  # inf - inf only where ``sure`` is false
        low2 = np.maximum(low, fitted + below[part] - noise)
        high2 = np.minimum(high, fitted + above[part] + noise)
        middle = fitted + (below[part] + above[part]) / 2
        sure &= low2 <= high2
        best = np.clip(middle, low2, np.maximum(low2, high2))
    return np.where(sure, low2, low), np.where(sure, high2, high), np.where(sure, best, point)


def _fit(exits: Exits, start: Floats) -> tuple[Floats, Floats]:
    """Offsets up to one constant a connected part [K], and what each exit is off by [N]."""
    point = np.where(np.isfinite(start), start, 0.0)
    members = np.maximum(np.bincount(exits.slot), 1)
    rows = np.bincount(exits.key, minlength=len(point))
    finish = np.zeros(len(members))
    for _ in range(ROUNDS):
        finish = np.bincount(exits.slot, exits.at - point[exits.key]) / members
        found = np.bincount(exits.key, exits.at - finish[exits.slot], len(point)) / np.maximum(rows, 1)
        moved = np.abs(found - point)[rows > 0].max(initial=0.0)
        point = np.where(rows > 0, found, point)
        if moved < 100.0:
            break
    return point, exits.at - finish[exits.slot] - point[exits.key]


def _noise(exits: Exits, line: Ints, residual: Floats, blur: Floats) -> Floats:
    """Half-width that the exits leave each key, ns [K]; inf where there are too few to judge."""
    rows = np.bincount(exits.key, minlength=len(line))
    of_row = line[exits.key]
    lines = int(line.max(initial=-1)) + 1
    several = rows[exits.key] > 1
    members = np.bincount(exits.slot)[exits.slot]  # means follow their own members: residuals look too small
    shrunk = np.sqrt(members / np.maximum(members - 1, 1) * rows[exits.key] / np.maximum(rows[exits.key] - 1, 1))
    size = np.abs(residual) * shrunk
    order = np.flatnonzero(several)
    order = order[np.lexsort((size[order], of_row[order]))]
    count = np.bincount(of_row[order], minlength=lines)
    start = np.cumsum(count) - count
    spread = np.full(lines, np.inf)
    has = count > 0
    spread[has] = size[order][start[has] + (QUANTILE * (count[has] - 1)).astype(np.int64)]
    spare = np.bincount(line, np.maximum(rows - 1, 0), lines)
    spread[spare < SPARE_MIN] = np.inf
    width = spread[line] * (BIAS + 3.0 / np.sqrt(np.maximum(rows, 1))) + FLOOR_NS + blur
    return np.where(rows > 0, width, np.inf)


def _parts(exits: Exits, keys: int) -> Ints:
    """Number of the connected part of each key, [K]: keys are tied by slots that both left."""
    slots = int(exits.slot.max()) + 1
    one = np.ones(len(exits.at), np.int8)
    graph = coo_array((one, (exits.key, keys + exits.slot)), shape=(keys + slots, keys + slots))
    found: Ints = connected_components(graph, directed=False)[1][:keys].astype(np.int64)
    return found
