"""Sentences with one fixed meaning (``patterns/field/known.yaml``): the exception itself names the cause."""

from __future__ import annotations

from lanterne.causal import words as w
from lanterne.causal.facts import FactEvent
from lanterne.causal.words import Words, cause, evidence, line
from lanterne.nouns import Cause, Evidence
from lanterne.nouns import CauseCategory as C

SHORT_MIN = 25  # characters of a sentence that says enough by itself


def candidates(words: Words) -> list[Cause]:
    """One cause a category. A rank is named when the sentence names it, or when exactly one rank says it."""
    rows: dict[str, list[FactEvent]] = {}
    for e in words.said("known_error"):
        rows.setdefault(str(e.attributes["cause"]), []).append(e)
    return [_cause(words, C(category), said) for category, said in rows.items() if _counts(words, category)]


def _counts(words: Words, category: str) -> bool:
    """The end of a loader's data is an error only where somebody waited for that rank or it died of it."""
    return category != C.UNEVEN_INPUTS or bool(
        words.said("collective_timeout", "store_timeout", "rank_failed", "child_failed", "exception", "known_error")
    )


def _cause(words: Words, category: C, said: list[FactEvent]) -> Cause:
    first = said[0]
    ranks = {e.rank for e in said if e.rank >= 0}
    nobody = first.attributes.get("who") == "nobody"
    if not ranks and not nobody:
        ranks = {e.rank for e in words.said("rank_failed") if e.attributes.get("first") and e.rank >= 0}
    rank = ranks.pop() if len(ranks) == 1 and not nobody else None
    victims = len(words.ranks("collective_timeout", "store_timeout"))
    proof = [_short(e) for e in said[:3]]
    if victims:
        proof.append(
            evidence(f"{victims} ranks timed out after it: they are victims", value=float(victims), unit="ranks")
        )
    soft = [e for e in words.said("xid") if category is C.RANK_CRASHED]
    proof += [evidence(f"the kernel saw it too: {w.quote(e)}", ref=e.ref) for e in soft[:1]]
    return cause(
        category,
        w.number(first, "sure", 0.8),
        proof,
        rank=rank,
        host=None if nobody else first.host or None,
        parameter=str(first.attributes["parameter"]) if "parameter" in first.attributes else None,
        step=first.step,
        do=str(first.attributes.get("do", "")),
    )


def _short(e: FactEvent) -> Evidence:
    """The sentence without what stands before it: time, source file and process do not belong into a verdict."""
    says = " ".join(str(e.attributes.get("message", "")).split())
    return evidence(f"log: {says[:200]}", ref=e.ref) if len(says) > SHORT_MIN else line(e)
