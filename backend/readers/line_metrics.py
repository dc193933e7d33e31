"""Trainer metrics in log lines: key=value, key: value, spoken (``loss 2.1 lr 3e-4``), Megatron's pipes, nanoGPT's
short keys, JSON and printed dicts. Where the numbers of a line stand is worked out once a form.

A name that says loss or norm of something else (``val loss``, ``router loss``) is not the training's and is left out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lanterne.backend.readers.gather import Gather
from lanterne.backend.readers.metric_names import ALIASES, SETTING_KEYS, SIZED, STEP_KEY_SET, key_of
from lanterne.backend.readers.metrics import RowMetrics, parse_object
from lanterne.backend.readers.source import Source
from lanterne.nouns import NO_RANK

LINE_CHARS_MAX = 4_000
_NUMBER = r"(?:[+-]?(?:\d+(?:,\d{3})*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?|[+-]?(?:nan|NaN|NAN|inf|Inf|INF|Infinity)\b)"
_UNIT = r"(?: ?(?P<unit>ms|us|s|sec|secs|seconds|[KMG]i?B)\b)?"
_PAIR = re.compile(rf"(?P<key>[A-Za-z_][\w /.()-]{{0,60}}?)['\"]?\s*[=:]\s*['\"]?(?P<value>{_NUMBER}){_UNIT}")
_SPOKEN = re.compile(
    rf"(?P<key>[A-Za-z_][\w/.-]*(?: [A-Za-z_][\w/.-]*){{0,2}})\s+(?P<value>{_NUMBER})(?![\w./:-]){_UNIT}"
)
_OTHERS = frozenset(
    ("val", "valid", "validation", "eval", "evaluation", "test", "dev", "aux", "auxiliary", "router", "target", "best")
)
"""Words before a name that make it another thing's."""
_MILLISECONDS = {"ms": 1.0, "us": 1e-3, "s": 1e3, "sec": 1e3, "secs": 1e3, "seconds": 1e3}
_BYTES = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}
_UNITS = {**dict.fromkeys(_MILLISECONDS, "_ms"), **dict.fromkeys(_BYTES, "_bytes")}
_STEP_WORD = re.compile(
    r"\b(?:step|iteration|iter|it|global_step|steps)\b['\"]?\s*[=:# ]?\s*\[?(\d{1,12})\b", re.IGNORECASE
)
_EPOCH_BATCH = re.compile(r"\bepoch\b[^\[\]]{0,20}\[\d+\]\s*\[\s*(\d{1,12})\s*/\s*\d+\]", re.IGNORECASE)
_SHORT = re.compile(r"^s:(\d+) (\w+):")
_TIMER = re.compile(
    rf"\b[Tt]ime:?\s+(?P<step>{_NUMBER})(?:\s*\([^)]*\))?\s+[Dd]ata(?:_time)?:?\s+(?P<data>{_NUMBER})(?![\w./-])"
)
"""``time: 2.31  data_time: 2.05`` and its like: seconds of a step, and those of them that went by waiting for data."""
_TWO_COLUMNS = re.compile(rf"^(\d+)[\t ,]+({_NUMBER})$")


@dataclass(frozen=True, slots=True)
class Layout:
    """``kind``: pairs, columns (step and loss), object, or short (nanoGPT's line of something else).

    ``pairs``: name, start and end of its number, and the factor to the series' own unit (0 = the name's).
    ``fixed``: no name holds a digit, so that the same places hold the same names on every line of the form.
    """

    kind: str
    pairs: tuple[tuple[str, int, int, float], ...] = ()
    step: tuple[int, int] | None = None
    fixed: bool = True


def layout_of(text: str) -> Layout | None:
    """Where the metrics of a line stand; None when it carries none."""
    text = text[:LINE_CHARS_MAX]
    short = _SHORT.match(text)
    if short and short[2] != "trl":
        return Layout("short", step=short.span(1))
    columns = _TWO_COLUMNS.match(text)
    if columns:
        return Layout("columns", (("loss", *columns.span(2), 0.0),), columns.span(1))
    if "{" in text and text.rstrip().endswith("}"):
        return Layout("object")
    found: dict[str, tuple[str, int, int, float]] = {}
    for form in (_SPOKEN, _PAIR):
        for match in form.finditer(text):
            name = _name(match["key"])
            if name is not None:
                name, factor = _in_unit(name, match["unit"] or "")
                found[name] = (name, *match.span("value"), factor)
    timer = _TIMER.search(text)
    if timer:
        found.pop("data", None)
        found |= {n: (n, *timer.span(g), 0.0) for n, g in (("step_time", "step"), ("data_time", "data"))}
    if not any(key_of(n) in ALIASES for n in found):
        return None
    step = _STEP_WORD.search(text) or _EPOCH_BATCH.search(text)
    return Layout(
        "pairs",
        tuple(found.values()),
        step.span(1) if step else short.span(1) if short else None,
        fixed=not any(c.isdigit() for n in found for c in n),
    )


def _name(key: str) -> str | None:
    """The longest tail of a captured key that is a known name (``12:00 step 5 - loss`` -> ``loss``)."""
    words = key.strip().split(" ")
    for i in range(len(words)):
        tail = " ".join(words[i:]).strip(" -")
        spelt = key_of(tail)
        if spelt in ALIASES or spelt in STEP_KEY_SET or spelt in SETTING_KEYS or spelt in SIZED:
            before = re.split(r"[\W_]", words[i - 1].lower()) if i else []
            return None if before and before[-1] in _OTHERS else tail
    return None


def _in_unit(name: str, unit: str) -> tuple[str, float]:
    """A name with a unit behind its number: the factor to the series' unit; ``memory: 61.2GiB`` needs one to count."""
    kind = _UNITS.get(unit)
    sized = SIZED.get(key_of(name))
    if sized is not None:
        return (sized, _BYTES[unit]) if kind == "_bytes" else (name, 0.0)
    alias = ALIASES.get(key_of(name))
    if alias is None or kind is None or not alias[0].endswith(kind):
        return name, 0.0
    return name, ({**_MILLISECONDS, **_BYTES}[unit]) / alias[1]


class LineMetrics:
    """Metrics inside log lines; feeds :class:`RowMetrics`."""

    def __init__(self, source: Source, gather: Gather) -> None:
        self.rows = RowMetrics(gather, NO_RANK, source.name)

    @property
    def found(self) -> int:
        return self.rows.found

    def close(self) -> None:
        """Leave which keys each rank logged."""
        self.rows.close()

    def line(self, text: str, rank: int, layout: Layout | None = None) -> int | None:
        """Take one line; the answer is its step where it has one. ``layout``: that of its form."""
        if layout is None or not layout.fixed:
            layout = layout_of(text)
        if layout is None:
            return None
        if layout.kind == "object":
            row = parse_object(text[text.find("{") :].rstrip())
            return self.rows.row(row, rank=rank) if row is not None else None
        step = int(text[layout.step[0] : layout.step[1]]) if layout.step else None
        if layout.kind == "short":
            return step
        found: dict[str, str | float] = {}
        for name, start, end, factor in layout.pairs:
            found[name] = float(text[start:end].replace(",", "")) * factor if factor else text[start:end]
        return self.rows.row(found, step=step, rank=rank)
