"""Schedule and state at a boundary: what jumped at a resume, and what was normalised by the wrong count."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lanterne.causal import words as w
from lanterne.causal.facts import Facts
from lanterne.causal.words import Words, cause, evidence
from lanterne.nouns import Cause, Evidence
from lanterne.nouns import CauseCategory as C

F64 = NDArray[np.float64]
ZERO_LR_STEPS_MIN, ZERO_LR_SHARE = 30, 0.3  # rows, and their share of the run up to its end
LR_JUMP = 3.0  # a cosine or step schedule never multiplies the rate by this from one step to the next


def row_values(facts: Facts, name: str) -> F64:
    """One value a step: median over ranks, NaN where nobody spoke."""
    table = facts.get(name)
    if not table.size:
        return np.zeros(0)
    out = np.full(len(table), np.nan)
    some = np.isfinite(table).any(axis=1)
    out[some] = np.nanmedian(np.where(np.isfinite(table[some]), table[some], np.nan), axis=1)
    return out


def known_values(x: F64) -> tuple[NDArray[np.int64], F64]:
    at = np.flatnonzero(np.isfinite(x))
    return at.astype(np.int64), x[at]


def setting(words: Words, key: str, event: str) -> float | None:
    value = words.setting(key)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            pass
    rows = words.said(event)
    return w.number(rows[0], "value") if rows and "value" in rows[0].attributes else None


def _boundary(facts: Facts, words: Words) -> list[int]:
    """Rows at which the run was resumed: said by a log, or the step counter went on in a new file."""
    steps = [e.step for e in words.said("resumed") if e.step >= 0]
    rows = {int(np.searchsorted(facts.steps, s)) for s in steps if len(facts.steps) and s <= facts.steps[-1]}
    return sorted(r for r in rows if r < len(facts.steps))


def lr_jump(facts: Facts) -> list[Cause]:
    """The learning rate is multiplied from one step to the next after it had been steady, and the loss goes up."""
    loss, lr = row_values(facts, "loss"), row_values(facts, "lr")
    at, x = known_values(lr)
    if len(x) < 12:
        return []
    for i in np.flatnonzero((x[10:] > LR_JUMP * x[9:-1]) & (x[9:-1] > 0)) + 10:
        steady = float(x[i - 10 : i].max()) < 1.5 * float(x[i - 10 : i].min())
        row = int(at[i])
        rise = _jump(loss, slice(max(0, row - 20), row), slice(row, row + 20))
        if steady and rise is not None and rise[1] > 1.05 * rise[0]:
            says = f"the learning rate went from {x[i - 1]:.3g} to {x[i]:.3g} in one step"
            proof = [evidence(says, value=float(x[i]), unit="1", baseline=float(x[i - 1])), _rose(rise)]
            do = "set the learning rate back and resume from the last checkpoint before that step"
            return [cause(C.LR_MISCONFIGURED, 0.88, proof, step=int(facts.steps[row]), do=do)]
    return []


def lr_zero(facts: Facts) -> list[Cause]:
    """The learning rate is zero all along, or long before the end, and the loss stands still."""
    at, lr = known_values(row_values(facts, "lr"))
    loss = row_values(facts, "loss")
    if len(lr) < ZERO_LR_STEPS_MIN or lr[-1] != 0:
        return []
    begun = int(np.flatnonzero(lr != 0)[-1]) + 1 if (lr != 0).any() else 0
    rest = len(lr) - begun
    if rest < max(ZERO_LR_STEPS_MIN, ZERO_LR_SHARE * len(lr)):
        return []
    still = known_values(loss[int(at[begun]) :])[1]
    if len(still) < ZERO_LR_STEPS_MIN:
        return []
    fifth = len(still) // 5
    head, tail = float(np.median(still[:fifth])), float(np.median(still[-fifth:]))
    if head - tail > 0.03 * abs(head):
        return []
    step = int(facts.steps[int(at[begun])])
    when = f"in all {len(lr)} rows" if not begun else f"from step {step} on, in {rest} of {len(lr)} rows"
    proof = [evidence(f"the learning rate is 0 {when} and the loss stays at {tail:.4g}: nothing is learned", value=0.0,
                      unit="1", baseline=float(lr.max()) if begun else None)]  # fmt: skip
    do = "see the schedule's total and warm-up steps, the order of optimizer.step() and scheduler.step(), and whether "
    return [cause(C.LR_MISCONFIGURED, 0.8, proof, step=step, do=do + "it is stepped once a step, not once a process")]


def resume(facts: Facts, words: Words) -> list[Cause]:
    """What jumped at a resume: loss with the learning rate restarted, or the update size with it unchanged."""
    if len(facts.steps) < 8:
        return []
    loss, lr, update = (row_values(facts, n) for n in ("loss", "lr", "update_ratio"))
    marked = _boundary(facts, words)
    for row in marked or _lr_restarts(lr):
        before = slice(max(0, row - 20), row)
        lost = _jump(lr, before, slice(row, row + 3))
        rise, pushed = _jump(loss, before, slice(row, row + 5)), _jump(update, before, slice(row, row + 3))
        same = lost is None or abs(lost[1] - lost[0]) < 0.25 * abs(lost[0])
        needs: tuple[str, ...] = ()
        if lost is not None and lost[1] < 0.5 * lost[0] and rise is not None and rise[1] > 1.03 * rise[0]:
            sure, do = 0.88, "diff scheduler and optimizer state before and after the resume"
            says = f"the learning rate fell from {lost[0]:.3g} to {lost[1]:.3g} at the resume: its schedule restarted"
            proof = [evidence(says, value=lost[1], unit="1", baseline=lost[0]), _rose(rise)]
        elif marked and pushed is not None and pushed[1] > 1.3 * pushed[0] and same:
            sure, do = 0.85, "compare the optimizer's step counter and moments before and after the resume"
            proof = [_pushed(pushed, known_values(update[row : row + 20])[1])]
        elif marked and rise is not None and rise[1] > 1.05 * rise[0] and rise[1] - rise[0] > 4 * _noise(loss[before]):
            sure, do = 0.7, "diff the state at the boundary: moments, step counter, scheduler, loader position"
            proof, needs = [_rose(rise)], ("the optimizer state (moments, step counter) before and after the resume",)
        else:
            continue
        return [cause(C.RESUME_STATE_LOST, sure, proof, step=int(facts.steps[row]), do=do, needs=needs)]
    return []


def _rose(rise: tuple[float, float]) -> Evidence:
    says = f"the loss jumped from {rise[0]:.4g} to {rise[1]:.4g} right at the resume"
    return evidence(says, value=rise[1], unit="1", baseline=rise[0])


def _pushed(pushed: tuple[float, float], after: F64) -> Evidence:
    says = (
        f"updates are {pushed[1] / pushed[0]:.2f} times too large after the resume and go to "
        f"{after[-1] / pushed[0]:.2f} times, at an unchanged learning rate: the optimizer's step counter restarted"
    )
    return evidence(says, value=pushed[1], unit="1", baseline=pushed[0])


def _lr_restarts(lr: F64) -> list[int]:
    """Rows where the learning rate falls to less than 0.4 of itself at once and then warms up again."""
    at, x = known_values(lr)
    rows = range(4, len(x) - 3)
    fell = [i for i in rows if 0 <= x[i] < 0.4 * x[i - 1] and x[i + 1] >= x[i] and x[i + 3] > 1.3 * x[i]]
    return [int(at[i]) for i in fell[:4]]


def _jump(x: F64, before: slice, after: slice) -> tuple[float, float] | None:
    a, b = known_values(x[before])[1], known_values(x[after])[1]
    return (float(np.median(a[-10:])), float(np.median(b))) if len(a) >= 3 and len(b) else None


def _noise(x: F64) -> float:
    known = known_values(x)[1]
    return float(np.median(np.abs(np.diff(known)))) if len(known) > 2 else 0.0


def accumulation(facts: Facts, words: Words) -> list[Cause]:
    """Loss and gradient norm too large by the number of accumulation steps."""
    steps = setting(words, "accumulation", "accumulation_setting") or 0.0
    loss, norm = row_values(facts, "loss"), row_values(facts, "grad_norm")
    series = row_values(facts, "accumulation")
    at, acc = known_values(series)
    change = [i for i in range(1, len(acc)) if acc[i] != acc[i - 1]]
    rows = [int(at[i]) for i in change][:3]
    if not rows and steps > 1:
        rows = _level_shifts(loss)
    for row in rows:
        factor = series[row] / acc[max(0, int(np.searchsorted(at, row)) - 1)] if change else steps
        a, b = (
            _jump(loss, slice(max(0, row - 20), row), slice(row, row + 10)),
            _jump(norm, slice(max(0, row - 20), row), slice(row, row + 10)),
        )
        if a is None or factor <= 1.2 or a[0] <= 0 or not 0.75 < a[1] / a[0] / factor < 1.3:
            continue
        proof = [
            evidence(
                f"the loss is {a[1] / a[0]:.2f} times what it was, with {factor:g} times the accumulation steps",
                value=a[1],
                unit="1",
                baseline=a[0],
            )
        ]
        if b is not None and b[0] > 0:
            proof.append(
                evidence(
                    f"the gradient norm is {b[1] / b[0]:.2f} times what it was", value=b[1], unit="1", baseline=b[0]
                )
            )
        return [
            cause(
                C.ACCUMULATION_ERROR,
                0.88,
                proof,
                step=int(facts.steps[row]),
                do="normalise by the tokens of all micro-batches together, once",
            )
        ]
    return _scaled_start(facts, loss, norm, steps or (float(acc[0]) if len(acc) else 0.0))


def _scaled_start(facts: Facts, loss: F64, norm: F64, steps: float) -> list[Cause]:
    """No change inside the run: the first loss itself is about ln(vocabulary) times the accumulation steps."""
    first = known_values(loss)[1][:3]
    del norm
    if steps < 4 or not len(first) or not 9.0 < float(np.median(first)) / steps < 13.0:
        return []
    ratio = float(np.median(first))
    return [
        cause(
            C.ACCUMULATION_ERROR,
            0.75,
            [
                evidence(
                    f"the first loss is {ratio:.1f}: {steps:g} times the {ratio / steps:.1f} of an untrained "
                    f"model (the log of its vocabulary), and there are {steps:g} accumulation steps",
                    value=ratio,
                    unit="1",
                    baseline=ratio / steps,
                )
            ],
            step=int(facts.steps[0]),
            needs=("one run with a single accumulation step",),
        )
    ]


def _level_shifts(loss: F64) -> list[int]:
    at, x = known_values(loss)
    return [
        int(at[i])
        for i in range(5, len(x) - 5)
        if np.median(x[i : i + 5]) > 1.8 * np.median(x[i - 5 : i]) > 0 and x[i] > 1.6 * x[i - 1]
    ][:3]
