"""Who makes the job slow: onset of every rank's own excess, loci, and what repairing each would save.

A step of a synchronous job is a max-plus system, so a victim shows the longest collective and the culprit the
shortest. Only *own* time is judged (frame.own: lateness or busy time beyond the role peers). Each rank gets its
own change point; ranks that changed are folded into a host or a pipeline stage where most of it changed; then
loci are peeled off in the order of their counterfactual saving, so that a straggler hidden behind a bigger one
is found too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lanterne.causal import partners, stats
from lanterne.causal.frame import Frame
from lanterne.causal.stats import Bools, Floats, Ints

SHIFT_SHARE_MIN = 0.02  # of a step: less is not worth a claim (research/causal.md 6.2: impact first)
SHIFT_MS_MIN = 0.5
SHIFT_SIGMAS_MIN = 2.0
WINSOR_SIGMAS = 25.0
SPORADIC_ROWS_MIN = 4
BURST_SHARE = 0.3  # of a large burst: what is smaller is none of them
SPORADIC_SHARE_MIN = 0.04
PERSISTENT_SHARE_MIN = 0.15
LOCI_MAX = 4
HIDDEN_SHARE = 0.3  # saves less than this of its own loss while the bigger ones are not repaired
CANDIDATES_MAX = 96
STAGE_ROWS_MIN = 8
GROWTH_ROWS_MIN, KNEES, GROWTH_FIT_MAX = 12, 48, 0.7
"""Known rows on each side, candidate knees, and the share of the step's residue that a growth leaves at most."""
BY_TURNS_ROWS_MIN = 8
ONE_LEADS_SHARE = 0.7  # of the rows: more is one straggler, not a lead that wanders


NOBODY = np.zeros(0, np.int64)


@dataclass(slots=True)
class Change:
    """One rank's own time moved. ``row`` is the first row of it; ``rows`` [T] marks the rows that show it."""

    column: int
    row: int
    shift_ms: float
    before_ms: float
    noise_ms: float
    sporadic: bool
    persistent: bool
    rows: Bools


@dataclass(slots=True)
class Locus:
    """Where the lost time comes from: one rank, one host or one pipeline stage, with what its repair saves."""

    level: str  # rank | host | partners (ranks of one copy of the model that nothing tells apart)
    columns: Ints
    change: Change
    saving_ms: float
    hidden: bool  # behind a bigger one: saves nothing until that one is repaired
    lead_share: float  # of the rows with a lead, those that it leads


def _noise(x: Floats) -> Floats:
    """Per-rank noise from successive differences, so that the change itself does not inflate it."""
    d = np.abs(np.diff(x, axis=0))
    return np.asarray(stats.MAD_TO_SIGMA * stats.median(d, 0) / np.sqrt(2))


def changes(frame: Frame) -> list[Change]:
    """Ranks whose own time rose, largest first."""
    rows = np.flatnonzero(frame.usable)
    if len(rows) < 12 or not frame.locator or not np.isfinite(frame.base_step_ms):
        return []
    x = frame.own[rows]
    step = frame.base_step_ms
    sigma = np.nan_to_num(_noise(x), nan=0.0)
    floor = max(SHIFT_MS_MIN, SHIFT_SHARE_MIN * step)
    scale = np.maximum(sigma, 0.1 * floor)
    middle = stats.median(x, 0)
    capped = np.clip(x, middle - WINSOR_SIGMAS * scale, middle + np.maximum(WINSOR_SIGMAS * scale, 4 * step))
    found = stats.split(capped)
    general = float(np.median(found.shift)) if x.shape[1] >= 8 else 0.0
    rise = found.shift - general
    worth = np.flatnonzero(rise > np.maximum(floor, SHIFT_SIGMAS_MIN * sigma * 0.5))
    worth = worth[np.argsort(-found.shift[worth])][:CANDIDATES_MAX]
    out = []
    for r in worth:
        change = _judge(frame, rows, x[:, r], int(found.at[r]), float(scale[r]), floor, int(r))
        if change is not None:
            out.append(change)
    known = {c.column for c in out}
    loud = [int(r) for r in np.argsort(-rise)[:CANDIDATES_MAX] if rise[r] > floor and int(r) not in known]
    turns = [_by_turns(frame, rows, x[:, r], int(found.at[r]), floor, r) for r in loud]
    out += [c for c in turns if c is not None]
    out += _persistent(frame, rows, x, {c.column for c in out})
    return sorted(out, key=lambda c: -c.shift_ms)


def _judge(frame: Frame, rows: Ints, y: Floats, at: int, scale: float, floor: float, column: int) -> Change | None:
    """Is the change of one rank sustained or a burst now and then, and does it differ from what was before?"""
    before, after = y[:at], y[at:]
    base = stats.rows_median(before)
    noise = max(scale, stats.noise_of(before))
    level = max(4 * noise, floor)
    shift = stats.rows_median(after) - base
    marks = np.zeros(len(frame.usable), bool)
    if shift > max(floor, SHIFT_SIGMAS_MIN * noise) and float(np.mean(after - base > 0.4 * shift)) > 0.7:
        first = _first(after - base > 0.5 * shift)
        marks[rows[at + first :]] = True
        grown = _growth(y, at)
        begin = at + first if grown is None else grown
        return Change(column, int(rows[begin]), shift, base, noise, False, False, marks)
    high_after = np.isfinite(after) & (after - base > level)
    if high_after.any():  # small pauses that the rank always had are not what it has now
        level = max(level, BURST_SHARE * float(np.quantile(after[high_after] - base, 0.75)))
    high_before, high_after = before - base > level, after - base > level
    rate0 = (float(high_before.mean()) if at else 0.0) + 1.0 / (at + 1)
    count = int(high_after.sum())
    burst = float((after[high_after] - base).sum()) / max(len(after), 1)
    if count < SPORADIC_ROWS_MIN or count / len(after) < max(SPORADIC_SHARE_MIN, 3 * rate0) or burst < floor:
        return None
    led = rows[at:][high_after]
    marks[led] = True
    return Change(column, int(led[0]), burst, base, noise, True, False, marks)


def _by_turns(frame: Frame, rows: Ints, y: Floats, at: int, floor: float, column: int) -> Change | None:
    """A fault that comes and goes every few steps, which successive differences show as noise: two levels apart, the
    lower one as it was before. Where there is only more noise, the space between them is filled."""
    before, after = y[:at], y[at:]
    base, noise = stats.rows_median(before), max(stats.noise_of(before), 0.1 * floor)
    level, beyond = max(4 * noise, floor), after - base
    high, between = beyond > level, (beyond > 0.5 * level) & (beyond <= level)
    rest = after[~high & ~between]
    if min(len(before), int(high.sum()), len(rest)) < BY_TURNS_ROWS_MIN or float((before - base > level).mean()) > 0.02:
        return None
    burst = float(beyond[high].sum()) / len(after)
    if between.sum() > 0.1 * high.sum() or stats.noise_of(rest) > 2 * noise or burst < floor:
        return None
    marks = np.zeros(len(frame.usable), bool)
    led = rows[at:][high]
    marks[led] = True
    return Change(column, int(led[0]), burst, base, noise, True, False, marks)


def _growth(y: Floats, at: int) -> int | None:
    """Where a rank that gets slower bit by bit began to: the knee of a hinge that fits much better than the step."""
    known = np.isfinite(y)
    if known[at:].sum() < GROWTH_ROWS_MIN or known[:at].sum() < GROWTH_ROWS_MIN:
        return None
    before, after = y[:at][known[:at]], y[at:][known[at:]]
    low, high = float(np.median(before)), float(np.quantile(after, 0.95))
    t, x = np.flatnonzero(known).astype(np.float64), np.minimum(y[known], low + 1.5 * (high - low))
    as_step = float(((before - before.mean()) ** 2).sum() + ((np.minimum(after, x.max()) - after.mean()) ** 2).sum())
    knees = np.unique(np.linspace(0, at - 1, KNEES).astype(np.int64))
    best, knee = min((stats.hinge(t, x, float(k))[0], int(k)) for k in knees)
    return knee if best < GROWTH_FIT_MAX * as_step else None


def _first(mask: Bools) -> int:
    return int(np.argmax(mask)) if mask.any() else 0


def _persistent(frame: Frame, rows: Ints, x: Floats, known: set[int]) -> list[Change]:
    """Ranks that were late from the first step on: no before to compare with, only the peers."""
    if x.shape[1] < 3:
        return []
    level = stats.median(x, 0)
    across = float(stats.MAD_TO_SIGMA * np.nanmedian(np.abs(level - np.nanmedian(level))))
    least = np.maximum(PERSISTENT_SHARE_MIN * frame.base_step_ms, np.maximum(8 * across, 3 * stats.spread(x, 0)))
    out = []
    for r in np.flatnonzero(np.nan_to_num(level, nan=-1.0) > least):
        if int(r) not in known:
            marks = frame.usable.copy()
            noise = stats.noise_of(x[:, r])
            out.append(Change(int(r), int(rows[0]), float(level[r]), 0.0, noise, False, True, marks))
    return out


def _fold(frame: Frame, found: list[Change]) -> list[tuple[str, list[Change]]]:
    """Fold ranks into their host where most of its visible ranks changed; the rest stand alone."""
    hosts: dict[int, list[Change]] = {}
    for c in found:
        hosts.setdefault(int(frame.host[c.column]), []).append(c)
    size = np.bincount(frame.host, minlength=len(frame.hosts))
    out: list[tuple[str, list[Change]]] = []
    for h, members in hosts.items():
        alike = [c for c in members if c.shift_ms > 0.25 * max(m.shift_ms for m in members)]
        whole = len(frame.hosts) > 1 and size[h] >= 2 and len(alike) >= 2 and len(alike) > 0.5 * size[h]
        if whole:
            out.append(("host", alike))
            rest = [c for c in members if c not in alike]
        else:
            rest = members
        out += [("rank", [c]) for c in rest]
    return out


def _partners(frame: Frame, groups: list[tuple[str, list[Change]]]) -> list[tuple[str, list[Change]]]:
    """Put single ranks together that only their common copy of the model explains."""
    for alike in partners.groups(frame, [c for _, members in groups for c in members]):
        if partners.silent(frame, alike):
            rest = [(level, [c for c in members if c not in alike]) for level, members in groups]
            groups = [("partners", alike), *((level, members) for level, members in rest if members)]
    return groups


def loci(frame: Frame, found: list[Change]) -> list[Locus]:
    """Peel loci by counterfactual saving: repair the biggest, look again, up to four times."""
    found, followers = partners.told(frame, found)
    groups = _partners(frame, _fold(frame, found))
    if not groups:
        return []
    first = min(c.row for c in found)
    rows = np.flatnonzero(frame.usable & (np.arange(len(frame.usable)) >= first))
    base_rows = np.flatnonzero(frame.usable & (np.arange(len(frame.usable)) < first))
    usual_level = stats.median(frame.own[base_rows], 0) if len(base_rows) >= 5 else np.zeros(frame.own.shape[1])
    for c in found:
        usual_level[c.column] = c.before_ms
    x = frame.own[rows] - usual_level
    whole = x.copy()
    out: list[Locus] = []
    while groups and len(out) < LOCI_MAX:
        held = [[*members, *(f for c in members for f in followers.get(c.column, ()))] for _, members in groups]
        saved = [_saving(x, rows, members) for members in held]
        at = max(range(len(groups)), key=lambda i: saved[i][0])
        (saving, share), best, moved = saved[at], groups.pop(at), held[at]
        columns = np.array([c.column for c in best[1]], np.int64)
        change = max(best[1], key=lambda c: c.shift_ms)
        if best[0] == "host":
            change.row = int(np.median([c.row for c in best[1]]))
        alone = _saving(whole, rows, moved)[0] if out else saving
        out.append(Locus(best[0], columns, change, saving, alone < HIDDEN_SHARE * saving, share))
        for c in moved:
            x[:, c.column] = _repaired(x[:, c.column], rows, c)
    return out


def _repaired(own: Floats, rows: Ints, change: Change) -> Floats:
    """Own time of a rank without its change: the sustained shift taken off, or the bursts cut down to the usual."""
    marked = change.rows[rows]
    if change.sporadic:
        return np.where(marked, np.minimum(own, 0.0), own)
    return np.where(marked, own - change.shift_ms, own)


def _saving(x: Floats, rows: Ints, group: list[Change]) -> tuple[float, float]:
    """Mean ms a step saved by repairing ``group``, from its onset on; share of its own rows that it leads.

    ``mean_t max(in, out) - max(repaired in, out)``: every leave-one-out from maxima, no replay needed.
    """
    columns = [c.column for c in group]
    keep = rows >= min(c.row for c in group)
    marked = np.zeros(keep.sum(), bool)
    for c in group:
        marked |= c.rows[rows[keep]]
    y = np.where(np.isfinite(x[keep]), x[keep], -np.inf)
    inside = y[:, columns].max(1)
    well = np.stack([_repaired(y[:, c.column], rows[keep], c) for c in group], 1).max(1)
    y[:, columns] = -np.inf
    outside = y.max(1) if y.shape[1] > len(columns) else np.full(len(y), -np.inf)
    known = np.isfinite(inside)
    gain = np.where(known, np.maximum(inside, outside) - np.maximum(np.where(known, well, 0.0), outside), 0.0)
    led = float((gain[marked] > 0).mean()) if marked.any() else 0.0
    return float(gain.mean()) if len(gain) else 0.0, led


@dataclass(slots=True)
class StageExcess:
    """A pipeline stage that is heavier than the others. ``persistent``: from the first step on."""

    stage: int
    row: int
    excess_ms: float
    usual_ms: float
    persistent: bool


def heavy_stage(frame: Frame) -> StageExcess | None:
    """The stage whose own time exceeds the other stages' by over 12%, from a step on or all along."""
    stages = np.unique(frame.stage)
    busy = frame.facts.series.get("busy_ms")
    rows = np.flatnonzero(frame.usable)
    if len(stages) < 2 or busy is None or len(rows) < 12:
        return None
    cost = np.stack([stats.median(busy[np.ix_(rows, np.flatnonzero(frame.stage == s))], 1) for s in stages], 1)
    if not np.isfinite(cost).all():
        return None
    others = np.stack([np.median(np.delete(cost, i, 1), 1) for i in range(len(stages))], 1)
    beyond = cost - others
    found = stats.split(beyond)
    i = int(found.shift.argmax())
    at = int(found.at[i])
    usual = float(np.median(others[:, i]))
    shift = float(np.median(beyond[at:, i]) - np.median(beyond[:at, i])) if 0 < at < len(rows) else 0.0
    sigma = max(stats.noise_of(np.diff(part)) for part in (beyond[:at, i], beyond[at:, i])) / np.sqrt(2)
    if shift > max(0.06 * usual, 4 * sigma) and len(rows) - at >= STAGE_ROWS_MIN:
        return StageExcess(int(stages[i]), int(rows[at]), shift, usual, False)
    level = np.median(beyond, 0)
    i = int(level.argmax())
    if level[i] > 0.12 * float(np.median(others[:, i])):
        return StageExcess(int(stages[i]), int(rows[0]), float(level[i]), float(np.median(others[:, i])), True)
    return None


@dataclass(slots=True)
class SpreadLead:
    """The lead of the slowest rank grew, but a different rank leads each time. ``row`` first row, means in ms;
    ``many``: no three ranks lead in most of the rows."""

    row: int
    before_ms: float
    after_ms: float
    many: bool


def spread_lead(frame: Frame, without: Ints = NOBODY) -> SpreadLead | None:
    """Does somebody lead by more than before, without being the same rank? ``without``: columns to leave out."""
    rows = np.flatnonzero(frame.usable)
    if len(rows) < 12 or not frame.locator:
        return None
    own = np.delete(frame.own[rows], without, 1)
    if own.shape[1] < 3:
        return None
    lead = stats.top2(own)[1]
    if not np.isfinite(lead).all():
        return None
    sigma = max(stats.noise_of(np.diff(lead)) / np.sqrt(2), 1e-6)
    found = stats.split(np.minimum(lead, np.median(lead) + WINSOR_SIGMAS * sigma)[:, None])
    at = int(found.at[0])
    before, after = stats.rows_median(lead[:at]), stats.rows_median(lead[at:])
    if not np.isfinite(before + after) or after - before < max(
        0.04 * frame.base_step_ms, 2 * stats.noise_of(lead[:at])
    ):
        return None
    leads = np.bincount(stats.top2(own[at:])[0], minlength=own.shape[1])
    if leads.max() > ONE_LEADS_SHARE * leads.sum():
        return None
    many = bool(np.sort(leads)[-3:].sum() < ONE_LEADS_SHARE * leads.sum())
    return SpreadLead(int(rows[at]), before, after, many)
