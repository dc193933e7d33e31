"""Values as a person reads them: units, ages, names. Pure; the current time is passed in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from math import isfinite
from typing import Any

from lanterne.nouns import group_ranks

NONE = "–"


ACRONYMS = {"lr": "LR", "ettr": "ETTR", "gc": "GC", "gil": "GIL", "fp16": "FP16", "h2d": "H2D"}


def plain(name: str) -> str:
    """A noun of the code as words: ``bad_batch`` -> ``bad batch``."""
    return " ".join(ACRONYMS.get(word, word) for word in name.split("_"))


def gpu_hours(value: Any) -> str:
    """GPU-hours; below a tenth in GPU-seconds, which read better."""
    if not isinstance(value, int | float) or not isfinite(value):
        return NONE
    return f"{number(float(value))} GPU-h" if abs(value) >= 0.1 or value == 0 else f"{number(value * 3600)} GPU-s"


def counted(n: int, noun: str) -> str:
    """``1 incident``, ``2 incidents``."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def safe(text: Any, most: int = 120) -> str:
    """Text that a trainer sent, fit for a Plotly label: Plotly renders ``<b>``, ``<br>`` and ``<a>`` in labels."""
    clean = "".join(c if c.isprintable() else " " for c in str(text))
    clean = clean if len(clean) <= most else clean[: most - 1] + "…"
    return clean.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def number(value: Any, digits: int = 3) -> str:
    """A number with ``digits`` significant figures, thousands grouped; a dash where there is none."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not isfinite(value):
        return NONE
    if isinstance(value, int) or (abs(value) >= 10 ** (digits - 1) and abs(value) < 1e15):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def milliseconds(value: Any) -> str:
    """Milliseconds in the unit that reads best: ``41 µs``, ``9.1 ms``, ``812 ms``, ``1.41 s``, ``3 min 20 s``."""
    if not isinstance(value, int | float) or not isfinite(value):
        return NONE
    size = abs(value)
    if size >= 120_000:
        return seconds(value / 1e3)
    if size >= 1_000:
        return f"{value / 1e3:.3g} s"
    if size >= 1 or size == 0:
        return f"{value:.3g} ms"
    return f"{value * 1e3:.3g} µs"


def seconds(value: Any) -> str:
    """Seconds as ``8.3 s``, ``3 min 20 s``, ``5 h 04 min``, ``2 d 3 h``."""
    if not isinstance(value, int | float) or not isfinite(value):
        return NONE
    size = abs(value)
    if size < 60:
        return f"{value:.3g} s"
    whole = round(size)
    sign = "-" if value < 0 else ""
    if whole < 3_600:
        great, small = f"{whole // 60} min", f"{whole % 60:02d} s"
    elif whole < 86_400:
        great, small = f"{whole // 3_600} h", f"{whole % 3_600 // 60:02d} min"
    else:
        great, small = f"{whole // 86_400} d", f"{whole % 86_400 // 3_600} h"
    return sign + (great if small.startswith(("00 ", "0 ")) else f"{great} {small}")


def percent(value: Any, digits: int = 1) -> str:
    """A share of one as per cent."""
    if not isinstance(value, int | float) or not isfinite(value):
        return NONE
    return f"{value * 100:.{digits}f} %"


def with_unit(value: Any, unit: str) -> str:
    """A value with its UCUM unit, as evidence prints it."""
    if unit == "ms":
        return milliseconds(value)
    if unit == "s":
        return seconds(value)
    if unit == "ns" and isinstance(value, int | float):
        return milliseconds(value / 1e6)
    if unit == "us" and isinstance(value, int | float):
        return milliseconds(value / 1e3)
    if unit in {"By", "bytes"}:
        return size(value)
    if unit == "%":
        return f"{number(value)} %"
    text = number(value)
    return text if text == NONE or unit in {"", "1"} else f"{text} {unit.strip('{}')}"


def size(value: Any) -> str:
    """Bytes in binary units."""
    if not isinstance(value, int | float) or not isfinite(value):
        return NONE
    amount = float(value)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(amount) < 1024 or unit == "TiB":
            return f"{amount:.3g} {unit}"
        amount /= 1024
    return NONE


def moment(text: Any) -> datetime | None:
    """An RFC 3339 time, or None."""
    if not isinstance(text, str) or not text:
        return None
    try:
        found = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def clock(text: Any) -> str:
    """The time of day in UTC, to the millisecond where there is one."""
    at = moment(text)
    if at is None:
        return NONE
    at = at.astimezone(UTC)
    return at.strftime("%H:%M:%S") + (f".{at.microsecond // 1000:03d}" if at.microsecond else "")


def day_and_clock(text: Any) -> str:
    """Date and time in UTC."""
    at = moment(text)
    return NONE if at is None else at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def age(text: Any, now: datetime) -> str:
    """How long ago: ``4 s ago``."""
    at = moment(text)
    if at is None:
        return NONE
    gone = (now - at).total_seconds()
    return "just now" if gone < 1 else f"{seconds(round(gone))} ago"


def between(first: Any, second: Any) -> str:
    """The time from one RFC 3339 moment to another, or a dash."""
    a, b = moment(first), moment(second)
    return NONE if a is None or b is None else seconds((b - a).total_seconds())


def subject(found: Mapping[str, Any] | None) -> str:
    """The subject of a cause as words: ``rank 3 on node-2``."""
    found = found or {}
    words: list[str] = []
    if found.get("rank") is not None:
        words.append(f"rank {found['rank']}")
    if found.get("device"):
        words.append(f"device {found['device']}")
    if found.get("host"):
        words.append(("on " if words else "host ") + str(found["host"]))
    if found.get("group"):
        words.append(f"group {found['group']}")
    if found.get("parameter"):
        words.append(f"parameter {found['parameter']}")
    if found.get("batch"):
        words.append(f"batch {found['batch']}")
    return " ".join(words) or "the whole job"


def members(name: str) -> tuple[int, ...]:
    """The ranks of a group in order; none where the name, which a trainer sent, is no rank set of a sane size."""
    try:
        return tuple(sorted(set(group_ranks(name))))
    except ValueError:
        return ()


def group(name: Any) -> str:
    """A process group's rank set, short: ``32 ranks, 0 to 62 by 2``; a short or unknown name stays as it is."""
    text = str(name or NONE)
    ranks = members(text) if len(text) > 16 else ()
    if len(ranks) < 2:
        return text
    gaps = {b - a for a, b in pairwise(ranks)}
    by = f" by {gap}" if len(gaps) == 1 and (gap := next(iter(gaps))) > 1 else ""
    return f"{len(ranks):,} ranks, {ranks[0]} to {ranks[-1]}{by}"


def headline(incident: Mapping[str, Any]) -> str:
    """The first cause in one sentence: subject, cause, since when."""
    causes: Sequence[Mapping[str, Any]] = incident.get("causes") or ()
    if not causes:
        return f"{plain(str(incident.get('kind', 'incident'))).capitalize()}: not diagnosed yet"
    first = causes[0]
    since = first.get("since_step")
    tail = f" since step {since:,}" if isinstance(since, int) else ""
    if first.get("category") == "unknown":
        needs = "; ".join(str(n) for n in first.get("needs") or ())
        return f"{plain(str(incident.get('kind', '')))}{tail}: cannot tell the cause" + (f", {needs}" if needs else "")
    who = subject(first.get("subject"))
    return f"{who[:1].upper()}{who[1:]}: {plain(str(first.get('category', '')))}{tail}"
