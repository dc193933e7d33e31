"""What an expression of a policy can see: plain data made from the incident, its first cause and the facts.

``series.NAME`` holds ``last`` (median over ranks of the last steps), ``before`` (median of the steps ahead of
the onset), ``change`` (``last / before - 1``) and ``nonfinite`` (share of the values of the last steps that are NaN
or infinite: with 1 there is no ``last``); a series that was never recorded is absent. ``lr`` holds
``now`` and ``planned`` of the last step. Arrays of facts are ``[steps, ranks]``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from lanterne.causal.facts import Facts, FloatArray
from lanterne.nouns import BreakerState, Cause, EventName, Evidence, Incident

LAST_STEPS = 3
BEFORE_STEPS = 30


def median(values: FloatArray) -> float:
    """Median of the finite values; NaN when there are none."""
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if finite.size else math.nan


def reduced(values: FloatArray, how: str) -> float:
    """``median`` or ``max`` of the finite values of ``[steps, ranks]``, or ``spread``: max - min over ranks of the
    last row. NaN when nothing is known, inf when a value is infinite."""
    if np.isinf(values).any():
        return math.inf
    if how == "median":
        return median(values)
    known = values[~np.isnan(values)] if how == "max" else values[-1:][~np.isnan(values[-1:])]
    if not known.size:
        return math.nan
    return float(known.max()) if how == "max" else float(known.max() - known.min())


def recorded(values: FloatArray) -> FloatArray:
    """The rows of ``[steps, ranks]`` in which something was recorded."""
    return values[~np.isnan(values).all(axis=1)] if values.size else values


CHECKPOINT_OK = "checkpoint_ok"
"""Besides the series: the share of ranks that read a checkpoint of one step back whole."""


def _checkpoint_ok(facts: Facts, step: int) -> float:
    """The largest share of the ranks that read a checkpoint of one step, ``step`` or later, back whole; NaN before one.

    At 1 there is one to go back to, whatever became of those saved after it.
    """
    whole: dict[int, set[int]] = {}
    for event in facts.events:
        if event.name == EventName.CHECKPOINT_VERIFIED and event.step >= step:
            ok = event.attributes.get("ok") not in (False, 0, "false", "False")
            whole.setdefault(event.step, set()).update({event.rank} if ok else ())
    world = max(facts.ranks_expected, len(facts.ranks), 1)
    return max((len(ranks) / world for ranks in whole.values()), default=math.nan)


def since(facts: Facts, name: str, step: int, count: int, how: str = "median", missing: float | None = None) -> float:
    """Series ``name`` over ranks and the last ``count`` recorded steps later than ``step``, reduced as ``how`` says.

    ``missing`` is the value when nothing was recorded after ``step`` (None: NaN). ``checkpoint_ok`` is no series but
    the share of ranks that read a checkpoint since ``step`` back whole.
    """
    if name == CHECKPOINT_OK:
        return _checkpoint_ok(facts, step)
    found = reduced(recorded(facts.get(name)[facts.steps > step])[-count:], how)
    return missing if math.isnan(found) and missing is not None else found


def _series(facts: Facts, onset: int | None) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for name, values in facts.series.items():
        latest = recorded(values)[-LAST_STEPS:]
        if not latest.size:
            continue
        last = median(latest)
        entry = {"nonfinite": float(np.isinf(latest).sum() / (~np.isnan(latest)).sum())}
        if not math.isnan(last):
            entry["last"] = last
        if onset is not None:
            before = median(values[(facts.steps < onset) & (facts.steps >= onset - BEFORE_STEPS)])
            if not math.isnan(before):
                entry["before"] = before
                if before and "last" in entry:
                    entry["change"] = last / before - 1.0
        found[name] = entry
    return found


def _idle_s(facts: Facts) -> float:
    """Seconds since the last step that somebody finished began to be overdue: its end, at the length it had."""
    if not len(facts.step_start_ns) or not facts.now_ns:
        return 0.0
    last_ms = recorded(facts.get("step_ms"))[-1:]
    end_ns = int(facts.step_start_ns[-1]) + (float(np.nanmax(last_ms)) * 1e6 if last_ms.size else 0.0)
    return max(0.0, (facts.now_ns - end_ns) / 1e9)


def _bound_s(facts: Facts) -> float:
    """The bound of the last standstill's alarm: the longest one that a rank was given; 0 without an alarm."""
    stalls = [e for e in facts.events if e.name == EventName.STALL]
    last = max((e.step for e in stalls), default=0)
    return max((float(e.attributes.get("bound_s", 0.0)) for e in stalls if e.step >= last - 1), default=0.0)


def view(
    job: str, attempt: int, incident: Incident, facts: Facts, breakers: Sequence[BreakerState] = ()
) -> dict[str, Any]:
    """``job attempt world step idle_s bound_s exited breakers incident cause series lr`` for :class:`Expression`."""
    cause = incident.causes[0] if incident.causes else Cause(category="unknown")  # type: ignore[arg-type]
    onset = cause.since_step if cause.since_step is not None else incident.opened_step
    series = _series(facts, onset)
    rates = {"now": series.get("lr", {}).get("last"), "planned": series.get("lr_planned", {}).get("last")}
    subject = cause.subject
    first = cause.evidence[0] if cause.evidence else Evidence(says="")
    return {
        "job": job,
        "attempt": attempt,
        "world": facts.ranks_expected or len(facts.ranks),
        "step": int(facts.steps[-1]) if len(facts.steps) else -1,
        "idle_s": _idle_s(facts),
        "bound_s": _bound_s(facts),
        "exited": len({e.rank for e in facts.events if e.name == EventName.EXITED}),
        "breakers": {s: sum(b.state == s for b in breakers) for s in ("open", "half_open")},
        "incident": {"kind": incident.kind, "severity": str(incident.severity), "id": incident.id},
        "cause": {
            "category": str(cause.category),
            "confidence": float(cause.confidence),
            "rank": -1 if subject.rank is None else subject.rank,
            "host": subject.host or "",
            "parameter": subject.parameter or "",
            "batch": subject.batch or "",
            "since_step": -1 if onset is None else onset,
            "slowdown": float(cause.cost.slowdown or 1.0),
            "gpu_hours": float(cause.cost.gpu_hours or 0.0),
            "value": float(first.value or 0.0),
            "baseline": float(first.baseline or 0.0),
        },
        "series": series,
        "lr": {k: v for k, v in rates.items() if v is not None},
    }
