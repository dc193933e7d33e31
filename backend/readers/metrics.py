"""Trainer metrics in text: key=value, key: value, Megatron's pipes, CSV, JSON lines, nanoGPT's short keys.

One table of aliases maps other people's names to the closed vocabulary of :mod:`lanterne.causal.facts`.
A name that says loss or norm of something else (``val_loss``, ``lm_loss_aux``) keeps its own name and is not judged.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from lanterne.backend.readers.gather import Gather
from lanterne.backend.readers.metric_names import (
    ALIASES,
    HOST_KEYS,
    RANK_KEYS,
    SETTING_KEYS,
    STEP_KEY_SET,
    STEP_KEYS,
    key_of,
)
from lanterne.backend.readers.source import Source
from lanterne.nouns import NO_RANK

_NUMBER = r"[+-]?(?:\d+(?:,\d{3})*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?|[+-]?(?:nan|NaN|NAN|inf|Inf|INF|Infinity)\b"
_PAIR = re.compile(rf"(?P<key>[A-Za-z_][\w /.()-]{{0,60}}?)['\"]?\s*[=:]\s*['\"]?(?P<value>{_NUMBER})(?P<unit>ms|s|%)?")
_STEP_WORD = re.compile(
    r"\b(?:step|iteration|iter|it|global_step|steps)\b['\"]?\s*[=:# ]?\s*\[?(\d{1,12})\b", re.IGNORECASE
)
_NANOGPT = re.compile(r"^s:(\d+) (\w+):")
_WORTH = re.compile(
    r"loss|norm|\blr\b|learning.rate|\btrl:|_ms\b|step.time|iter.*time|checksum|scale|valid_|tokens", re.IGNORECASE
)
_TWO_COLUMNS = re.compile(rf"^(\d+)[\t ,]+({_NUMBER})$")


def worth(text: str) -> bool:
    """A cheap look: may this line carry metrics?"""
    return text[:1].isdigit() or _WORTH.search(text[:4_000]) is not None


def number(value: Any) -> float | None:
    """A metric value as float; text like ``nan`` counts, other text does not."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, str):
        try:
            return float(value.replace(",", ""))
        except ValueError:
            return None
    return None


def flatten(row: Mapping[str, Any], depth: int = 0) -> dict[str, Any]:
    """Nested JSON objects joined by ``/`` (four levels)."""
    out: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, Mapping) and depth < 4:
            inner = flatten(value, depth + 1)
            out.update({k if k not in out else f"{key}/{k}": v for k, v in inner.items()})
            out.update({f"{key}/{k}": v for k, v in inner.items()})
        else:
            out[str(key)] = value
    return out


_QUANTISED = re.compile(r"0\.0{3,}\d?")
"""A learning rate printed with fixed decimals and at most one digit left: 0.000002 says nothing of its course."""
FINGERPRINTS_MAX = 20_000
FINGERPRINT_KEYS = tuple(
    map(key_of, ("batch_fingerprint", "fingerprint", "batch_hash", "sample_ids", "sample_indices"))
)
_JUDGED = frozenset({"loss", "grad_norm", "grad_norm_local"})


class RowMetrics:
    """Takes rows (name -> value) with a step and, maybe, a rank; used by JSON, CSV, TensorBoard and text."""

    def __init__(self, gather: Gather, rank: int, where: str) -> None:
        self.gather, self.rank, self.where = gather, rank, where
        self.count = 0
        self.found = 0
        self.prints = 0
        self.keys: dict[int, set[str]] = {}
        self.per_rank_columns = re.compile(r"^(?P<name>.+?)[/_.\[ -]?rank[_ -]?(?P<rank>\d+)\]?$", re.IGNORECASE)

    def row(self, row: Mapping[str, Any], step: int | None = None, rank: int | None = None) -> int | None:
        """Add one row; the answer is its step."""
        flat = flatten(row)
        by_key = {key_of(k): v for k, v in flat.items()}
        if step is None:
            step = next(
                (
                    int(v)
                    for k in STEP_KEYS
                    if (v := number(by_key.get(key_of(k)))) is not None and math.isfinite(v) and v >= 0
                ),
                None,
            )
        own = next((number(by_key[k]) for k in RANK_KEYS if k in by_key), None)
        who = (
            int(own)
            if own is not None and math.isfinite(own) and 0 <= own < 131_072
            else (self.rank if rank is None else rank)
        )
        host = next((str(by_key[k]) for k in HOST_KEYS if k in by_key), "")
        if host and who >= 0:
            self.gather.place(who, host=host)
        self.settings(by_key)
        names = [k for k in flat if key_of(k) in ALIASES or self.per_rank_columns.match(k)]
        if step is None:
            step = self.count if names else None
        self.count += bool(names)
        for name in names:
            self.value(name, flat[name], step or 0, who)
        self._note_keys(flat, who)
        self._fingerprint(by_key, step, who)
        self._words(by_key, step, who)
        return step

    def value(self, name: str, raw: Any, step: int, rank: int) -> None:
        """Add one metric; a list is one value a rank; NaN and inf also leave a fact."""
        column = self.per_rank_columns.match(name)
        if column and key_of(column["name"]) in ALIASES:
            name, rank = column["name"], int(column["rank"])
        alias = ALIASES.get(key_of(name))
        if alias is None or step >= 1 << 53:
            return
        values = raw if isinstance(raw, list) else [raw]
        for i, item in enumerate(values[:131_072]):
            value = number(item)
            if value is not None and not (alias[0] == "lr" and isinstance(item, str) and _QUANTISED.fullmatch(item)):
                self.found += 1
                who = i if isinstance(raw, list) and len(values) > 1 else rank
                if not math.isfinite(value) and alias[0] in _JUDGED:
                    self.gather.event("nonfinite_sample", rank=who, step=step, ref=self.where, series=alias[0])
                self.gather.sample(
                    alias[0], step, i if isinstance(raw, list) and len(values) > 1 else rank, value * alias[1]
                )

    def settings(self, by_key: Mapping[str, Any]) -> None:
        """Note configuration values, once each."""
        for key, name in SETTING_KEYS.items():
            value = by_key.get(key)
            if isinstance(value, (str, int, float, bool)) and f"setting:{name}={value}" not in self.gather.notes_seen:
                self.gather.notes_seen.add(f"setting:{name}={value}")
                self.gather.event("setting", rank=NO_RANK, ref=self.where, key=name, value=value)
                if name == "world_size" and isinstance(value, int) and 0 < value <= 131_072:
                    self.gather.expected = max(self.gather.expected, value)

    def _note_keys(self, flat: Mapping[str, Any], rank: int) -> None:
        if rank >= 0 and len(self.keys.setdefault(rank, set())) < 1_000:
            self.keys[rank].update(k for k, v in flat.items() if number(v) is not None or v is None)

    def _fingerprint(self, by_key: Mapping[str, Any], step: int | None, rank: int) -> None:
        """Which samples a rank saw: equal prints on several ranks are the same batch."""
        value = next((by_key[k] for k in FINGERPRINT_KEYS if by_key.get(k) not in (None, "", [])), None)
        if value is None or step is None or rank < 0 or self.prints >= FINGERPRINTS_MAX:
            return
        self.prints += 1
        text = ",".join(map(str, value[:64])) if isinstance(value, list) else str(value)
        self.gather.event("log.batch_fingerprint", rank=rank, step=step, ref=self.where, value=text[:400])

    def _words(self, by_key: Mapping[str, Any], step: int | None, rank: int) -> None:
        """Rows that carry an event in words: ``{"event": "resume", "step": 4000}``."""
        for key in ("event", "msg", "message", "note", "type"):
            text = by_key.get(key)
            if isinstance(text, str) and text:
                from lanterne.backend.readers import patterns

                for pattern, attributes in patterns.match(text):
                    plain = {
                        k: v for k, v in attributes.items() if k not in {"rank", "step", "host", "name", "ref", "body"}
                    }
                    self.gather.event(
                        f"log.{pattern.event}",
                        rank=rank,
                        step=-1 if step is None else step,
                        body=text[:1000],
                        ref=self.where,
                        extra=plain,
                    )
                if re.search(r"resum|restor|load.*checkpoint", text, re.IGNORECASE):
                    self.gather.event(
                        "log.resumed", rank=rank, step=-1 if step is None else step, body=text[:200], ref=self.where
                    )
        if by_key.get("resumed") in (True, 1) or by_key.get("resume") in (True, 1):
            self.gather.event(
                "log.resumed", rank=rank, step=-1 if step is None else step, body="resumed", ref=self.where
            )

    def close(self) -> None:
        """Leave which keys each rank logged: uneven sets are a broken stream of reductions."""
        for rank, keys in self.keys.items():
            if keys:
                self.gather.event("log.metric_keys", rank=rank, ref=self.where, keys=",".join(sorted(keys))[:4000])


class LineMetrics:
    """Metrics inside log lines; feeds :class:`RowMetrics`."""

    def __init__(self, source: Source, gather: Gather) -> None:
        self.rows = RowMetrics(gather, NO_RANK, source.name)
        self.two_columns = 0

    @property
    def found(self) -> int:
        return self.rows.found

    def close(self) -> None:
        """Leave which keys each rank logged."""
        self.rows.close()

    def line(self, text: str, rank: int) -> int | None:
        """Take one line; the answer is its step where it has one."""
        if (short := _NANOGPT.match(text)) and short[2] != "trl":
            return int(short[1])
        plain = _TWO_COLUMNS.match(text)
        if plain:
            return self.rows.row({"step": int(plain[1]), "loss": plain[2]}, rank=rank)
        start = text.find("{")
        if start >= 0 and text.rstrip().endswith("}"):
            row = parse_object(text[start:])
            if row is not None:
                return self.rows.row(row, rank=rank)
        pairs = {m["key"].strip(): _with_unit(m) for m in _PAIR.finditer(text[:4_000])}
        pairs = {_last_words(k): v for k, v in pairs.items()}
        if not any(key_of(k) in ALIASES for k in pairs):
            return None
        step = _STEP_WORD.search(text[:4_000])
        return self.rows.row(pairs, step=int(step.group(1)) if step else (int(short[1]) if short else None), rank=rank)


def _with_unit(found: re.Match[str]) -> str:
    return found["value"]


def _last_words(key: str) -> str:
    """The longest tail of a captured key that is a known name (``12:00 step 5 - loss`` -> ``loss``)."""
    words = key.split(" ")
    for i in range(len(words)):
        tail = " ".join(words[i:]).strip(" -")
        if key_of(tail) in ALIASES or key_of(tail) in STEP_KEY_SET:
            return tail
    return key


def parse_object(text: str) -> dict[str, Any] | None:
    """A JSON object or a printed Python dict of plain values; None for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        import ast

        try:
            value = ast.literal_eval(text[:20_000].replace(": nan", ": 'nan'").replace(": inf", ": 'inf'"))
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            return None
    return value if isinstance(value, dict) else None


def rows(source: Source, gather: Gather, items: Iterable[Mapping[str, Any]]) -> int:
    """Read an iterable of rows; the answer is how many values were kept."""
    table = RowMetrics(gather, source.rank, source.name)
    for item in items:
        table.row(item)
    table.close()
    return table.found
