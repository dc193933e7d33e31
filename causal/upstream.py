"""Why a late rank or host is late: phases first, then the known causes of each phase, by how much they explain.

The strongest weight is effect size: which share of the child's lost milliseconds does the parent's change explain,
in known units? Granger and mutual information only break ties; they never make an edge that the in-step order does
not allow (research/causal.md, sections 0.7 and 6.6).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lanterne.causal import granger, stats
from lanterne.causal.finding import Link, number
from lanterne.causal.frame import Frame
from lanterne.causal.patterns import UPSTREAM, Metric, Pattern, PatternEdge
from lanterne.causal.stats import Bools, Floats, Ints
from lanterne.causal.timing import Locus
from lanterne.nouns import CauseCategory, Evidence

EVIDENCE_ROWS_MAX = 240
DECAY = 0.97
EXPLAINED_AWAY = 0.6  # of a node's score, when its own cause is active too
TIE = 0.02
"""What Granger causality and mutual information may take off a weight: they break ties. As a stronger factor they made
the answers worse (docs/causal.md, ablation)."""
EXPLAINS_ENOUGH = 0.75  # a parent that explains three quarters of the child explains it


@dataclass(slots=True)
class Explained:
    """Category of a late locus, the path up to it and how well the path stands (0..1)."""

    category: CauseCategory
    score: float
    path: tuple[Link, ...]
    evidence: tuple[Evidence, ...]
    refused: tuple[Link, ...]
    upstream: bool  # a measured cause of the phase was found, not only the phase


@dataclass(slots=True)
class Window:
    """Rows of one locus: ``now`` shows the change, ``before`` is its baseline; both [T] masks."""

    now: Bools
    before: Bools


def window_of(frame: Frame, locus: Locus) -> Window:
    """Baseline = usable rows before the onset; of a persistent change there is none (all False)."""
    before = frame.usable & (np.arange(len(frame.usable)) < locus.change.row)
    if locus.change.persistent:
        before[:] = False
    return Window(now=locus.change.rows & frame.usable, before=before)


def _excess(frame: Frame, name: str, locus: Locus, w: Window) -> float:
    """Rise of a series of the locus beyond its peers; NaN where it was not recorded."""
    values = []
    for column in locus.columns:
        y = _series(frame, name, int(column), locus.level)
        base = stats.rows_median(y[w.before]) if w.before.any() else 0.0
        values.append(stats.rows_mean(y[w.now]) - (0.0 if np.isnan(base) else base))
    return stats.rows_median(np.array(values))


def _series(frame: Frame, name: str, column: int, level: str) -> Floats:
    """Beyond the role peers for a rank; beyond the whole job's median for a host (its ranks move together)."""
    if level != "host":
        return frame.beyond_peers(name, column)
    x = frame.facts.series.get(name)
    return np.full(len(frame.facts.steps), np.nan) if x is None else x[:, column] - stats.median(x, 1)


def _level(frame: Frame, name: str, locus: Locus, rows: Bools) -> float:
    x = frame.facts.series.get(name)
    return float("nan") if x is None or not rows.any() else stats.rows_median(x[np.ix_(rows, locus.columns)])


PHASES = {
    "data_wait_ms": "wait for data",
    "h2d_ms": "copy to the device",
    "forward_ms": "forward",
    "optimizer_ms": "optimizer",
    "other_ms": "rest of the step",
}


def phases(frame: Frame, locus: Locus, w: Window) -> dict[str, float]:
    """Own excess ms of the locus by phase; ``backward_ms`` is what the measured phases leave (host backward times
    hold the wait for others, so they are never used)."""
    out = {}
    for name in PHASES:
        value = _excess(frame, name, locus, w) if name in frame.facts.series else 0.0
        out[name] = max(0.0, float(np.nan_to_num(value)))
    own = stats.rows_median(
        np.array(
            [
                stats.rows_mean(frame.own[w.now, c]) - float(np.nan_to_num(stats.rows_median(frame.own[w.before, c])))
                for c in locus.columns
            ]
        )
    )
    out["backward_ms"] = max(0.0, own - sum(out.values()))
    return out


def explain(frame: Frame, locus: Locus) -> Explained:
    """Name the phase that grew, then the measured cause of it that explains most."""
    w = window_of(frame, locus)
    grown = phases(frame, locus, w)
    data = grown["data_wait_ms"]
    compute = sum(v for k, v in grown.items() if k != "data_wait_ms")
    total = data + compute
    if total <= 0:
        return Explained(CauseCategory.SLOW_COMPUTE, 0.0, (), (), (), False)
    child, amount = ("data_wait_ms", data) if data >= compute else ("compute_ms", compute)
    share = amount / total
    path, evidence = [_phase_link(child, share, amount, locus)], _phase_evidence(frame, locus, w, grown, child)
    category = CauseCategory.DATA_STALL if child == "data_wait_ms" else CauseCategory.SLOW_COMPUTE
    best, score, chain, says = _best_pattern(frame, locus, w, child, amount)
    refused = _refused(frame, locus, w)
    if best is not None and score >= 0.5:
        return Explained(best.category, share * score, (*path, *chain), (*evidence, *says), refused, True)
    if child == "compute_ms" and "data_wait_ms" not in frame.facts.series and grown["forward_ms"] < 0.5 * amount:
        share = 0.0  # what no phase shows may as well be the wait for data
    return Explained(category, share * (1 - 0.5 * score), tuple(path), tuple(evidence), refused, False)


def _best_pattern(
    frame: Frame, locus: Locus, w: Window, child: str, amount: float
) -> tuple[Pattern | None, float, tuple[Link, ...], tuple[Evidence, ...]]:
    """The pattern whose root scores best; a chain that a longer one extends is explained away by it."""
    scored = [
        (pattern, *_backtrack(frame, locus, w, pattern, amount))
        for pattern in UPSTREAM
        if pattern.edges[-1].effect == child
    ]
    best: tuple[Pattern | None, float, tuple[Link, ...], tuple[Evidence, ...]] = (None, 0.0, (), ())
    for pattern, score, links, says in scored:
        longer = max((s for other, s, _, _ in scored if _extends(other, pattern)), default=0.0)
        ranked = score * (1 - EXPLAINED_AWAY * min(1.0, longer / score)) if score > 0 else 0.0
        if ranked > best[1]:
            best = pattern, ranked, links, says
    return best


def _extends(longer: Pattern, shorter: Pattern) -> bool:
    own, other = longer.edges, shorter.edges
    return len(own) > len(other) and [(e.cause, e.effect) for e in own[-len(other) :]] == [
        (e.cause, e.effect) for e in other
    ]


def _phase_link(child: str, share: float, amount: float, locus: Locus) -> Link:
    label = "wait for data" if child == "data_wait_ms" else "compute"
    return Link(
        metric=child,
        label=label,
        weight=min(0.99, 0.5 + 0.49 * share),
        says=f"{number(amount, 'ms')} of the lost time is {label} ({share:.0%})",
    )


def _phase_evidence(frame: Frame, locus: Locus, w: Window, grown: dict[str, float], child: str) -> list[Evidence]:
    out = []
    names = ["data_wait_ms"] if child == "data_wait_ms" else [k for k in grown if k != "data_wait_ms"]
    for name in sorted(names, key=lambda k: -grown[k])[:2]:
        if grown[name] < 0.15 * sum(grown.values()):
            continue
        if name == "backward_ms":
            says = f"{number(grown[name], 'ms')} of own time that no other phase shows, so inside backward"
            out.append(Evidence(says=says, value=grown[name], unit="ms", baseline=0.0))
            continue
        now, before = _level(frame, name, locus, w.now), _level(frame, name, locus, w.before)
        was = f", before {number(before, 'ms')}" if np.isfinite(before) else ""
        says = f"its {PHASES[name]} takes {number(now, 'ms')}{was}; {number(grown[name], 'ms')} more than its peers'"
        out.append(Evidence(says=says, value=now, unit="ms", baseline=before if np.isfinite(before) else None))
    cpu = _excess(frame, "process_cpu_ms", locus, w)
    if child != "data_wait_ms" and cpu > 0.5 * sum(grown.values()):
        says = f"its CPU time rose by {number(cpu, 'ms')} a step beyond its peers': it computes in that time"
        out.append(Evidence(says=says, value=cpu, unit="ms", baseline=0.0, ref="process_cpu_ms"))
    return out


def _active(frame: Frame, locus: Locus, w: Window, metric: Metric) -> float:
    """Probability-like activity of a parent: did it move in its abnormal direction, beyond noise and floor?"""
    change = _excess(frame, metric.name, locus, w) * metric.direction
    if not np.isfinite(change):
        return 0.0
    y = _series(frame, metric.name, int(locus.columns[0]), locus.level)
    sd = stats.noise_of(y[w.before]) if w.before.any() else 0.0
    z = change / max(sd, metric.floor / 2, 1e-12)
    active = float(1 / (1 + np.exp(-np.clip(1.5 * (z - 2.5), -30, 30))))
    if metric.at_least is not None and not _reaches(frame, metric, locus, w):
        active *= 0.2
    return active


def _reaches(frame: Frame, metric: Metric, locus: Locus, w: Window) -> bool:
    x = frame.facts.series[metric.name][np.ix_(w.now, locus.columns)]
    return bool(np.nanmax(x) >= float(metric.at_least or 0.0)) if np.isfinite(x).any() else False


def _backtrack(
    frame: Frame, locus: Locus, w: Window, pattern: Pattern, amount: float
) -> tuple[float, tuple[Link, ...], tuple[Evidence, ...]]:
    """Score of the pattern's root: product of edge weight x activity x decay, from the child upwards."""
    if pattern.scope == "host" and locus.level == "rank" and not _alone_on_host(frame, locus):
        return 0.0, (), ()
    metrics = {m.name: m for m in pattern.metrics}
    score, links, says = 1.0, [], []
    for edge in reversed(pattern.edges):
        if edge.cause not in frame.facts.series:
            return 0.0, (), ()
        active = _active(frame, locus, w, metrics[edge.cause])
        if active < 0.05:
            return 0.0, (), ()
        link = _weigh(frame, locus, w, edge, metrics, amount)
        score *= link.weight * active * DECAY
        links.append(link)
        says.append(_upstream_evidence(frame, locus, w, metrics[edge.cause]))
    return score, tuple(links), tuple(says)


def _alone_on_host(frame: Frame, locus: Locus) -> bool:
    """A host metric speaks for a single rank only where no other rank of the host stayed well."""
    host = frame.host[locus.columns[0]]
    return len(frame.hosts) > 1 and int((frame.host == host).sum()) == len(locus.columns)


def _weigh(frame: Frame, locus: Locus, w: Window, edge: PatternEdge, metrics: dict[str, Metric], amount: float) -> Link:
    column = int(locus.columns[0])
    rows = _evidence_rows(frame, locus)
    cause = _series(frame, edge.cause, column, locus.level)[rows]
    effect = _effect_series(frame, edge.effect, column, locus.level)[rows]
    p, r2, n = granger.granger_edge(cause, effect)
    mi = granger.mutual_information_pair(cause, effect)
    evidence = granger.strength(p, r2, mi)
    explained = _explained(frame, locus, w, edge, amount, cause, effect, metrics)
    weight = edge.prior * min(1.0, explained / EXPLAINS_ENOUGH) * (1 - TIE * (1 - evidence))
    label = metrics[edge.cause].label
    says = (
        f"{label} explains {min(explained, 1.0):.0%} of {metrics[edge.effect].label}"
        f" (partial R2 {r2:.2f}, mutual information {mi:.2f} nats, {n} steps)"
    )
    return Link(
        metric=edge.cause,
        label=label,
        weight=float(weight),
        says=says,
        kind="learned" if n else "pattern",
        statistic=r2,
        p_value=p,
        samples=n,
    )


def _evidence_rows(frame: Frame, locus: Locus) -> Ints:
    """Usable rows on both sides of the onset, at most :data:`EVIDENCE_ROWS_MAX`; the last ones where there is none."""
    rows = np.flatnonzero(frame.usable)
    last = int(np.searchsorted(rows, locus.change.row)) + EVIDENCE_ROWS_MAX // 2
    stop = len(rows) if locus.change.persistent else min(len(rows), max(last, EVIDENCE_ROWS_MAX))
    return rows[max(0, stop - EVIDENCE_ROWS_MAX) : stop]


def _effect_series(frame: Frame, name: str, column: int, level: str) -> Floats:
    return frame.own[:, column] if name == "compute_ms" else _series(frame, name, column, level)


def _explained(
    frame: Frame,
    locus: Locus,
    w: Window,
    edge: PatternEdge,
    amount: float,
    cause: Floats,
    effect: Floats,
    metrics: dict[str, Metric],
) -> float:
    """Share of the child's change that the parent's change explains, in known units where there are any."""
    change = _excess(frame, edge.cause, locus, w)
    if edge.units == "milliseconds":
        return max(0.0, change) / max(amount, 1e-9)
    if edge.units == "share":  # per cent of the step
        return max(0.0, change) / 100 * float(np.nan_to_num(stats.rows_mean(frame.step_ms[w.now]))) / max(amount, 1e-9)
    if edge.units in {"inverse", "proportional"}:
        now, before = _level(frame, edge.cause, locus, w.now), _level(frame, edge.cause, locus, w.before)
        usual = _level(frame, "busy_ms", locus, w.before)
        if not np.isfinite(usual):
            usual = frame.base_step_ms
        ratio = before / now if edge.units == "inverse" else now / before
        return float(np.nan_to_num(max(0.0, usual * (ratio - 1)) / max(amount, 1e-9)))
    known = np.isfinite(cause) & np.isfinite(effect)
    if known.sum() < 12 or np.var(cause[known]) < 1e-12:
        return 0.0
    slope = float(np.cov(cause[known], effect[known])[0, 1] / np.var(cause[known]))
    moved = _excess(frame, edge.effect, locus, w) if edge.effect != "compute_ms" else amount
    return max(0.0, slope * change / moved) if moved else 0.0


def _upstream_evidence(frame: Frame, locus: Locus, w: Window, metric: Metric) -> Evidence:
    now, before = _level(frame, metric.name, locus, w.now), _level(frame, metric.name, locus, w.before)
    was = f", before {number(before, metric.unit)}" if np.isfinite(before) else ""
    says = f"{metric.label} is {number(now, metric.unit)}{was}"
    return Evidence(says=says, value=now, unit=metric.unit, baseline=before if np.isfinite(before) else None)


def _refused(frame: Frame, locus: Locus, w: Window) -> tuple[Link, ...]:
    """Learned edges that run against the order inside a step: said, never used."""
    names = sorted({e.cause for p in UPSTREAM for e in p.edges} & set(frame.facts.series))
    rows = _evidence_rows(frame, locus)
    column = int(locus.columns[0])
    series = {"compute_ms": frame.own[rows, column].astype(np.float64)}
    for name in names:
        y = _series(frame, name, column, locus.level)[rows]
        if np.isfinite(y).all() and np.ptp(y) > 0:
            series[name] = y
    if len(series) < 2 or not np.isfinite(series["compute_ms"]).all() or len(rows) < 30:
        return ()
    order = list(series)
    tested = granger.granger_all(np.column_stack([series[k] for k in order]), lags=2)
    stands = granger.benjamini_hochberg(tested.p_value[1:, 0], 0.01)
    return tuple(
        Link(
            metric=order[i + 1],
            label=order[i + 1],
            weight=0.0,
            kind="learned",
            lag=1,
            samples=tested.samples,
            statistic=float(tested.partial_r2[i + 1, 0]),
            p_value=float(tested.p_value[i + 1, 0]),
            says=f"compute seems to drive {order[i + 1]} (partial R2 {tested.partial_r2[i + 1, 0]:.2f})",
            refused="the order inside a step is known: compute follows it",
        )
        for i in np.flatnonzero(stands & (tested.partial_r2[1:, 0] > 0.05))
    )
