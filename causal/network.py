"""Slow links: the transfer after the last arrival grew and nobody is late.

Which member of a ring is to blame cannot be told from start and end stamps alone: what narrows it down is which
groups are hot (tomography over hosts and switches), retransmits, and bytes that pile up in a rank's send queue. Late
completions do not: in a real gloo ring it is the slow sender's neighbour that completes last. Where nothing speaks,
the group is named and the diagnosis says what would settle it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lanterne.causal import stats
from lanterne.causal.contention import contended
from lanterne.causal.finding import Finding, Link, make, number
from lanterne.causal.frame import Frame, slim
from lanterne.causal.patterns import prior
from lanterne.causal.stats import Bools, Floats, Ints
from lanterne.causal.straggler import cost_of
from lanterne.nouns import CauseCategory, Evidence, Subject, Symptom, group_name

RISE_SHARE_MIN = 0.04  # of a step
RISE_FACTOR_MIN = 1.43  # bandwidth below 70% of what it was (DESIGN.md section 6)
RISE_SIGMAS_MIN = 4.0
UNSEEN_SURE = 0.45
"""How sure the link is where a silent rank may be what the others wait for: a lead at most, never a claim."""
HOT_SHARE = 0.5


@dataclass(slots=True)
class Rise:
    """Transfer time rose at ``row``: hot columns, before and after in ms (medians over the hot ranks)."""

    row: int
    hot: Ints
    before: float
    after: float
    noise: float
    steady: float  # share of the rows after the onset that show it


def findings(frame: Frame) -> list[Finding]:
    """At most one finding: the slow part of the network, as narrow as the evidence allows."""
    rise = _rise(frame)
    if rise is None or _host_is_loaded(frame, rise):
        return []
    rows = np.arange(len(frame.usable))
    now, before = frame.usable & (rows >= rise.row), frame.usable & (rows < rise.row)
    subject, sure, how = _locate(frame, rise, now, before)
    silent = _silent(frame, rise) if not how or how[0].ref == "transfer_ms" else ()
    if silent:
        sure = min(sure, UNSEEN_SURE)
    since = frame.step(rise.row)
    delta = rise.after - rise.before
    says = (
        f"transfers take {number(rise.after, 'ms')} a step after the last arrival since step {since},"
        f" before {number(rise.before, 'ms')}"
    )
    evidence = [Evidence(says=says, value=rise.after, unit="ms", baseline=rise.before, ref="transfer_ms"), *how]
    evidence.append(_nobody_late(frame, now, before, delta))
    clear = 1 - np.exp(-0.35 * delta / max(rise.noise, 1e-6))
    size = 1 - np.exp(-20 * delta / max(frame.base_step_ms, 1e-9))
    confidence = float(clear * size * rise.steady * sure)
    victims = [int(frame.ranks[i]) for i in rise.hot]
    return [
        make(
            CauseCategory.SLOW_LINK,
            "communication",
            confidence=confidence,
            subject=subject,
            since_step=since,
            cost=cost_of(frame, delta, rise.row),
            evidence=evidence,
            path=(
                Link(metric="transfer_ms", label="transfer time", weight=prior("slow_link"), says=says, kind="pattern"),
            ),
            symptoms=(Symptom(kind="transfer", says=f"ranks {group_name(victims)} wait for the transfers"),),
            needs=_needs(silent, sure),
        )
    ]


def _silent(frame: Frame, rise: Rise) -> tuple[int, ...]:
    """Ranks without data in the groups of the hot ones: a late arrival that nobody reported looks like a transfer."""
    hot = {int(frame.ranks[i]) for i in rise.hot}
    members = {r for group in frame.facts.groups.values() if hot & set(group) for r in group}
    expected = members or set(range(frame.facts.ranks_expected))
    return tuple(sorted(expected - set(frame.ranks)))


def _needs(silent: tuple[int, ...], sure: float) -> tuple[str, ...]:
    if silent:
        return (f"ranks {group_name(silent)} are silent: one of them may have come late",)
    return () if sure > 0.8 else ("retransmit counters or per-link times would name the link",)


def _rise(frame: Frame) -> Rise | None:
    x = frame.facts.series.get("transfer_ms")
    rows = np.flatnonzero(frame.usable)
    if x is None or len(rows) < 12 or not np.isfinite(frame.base_step_ms):
        return None
    y = slim(x[rows])
    if not _blocks_rise(y):
        return None
    sigma = stats.MAD_TO_SIGMA * stats.median(np.abs(np.diff(y, axis=0)), 0) / np.sqrt(2)
    middle = stats.median(y, 0)
    found = stats.split(np.minimum(y, middle + np.maximum(30 * sigma, 2 * frame.base_step_ms)))
    least = np.maximum(RISE_SHARE_MIN * frame.base_step_ms, np.nan_to_num(RISE_SIGMAS_MIN * sigma))
    hot = np.flatnonzero((found.shift > least) & (found.after > RISE_FACTOR_MIN * found.before))
    if not len(hot):
        return None
    at = int(np.median(found.at[hot]))
    level = stats.median(y[:, hot], 1)
    before, after = stats.rows_median(level[:at]), stats.rows_median(level[at:])
    noise = max(stats.noise_of(level[:at]), stats.noise_of(np.diff(level[:at])) / np.sqrt(2))
    if at < 5 or after < RISE_FACTOR_MIN * before or after - before < max(RISE_SIGMAS_MIN * noise, least[hot].min()):
        return None
    steady = float(np.mean(level[at:] - before > 0.4 * (after - before)))
    return Rise(int(rows[at]), hot, before, after, noise, steady) if steady > 0.6 else None


def _blocks_rise(y: Floats) -> bool:
    """A cheap look first: does any rank's block mean reach the factor over another of its own block means?"""
    known = np.nan_to_num(y)
    blocks = np.stack([b.mean(0) for b in np.array_split(known, min(12, len(known)))])
    return bool((blocks.max(0) > RISE_FACTOR_MIN * 0.9 * np.maximum(blocks.min(0), 1e-9)).any())


def _host_is_loaded(frame: Frame, rise: Rise) -> bool:
    """The ranks had no cores, or all forward passes slowed with the transfers: the machine is busy, not the network."""
    if contended(frame, rise.row, rise.after - rise.before):
        return True
    forward = frame.facts.series.get("forward_ms")
    if forward is None:
        return False
    rows = np.arange(len(frame.usable))
    before = stats.rows_median(forward[frame.usable & (rows < rise.row)])
    after = stats.rows_median(forward[frame.usable & (rows >= rise.row)])
    if not np.isfinite(before + after) or before <= 0:
        return False
    return after > 1.3 * before and rise.after / max(rise.before, 1e-6) < 2 * after / before


def _rose(frame: Frame, name: str, now: Bools, before: Bools) -> Floats | None:
    """Per-rank rise of a series beyond the job's median rise, ``[R]``."""
    x = frame.facts.series.get(name)
    if x is None or not before.any():
        return None
    rise = (
        np.nanmean(x[now], 0) - stats.median(x[before], 0) if np.isfinite(x[now]).any() else np.full(x.shape[1], np.nan)
    )
    return np.asarray(rise - np.nanmedian(rise)) if np.isfinite(rise).any() else None


def _locate(frame: Frame, rise: Rise, now: Bools, before: Bools) -> tuple[Subject, float, list[Evidence]]:
    """Subject, how sure the place is (0..1) and the evidence for it."""
    for name, label, unit, least in (
        ("send_queue_bytes", "bytes that the network did not take from", "bytes", 16_384.0),
        ("net_retries", "retransmits of", "packets", 3.0),
    ):
        piled = _piled(frame, name, least, now, before)
        if piled is not None:
            narrow, value = piled
            says = f"{label} {_words(narrow)} rose by {number(value, unit)} beyond the other ranks'"
            return narrow, 0.97, [Evidence(says=says, value=value, unit=unit, baseline=0.0, ref=name)]
    if len(rise.hot) < 0.8 * len(frame.ranks):
        place = _place(frame, rise.hot)
        if place is not None:
            return place, 0.9, [_only(place, rise)]
        hosts = _hot_hosts(frame, rise.hot)
        if len(hosts) == 1:
            place = Subject(host=frame.hosts[hosts[0]])
            return place, 0.85, [_only(place, rise)]
    group = group_name([int(frame.ranks[i]) for i in rise.hot])
    return Subject(group=group), 0.75, []


def _piled(frame: Frame, name: str, least: float, now: Bools, before: Bools) -> tuple[Subject, float] | None:
    """One rank or host on which a counter of the network rose far beyond the others', and by how much."""
    rise = _rose(frame, name, now, before)
    if rise is None:
        return None
    noise = np.nan_to_num(stats.spread(frame.facts.series[name][before], 0))
    hot = np.flatnonzero(np.nan_to_num(rise) > max(6 * float(noise.max()), least, 0.3 * float(np.nanmax(rise))))
    place = _place(frame, hot)
    return None if place is None else (place, float(np.median(rise[hot])))


def _only(place: Subject, rise: Rise) -> Evidence:
    return Evidence(
        says=f"only the transfers of {_words(place)} rose",
        value=rise.after,
        unit="ms",
        baseline=rise.before,
        ref="transfer_ms",
    )


def _words(place: Subject) -> str:
    return f"rank {place.rank}" if place.rank is not None else f"host {place.host}"


def _place(frame: Frame, hot: Ints) -> Subject | None:
    """One rank, or one host of which most ranks are hot; None where it is neither."""
    if not len(hot):
        return None
    hosts = np.unique(frame.host[hot])
    if len(hot) == 1:
        return Subject(rank=int(frame.ranks[int(hot[0])]), host=frame.hosts[int(hosts[0])] or None)
    size = int((frame.host == hosts[0]).sum())
    if len(hosts) == 1 and len(frame.hosts) > 1 and len(hot) > HOT_SHARE * size:
        return Subject(host=frame.hosts[int(hosts[0])])
    return None


def _hot_hosts(frame: Frame, hot: Ints) -> list[int]:
    size = np.bincount(frame.host, minlength=len(frame.hosts))
    count = np.bincount(frame.host[hot], minlength=len(frame.hosts))
    return [int(h) for h in np.flatnonzero(count > HOT_SHARE * size)]


def _nobody_late(frame: Frame, now: Bools, before: Bools, delta: float) -> Evidence:
    lead1 = stats.rows_median(stats.top2(frame.own[now])[1])
    lead0 = stats.rows_median(stats.top2(frame.own[before])[1])
    says = f"nobody is late: the slowest rank leads by {number(lead1, 'ms')}, before {number(lead0, 'ms')}"
    if lead1 - lead0 > 0.1 * delta:
        says = (
            f"late arrivals explain less: the slowest rank leads by {number(lead1, 'ms')}, before {number(lead0, 'ms')}"
        )
    return Evidence(says=says, value=lead1, unit="ms", baseline=lead0, ref=frame.locator)
