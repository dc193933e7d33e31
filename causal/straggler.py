"""From late ranks to findings: subject, onset, cost, evidence, victims. See timing.py and upstream.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lanterne.causal import stats
from lanterne.causal.finding import Finding, Link, make, number
from lanterne.causal.frame import ROLE_PEERS_MIN, Frame
from lanterne.causal.kernels import kernel_evidence
from lanterne.causal.scoring import CLAIM
from lanterne.causal.stats import Ints
from lanterne.causal.timing import NOBODY, Change, Locus, SpreadLead, changes, heavy_stage, loci, spread_lead
from lanterne.causal.upstream import Explained, explain, window_of
from lanterne.nouns import CauseCategory, Cost, Evidence, Subject, Symptom, group_name

VICTIMS_MAX = 8
UPSTREAM_SERIES = ("gpu_clock_mhz", "host_runqueue", "gc_ms", "tokens")
TOGETHER_MIN, TOGETHER_STEPS, UNPLACED = 3, 3, 0.5
PARTNERS_SURE = 0.6
"""A lead at most, where one of several partners is the cause and nothing tells which."""
SAVING_SHARE_MIN = 0.012  # of a step; a straggler that saves less is not reported


def findings(frame: Frame) -> list[Finding]:
    """Stragglers of the window: ranks, hosts, a heavy stage, or a lead that wanders from rank to rank."""
    changed = changes(frame)
    pairs = [(locus, _finding(frame, locus)) for locus in loci(frame, changed)]
    named = [(locus, _unplaced(frame, f, changed)) for locus, f in pairs if f is not None]
    steady = [locus for locus, _ in named if _steady(frame, locus)]
    lead = spread_lead(frame, np.concatenate([NOBODY, *(locus.columns for locus in steady)]))
    wandering = None if lead is None else _wandering(frame, lead)
    if wandering is not None or (lead is not None and lead.many):
        named = [(locus, f) for locus, f in named if locus in steady or _of_its_own(f, wandering)]
    rest = (wandering, _stage(frame), _everybody_waits_for_data(frame))
    return [*(f for _, f in named), *(f for f in rest if f is not None)]


def _unplaced(frame: Frame, finding: Finding, changed: list[Change]) -> Finding:
    """A lead at most, where several ranks became slower together and nobody told which of them share a host."""
    since = finding.cause.since_step
    together = [int(frame.ranks[c.column]) for c in changed if abs(frame.step(c.row) - (since or 0)) <= TOGETHER_STEPS]
    if frame.hosts != ("",) or since is None or len(together) < TOGETHER_MIN:
        return finding
    need = f"the hosts of ranks {group_name(together)}, which became slower at the same step"
    cause = replace(finding.cause, needs=(need, *finding.cause.needs))
    return replace(finding, cause=cause).with_confidence(min(cause.confidence, UNPLACED))


def _steady(frame: Frame, locus: Locus) -> bool:
    """It leads most of its rows, for more than a few: not one of many ranks that are last by turns."""
    rows = int(locus.change.rows.sum())
    regular = not locus.change.sporadic or locus.lead_share > 0.9
    return regular and locus.lead_share > 0.5 and rows >= 10


def _of_its_own(finding: Finding, wandering: Finding | None) -> bool:
    """A claim with a measured reason that is not the one for which all are last by turns."""
    category = finding.cause.category
    shared = None if wandering is None else wandering.cause.category
    apart = category not in {shared, CauseCategory.SLOW_COMPUTE, CauseCategory.SEQUENCE_IMBALANCE}
    return apart and finding.cause.confidence >= CLAIM


def cost_of(frame: Frame, saving_ms: float, row: int) -> Cost:
    """Cost of a saving from ``row`` on: slowdown, GPU-hours lost so far by all expected ranks, ms a step."""
    after = frame.step_ms[row:]
    observed = stats.rows_mean(after)
    if not np.isfinite(observed) or observed <= 0:
        return Cost(saving_ms_per_step=saving_ms)
    saving = min(max(saving_ms, 0.0), 0.95 * observed)
    ranks = frame.facts.ranks_expected or len(frame.ranks)
    hours = saving * int(np.isfinite(after).sum()) * ranks / 3.6e6
    return Cost(slowdown=observed / (observed - saving), gpu_hours=hours, saving_ms_per_step=saving)


def _subject(frame: Frame, locus: Locus) -> Subject:
    host = frame.hosts[int(frame.host[locus.columns[0]])] or None
    if locus.level == "host":
        return Subject(host=host)
    if locus.level == "partners":
        return Subject(group=group_name([int(frame.ranks[c]) for c in locus.columns]))
    return Subject(rank=int(frame.ranks[int(locus.columns[0])]), host=host)


def _name(subject: Subject) -> str:
    if subject.group is not None:
        return f"one of the ranks {subject.group}"
    if subject.rank is None and subject.host is None:
        return "one of many ranks"
    return f"rank {subject.rank}" if subject.rank is not None else f"host {subject.host}"


def _saving(frame: Frame, locus: Locus) -> float:
    """What repairing saves. One bucket's lateness can miss half of it, so the step's rise may lift it to own time."""
    w = window_of(frame, locus)
    if locus.hidden or not w.before.any() or frame.locator != "lateness_ms":
        return locus.saving_ms
    rise = stats.rows_mean(frame.step_ms[frame.usable & ~w.before]) - stats.rows_median(frame.step_ms[w.before])
    busy = frame.facts.series.get("busy_ms")
    if busy is None or not np.isfinite(rise):
        return locus.saving_ms
    own = [
        stats.rows_mean(frame.beyond_peers("busy_ms", int(c))[w.now])
        - stats.rows_median(frame.beyond_peers("busy_ms", int(c))[w.before])
        for c in locus.columns
    ]
    rate = float(w.now.sum() / max(1, (frame.usable & ~w.before).sum()))
    return max(locus.saving_ms, min(rise, stats.rows_median(np.array(own)) * rate, 3 * locus.saving_ms))


def _finding(frame: Frame, locus: Locus) -> Finding | None:
    why = explain(frame, locus)
    saving = _saving(frame, locus)
    step = frame.base_step_ms
    worth = locus.change.shift_ms if locus.hidden else saving
    if worth < SAVING_SHARE_MIN * step:
        return None
    category = why.category
    subject = _subject(frame, locus)
    if category is CauseCategory.SEQUENCE_IMBALANCE and _uneven(frame, locus.change.row, locus.columns) is not None:
        subject = Subject()  # everybody's tokens scatter: it is last by chance
    if locus.level == "host" and category is CauseCategory.SLOW_COMPUTE and not why.upstream:
        why.score *= 0.8
    confidence = _confidence(frame, locus, why)
    if locus.level == "partners":
        confidence = min(confidence, PARTNERS_SURE)
    since = frame.step(locus.change.row)
    path = (_lateness_link(locus, subject), *why.path)
    return make(
        category,
        "straggler",
        confidence=confidence,
        subject=subject,
        since_step=since,
        cost=cost_of(frame, saving, locus.change.row),
        evidence=(
            _lateness_evidence(frame, locus, subject, since),
            *why.evidence,
            *kernel_evidence(frame.facts, {int(frame.ranks[k]) for k in locus.columns}, since),
            *_saving_evidence(frame, locus, saving),
        ),
        path=path,
        symptoms=_victims(frame, locus, subject),
        refused=why.refused,
        needs=_needs(frame, locus, subject, why),
    )


def _needs(frame: Frame, locus: Locus, subject: Subject, why: Explained) -> tuple[str, ...]:
    if locus.level == "partners":
        return (f"calls inside the model's copy on ranks {subject.group}: who enters them last is the one",)
    if why.upstream or why.category is not CauseCategory.SLOW_COMPUTE:
        return ()
    missing = [n for n in ("data_wait_ms", *UPSTREAM_SERIES) if n not in frame.facts.series]
    return (f"upstream of the slow compute unknown; not recorded: {', '.join(missing)}",) if missing else ()


def _confidence(frame: Frame, locus: Locus, why: Explained) -> float:
    """Raw score in [0, 1]: clear of noise x how well the phase explains it x how much it leads."""
    c = locus.change
    noise = max(c.noise_ms, 1e-6)
    peak = (
        c.shift_ms / max(float(c.rows.sum()) / max(1, int((frame.usable[c.row :]).sum())), 1e-6)
        if c.sporadic
        else c.shift_ms
    )
    clear = 1 - np.exp(-0.5 * peak / noise)
    size = 1 - np.exp(-25 * max(c.shift_ms, locus.saving_ms) / max(frame.base_step_ms, 1e-9))
    rows = 1 - np.exp(-float(c.rows.sum()) / 4)
    score = float(clear * (0.6 + 0.4 * size) * rows * (0.55 + 0.45 * min(1.0, why.score)))
    if c.sporadic and not why.upstream:
        score = min(score, 0.6)
    if c.persistent:
        score *= 0.8
    if len(frame.ranks) < 3:
        score *= 0.85
    return score * (0.8 if locus.hidden else 1.0)


def _lateness_link(locus: Locus, subject: Subject) -> Link:
    says = f"{_name(subject)} leads {locus.lead_share:.0%} of its slow steps; the others wait for it"
    return Link(metric="own_ms", label="late at the collectives", weight=0.99, says=says)


def _lateness_evidence(frame: Frame, locus: Locus, subject: Subject, since: int) -> Evidence:
    c = locus.change
    w = window_of(frame, locus)
    now = stats.rows_mean(np.array([stats.rows_mean(frame.own[w.now, k]) for k in locus.columns]))
    what = "enters its collectives" if frame.locator == "lateness_ms" else "finishes its own work"
    often = " in some steps" if c.sporadic else ""
    when = "in the whole window" if c.persistent else f"since step {since}, before {number(c.before_ms, 'ms')}"
    says = f"{_name(subject)} {what} {number(now, 'ms')} later than its peers{often} {when}"
    return Evidence(says=says, value=now, unit="ms", baseline=c.before_ms, ref=frame.locator)


def _saving_evidence(frame: Frame, locus: Locus, saving: float) -> tuple[Evidence, ...]:
    observed = stats.rows_mean(frame.step_ms[locus.change.row :])
    if not np.isfinite(observed):
        return ()
    rest = max(observed - saving, 0.0)
    if locus.hidden:
        says = "hidden behind a slower rank: repairing it alone saves little, after that one it is next"
    else:
        says = f"without it a step would take {number(rest, 'ms')} instead of {number(observed, 'ms')}"
    return (Evidence(says=says, value=rest, unit="ms", baseline=observed, ref="counterfactual"),)


def _victims(frame: Frame, locus: Locus, subject: Subject) -> tuple[Symptom, ...]:
    wait = frame.facts.series.get("wait_ms")
    w = window_of(frame, locus)
    if wait is None or not w.now.any():
        return ()
    known = np.isfinite(wait[w.now])
    mean = np.where(known, wait[w.now], 0.0).sum(0) / np.maximum(known.sum(0), 1)
    mean[locus.columns] = np.nan
    order = [int(i) for i in np.argsort(-np.nan_to_num(mean, nan=-1.0))[:VICTIMS_MAX] if mean[i] > 0]
    return tuple(
        Symptom(
            kind="wait",
            says=f"rank {frame.ranks[i]} waits {number(float(mean[i]), 'ms')} a step for {_name(subject)}",
            subject=Subject(rank=int(frame.ranks[i])),
        )
        for i in order
    )


def _stage(frame: Frame) -> Finding | None:
    heavy = heavy_stage(frame)
    if heavy is None:
        return None
    share = heavy.excess_ms / max(heavy.usual_ms, 1e-9)
    since = frame.step(heavy.row)
    ranks = [int(frame.ranks[i]) for i in np.flatnonzero(frame.stage == heavy.stage)]
    judged = len(ranks) >= ROLE_PEERS_MIN  # against the peers of their own stage, so its weight is in neither side
    says = (
        f"pipeline stage {heavy.stage} (ranks {ranks[0]} to {ranks[-1]}) works {share:.0%} longer than the"
        f" others: {number(heavy.usual_ms + heavy.excess_ms, 'ms')} against {number(heavy.usual_ms, 'ms')} a step"
    )
    return make(
        CauseCategory.PARTITION_IMBALANCE,
        "straggler",
        confidence=min(0.97, 0.5 + 1.6 * share),
        since_step=since,
        subject=Subject(),
        cost=cost_of(frame, heavy.excess_ms, heavy.row),
        evidence=(Evidence(says=says, value=heavy.usual_ms + heavy.excess_ms, unit="ms", baseline=heavy.usual_ms),),
        path=(Link(metric="stage_ms", label=f"stage {heavy.stage} heavier", weight=0.97, says=says),),
        covers=frozenset() if judged else frozenset(ranks),
    )


def _wandering(frame: Frame, lead: SpreadLead) -> Finding | None:
    """A different rank is last each time: token counts, or collections everywhere; None where neither shows."""
    rows = np.arange(len(frame.usable))
    now = frame.usable & (rows >= lead.row)
    saving, since = lead.after_ms - lead.before_ms, frame.step(lead.row)
    cost = cost_of(frame, saving, lead.row)
    first = Evidence(
        says=f"the last rank, a different one each time, is {number(lead.after_ms, 'ms')} late since step {since}",
        value=lead.after_ms,
        unit="ms",
        baseline=lead.before_ms,
    )
    uneven = _uneven(frame, lead.row, NOBODY)
    if uneven is not None:
        return make(
            CauseCategory.SEQUENCE_IMBALANCE,
            "straggler",
            confidence=0.93,
            since_step=since,
            cost=cost,
            evidence=(first, uneven),
            path=(Link(metric="tokens", label="uneven token counts", weight=0.96, says=uneven.says),),
        )
    gc = frame.facts.series.get("gc_ms")
    if gc is not None:
        who = stats.top2(frame.own[now])[0]
        part = float(np.nansum(gc[now][np.arange(len(who)), who]) / max(saving * len(who), 1e-9))
        if part > 0.5:
            says = f"garbage collection of the last rank explains {min(part, 1):.0%} of that"
            return make(
                CauseCategory.GC_PAUSE,
                "straggler",
                confidence=0.9,
                since_step=since,
                cost=cost,
                evidence=(first, Evidence(says=says, value=part, unit="1", ref="gc_ms")),
                path=(Link(metric="gc_ms", label="garbage collection on every rank", weight=0.95, says=says),),
            )
    return None


def _uneven(frame: Frame, row: int, without: Ints) -> Evidence | None:
    """Do the token counts of the ranks, but for ``without`` (columns), scatter from ``row`` on, and not before?"""
    tokens = frame.facts.series.get("tokens")
    if tokens is None:
        return None
    tokens, rows = np.delete(tokens, without, 1), np.arange(len(frame.usable))
    before, now = tokens[frame.usable & (rows < row)], tokens[frame.usable & (rows >= row)]
    known = [m[np.isfinite(m).any(1)] for m in (before, now)]
    t0, t1 = (stats.rows_median(np.nanstd(m, 1)) if m.size else 0.0 for m in known)
    middle = stats.rows_median(now)
    if not (t1 > 2 * t0 and t1 > 0.03 * middle):
        return None
    says = f"tokens differ between ranks by {t1 / middle:.0%} (standard deviation), before {t0 / middle:.0%}"
    return Evidence(says=says, value=t1, unit="tokens", baseline=t0, ref="tokens")


def _everybody_waits_for_data(frame: Frame) -> Finding | None:
    """The wait for data rose on most ranks together: the shared source is slow."""
    data = frame.facts.series.get("data_wait_ms")
    rows = np.flatnonzero(frame.usable)
    if data is None or len(rows) < 12:
        return None
    common = stats.median(data[rows], 1)
    if not np.isfinite(common).all():
        return None
    found = stats.split(common[:, None])
    at = int(found.at[0])
    before, after = stats.rows_median(common[:at]), stats.rows_median(common[at:])
    noise = max(stats.noise_of(common[:at]), 1e-6)
    if not np.isfinite(frame.base_step_ms) or at < 5 or after - before < max(0.25 * frame.base_step_ms, 5 * noise):
        return None
    since = frame.step(int(rows[at]))
    says = f"most ranks wait {number(after, 'ms')} for data since step {since}, before {number(before, 'ms')}"
    return make(
        CauseCategory.DATA_STALL,
        "straggler",
        confidence=0.85,
        since_step=since,
        cost=cost_of(frame, after - before, int(rows[at])),
        evidence=(Evidence(says=says, value=after, unit="ms", baseline=before, ref="data_wait_ms"),),
        path=(Link(metric="data_wait_ms", label="shared data source slow", weight=0.9, says=says),),
    )
