"""Numerics, schedule and pace from the series of trainer files: what jumped, at which boundary, on which rank.

Every rule compares a run with itself (before and after), never with a level from elsewhere, except where the
ratio itself is the evidence (accumulation steps, clip value).
"""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lanterne.causal import field_data, field_pace, field_schedule
from lanterne.causal import words as w
from lanterne.causal.facts import FactEvent, Facts
from lanterne.causal.field_schedule import known_values, row_values, setting
from lanterne.causal.words import Words, cause, evidence, line
from lanterne.nouns import Cause
from lanterne.nouns import CauseCategory as C

F64 = NDArray[np.float64]
CLIP_FAR_BELOW = 0.01  # a healthy norm sits within two decades of its clip value
FLAT_SHARE = 0.03
SPIKE_SIGMAS = 8.0
OVERFLOWS_MIN = 3
CALIBRATION_STEPS_MAX, CALIBRATED_SCALE_MIN = 40, 64.0
"""A dynamic loss scale starts at 2^16 to 2^32 and halves at each overflow until it fits."""
SKIPS_APART = 50  # steps: scalers grow after 100 (DeepSpeed tests) to 2,000 (torch) steps without an overflow
VANISHED = 1e-4
EXPLODED, EXPLODED_STEPS_MIN = 10.0, 8  # times the usual norm, for so many rows up to the end


def candidates(facts: Facts, words: Words) -> list[Cause]:
    """Causes from series and settings; an unexplained spike only as an abstention."""
    out = [*_nonfinite(facts, words), *_scaler(facts, words)]
    out += [] if out else field_data.seeds(words)
    out += [] if out else _replicas(facts, words)
    out += [] if out else [*field_schedule.resume(facts, words), *field_schedule.accumulation(facts, words)]
    out += [] if out else [*field_schedule.lr_jump(facts), *field_schedule.lr_zero(facts), *_metric_keys(words)]
    out += [] if out else [*_overflow(facts, words), *_explodes(facts), *_vanishes(facts)]
    if not out:
        out += field_pace.candidates(facts, words)
    out += [] if out else [*field_data.candidates(facts, words), *_diverges(facts)]
    out += [] if out else _spike(facts)
    return out


def _fp16(facts: Facts, words: Words) -> bool:
    said = [str(e.attributes.get("format", "")).lower() for e in words.said("precision")]
    value = [str(words.setting(k)).lower() for k in ("precision", "fp16")]
    on = any(x in {"fp16", "float16", "half", "16", "16-mixed", "torch.float16"} for x in (*said, value[0])) or value[
        1
    ] in {"true", "1"}
    return on or bool(np.isfinite(facts.get("loss_scale")).any() and np.nanmax(facts.get("loss_scale")) > 1)


def _scaler(facts: Facts, words: Words) -> list[Cause]:
    """Clipping before unscaling: the norm the optimizer sees is far below the clip value, and nothing is learned."""
    clip = setting(words, "clip", "clip_setting")
    norm = known_values(row_values(facts, "grad_norm"))[1]
    if not clip or len(norm) < 8 or not _fp16(facts, words):
        return []
    usual = float(np.median(norm[len(norm) // 4 :]))
    loss = known_values(row_values(facts, "loss"))[1]
    flat = True
    if len(loss) >= 8:
        head, tail = float(np.median(loss[: max(3, len(loss) // 5)])), float(np.median(loss[-max(3, len(loss) // 5) :]))
        flat = head - tail < FLAT_SHARE * abs(head)
    if not (0 <= usual < CLIP_FAR_BELOW * clip and flat):
        return []
    proof = [
        evidence(
            f"the gradient norm seen by the optimizer is {usual:.3g}, the clip value {clip:g}, in fp16 with a "
            f"loss scale",
            value=usual,
            unit="1",
            baseline=clip,
        )
    ]
    if len(loss) >= 8:
        proof.append(evidence(f"the loss is flat: {head:.4g} to {tail:.4g}", value=tail, unit="1", baseline=head))
    return [
        cause(
            C.SCALER_MISUSE,
            0.88,
            proof,
            step=int(facts.steps[0]),
            do="unscale before clipping: scaler.unscale_(optimizer), then clip_grad_norm_",
        )
    ]


def _nonfinite(facts: Facts, words: Words) -> list[Cause]:
    """The first rank with a non-finite value before the reduction; its batch's valid labels."""
    said = words.said("nonfinite")
    if not said and not _any_nan(facts):
        return []
    before = [e for e in said if any(x in w.text(e) for x in ("before", "pre-reduc", "local", "unreduced"))]
    zero = _zero_labels(facts, words)
    ranks = {e.rank for e in before if e.rank >= 0} or _first_nan(facts)
    proof = [line(e) for e in (*before, *said)[:2]]
    step = min((e.step for e in said if e.step >= 0), default=_nan_step(facts))
    rank = next(iter(ranks)) if len(ranks) == 1 else next(iter(zero)) if len(zero) == 1 else None
    if rank is not None:
        if rank in zero:
            says = f"rank {rank} had 0 valid labels in that batch: 0/0 in a mean loss, spread by the reduction"
            proof.insert(0, evidence(says, value=0.0, unit="labels"))
        if ranks == {rank}:
            proof.insert(0, evidence(f"rank {rank} is the first with a non-finite value before the reduction"))
        do = "look at that rank's batch; divide by the global label count, never by a local zero"
        sure = 0.9 if ranks == {rank} else 0.85
        return [cause(C.NONFINITE_VALUES, sure, proof, rank=rank, step=step, do=do)]
    if _overlapped_fp8(words):
        proof.insert(0, evidence("NaN gradient norm with an FP8 format and overlapped parameter gather both on"))
        do = "toggle one switch at a time: overlap_param_gather off first"
        needs = ("one run with overlap_param_gather off and the same FP8 format",)
        return [cause(C.NONFINITE_VALUES, 0.7, proof, step=step, do=do, needs=needs)]
    needs = ("gradient norms per rank before the reduction: after it everybody has the NaN",)
    return [cause(C.NONFINITE_VALUES, 0.65, proof, step=step, needs=needs)]


def _overlapped_fp8(words: Words) -> bool:
    """FP8 and overlapped parameter gather both on, in a log or a configuration."""
    overlap = bool(words.said("overlap_param_gather"))
    overlap |= str(words.setting("overlap_param_gather")).lower() in {"true", "1"}
    said = [str(e.attributes.get("format", "")).lower() for e in words.said("precision")]
    said += [str(words.setting(k)).lower() for k in ("precision", "fp8_recipe", "fp8")]
    return overlap and (any("fp8" in x for x in said) or str(words.setting("fp8")).lower() in {"true", "1"})


def _zero_labels(facts: Facts, words: Words) -> set[int]:
    zero = {e.rank for e in words.said("valid_labels") if e.rank >= 0 and w.number(e, "count", 1) == 0}
    table = facts.get("valid_labels")
    for column, rank in enumerate(facts.ranks):
        if table.size and (table[:, column] == 0).any():
            zero.add(rank)
    return zero


def _any_nan(facts: Facts) -> bool:
    return any(_nan_rows(facts, name).any() for name in ("loss", "grad_norm", "grad_norm_local")) or bool(
        (facts.get("grad_nonfinite") > 0).any()
    )


def _nan_rows(facts: Facts, name: str) -> NDArray[np.bool_]:
    """Rows in which somebody logged NaN or inf: such values are kept apart by the readers as facts."""
    rows = [e.step for e in facts.events if e.name == "nonfinite_sample" and e.attributes.get("series") == name]
    if rows:
        return np.asarray(np.isin(facts.steps, rows))
    return np.asarray(np.isinf(facts.get(name)).any(axis=1))


def _first_nan(facts: Facts) -> set[int]:
    for series in ("grad_norm_local", "grad_nonfinite", "loss"):
        rows = [
            e
            for e in facts.events
            if e.name == "nonfinite_sample" and e.attributes.get("series") == series and e.rank >= 0
        ]
        if rows:
            first = min(e.step for e in rows)
            ranks = {e.rank for e in rows if e.step == first}
            if series != "loss" or len(ranks) < max(2, len(facts.ranks)):
                return ranks
    return set()


def _nan_step(facts: Facts) -> int | None:
    return min((e.step for e in facts.events if e.name == "nonfinite_sample" and e.step >= 0), default=None)


def _replicas(facts: Facts, words: Words) -> list[Cause]:
    """Checksums or norms of replicated parameters that differ between ranks."""
    said: dict[int, dict[int, str]] = {}
    for e in words.said("replica_checksum"):
        if e.rank >= 0:
            said.setdefault(e.step, {})[e.rank] = str(e.attributes.get("value"))
    for step, values in sorted(said.items()):
        texts = list(values.values())
        if len(values) > 1 and len(set(texts)) > 1:
            usual = max(set(texts), key=texts.count)
            odd = sorted(r for r, v in values.items() if v != usual)
            tie = texts.count(usual) * 2 <= len(texts)
            says = evidence(
                f"rank {','.join(map(str, odd[:8]))} has another checksum of the replicated parameters at step "
                f"{step} than the other {len(values) - len(odd)}",
                value=float(len(odd)),
                unit="ranks",
                baseline=0.0,
            )
            return [
                cause(
                    C.REPLICA_DIVERGENCE,
                    0.9,
                    [says],
                    rank=None if tie else odd[0],
                    step=step,
                    do="restore from a checkpoint before that step; see which group does not reduce or clip these "
                    "parameters",
                )
            ]
    rows = words.said("replica_mismatch")
    if rows:
        ranks = {e.rank for e in rows if e.rank >= 0}
        return [
            cause(
                C.REPLICA_DIVERGENCE,
                0.8,
                [line(e) for e in rows[:2]],
                rank=ranks.pop() if len(ranks) == 1 else None,
                do="checksum replicated parameters across ranks every N steps; see which group has size 1",
            )
        ]
    return []


def _metric_keys(words: Words) -> list[Cause]:
    """Ranks that log different metrics: each key is one reduction."""
    keys: dict[int, set[str]] = {}
    for e in words.said("metric_keys"):
        if e.rank >= 0:
            keys.setdefault(e.rank, set()).update(
                k
                for k in re.split(r"[\[\]{}'\", ]+", str(e.attributes.get("keys", "")))
                if k and not re.fullmatch(r"[-\d.:]+", k)
            )
    if len(keys) < 2:
        return []
    common = set.intersection(*keys.values())
    extra = {r: k - common for r, k in keys.items() if k - common}
    crossed = len({frozenset(k) for k in keys.values()}) > 1 and not any(
        k == set.union(*keys.values()) for k in keys.values()
    )
    hung = bool(words.said("collective_timeout", "store_timeout", "validation"))
    if not extra or not (crossed or hung):
        return []
    groups: dict[frozenset[str], list[int]] = {}
    for r, k in keys.items():
        groups.setdefault(frozenset(k), []).append(r)
    odd = min(groups.values(), key=len)
    lone = len(odd) == 1 and len(keys) > 2
    shown = "; ".join(f"rank {r}: {', '.join(sorted(k))[:80]}" for r, k in sorted(extra.items())[:4])
    says = evidence(
        f"ranks log different metric keys, and each key is one reduction: {shown}",
        value=float(len(groups)),
        unit="key sets",
        baseline=1.0,
    )
    return [
        cause(
            C.COLLECTIVE_DIVERGENCE,
            0.85 if hung else 0.75,
            [says],
            rank=odd[0] if lone else None,
            do="log the same keys on all ranks, or reduce one packed tensor",
        )
    ]


def _overflow(facts: Facts, words: Words) -> list[Cause]:
    """Skipped steps of a loss scaler. Its way down from the first guess, and one skip a growth period, are normal."""
    low = words.said("loss_scale_minimum")
    rows = words.said("overflow_skip")
    if low:
        return [cause(C.LOSS_SCALE_COLLAPSE, 0.85, [line(low[0]), *map(line, rows[:1])], rank=low[0].rank)]
    one = [e for e in rows if e.rank == rows[0].rank]  # every rank says the same
    scales = [w.number(e, "scale") for e in one if w.number(e, "scale") > 0]
    if scales and scales[-1] <= 1 and len(one) >= OVERFLOWS_MIN:
        says = f"the loss scale fell to {scales[-1]:g} in {len(one)} skipped steps: no scale is small enough"
        proof = [evidence(says, value=scales[-1], unit="1", baseline=max(scales)), line(one[-1])]
        ranks = {e.rank for e in rows if e.rank >= 0}
        return [cause(C.LOSS_SCALE_COLLAPSE, 0.8, proof, rank=ranks.pop() if len(ranks) == 1 else None)]
    if len(one) < OVERFLOWS_MIN or _calibration(facts, one, scales) or _growth(one, scales):
        return []
    ranks = {e.rank for e in rows if e.rank >= 0}
    proof = [line(one[0]), evidence(f"{len(one)} skipped steps", value=float(len(one)), unit="steps")]
    return [cause(C.FP16_OVERFLOW, 0.7, proof, rank=ranks.pop() if len(ranks) == 1 else None)]


def _calibration(facts: Facts, rows: list[FactEvent], scales: list[float]) -> bool:
    """The scaler looks for its scale: from a high first guess straight down, and then training goes on."""
    straight = len(scales) == len(rows) and all(b <= a for a, b in pairwise(scales))
    settled = bool(scales) and scales[-1] >= CALIBRATED_SCALE_MIN and len(rows) <= CALIBRATION_STEPS_MAX
    known = known_values(row_values(facts, "loss"))[0]
    early = max((e.step for e in rows), default=-1)
    went_on = not len(known) or early < 0 or int(facts.steps[known[-1]]) > early
    at_start = early < 0 or not len(facts.steps) or early - int(facts.steps[0]) <= 2 * CALIBRATION_STEPS_MAX
    return straight and settled and went_on and at_start


def _growth(rows: list[FactEvent], scales: list[float]) -> bool:
    """One skip a growth period: the scale doubles, does not fit and comes back to where it was; never in a row."""
    steps = [e.step for e in rows]
    if min(steps) >= 0 and len(set(steps)) > 1:
        close = any(b - a <= 20 for a, b in zip(steps, steps[OVERFLOWS_MIN - 1 :], strict=False))
        return not close and len(rows) * SKIPS_APART <= max(steps) - min(steps) + SKIPS_APART
    return len(scales) == len(rows) and min(scales) >= CALIBRATED_SCALE_MIN and len(set(scales)) == 1


def _explodes(facts: Facts) -> list[Cause]:
    """The gradient norm climbs by decades and stays up until the end, and the loss goes with it."""
    norm, loss = row_values(facts, "grad_norm"), row_values(facts, "loss")
    at, x = known_values(norm)
    if len(x) < 40 or float(np.median(x[: len(x) // 2])) <= 0:
        return []
    usual = float(np.median(x[: len(x) // 2]))
    high = x > EXPLODED * usual
    first = int(np.flatnonzero(~high)[-1]) + 1 if (~high).any() else 0
    if len(x) - first < EXPLODED_STEPS_MIN:
        return []
    begun = first
    while begun > 0 and x[begun - 1] > 3 * usual:
        begun -= 1
    row = int(at[begun])
    before, after = known_values(loss[max(0, row - 20) : row])[1], known_values(loss[int(at[first]) :])[1]
    if len(before) and len(after) and float(np.median(after)) < 1.02 * float(np.median(before)):
        return []
    says = f"the gradient norm climbs from {usual:.3g} to {x[-1]:.3g} since step {int(facts.steps[row])} and stays up"
    proof = [evidence(says, value=float(x[-1]), unit="1", baseline=usual)]
    needs = ("gradient norms by layer and rank", "learning rate and batch fingerprints around that step")
    return [cause(C.GRADIENT_EXPLOSION, 0.75, proof, step=int(facts.steps[row]), needs=needs)]


def _vanishes(facts: Facts) -> list[Cause]:
    """The gradient norm falls by decades and stays there, while the learning rate does not."""
    norm = row_values(facts, "grad_norm")
    at, x = known_values(norm)
    if len(x) < 40 or not (x >= 0).all():
        return []
    head, tail = float(np.median(x[: len(x) // 4])), float(np.median(x[-max(5, len(x) // 10) :]))
    if not (head > 0 and tail < VANISHED * head):
        return []
    row = int(at[int(np.argmax(x < 10 * VANISHED * head))])
    says = f"the gradient norm fell from {head:.3g} to {tail:.3g} and stays there: almost nothing is learned"
    proof = [evidence(says, value=tail, unit="1", baseline=head)]
    needs = ("gradient norms by layer: where the chain breaks", "the share of zero activations")
    return [cause(C.GRADIENT_VANISHING, 0.75, proof, step=int(facts.steps[row]), needs=needs)]


def _diverges(facts: Facts) -> list[Cause]:
    """The loss turns and climbs above where it began, and stays there: instability, with nothing else to blame."""
    loss, norm = row_values(facts, "loss"), row_values(facts, "grad_norm")
    at, x = known_values(loss)
    if len(x) < 40:
        return []
    blocks = np.array([np.median(b) for b in np.array_split(x, 20)])
    noise = float(np.median(np.abs(np.diff(x))))
    low = int(np.flatnonzero(blocks <= blocks.min() + 2 * noise)[-1])  # the turn, not a dip before it
    climb = blocks[low:]
    steady = len(climb) >= 4 and float(np.mean(np.diff(climb) > 0)) >= 0.75
    if not steady or low == 0 or blocks[-1] < 1.2 * blocks[low] or blocks[-1] <= blocks[0]:
        return []
    row = int(at[int(low * len(x) / 20)])
    says = f"the loss climbs from {blocks[low]:.3f} to {blocks[-1]:.3f} since step {int(facts.steps[row])} and stays up"
    proof = [evidence(says, value=float(blocks[-1]), unit="1", baseline=float(blocks[low]))]
    before, after = known_values(norm[:row])[1], known_values(norm[row:])[1]
    if len(before) and len(after) and np.median(after) > 2 * np.median(before):
        says = f"the gradient norm rose from {np.median(before):.3g} to {np.median(after):.3g}"
        proof.append(evidence(says, value=float(np.median(after)), unit="1", baseline=float(np.median(before))))
    needs = ("learning rate, loss scale and batch fingerprints around that step",)
    return [cause(C.TRAINING_INSTABILITY, 0.7, proof, step=int(facts.steps[row]), needs=needs)]


def _spike(facts: Facts) -> list[Cause]:
    """A loss spike without a cause in sight: reported, and abstained from."""
    loss, norm = row_values(facts, "loss"), row_values(facts, "grad_norm")
    at, x = known_values(loss)
    if len(x) < 20:
        return []
    base = np.array([np.median(x[max(0, i - 25) : i]) if i >= 5 else np.nan for i in range(len(x))])
    noise = max(float(np.nanmedian(np.abs(x - base)[5:])) * 1.4826, 0.01 * float(np.median(np.abs(x))))
    over = (x - base) / noise
    peak = int(np.nanargmax(over)) if np.isfinite(over).any() else -1
    if peak < 10 or over[peak] < SPIKE_SIGMAS or x[peak] < 1.25 * base[peak]:
        return []
    tail = x[peak + 1 :]
    back = bool(len(tail) > 3 and np.median(tail[-10:]) < base[peak] + 2 * noise)
    lead = _leads(norm, int(at[peak]))
    says = evidence(
        f"the loss rose from {base[peak]:.3f} to {x[peak]:.3f} at step {int(facts.steps[at[peak]])}"
        + (" and came back by itself" if back else ""),
        value=float(x[peak]),
        unit="1",
        baseline=float(base[peak]),
    )
    proof = [
        says,
        *([evidence(f"the gradient norm rose before it, to {lead:.3g}", value=lead, unit="1")] if lead else []),
    ]
    return [
        cause(
            C.UNKNOWN,
            0.5,
            proof,
            step=int(facts.steps[at[peak]]),
            do="it recovered: no action; keep per-rank gradient norms for the next one" if back else "",
            needs=("gradient norms per rank before the reduction", "fingerprints of the batches around that step"),
        )
    ]


def _leads(norm: F64, row: int) -> float | None:
    near = known_values(norm[max(0, row - 8) : row + 1])[1]
    far = known_values(norm[max(0, row - 60) : max(0, row - 8)])[1]
    return float(near.max()) if len(near) and len(far) > 3 and near.max() > 5 * np.median(far) else None
