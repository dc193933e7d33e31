"""What a stage of the engine hands back: a cause, the path that explains it, and its victims."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lanterne.causal.remedies import remedy_for
from lanterne.nouns import Cause, CauseCategory, Cost, Evidence, Subject, Symptom

NOBODY, NO_COST = Subject(), Cost()
MS_FLOOR = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One step of a path, from effect to its own cause.

    ``metric`` names the series; ``weight`` in [0, 1] is how much of the effect below it explains;
    ``kind`` is structure, resource, learned or pattern; ``effect_ms`` the explained time, where known.
    """

    metric: str
    label: str
    weight: float
    says: str
    kind: str = "structure"
    statistic: float | None = None
    p_value: float | None = None
    samples: int = 0
    lag: int = 0
    refused: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A candidate. ``path`` runs from the symptom upstream to the cause; ``family`` is the kind of diagnosis.

    ``stops`` says that the job cannot go on with it; ``covers`` are ranks whose own slowness it explains.
    """

    cause: Cause
    family: str
    symptom: str = "step time"
    path: Sequence[Link] = ()
    symptoms: Sequence[Symptom] = ()
    stops: bool = False
    refused: Sequence[Link] = field(default_factory=tuple)
    covers: frozenset[int] = frozenset()

    @property
    def key(self) -> tuple[CauseCategory, int | None, str | None]:
        """Category and rank; the host where no rank is named."""
        subject = self.cause.subject
        return self.cause.category, subject.rank, subject.host if subject.rank is None else None

    def with_confidence(self, confidence: float) -> Finding:
        return replace(self, cause=replace(self.cause, confidence=confidence))


def make(
    category: CauseCategory,
    family: str,
    *,
    confidence: float,
    evidence: Sequence[Evidence],
    subject: Subject = NOBODY,
    since_step: int | None = None,
    cost: Cost = NO_COST,
    symptom: str = "step time",
    path: Sequence[Link] = (),
    symptoms: Sequence[Symptom] = (),
    stops: bool = False,
    refused: Sequence[Link] = (),
    needs: Sequence[str] = (),
    covers: frozenset[int] = frozenset(),
) -> Finding:
    """A finding with the remedy of its category filled in; confidence is clipped to [0, 0.99]."""
    cause = Cause(
        category=category,
        subject=subject,
        since_step=since_step,
        confidence=min(max(confidence, 0.0), 0.99),
        cost=cost,
        evidence=tuple(evidence),
        remedy=remedy_for(category, subject),
        needs=tuple(needs),
    )
    return Finding(
        cause=cause,
        family=family,
        symptom=symptom,
        path=tuple(path),
        symptoms=tuple(symptoms),
        stops=stops,
        refused=tuple(refused),
        covers=covers,
    )


def number(value: float, unit: str = "") -> str:
    """A number for a sentence: three significant digits, bytes in binary units, no fractions of a microsecond.

    >>> number(1234.5, "ms"), number(3 << 30, "bytes"), number(-5.8e-5, "ms")
    ('1.23 s', '3 GiB', '0 ms')
    """
    if unit == "bytes":
        for size, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
            if abs(value) >= size:
                return f"{value / size:.3g} {name}"
        return f"{value:.0f} bytes"
    if unit == "ms" and abs(value) >= 1000:
        return f"{value / 1000:.3g} s"
    if unit == "ms" and abs(value) < MS_FLOOR:
        return "0 ms"
    text = f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{text} {unit}".strip()
