"""The pattern library: known ways in which training goes wrong, as data (``*.yaml``), read once at import.

A pattern is a template graph: metrics, root first, and edges with a prior (how often the cause has that effect),
the units in which the effect can be computed, and the source of the knowledge. Nothing is read afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

import yaml

from lanterne.nouns import CauseCategory

UNITS = ("milliseconds", "inverse", "proportional", "share", "learned", "event")
SCOPES = ("rank", "host", "world", "service")


@dataclass(frozen=True, slots=True)
class Metric:
    """A node: ``direction`` +1 up, -1 down is abnormal; ``floor`` is the smallest change worth a thought."""

    name: str
    label: str
    unit: str
    direction: int
    floor: float
    at_least: float | None


@dataclass(frozen=True, slots=True)
class PatternEdge:
    cause: str
    effect: str
    prior: float
    units: str


@dataclass(frozen=True, slots=True)
class Pattern:
    name: str
    category: CauseCategory
    scope: str
    metrics: tuple[Metric, ...]
    edges: tuple[PatternEdge, ...]
    says: str
    source: str
    match: tuple[str, ...]

    @property
    def root(self) -> str:
        return self.metrics[0].name


def _metric(data: Mapping[str, Any]) -> Metric:
    return Metric(
        name=str(data["metric"]),
        label=str(data.get("label", data["metric"])),
        unit=str(data.get("unit", "")),
        direction=-1 if data.get("direction") == "down" else 1,
        floor=float(data.get("floor", 0.0)),
        at_least=None if data.get("at_least") is None else float(data["at_least"]),
    )


def parse(text: str, where: str) -> list[Pattern]:
    """Patterns of one YAML text. Raises ValueError naming file, pattern and field when something is wrong."""
    out = []
    for data in yaml.safe_load(text)["patterns"]:
        name = data.get("name", "?")
        try:
            pattern = Pattern(
                name=str(data["name"]),
                category=CauseCategory(data["category"]),
                scope=str(data["scope"]),
                metrics=tuple(_metric(m) for m in data["metrics"]),
                edges=tuple(
                    PatternEdge(str(e["cause"]), str(e["effect"]), float(e["prior"]), str(e["units"]))
                    for e in data["edges"]
                ),
                says=str(data["says"]),
                source=str(data["source"]),
                match=tuple(str(m) for m in data.get("match", ())),
            )
        except (KeyError, ValueError, TypeError) as error:
            raise ValueError(f"{where}: pattern {name}: {error!r}") from error
        _check(pattern, where)
        out.append(pattern)
    return out


def _check(pattern: Pattern, where: str) -> None:
    known = {m.name for m in pattern.metrics}
    if pattern.scope not in SCOPES:
        raise ValueError(f"{where}: pattern {pattern.name}: scope {pattern.scope!r} is none of {', '.join(SCOPES)}")
    for edge in pattern.edges:
        if not {edge.cause, edge.effect} <= known:
            raise ValueError(
                f"{where}: pattern {pattern.name}: edge {edge.cause} -> {edge.effect} names no metric of it"
            )
        if edge.units not in UNITS:
            raise ValueError(f"{where}: pattern {pattern.name}: units {edge.units!r} are none of {', '.join(UNITS)}")
        if not 0 < edge.prior <= 1:
            raise ValueError(f"{where}: pattern {pattern.name}: prior {edge.prior} is outside (0, 1]")


def _load() -> tuple[Pattern, ...]:
    found: list[Pattern] = []
    for entry in sorted(resources.files(__name__).iterdir(), key=lambda e: e.name):
        if entry.name.endswith(".yaml"):
            found += parse(entry.read_text(encoding="utf-8"), entry.name)
    names = [p.name for p in found]
    if len(set(names)) != len(names):
        raise ValueError(f"patterns: a name is used twice among {names}")
    return tuple(found)


PATTERNS: tuple[Pattern, ...] = _load()
BY_NAME: Mapping[str, Pattern] = {p.name: p for p in PATTERNS}
UPSTREAM: tuple[Pattern, ...] = tuple(p for p in PATTERNS if p.scope in {"rank", "host"})
SERVICE: tuple[Pattern, ...] = tuple(p for p in PATTERNS if p.scope == "service")


def prior(name: str) -> float:
    """Prior of the whole chain of pattern ``name``: the product of its edges' priors."""
    out = 1.0
    for edge in BY_NAME[name].edges:
        out *= edge.prior
    return out
