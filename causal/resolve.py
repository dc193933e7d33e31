"""Which findings are causes and which are only their effects: known orders between categories."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lanterne.causal.finding import Finding
from lanterne.causal.remedies import place
from lanterne.nouns import CauseCategory as C
from lanterne.nouns import Symptom

Test = Callable[[Finding, Finding], bool]

FATAL = frozenset(
    {
        C.OUT_OF_MEMORY,
        C.FRAGMENTATION,
        C.COLLECTIVE_MISMATCH,
        C.COLLECTIVE_DIVERGENCE,
        C.DEVICE_FAULT,
        C.SHARED_MEMORY_EXHAUSTED,
        C.NETWORK_FAILURE,
        C.RANK_CRASHED,
    }
)
LATE = frozenset({C.SLOW_COMPUTE, C.GC_PAUSE, C.HOST_CONTENTION, C.DATA_STALL, C.EXCLUSIVE_WORK, C.UNEVEN_INPUTS})
RUINED = frozenset(
    {
        C.NONFINITE_VALUES,
        C.BAD_BATCH,
        C.GRADIENT_EXPLOSION,
        C.TRAINING_INSTABILITY,
        C.FP16_OVERFLOW,
        C.LOSS_SCALE_COLLAPSE,
    }
)
SLACK_STEPS = 3
SOON_STEPS = 50


def _after(cause: Finding, effect: Finding) -> bool:
    first, second = cause.cause.since_step, effect.cause.since_step
    return first is None or second is None or second >= first - SLACK_STEPS


def _strictly_after(cause: Finding, effect: Finding) -> bool:
    first, second = cause.cause.since_step, effect.cause.since_step
    return first is not None and second is not None and second > first


def _soon(cause: Finding, effect: Finding) -> bool:
    """Within the steps in which what all ranks suffer may show on one of them first."""
    first, second = cause.cause.since_step, effect.cause.since_step
    return first is None or second is None or second <= first + SOON_STEPS


def _same_rank(cause: Finding, effect: Finding) -> bool:
    return cause.cause.subject.rank is None or cause.cause.subject.rank == effect.cause.subject.rank


def _saving(finding: Finding) -> float:
    return finding.cause.cost.saving_ms_per_step or 0.0


def _any(cause: Finding, effect: Finding) -> bool:
    del cause, effect
    return True


@dataclass(frozen=True, slots=True)
class Rule:
    """``effects`` on the side of a sure ``causes`` finding are its effects when ``when`` holds."""

    causes: frozenset[C]
    effects: frozenset[C]
    when: Test
    says: str


RULES: tuple[Rule, ...] = (
    Rule(FATAL - {C.RANK_CRASHED}, frozenset({C.RANK_CRASHED}), _any, "the process ended because of it"),
    Rule(FATAL, frozenset({C.RANK_HUNG, C.RANK_MISSING}), _any, "the others wait for a rank that is gone"),
    Rule(
        FATAL | {C.RANK_HUNG, C.NONFINITE_VALUES, C.EXTERNAL_TERMINATION},
        frozenset({C.EXTERNAL_TERMINATION, C.RANK_MISSING}),
        _any,
        "the launcher ended the job after it",
    ),
    Rule(
        frozenset({C.COLLECTIVE_MISMATCH}),
        frozenset({C.COLLECTIVE_DIVERGENCE}),
        _any,
        "the streams differ from there on",
    ),
    Rule(frozenset({C.RANK_HUNG}), frozenset({C.RANK_CRASHED}), _after, "it was ended after the stall"),
    Rule(
        frozenset({C.MEMORY_LEAK}),
        frozenset({C.OUT_OF_MEMORY, C.FRAGMENTATION, C.RANK_CRASHED, *LATE}),
        lambda a, b: _same_rank(a, b) and _after(a, b),
        "memory that grows slows allocation, then it fails",
    ),
    Rule(
        frozenset({C.LR_MISCONFIGURED}),
        RUINED,
        lambda a, b: _after(a, b) and (b.cause.subject.rank is None or _soon(a, b)),
        "too large updates ruin gradient and loss",
    ),
    Rule(
        frozenset({C.BAD_BATCH}),
        RUINED - {C.BAD_BATCH},
        lambda a, b: _strictly_after(a, b),
        "the bad step spreads to all ranks",
    ),
    Rule(
        frozenset({C.NONFINITE_VALUES, C.FP16_OVERFLOW}),
        RUINED - {C.NONFINITE_VALUES, C.FP16_OVERFLOW},
        lambda a, b: _after(a, b) and (b.cause.category is not C.BAD_BATCH or _same_rank(a, b)),
        "non-finite values reach every rank through the reduction",
    ),
    Rule(frozenset({C.FP16_OVERFLOW}), frozenset({C.NONFINITE_VALUES}), _any, "the scaler skips steps that overflow"),
    Rule(
        frozenset({C.CHECKPOINT_STALL, C.STORAGE_SLOW}),
        frozenset({C.RANK_HUNG, *LATE}),
        lambda a, b: _same_rank(a, b) and a.cause.since_step == b.cause.since_step is not None,
        "the others wait for the checkpoint",
    ),
    Rule(
        frozenset({C.SLOW_LINK}),
        frozenset({C.SLOW_COMPUTE}),
        lambda a, b: _after(a, b) and _saving(b) < 0.5 * _saving(a),
        "who leaves a slow transfer last enters the next one late",
    ),
    Rule(
        frozenset({C.HOST_CONTENTION}),
        frozenset({C.SLOW_COMPUTE}),
        lambda a, b: a.cause.subject.rank is None and _after(a, b) and _saving(b) < 0.7 * _saving(a),
        "a rank without a core is late",
    ),
    Rule(
        frozenset({C.PARTITION_IMBALANCE}),
        LATE,
        lambda a, b: _after(a, b) and b.cause.subject.rank in a.covers,
        "its ranks are in the heavy stage",
    ),
)


def resolve(findings: Sequence[Finding]) -> tuple[list[Finding], list[Finding]]:
    """(causes, effects). An effect becomes a symptom of the cause that explains it; nothing is lost."""
    best: dict[object, Finding] = {}
    for f in sorted(findings, key=lambda f: -f.cause.confidence):
        best.setdefault(f.key, f)
    kept = _specific(list(best.values()))
    causes: list[Finding] = []
    effects: list[Finding] = []
    extra: dict[int, list[Symptom]] = {}
    for f in kept:
        owner = next((g for g in kept if g is not f and _explains(g, f)), None)
        if owner is None:
            causes.append(f)
            continue
        effects.append(f)
        rule = next(r for r in RULES if _matches(r, owner, f))
        says = f"{f.cause.category.value} of {place(f.cause.subject)}: {rule.says}"
        extra.setdefault(id(owner), []).append(Symptom(kind=f.cause.category.value, says=says, subject=f.cause.subject))
    return [replace(f, symptoms=(*f.symptoms, *extra.get(id(f), ()))) for f in causes], effects


def _specific(findings: list[Finding]) -> list[Finding]:
    """Where one finding of a category names a rank or host, one that names nobody says less and is left out."""
    placed = {f.cause.category for f in findings if (f.cause.subject.rank, f.cause.subject.host) != (None, None)}
    return [
        f
        for f in findings
        if (f.cause.subject.rank, f.cause.subject.host) != (None, None) or f.cause.category not in placed
    ]


def _matches(rule: Rule, cause: Finding, effect: Finding) -> bool:
    return (
        cause.cause.category in rule.causes
        and effect.cause.category in rule.effects
        and cause.cause.category is not effect.cause.category
        and rule.when(cause, effect)
    )


def _explains(cause: Finding, effect: Finding) -> bool:
    sure = cause.cause.confidence >= min(0.5, effect.cause.confidence)
    return sure and any(_matches(rule, cause, effect) for rule in RULES)
