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
    every: bool = False  # a line may say it several times


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
            every = bool(row.get("every", False))
            found.append(
                Pattern(row["name"], row["event"], contains, regex, row["source"], row["example"], means, every)
            )
    return tuple(found)


_NOT_A_DIGIT = re.compile(r"\(\?P?<\w+>|\{[\d,]+\}|0-9|\\d")
_ZEROS = str.maketrans("123456789", "000000000")


@lru_cache(maxsize=1)
def _by_literal() -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Literal, with ``0`` for every digit, -> places of its patterns."""
    places: dict[str, set[int]] = {}
    for i, pattern in enumerate(patterns()):
        for literal in pattern.contains:
            places.setdefault(literal.translate(_ZEROS), set()).add(i)
    return tuple((literal, tuple(sorted(at))) for literal, at in places.items())


@lru_cache(maxsize=1)
def _tied_to_digits() -> frozenset[int]:
    """Places of patterns whose match depends on which digits stand in a line, not only on where."""
    rest = [_NOT_A_DIGIT.sub("", p.regex.pattern) for p in patterns()]
    return frozenset(i for i, r in enumerate(rest) if re.search("[1-9]|\\[\\^0", r))


def candidates(form: str) -> tuple[Pattern, ...]:
    """The patterns that lines of this form may match; ``form`` is a line with ``0`` for every digit."""
    lower = form.lower()
    places: set[int] = set()
    for literal, at in _by_literal():
        if literal in lower:
            places.update(at)
    known, tied = patterns(), _tied_to_digits()
    return tuple(known[i] for i in sorted(places) if i in tied or known[i].regex.search(form))


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


def captured(pattern: Pattern, text: str) -> dict[str, AttributeValue] | None:
    """What ``pattern`` finds first in a line, or None. ``name2`` is another spelling of ``name``."""
    found = pattern.regex.search(text)
    return None if found is None else _attributes(pattern, found)


def all_captured(pattern: Pattern, text: str) -> list[dict[str, AttributeValue]]:
    """What ``pattern`` finds in a line: once, or as often as it stands there when the pattern says ``every``."""
    if pattern.every:
        return [_attributes(pattern, found) for found in pattern.regex.finditer(text)]
    one = captured(pattern, text)
    return [] if one is None else [one]


def _attributes(pattern: Pattern, found: re.Match[str]) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = dict(pattern.means)
    for key, part in found.groupdict().items():
        if part is not None and part.strip():
            attributes.setdefault(key.rstrip("23"), value_of(_SPACES.sub(" ", part.strip())[:400]))
    return attributes


def match(line: str) -> Iterator[tuple[Pattern, dict[str, AttributeValue]]]:
    """Yield every pattern the line matches with its captured attributes."""
    text = line[:LINE_CHARS_MAX]
    for pattern in candidates(text.translate(_ZEROS)):
        attributes = captured(pattern, text)
        if attributes is not None:
            yield pattern, attributes
