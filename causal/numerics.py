"""Numbers that go wrong, in the order in which they can: local gradient -> global norm -> update -> loss.

The first rank to move before the reduction is the culprit; after it everybody has the same values. A learning
rate is judged against its own plan; a bad batch by its rank's share of the global gradient; overflow by its
repetition on one rank. Ties are broken by time, then by effect size (research/causal.md section 6.7).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lanterne.causal import stats
from lanterne.causal.facts import FactEvent, Facts
from lanterne.causal.finding import Finding, Link, make, number
from lanterne.causal.frame import Frame, slim
from lanterne.causal.liveness import live
from lanterne.causal.patterns import BY_NAME
from lanterne.causal.stats import Bools, Floats
from lanterne.nouns import CauseCategory, EventName, Evidence, Subject, group_name

LOCAL_Z_MIN = 8.0
LOCAL_FACTOR_MIN = 3.0
LR_DRIFT_HIGH, LR_DRIFT_LOW = 0.95, -0.8  # DESIGN.md section 6
LR_LOG_JUMP_MIN = 0.5
OVERFLOWS_MIN = 3  # one is how a dynamic scale finds its level
CALIBRATION_STEPS_MAX, CALIBRATED_SCALE_MIN = 40, 64.0  # a first guess of 2^16 to 2^32 is halved until it fits
LOSS_RISE_SIGMAS = 4.0
BATCH_ROWS_MAX = 4
CLEAN_MIN = 2
"""So many ranks, and a quarter of the job, must have told a finite gradient to clear those that told nothing."""


def findings(frame: Frame) -> list[Finding]:
    """Causes of numeric trouble, unordered; the engine ranks them and removes effects of others."""
    if not len(frame.facts.steps):
        return []
    overflow = _overflow(frame)
    out = [overflow] if overflow is not None else []
    nonfinite = _nonfinite(frame) if overflow is None else None
    lr = _learning_rate(frame)
    batch = _bad_batch(frame)
    return [*out, *(f for f in (nonfinite, lr, batch) if f is not None)]


def chain(name: str, says: str) -> tuple[Link, ...]:
    """Path of a numeric pattern from its symptom up to its root, with the pattern's priors."""
    pattern = BY_NAME[name]
    labels = {m.name: m.label for m in pattern.metrics}
    return tuple(
        Link(
            metric=e.cause,
            label=labels[e.cause],
            weight=e.prior,
            says=says if e.cause == pattern.root else pattern.says,
            kind="pattern",
        )
        for e in reversed(pattern.edges)
    )


def _subject(frame: Frame, rank: int | None, **rest: str | None) -> Subject:
    if rank is None or rank not in frame.ranks:
        return Subject(rank=rank, **rest)
    return Subject(rank=rank, host=frame.hosts[int(frame.host[frame.ranks.index(rank)])] or None, **rest)


# --- non-finite values and overflow --------------------------------------------------------------


def _first_nonfinite(frame: Frame) -> tuple[int, list[int], str]:
    """(row, ranks, series) of the first non-finite gradient or loss; row -1 when there is none."""
    count = frame.facts.series.get("grad_nonfinite")
    best = (-1, list[int](), "")
    if count is not None:
        hit = np.nan_to_num(count) > 0
        if hit.any():
            row = int(hit.any(1).argmax())
            best = row, [int(frame.ranks[c]) for c in np.flatnonzero(hit[row])], "grad_nonfinite"
    for name in ("loss", "grad_norm_local"):
        x = frame.facts.series.get(name)
        if x is None:
            continue
        if np.isfinite(x).all():
            continue
        ever = np.logical_or.accumulate(np.isfinite(x), 0)
        gone = ever & np.isinf(x)
        if _from_files(frame.facts):  # a log that ends early lacks values, and readers tell the non-finite ones
            gone |= _told(frame, name)
        elif not live(frame.facts):  # there a value that is missing at the end is one that was not received yet
            gone |= ever & ~np.isfinite(x) & _lasting(x)
        if gone.any():
            row = int(gone.any(1).argmax())
            if best[0] < 0 or row < best[0]:
                best = row, [int(frame.ranks[c]) for c in np.flatnonzero(gone[row])], name
    return best


def _from_files(facts: Facts) -> bool:
    """Trainer files of a job that is over, and no session of our own among them."""
    return bool({"log", "metrics"} & set(facts.sources)) and not {"live", "simulator", "spool"} & set(facts.sources)


def _told(frame: Frame, name: str) -> Bools:
    """Where a file said NaN or inf itself."""
    said = np.zeros((len(frame.facts.steps), len(frame.ranks)), bool)
    for e in frame.facts.events:
        if e.name == "nonfinite_sample" and e.attributes.get("series") == name:
            rows = np.flatnonzero(frame.facts.steps == e.step)
            said[rows, frame.ranks.index(e.rank) if e.rank in frame.ranks else 0] = True
    return said


def _lasting(x: Floats) -> Bools:
    """NaN that lasts to the end of the window in that column: a value that was lost, not one that was not sampled."""
    lasting = np.zeros(x.shape, bool)
    lost = np.flatnonzero(np.isnan(x[-2:]).all(0)) if len(x) > 1 else np.zeros(0, np.int64)
    lasting[:, lost] = np.logical_and.accumulate(np.isnan(x[:, lost])[::-1], 0)[::-1]
    return lasting


def _events(frame: Frame, name: EventName) -> list[FactEvent]:
    return sorted((e for e in frame.facts.events if e.name == name), key=lambda e: (e.step, e.job_ns))


def _culprits(frame: Frame, events: list[FactEvent], row: int, ranks: list[int]) -> tuple[int, list[int], str | None]:
    """Earliest (step, ranks, parameter) from gradient events before the reduction and from the series."""
    step = frame.step(row) if row >= 0 else -1
    parameter = None
    before = [e for e in events if e.attributes.get("where", "gradient") != "loss"]
    if before and (step < 0 or before[0].step <= step):
        first = [e for e in before if e.step == before[0].step]
        named = sorted({e.rank for e in first if e.rank >= 0})
        if step < 0 or before[0].step < step or not ranks or len(named) < len(ranks):
            step, ranks = before[0].step, named
    for e in before:
        if e.step == step and e.rank in ranks and e.attributes.get("parameter"):
            parameter = str(e.attributes["parameter"])
            break
    return step, ranks, parameter


def _absent(frame: Frame, step: int) -> list[int]:
    """Ranks of a live job whose data do not reach the step before: late shippers, not innocent ranks."""
    facts = frame.facts
    if not live(facts) or not len(facts.steps):
        return []
    done = np.isfinite(facts.get("step_ms")) & (facts.steps >= min(step - 1, int(facts.steps[-1])))[:, None]
    there = {r for i, r in enumerate(facts.ranks) if done[:, i].any()}
    absent = sorted(set(range(facts.ranks_expected)) - there)
    return [] if _others_clean(frame, step) >= max(CLEAN_MIN, facts.ranks_expected // 4) else absent


def _others_clean(frame: Frame, step: int) -> int:
    """Ranks that told their gradient of that very step and it was finite: had another rank broken the parameters
    before, theirs would be broken too, so whoever is not finite then is so by itself."""
    count = frame.facts.get("grad_nonfinite")[frame.facts.steps == step]
    return int((count == 0).sum())


def _nonfinite(frame: Frame) -> Finding | None:
    row, ranks, series = _first_nonfinite(frame)
    events = _events(frame, EventName.NONFINITE)
    if row < 0 and not events:
        return None
    step, ranks, parameter = _culprits(frame, events, row, ranks)
    few = 0 < len(ranks) <= max(1, len(frame.ranks) // 4)
    absent = _absent(frame, step)
    rank = ranks[0] if few and len(ranks) == 1 and not absent else None
    where = f"in {parameter} " if parameter else ""
    who = f"rank {rank}" if rank is not None else f"{len(ranks)} ranks at once"
    what = "loss" if series == "loss" and not events else "gradient"
    says = f"the first non-finite {what} {where}appeared at step {step} on {who}, before any other rank"
    if rank is None:
        says = f"the first non-finite {what} {where}was seen at step {step} on {who}"
    counts = [float(e.attributes.get("count", 0) or 0) for e in events if e.step == step and e.rank == rank]
    evidence = [
        Evidence(says=says, value=counts[0] if counts else None, unit="elements" if counts else "", baseline=0.0)
    ]
    loss = frame.facts.series.get("loss")
    if (
        loss is not None
        and not np.isfinite(loss[-1]).any()
        and np.isfinite(loss[: max(1, frame.usable.size // 2)]).any()
    ):
        evidence.append(
            Evidence(says=f"the loss is not a number on all {len(frame.ranks)} ranks at the end of the window")
        )
    confidence = 0.96 if rank is not None else 0.55
    needs = () if rank is not None else ("non-finite counts of each rank's gradient before the reduction",)
    if absent:
        needs = (f"the data of ranks {group_name(absent)} of step {step}: one of them may have been first",)
    return make(
        CauseCategory.NONFINITE_VALUES,
        "numerics",
        confidence=confidence,
        since_step=step,
        subject=_subject(frame, rank, parameter=parameter, batch=_fingerprint(frame, rank, step)),
        evidence=evidence,
        symptom="loss",
        path=chain("nonfinite_spreads", says),
        needs=needs,
    )


def _overflow(frame: Frame) -> Finding | None:
    """Repeated skipped steps of the loss scaler, and the rank whose gradients overflowed before the reduction."""
    events = _events(frame, EventName.OVERFLOW)
    steps = sorted({e.step for e in events})
    scale = frame.facts.series.get("loss_scale")
    level = stats.median(scale, 1) if scale is not None else np.zeros(0)
    drops = np.flatnonzero(np.diff(level) < -1e-9) + 1 if len(level) > 1 else np.zeros(0, np.int64)
    repeated = max(len(steps), len(drops))
    if repeated < OVERFLOWS_MIN:
        return None
    skipped = steps if len(steps) >= len(drops) else [frame.step(int(d)) for d in drops]
    burst = _burst(skipped)
    if burst is None or _calibrates(frame, level, skipped):
        return None
    since = burst
    rank, share = _overflowing_rank(frame, events, since)
    before, after = (float(level[0]), float(np.nanmin(level))) if np.isfinite(level).any() else (float("nan"),) * 2
    first = Evidence(
        says=f"the loss scaler skipped {repeated} steps since step {since}",
        value=float(repeated),
        unit="steps",
        baseline=0.0,
    )
    evidence = [first]
    if np.isfinite(before) and after < before:
        says = f"the loss scale fell from {number(before)} to {number(after)}"
        evidence.append(Evidence(says=says, value=after, unit="1", baseline=before, ref="loss_scale"))
    if rank is not None:
        says = f"{share:.0%} of the overflowing gradients were on rank {rank}, before the reduction"
        evidence.append(Evidence(says=says, value=share, unit="1", ref="grad_nonfinite"))
    category = CauseCategory.FP16_OVERFLOW
    if rank is None and (after <= 1.0 or _floor_said(frame)):
        category = CauseCategory.LOSS_SCALE_COLLAPSE
    needs = () if rank is not None else ("non-finite counts of each rank's gradient before the reduction",)
    return make(
        category,
        "numerics",
        confidence=0.94 if rank is not None else 0.7,
        since_step=since,
        subject=_subject(frame, rank),
        evidence=evidence,
        symptom="loss scale",
        path=chain("overflow_scale_collapse", first.says),
        needs=needs,
    )


def _floor_said(frame: Frame) -> bool:
    """The scaler itself says that it can go no lower."""
    category = CauseCategory.LOSS_SCALE_COLLAPSE
    events = frame.facts.events
    return any(e.name == "log.loss_scale_minimum" or e.attributes.get("cause") == category for e in events)


def _calibrates(frame: Frame, level: NDArray[np.float64], skipped: list[int]) -> bool:
    """A dynamic scale starts far too high and comes straight down in the first steps: normal, if it settles high."""
    known = level[np.isfinite(level)]
    if not len(known) or float(known.min()) < CALIBRATED_SCALE_MIN or len(skipped) > CALIBRATION_STEPS_MAX:
        return False
    started = skipped[0] - frame.step(0) <= 2 and skipped[-1] - frame.step(0) <= 2 * CALIBRATION_STEPS_MAX
    return started and frame.step(len(level) - 1) > skipped[-1]


def _burst(steps: list[int]) -> int | None:
    """First step from which at least three overflows come within 20 steps; None when they are scattered (benign)."""
    for i in range(len(steps) - OVERFLOWS_MIN + 1):
        if steps[i + OVERFLOWS_MIN - 1] - steps[i] <= 20:
            return steps[i]
    return None


def _overflowing_rank(frame: Frame, events: list[FactEvent], since: int) -> tuple[int | None, float]:
    rows = frame.facts.steps >= since
    count = frame.facts.series.get("grad_nonfinite")
    times = np.zeros(len(frame.ranks), np.int64) if count is None else (np.nan_to_num(count[rows]) > 0).sum(0)
    if not times.any() or (times > 0.5 * times.max()).sum() > 1:
        gradient = [e for e in _events(frame, EventName.NONFINITE) if e.step >= since]
        named = np.array([sum(e.rank == r for e in gradient or events) for r in frame.ranks])
        if named.any() and (not times.any() or (named > 0.5 * named.max()).sum() == 1):
            times = named
    if not times.any():
        return None, 0.0
    share = float(times.max() / times.sum())
    return (int(frame.ranks[int(times.argmax())]), share) if share > 0.5 else (None, share)


# --- learning rate -------------------------------------------------------------------------------


def _own_commands(frame: Frame) -> set[int]:
    """Steps at which a command of ours changed the learning rate."""
    return {
        e.step
        for e in frame.facts.events
        if e.name == EventName.COMMAND
        and e.attributes.get("phase") == "applied"
        and str(e.attributes.get("action", "")) in {"set_lr", "scale_lr", "rollback"}
    }


def _lr_jump(frame: Frame) -> tuple[int, float, float, bool] | None:
    """(row, before or planned, after, against the plan) of the first departure of the learning rate."""
    lr = stats.median(frame.facts.get("lr"), 1)
    planned = stats.median(frame.facts.get("lr_planned"), 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        drift = (lr - planned) / planned
        off = np.isfinite(drift) & ((drift > LR_DRIFT_HIGH) | (drift < LR_DRIFT_LOW))
        delta = np.diff(np.log(np.where(lr > 0, lr, np.nan)))
    if off.any() and not off.all():
        row = int(off.argmax())
        return row, float(planned[row]), float(lr[row]), True
    if len(delta) < 8:
        return None
    size = np.abs(np.nan_to_num(delta))
    for k in np.argsort(-size)[:3]:
        around = np.r_[size[max(0, k - 5) : k], size[k + 1 : k + 6]]
        usual = float(np.max(np.sort(around)[: max(1, len(around) - 1)])) if len(around) else 0.0
        if size[k] > max(LR_LOG_JUMP_MIN, 4 * usual) and k >= 3:
            return int(k) + 1, float(lr[k]), float(lr[k + 1]), False
    return None


def _learning_rate(frame: Frame) -> Finding | None:
    jump = _lr_jump(frame)
    if jump is None:
        return None
    row, before, after, planned = jump
    if any(abs(frame.step(row) - s) <= 1 for s in _own_commands(frame)):
        return None
    hurt = _suffers(frame, row)
    if not planned and (hurt is None or after < before):  # a lower rate by steps is how many schedules go on
        return None
    word = "its plan of" if planned else "its value of"
    says = (
        f"the learning rate is {number(after)} since step {frame.step(row)},"
        f" {after / before:.3g} times {word} {number(before)}"
    )
    evidence = [Evidence(says=says, value=after, unit="1", baseline=before, ref="lr")]
    confidence = 0.85 if planned else 0.6
    if hurt is not None:
        evidence.append(hurt)
        confidence = 0.97 if after > before else confidence
    elif planned and after < before:
        confidence = 0.75
    return make(
        CauseCategory.LR_MISCONFIGURED,
        "numerics",
        confidence=confidence,
        since_step=frame.step(row),
        evidence=evidence,
        symptom="loss",
        path=chain("lr_jump", says),
    )


def _suffers(frame: Frame, row: int) -> Evidence | None:
    """Did loss or gradient norm rise after the row, beyond their own noise?"""
    for name, label in (("loss", "loss"), ("grad_norm", "global gradient norm")):
        x = frame.facts.series.get(name)
        if x is None:
            continue
        y = stats.median(x, 1)
        before, after = y[max(0, row - 40) : row], y[row : row + 60]
        if np.isfinite(before).sum() < 5 or not len(after):
            continue
        level, noise = stats.rows_median(before), max(stats.noise_of(before), 1e-9)
        lost = float(np.mean(~np.isfinite(after)))
        worst = float(np.nanmax(after)) if np.isfinite(after).any() else float("inf")
        if lost > 0.3 or worst > level + max(LOSS_RISE_SIGMAS * noise, 0.1 * abs(level)):
            says = f"the {label} went from {number(level)} to {number(worst)} after it"
            return Evidence(says=says, value=worst if np.isfinite(worst) else None, unit="1", baseline=level, ref=name)
    return None


# --- bad batch -----------------------------------------------------------------------------------


def _beyond(frame: Frame, name: str, logarithm: bool) -> Floats | None:
    """Standardised excess of a rank over the median rank, ``[T, R]``; inf counts as far above."""
    x = frame.facts.series.get(name)
    if x is None or x.shape[1] < 2 or np.isfinite(x).mean() < 0.3:
        return None
    x = slim(x)
    with np.errstate(invalid="ignore", divide="ignore"):
        y = np.log(np.where(x > 0, x, np.nan)) if logarithm else x
        beyond = y - stats.median(np.where(np.isfinite(y), y, np.nan), 1)[:, None]
    if x.shape[1] == 2:
        beyond = beyond * 2
    settled = beyond[min(5, len(beyond) // 4) :]
    flat = settled[np.isfinite(settled)]
    if not flat.size:
        return None
    usual = stats.median(settled, 0)
    scale = max(float(stats.MAD_TO_SIGMA * np.median(np.abs(flat - np.median(flat)))), 0.02)
    return np.asarray((beyond - usual) / scale)


def _bad_batch(frame: Frame) -> Finding | None:
    """A rank whose own gradient or loss leaves its peers' for a step or a few, and moves the global norm."""
    gradient, loss = _beyond(frame, "grad_norm_local", True), _beyond(frame, "loss", False)
    best: tuple[float, int, int] | None = None
    for z in (gradient, loss):
        if z is None:
            continue
        y = np.nan_to_num(z, nan=-np.inf)
        y[: min(3, len(y))] = -np.inf
        row, column = (int(v) for v in np.unravel_index(int(y.argmax()), y.shape))
        if y[row, column] > LOCAL_Z_MIN and (best is None or y[row, column] > best[0]):
            best = float(y[row, column]), row, column
    if best is None:
        return None
    z_peak, row, column = best
    row = _first_of(row, column, gradient, loss)
    evidence, factor = _batch_evidence(frame, row, column, gradient, loss)
    effect = _global_effect(frame, row)
    if factor < LOCAL_FACTOR_MIN and effect is None:
        return None
    if effect is not None:
        evidence.append(effect)
    spans = max(int((z[:, column] > LOCAL_Z_MIN).sum()) for z in (gradient, loss) if z is not None)
    confidence = 0.55 + 0.2 * min(1.0, z_peak / 24) + (0.2 if effect is not None else 0.0)
    if spans > BATCH_ROWS_MAX:
        confidence *= 0.6
    rank, step = int(frame.ranks[column]), frame.step(row)
    says = evidence[0].says if evidence else f"rank {rank} left its peers at step {step}"
    return make(
        CauseCategory.BAD_BATCH,
        "numerics",
        confidence=confidence,
        since_step=step,
        evidence=evidence,
        symptom="loss",
        subject=_subject(frame, rank, batch=_fingerprint(frame, rank, step)),
        path=chain("loss_spike_by_batch", says),
    )


def _first_of(row: int, column: int, *scores: Floats | None) -> int:
    """Earliest row within the few before the peak at which the rank is already out."""
    for back in range(max(0, row - BATCH_ROWS_MAX), row):
        if any(z is not None and z[back, column] > LOCAL_Z_MIN for z in scores):
            return back
    return row


def _batch_evidence(
    frame: Frame, row: int, column: int, gradient: Floats | None, loss: Floats | None
) -> tuple[list[Evidence], float]:
    out: list[Evidence] = []
    factor = 0.0
    rank, step = int(frame.ranks[column]), frame.step(row)
    for z, name, label in ((gradient, "grad_norm_local", "gradient norm before the reduction"), (loss, "loss", "loss")):
        if z is None or not z[row, column] > LOCAL_Z_MIN:
            continue
        x = frame.facts.series[name]
        value, peers = float(x[row, column]), stats.rows_median(np.delete(x[row], column))
        factor = max(factor, value / peers if peers > 0 else 0.0)
        says = (
            f"rank {rank}'s {label} at step {step} is {number(value)}, its peers' {number(peers)}"
            f" ({z[row, column]:.0f} sigma)"
        )
        out.append(Evidence(says=says, value=value, unit="1", baseline=peers, ref=name))
        if name == "grad_norm_local":
            square = np.nan_to_num(x[row]) ** 2
            share = float(square[column] / max(square.sum(), 1e-30))
            out.append(Evidence(says=f"that is {share:.0%} of the squared global gradient", value=share, unit="1"))
    return out, factor


def _global_effect(frame: Frame, row: int) -> Evidence | None:
    """Did the global norm, or everybody's loss in the next steps, move at that row?"""
    for name, label, ahead in (("grad_norm", "global gradient norm", 2), ("loss", "median loss of all ranks", 6)):
        x = frame.facts.series.get(name)
        if x is None:
            continue
        y = stats.median(x, 1)
        before, after = y[max(0, row - 40) : row], y[row : row + ahead]
        if np.isfinite(before).sum() < 5 or not np.isfinite(after).any():
            continue
        level, noise = stats.rows_median(before), max(stats.noise_of(before), 1e-9)
        worst = float(np.nanmax(after))
        if worst > level + 6 * noise and worst > 1.2 * level:
            says = f"the {label} rose to {number(worst)} with it, before {number(level)}"
            return Evidence(says=says, value=worst, unit="1", baseline=level, ref=name)
    return None


def _fingerprint(frame: Frame, rank: int | None, step: int) -> str | None:
    """Fingerprint of the batch that the rank held at the step, where the collector recorded it."""
    if rank is None:
        return None
    for e in frame.facts.events:
        if e.name == EventName.BATCH and e.rank == rank and e.step == step and e.attributes.get("fingerprint"):
            return str(e.attributes["fingerprint"])
    return None
