"""What all detectors share: robust statistics, the steps that count, and the form of a finding.

A healthy run raises nothing. So a claim about time needs an effect size (a share of the step and an
absolute floor), persistence (several steps) and distance from the run's own noise, all three at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from lanterne.causal.facts import FactEvent, Facts, FloatArray, IntArray
from lanterne.errors import UsageError
from lanterne.nouns import NO_RANK, NO_STEP, Anomaly, EventName, Severity, Subject

Mask = NDArray[np.bool_]
Detector = Callable[[Facts], list[Anomaly]]

WARM_UP_STEPS = 10
"""First steps of an attempt: allocation, connection set-up, compilation. Judged by nothing that measures time."""
WINDOW_STEPS = 400
"""Steps of a live window: one that is shorter holds its attempt from the start."""
MAD_TO_SIGMA = 1.4826
LOST_MS = 500.0
"""What a slowness must have cost the job in all before it is told: some short steps are a hiccup of the machine."""
LONG_PHASES = ("checkpoint_ms", "eval_ms", "compile_ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """Fixed levels of the contract (DESIGN 6). A level given by the user fires alone; a default one needs the baseline.

    ``chosen`` names the levels that the user set.
    """

    grad_norm: float = 10.0
    loss_spikeness: float = 0.35
    lr_drift_low: float = -0.8
    lr_drift_high: float = 0.95
    sync_ms: float = 800.0
    node_gb_per_s: float = 0.0  # what the links within a host, and between hosts, should give; 0 = not known
    network_gb_per_s: float = 0.0
    chosen: frozenset[str] = frozenset()


def levels_of(text: str) -> Levels:
    """Levels from ``LANTERNE_LEVELS``: ``name=value`` entries with spaces between; those named are the chosen ones.

    Raises :class:`UsageError` for a name that is none and for a value that is no finite number.
    """
    known = {f.name for f in fields(Levels)} - {"chosen"}
    chosen: dict[str, float] = {}
    for entry in text.split():
        name, _, value = entry.partition("=")
        if name not in known:
            raise UsageError(f"levels: {name[:40]!r} is not one of {', '.join(sorted(known))}")
        try:
            chosen[name] = float(value)
        except ValueError:
            raise UsageError(f"levels: {entry[:60]!r} is not NAME=NUMBER, for example grad_norm=12") from None
        if not np.isfinite(chosen[name]):
            raise UsageError(f"levels: {entry[:60]!r} is not a finite number")
    return Levels(**chosen, chosen=frozenset(chosen))


def median(values: FloatArray, axis: int | None = None) -> FloatArray:
    """NaN-ignoring median; NaN where all are missing (numpy's own falls back to a slow path there)."""
    x = np.asarray(values, np.float64)
    if axis is None:
        x, axis = x.reshape(-1), 0
    if x.size and np.isfinite(x).all():
        return np.asarray(np.median(x, axis=axis), np.float64)  # selection: a third of the sort's cost
    x = np.sort(x, axis=axis)  # NaN sorts last
    known = x.shape[axis] - np.isnan(x).sum(axis=axis, keepdims=True)
    if not x.shape[axis]:
        return np.full(np.delete(x.shape, axis), np.nan)
    low = np.take_along_axis(x, np.maximum((known - 1) // 2, 0), axis)
    high = np.take_along_axis(x, np.minimum(known // 2, x.shape[axis] - 1), axis)
    with np.errstate(invalid="ignore"):  # inf and -inf in the middle
        middle = np.where(known > 0, np.where(low == high, low, 0.5 * (low + high)), np.nan)
    return np.asarray(np.squeeze(middle, axis=axis), np.float64)


def mad(values: FloatArray, axis: int | None = None) -> FloatArray:
    """Median absolute deviation scaled to a normal's sigma."""
    centre = median(values, axis) if axis is None else np.expand_dims(median(values, axis), axis)
    return median(np.abs(values - centre), axis) * MAD_TO_SIGMA


def robust_scale(values: FloatArray) -> float:
    """max(IQR/1.349, 0.25 std, 0.001 |median|): the floored scale of research/causal.md section 2."""
    known = values[np.isfinite(values)]
    if len(known) < 4:
        return float("inf")
    low, mid, high = np.percentile(known, [25, 50, 75])
    return float(max((high - low) / 1.349, 0.25 * known.std(), 1e-3 * abs(mid), 1e-12))


def sliding_median(values: FloatArray, width: int) -> FloatArray:
    """Median of each window of ``width`` rows of [T, R]; row i covers steps i..i+width-1; [T-width+1, R]."""
    return median(np.lib.stride_tricks.sliding_window_view(values, width, axis=0), axis=-1)


def ranges(values: FloatArray) -> FloatArray:
    """Largest less smallest finite value of each column of [T, R]; 0 where there is none. Bounds any lasting rise."""
    known = np.isfinite(values)
    top = np.where(known, values, -np.inf).max(axis=0, initial=-np.inf)
    low = np.where(known, values, np.inf).min(axis=0, initial=np.inf)
    return np.asarray(np.maximum(top - low, 0.0), np.float64)


def risen(values: FloatArray, width: int, floor: float) -> list[int]:
    """Columns of [T, R] whose sliding median moves by ``floor``: the only ones in which a rise can last."""
    wide = np.flatnonzero(ranges(values) >= floor)
    if not len(wide) or len(values) < width:
        return []
    return [int(r) for r in wide[ranges(sliding_median(values[:, wide], width)) >= floor]]


def first_step(facts: Facts) -> int:
    """The step with which the attempt began: 0, or where it resumed, as told or as a short window shows."""
    if not len(facts.steps) or facts.steps[0] <= WARM_UP_STEPS:
        return 0
    told = [e.step for e in facts.events if e.name == EventName.ATTACHED and e.step > 0]
    if told:
        return min(told)
    return int(facts.steps[0]) if len(facts.steps) < WINDOW_STEPS else 0


def settled(facts: Facts) -> Mask:
    """Steps [T] that timing detectors may judge: no warm-up, no checkpoint, eval or compile on any rank."""
    steps = facts.steps
    keep = steps - first_step(facts) >= min(WARM_UP_STEPS, 2 + len(steps) // 4)
    typical = float(median(step_ms(facts)))
    for name in LONG_PHASES:
        values = facts.series.get(name)
        if values is not None and np.isfinite(typical):
            keep &= ~(np.nan_to_num(values) > 0.05 * typical).any(axis=1)
    return keep


_SHARED: ContextVar[tuple[Facts, dict[str, FloatArray]] | None] = ContextVar("shared", default=None)


@contextmanager
def sharing(facts: Facts) -> Iterator[None]:
    """Within it the job's medians of ``facts`` are worked out once, whoever asks."""
    token = _SHARED.set((facts, {}))
    try:
        yield
    finally:
        _SHARED.reset(token)


def common(facts: Facts, name: str) -> FloatArray:
    """A series of the job, [T]: median over the ranks that have a finite value; NaN where none has."""
    if not len(facts.ranks) or name not in facts.series:
        return np.full(len(facts.steps), np.nan)
    shared = _SHARED.get()
    known = shared[1] if shared is not None and shared[0] is facts else {}
    if name not in known:
        values = facts.series[name]
        finite = np.isfinite(values)
        known[name] = median(values if finite.all() else np.where(finite, values, np.nan), axis=1)
    return known[name]


def step_ms(facts: Facts) -> FloatArray:
    """Step time of the job, [T]: median over ranks (a synchronous job has one)."""
    return common(facts, "step_ms")


def lost_ms(step: FloatArray, normal: float) -> float:
    """By how much a stretch of steps, ms [n], was longer than ``normal`` in all."""
    return float(np.nansum(np.maximum(step - normal, 0.0)))


def column(facts: Facts, rank: int) -> int:
    """Column of a rank in the series."""
    return facts.ranks.index(rank)


def events(facts: Facts, *names: str) -> list[FactEvent]:
    """Events of these names, in time order."""
    return [e for e in facts.events if e.name in names]


def attribute(event: FactEvent, *names: str, default: float = float("nan")) -> float:
    """First numeric attribute among ``names``."""
    for name in names:
        value = event.attributes.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
    return default


def step_at(facts: Facts, event: FactEvent) -> int:
    """Step of an event; the last finished one where the event carries none."""
    if event.step > NO_STEP:
        return event.step
    return int(facts.steps[-1]) if len(facts.steps) else NO_STEP


def subject(facts: Facts, rank: int | None, *, group: str | None, parameter: str | None, batch: str | None) -> Subject:
    """Subject of a rank with its host and device filled in."""
    if rank is None or rank == NO_RANK:
        return Subject(group=group, parameter=parameter, batch=batch)
    place = facts.places.get(rank)
    return Subject(
        rank=rank,
        host=(place.host or None) if place else None,
        device=(place.device or None) if place else None,
        group=group,
        parameter=parameter,
        batch=batch,
    )


def runs(active: Mask) -> Iterable[tuple[int, int]]:
    """(first, last) of each run of True, inclusive."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], active, [False]]).astype(np.int8)))
    return zip(edges[::2].tolist(), (edges[1::2] - 1).tolist(), strict=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """A lasting rise of one series: rows ``first..last`` (inclusive) against the rest."""

    first: int
    last: int
    level: float
    baseline: float
    noise: float

    @property
    def rise(self) -> float:
        return self.level - self.baseline

    @property
    def z(self) -> float:
        return self.rise / self.noise if self.noise > 0 else float("inf")


def lasting_rise(x: FloatArray, width: int, floor: float) -> Shift | None:
    """The strongest lasting rise of ``x`` [n] by at least ``floor``: sliding medians over ``width`` samples.

    The baseline is the median of the samples before it. None when nothing rises by ``floor``, or fewer than ten
    samples (``width`` where that is less) lie before.
    """
    n = len(x)
    if n < 2 * width or np.isfinite(x).sum() < 2 * width:
        return None
    smooth = sliding_median(x[:, None], width)[:, 0]
    if not np.isfinite(smooth).any():
        return None
    peak = int(np.nanargmax(smooth))
    top = float(smooth[peak])
    low = float(np.nanpercentile(smooth, 10))
    if not top - low >= floor:
        return None
    half = low + 0.5 * (top - low)
    high_samples = np.nan_to_num(x, nan=half) >= half
    first, last = peak, peak + width - 1
    window = max(3, width // 2)
    while first > 0 and high_samples[max(0, first - window) : first].mean() >= 0.5:
        first -= 1
    while last < n - 1 and high_samples[last + 1 : last + 1 + window].mean() >= 0.5:
        last += 1
    while first > 0 and high_samples[first - 1]:
        first -= 1
    while last < n - 1 and high_samples[last + 1]:
        last += 1
    while first < last and not high_samples[first]:
        first += 1
    while last > first and not high_samples[last]:
        last -= 1
    before = x[:first][np.isfinite(x[:first])]
    if len(before) < min(width, WARM_UP_STEPS):
        return None  # what is slow from the first step on and then mends has started up
    baseline = float(np.median(before))
    noise = float(np.median(np.abs(before - baseline))) * MAD_TO_SIGMA
    return Shift(
        first=first, last=last, level=float(np.nanmedian(x[first : last + 1])), baseline=baseline,
        noise=max(noise, 1e-9),
    )  # fmt: skip


def finding(
    facts: Facts, kind: str, says: str, *, severity: Severity, first: int, last: int, score: float,
    rank: int | None = None, group: str | None = None, parameter: str | None = None, batch: str | None = None,
    host: str | None = None, at_ns: int = 0, value: float | None = None, unit: str = "",
    baseline: float | None = None, fired_by: str = "baseline",
) -> Anomaly:  # fmt: skip
    """An Anomaly about ``rank`` (None: not one rank). ``first``, ``last``: steps; ``at_ns``: job time of the onset."""
    about = subject(facts, rank, group=group, parameter=parameter, batch=batch)
    if host is not None:
        about = Subject(rank=rank, host=host, group=group, parameter=parameter, batch=batch)
    return Anomaly(
        kind=kind, subject=about, severity=severity, first_step=int(first), last_step=int(last), score=float(score),
        says=says, at_unix_ns=int(at_ns), value=value, unit=unit, baseline=baseline, fired_by=fired_by,
    )  # fmt: skip


def rows_of(mask: Mask) -> IntArray:
    """Row numbers of a mask."""
    return np.flatnonzero(mask).astype(np.int64)
