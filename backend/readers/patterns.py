"""Text patterns as data: ``causal/patterns/field/*.yaml`` compiled once, matched behind a cheap literal check."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

import yaml

from lanterne.nouns import AttributeValue

LINE_CHARS_MAX = 4_000
_SPACES = re.compile(r"\s+")


@dataclass(frozen=True, slots=True)
class Pattern:
    """``contains``: one of these lower-case texts must stand in the line before ``regex`` is tried."""

    name: str
    event: str
    contains: tuple[str, ...]
    regex: re.Pattern[str]
    source: str
    example: str
    means: tuple[tuple[str, AttributeValue], ...] = ()  # cause, sure, do, who of a sentence with one meaning


@lru_cache(maxsize=1)
def patterns() -> tuple[Pattern, ...]:
    """All field patterns, in file order. Raises ValueError (with the pattern's name) on a wrong definition."""
    found: list[Pattern] = []
    folder = files("lanterne.causal.patterns") / "field"
    for file in sorted(folder.iterdir(), key=lambda f: f.name):
        if not file.name.endswith(".yaml"):
            continue
        for row in yaml.safe_load(file.read_text(encoding="utf-8")):
            try:
                regex = re.compile(row["regex"])
            except re.error as error:
                raise ValueError(f"{file.name}: {row.get('name')}: {error}") from error
            contains = tuple(str(c).lower() for c in row["contains"])
            means = tuple((k, row[k]) for k in ("cause", "sure", "do", "who") if k in row)
            found.append(Pattern(row["name"], row["event"], contains, regex, row["source"], row["example"], means))
    return tuple(found)


@lru_cache(maxsize=1)
def _any_literal() -> re.Pattern[str]:
    literals = sorted({c for p in patterns() for c in p.contains}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, literals)))


def value_of(text: str) -> AttributeValue:
    """A captured text as int or float where it is one."""
    try:
        return int(text) if len(text) < 19 else text
    except ValueError:
        pass
    try:
        return float(text) if len(text) < 40 and text[:1] in "+-.0123456789" else text
    except ValueError:
        return text


def match(line: str) -> Iterator[tuple[Pattern, dict[str, AttributeValue]]]:
    """Yield every pattern the line matches with its captured attributes. ``name2`` is another spelling of ``name``."""
    text = line[:LINE_CHARS_MAX]
    lower = text.lower()
    if not _any_literal().search(lower):
        return
    for pattern in patterns():
        if not any(c in lower for c in pattern.contains):
            continue
        found = pattern.regex.search(text)
        if found is None:
            continue
        attributes: dict[str, AttributeValue] = dict(pattern.means)
        for key, captured in found.groupdict().items():
            if captured is not None and captured.strip():
                short = _SPACES.sub(" ", captured.strip())[:400]
                attributes.setdefault(key.rstrip("23"), value_of(short))
        yield pattern, attributes
