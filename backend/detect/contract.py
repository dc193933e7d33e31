"""The contract's service rules over one window: liveness, checkpoint success, heartbeats, leak drift, precision.

Each is a function of plain arrays with its threshold beside it, so that a view, a policy or a report may ask for it.
They say what was measured (a :class:`Ruling`, None where nothing was); the detectors that raise incidents judge by
the run's own baseline and stand in the other files of this folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import numpy as np

from lanterne.backend.detect.base import MAD_TO_SIGMA, median
from lanterne.causal.facts import Facts, FloatArray
from lanterne.nouns import EventName, Ruling

LIVENESS = 0.9995
LIVENESS_SAMPLES = 60
CHECKPOINT_SUCCESS = 0.997
CHECKPOINT_WINDOW_S = 300.0
HEARTBEATS_LOST = 3
VERSION_GAP = 5
LEAK_WINDOWS = 10
LEAK_SIGMAS = 4.0
LEAK_FLOOR = 0.02
"""Normalised drift below this (2% of the level a window) is no leak, however quiet the healthy windows were."""
UNDERFLOW_SHARE = 0.05
STD_FALL = 0.40
RETURN_SHARE = {"fp16": 1e-4, "e4m3": 5e-3}
"""Overflow-plus-underflow share below which a format may be taken up again (the seed contract)."""
SHARES_MIN = 6
"""Samples of the gradients that a precision rule needs; the collector takes one every 32 steps or more."""


def liveness(shares: FloatArray) -> Ruling | None:
    """Share of ranks that live, one sample a second: broken when the last 60 all lie below 99.95%.

    ``shares`` [N], NaN = not measured (such a second breaks the row). None before there are 60 samples.
    """
    last = np.asarray(shares, np.float64)[-LIVENESS_SAMPLES:]
    if len(last) < LIVENESS_SAMPLES or not np.isfinite(last[-1]):
        return None
    return Ruling(
        rule="liveness", broken=bool((last < LIVENESS).all()), value=float(last[-1]), threshold=LIVENESS, unit="1",
        says=f"{last[-1]:.2%} of the ranks live; below {LIVENESS:.2%} in {int((last < LIVENESS).sum())} of the last "
        f"{LIVENESS_SAMPLES} seconds",
    )  # fmt: skip


def checkpoint_success(facts: Facts) -> Ruling | None:
    """Saved checkpoints that did not turn out damaged, over the last five minutes; None where none was saved."""
    since = facts.now_ns - int(CHECKPOINT_WINDOW_S * 1e9)
    recent = [e for e in facts.events if e.job_ns >= since]
    saved = sum(e.name == EventName.CHECKPOINT_SAVED for e in recent)
    if not saved:
        return None
    bad = sum(
        e.name == EventName.CHECKPOINT_VERIFIED and e.attributes.get("ok") in (False, 0, "false", "False")
        for e in recent
    )
    share = 1 - min(bad, saved) / saved
    return Ruling(
        rule="checkpoint_success", broken=share < CHECKPOINT_SUCCESS, value=share, threshold=CHECKPOINT_SUCCESS,
        unit="1", says=f"{saved - min(bad, saved)} of {saved} checkpoints of the last five minutes are sound",
    )  # fmt: skip


class Absence(StrEnum):
    """Two ways in which a rank can be away; they need different remedies."""

    PRESENT = "present"
    SILENT = "silent"  # no heartbeat: the process or its host
    BEHIND = "behind"  # it speaks, but its steps are old: it must be brought up to date


def absence(seconds_since_heartbeat: float, step: int, newest_step: int, *, interval_s: float = 1.0) -> Absence:
    """Heartbeat lost for 3 intervals, or a version gap of 5 steps and more in a rank that still speaks."""
    if seconds_since_heartbeat >= HEARTBEATS_LOST * interval_s:
        return Absence.SILENT
    return Absence.BEHIND if newest_step - step >= VERSION_GAP else Absence.PRESENT


def leak_drift(values: FloatArray, width: int = 20) -> Ruling | None:
    """Leak drift of a series of sizes: differences, their cumulative sum over a window, normalised by the level.

    ``drift_w = sum(diff(x) in window w) / median(x)`` per window of ``width`` samples. The last window is
    broken when it exceeds ``mu + k sigma`` of the ten windows before it (median and MAD, so that one jump does not
    hide the next) and a floor. None with fewer than eleven windows.
    """
    known = values[np.isfinite(values)]
    count = (len(known) - 1) // width
    if count < LEAK_WINDOWS + 1:
        return None
    steps = np.diff(known)[-count * width :].reshape(count, width)
    drift = steps.sum(axis=1) / max(float(np.median(known)), 1.0)
    healthy, now = drift[-LEAK_WINDOWS - 1 : -1], float(drift[-1])
    centre = float(np.median(healthy))
    sigma = float(np.median(np.abs(healthy - centre))) * MAD_TO_SIGMA
    bound = max(centre + LEAK_SIGMAS * sigma, LEAK_FLOOR)
    return Ruling(
        rule="leak_drift", broken=now > bound, value=now, threshold=bound, unit="1",
        says=f"grew by {now:.1%} of its level in the last {width} samples ({centre:.1%} usually)",
    )  # fmt: skip


def downgrade(underflow_share: FloatArray, std: FloatArray) -> Ruling | None:
    """Leave a low-precision format: underflow above 5%, the spread fallen by more than 40% in the window.

    ``underflow_share`` and ``std`` [T] of the sampled gradients; None with fewer than six samples.
    """
    known = np.isfinite(underflow_share) & np.isfinite(std)
    if known.sum() < SHARES_MIN:
        return None
    share, spread = underflow_share[known], std[known]
    edge = max(2, len(share) // 4)
    now, before, after = float(median(share[-edge:])), float(median(spread[:edge])), float(median(spread[-edge:]))
    fall = 1 - after / before if before > 0 else 0.0
    return Ruling(
        rule="precision_downgrade", broken=now > UNDERFLOW_SHARE and fall > STD_FALL, value=now,
        threshold=UNDERFLOW_SHARE, unit="1",
        says=f"{now:.1%} of the values underflow and their spread fell by {fall:.0%}",
    )  # fmt: skip


def may_return(format: str, outside_share: FloatArray) -> Ruling | None:  # noqa: A002
    """Whether ``fp16`` or ``e4m3`` may be (or stay) in use: all of the last six shares lie below its level.

    Broken = it may not. None with fewer than six samples; KeyError for formats that have no return level.
    """
    known = outside_share[np.isfinite(outside_share)][-SHARES_MIN:]
    if len(known) < SHARES_MIN:
        return None
    worst, level = float(known.max()), RETURN_SHARE[format]
    return Ruling(
        rule=f"{format}_return", broken=not worst < level, value=worst, threshold=level, unit="1",
        says=f"{worst:.2%} of the gradient elements lie outside of {format}; it may be taken up below {level:.2%}",
    )  # fmt: skip


def scaler_misuse(calls: Sequence[str]) -> list[str]:
    """What is wrong with one step's order of calls: scale, backward, unscale, clip, step, update (in that order).

    ``backward_in_autocast`` stands for a backward pass under autocast. Each finding is one sentence.
    """
    at = {name: i for i, name in reversed(list(enumerate(calls)))}
    wrong = []
    if "backward_in_autocast" in at:
        wrong.append("backward runs under autocast: leave the context before it")
    if "backward" in at and "step" in at and "scale" not in at:
        wrong.append("the scaler steps, but the loss was not scaled")
    if "clip" in at and "step" in at and at["clip"] < at.get("unscale", len(calls)):
        wrong.append("gradients are clipped before they are unscaled: the limit is off by the loss scale")
    if "step" in at and "update" not in at:
        wrong.append("the scaler is never updated: its scale stays as it began")
    if "optimizer_step" in at and "scale" in at and "step" not in at:
        wrong.append("the optimizer steps by itself on scaled gradients: use scaler.step(optimizer)")
    return wrong
