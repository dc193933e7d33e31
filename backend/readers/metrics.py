"""Rows of trainer metrics (JSON, CSV, TensorBoard, text) become series of the closed vocabulary.

One table of aliases maps other people's names to the closed vocabulary of :mod:`lanterne.causal.facts`.
A name that says loss or norm of something else (``val_loss``, ``lm_loss_aux``) keeps its own name and is not judged.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lanterne import limits
from lanterne.backend.readers import patterns
from lanterne.backend.readers.gather import Gather
from lanterne.backend.readers.metric_names import (
    ALIASES,
    HOST_KEYS,
    RANK_KEYS,
    SETTING_KEYS,
    STEP_KEYS,
    key_of,
)
from lanterne.backend.readers.source import Source
from lanterne.nouns import NO_RANK


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


_BELOW_PRINT = re.compile(r"0\.0{2,}")
"""A learning rate printed with fixed decimals and none of them left: too small to print is not zero."""
FINGERPRINTS_MAX = 20_000
FINGERPRINT_KEYS = tuple(
    map(key_of, ("batch_fingerprint", "fingerprint", "batch_hash", "sample_ids", "sample_indices"))
)
_JUDGED = frozenset({"loss", "grad_norm", "grad_norm_local"})
COLUMN_SETS_MAX = 10_000
_STEP_ORDER = tuple(map(key_of, STEP_KEYS))
_WORD_KEYS = frozenset({"event", "msg", "message", "note", "type", "resumed", "resume"})
_PER_RANK = re.compile(r"^(?P<name>.+?)[/_.\[ -]?rank[_ -]?(?P<rank>\d+)\]?$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Columns:
    """``metrics``: column, series, factor, and the rank where the column's name holds one."""

    steps: tuple[str, ...]
    rank: str | None
    host: str | None
    metrics: tuple[tuple[str, str, float, int | None], ...]
    words: bool  # settings, fingerprints or events


def _columns_of(names: tuple[str, ...]) -> _Columns:
    keys = {key_of(n): n for n in names}
    found: list[tuple[str, str, float, int | None]] = []
    for name in names:
        apart = _PER_RANK.match(name)
        alias = ALIASES.get(key_of(apart["name"])) if apart else None
        if apart and alias:
            found.append((name, *alias, int(apart["rank"])))
        elif alias := ALIASES.get(key_of(name)):
            found.append((name, *alias, None))
    return _Columns(
        steps=tuple(keys[k] for k in _STEP_ORDER if k in keys),
        rank=next((keys[k] for k in RANK_KEYS if k in keys), None),
        host=next((keys[k] for k in HOST_KEYS if k in keys), None),
        metrics=tuple(found),
        words=any(k in SETTING_KEYS or k in FINGERPRINT_KEYS or k in _WORD_KEYS for k in keys),
    )


class RowMetrics:
    """Takes rows (name -> value) with a step and, maybe, a rank; used by JSON, CSV, TensorBoard and text."""

    def __init__(self, gather: Gather, rank: int, where: str) -> None:
        self.gather, self.rank, self.where = gather, rank, where
        self.count = 0
        self.found = 0
        self.prints = 0
        self.keys: dict[int, set[str]] = {}
        self.columns: dict[tuple[str, ...], _Columns] = {}

    def row(self, row: Mapping[str, Any], step: int | None = None, rank: int | None = None) -> int | None:
        """Add one row; the answer is its step."""
        flat = flatten(row) if any(isinstance(v, dict) for v in row.values()) else row
        columns = self._columns(tuple(flat))
        if step is None:
            step = next(
                (int(v) for c in columns.steps if (v := number(flat[c])) is not None and 0 <= v < 1 << 63), None
            )
        own = number(flat[columns.rank]) if columns.rank is not None else None
        who = self.rank if rank is None else rank
        if own is not None and math.isfinite(own) and 0 <= own < limits.RANKS_MAX:
            who = int(own)
        if columns.host is not None and who >= 0 and flat[columns.host]:
            self.gather.place(who, host=str(flat[columns.host]))
        if step is None:
            step = self.count if columns.metrics else None
        self.count += bool(columns.metrics)
        for name, series, factor, column_rank in columns.metrics:
            self._value(series, factor, flat[name], step or 0, who if column_rank is None else column_rank)
        if columns.words:
            by_key = {key_of(k): v for k, v in flat.items()}
            self.settings(by_key)
            self._fingerprint(by_key, step, who)
            self._words(by_key, step, who)
        self._note_keys(flat, who)
        return step

    def _columns(self, names: tuple[str, ...]) -> _Columns:
        """What each column of a row of this form means, worked out once."""
        known = self.columns.get(names)
        if known is None:
            if len(self.columns) >= COLUMN_SETS_MAX:
                self.columns.clear()
            known = self.columns[names] = _columns_of(names)
        return known

    def value(self, name: str, raw: Any, step: int, rank: int) -> None:
        """Add one metric by its name; names that mean nothing here are passed over."""
        for _, series, factor, column_rank in _columns_of((name,)).metrics:
            self._value(series, factor, raw, step, rank if column_rank is None else column_rank)

    def _value(self, series: str, factor: float, raw: Any, step: int, rank: int) -> None:
        """A list is one value a rank; NaN and inf also leave a fact."""
        if step >= 1 << 53:
            return
        spread = isinstance(raw, list)
        values = raw if isinstance(raw, list) else (raw,)
        for i, item in enumerate(values[: limits.RANKS_MAX]):
            value = number(item)
            if value is None or (series == "lr" and isinstance(item, str) and _BELOW_PRINT.fullmatch(item)):
                continue
            self.found += 1
            if not math.isfinite(value) and series in _JUDGED:
                who = i if spread and len(values) > 1 else rank
                self.gather.event("nonfinite_sample", rank=who, step=step, ref=self.where, series=series)
            self.gather.sample(series, step, i if spread else rank, value * factor)

    def settings(self, by_key: Mapping[str, Any]) -> None:
        """Note configuration values, once each."""
        for key, name in SETTING_KEYS.items():
            value = by_key.get(key)
            if isinstance(value, (str, int, float, bool)) and f"setting:{name}={value}" not in self.gather.notes_seen:
                self.gather.notes_seen.add(f"setting:{name}={value}")
                self.gather.event("setting", rank=NO_RANK, ref=self.where, key=name, value=value)
                if name == "world_size" and isinstance(value, int) and 0 < value <= limits.RANKS_MAX:
                    self.gather.expected = max(self.gather.expected, value)

    def _note_keys(self, flat: Mapping[str, Any], rank: int) -> None:
        if rank < 0:
            return
        keys = self.keys.setdefault(rank, set())
        if len(keys) < 1_000 and not keys.issuperset(flat):
            keys.update(k for k, v in flat.items() if number(v) is not None or v is None)

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
