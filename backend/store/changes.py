"""Which jobs got rows since when, so that an answer made from them can be kept until it is out of date."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa

from lanterne.backend.store.batch import Batch

Key = tuple[str, int]
"""Job and attempt."""
BEYOND = 1 << 62
"""A step after all steps: rows came, but none that belongs to a step."""
COMMITS_KEPT = 512
KEYS_MAX = 10_000


class Changes:
    """Counts commits by (job, attempt), with the lowest step that each of the last ``COMMITS_KEPT`` touched."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = 0
        self._floor = 0
        self._seen: dict[Key, deque[tuple[int, int]]] = {}

    def note(self, batches: Iterable[Batch], derived: Iterable[tuple[str, pa.Table]]) -> None:
        """Called after a commit with what it held."""
        found: dict[Key, int] = {}
        for batch in batches:
            steps = batch.table.column("step").to_numpy()
            for key, (start, stop) in _stretches(((run.job, run.attempt), run.start, run.stop) for run in batch.runs):
                part = steps[start:stop]
                part = part[part >= 0]
                found[key] = min(found.get(key, BEYOND), int(part.min()) if part.size else BEYOND)
        for _, rows in derived:
            for row in _groups(rows):
                key = (row["job"], row["attempt"])
                found[key] = min(found.get(key, BEYOND), row["low"])
        with self._lock:
            self._number += 1
            if len(self._seen) + len(found) > KEYS_MAX:
                self._forget()
            for key, low_step in found.items():
                self._seen.setdefault(key, deque(maxlen=COMMITS_KEPT)).append((self._number, low_step))

    def forget(self) -> None:
        """Rows may have gone (retention, a back-up read in): whatever was kept is out of date."""
        with self._lock:
            self._number += 1
            self._forget()

    def _forget(self) -> None:
        self._seen.clear()
        self._floor = self._number

    def version(self, job: str, attempt: int) -> int:
        """Number of the last commit with rows of this attempt; what was kept at the same version is still true."""
        with self._lock:
            seen = self._seen.get((job, attempt))
            return seen[-1][0] if seen else self._floor

    def lowest(self, job: str, attempt: int, since: int) -> int | None:
        """The lowest step touched after version ``since``; ``BEYOND`` = none; None where that is no longer known."""
        with self._lock:
            seen = self._seen.get((job, attempt))
            if since < self._floor:
                return None
            if not seen:
                return BEYOND
            if len(seen) == COMMITS_KEPT and seen[0][0] > since:
                return None
            return min((step for number, step in seen if number > since), default=BEYOND)


def _stretches(runs: Iterable[tuple[Key, int, int]]) -> list[tuple[Key, tuple[int, int]]]:
    """Neighbouring runs of one attempt joined to one stretch of rows."""
    found: list[tuple[Key, tuple[int, int]]] = []
    for key, start, stop in runs:
        if found and found[-1][0] == key and found[-1][1][1] == start:
            found[-1] = (key, (found[-1][1][0], stop))
        else:
            found.append((key, (start, stop)))
    return found


def _groups(rows: pa.Table) -> Sequence[dict[str, Any]]:
    """Job, attempt and lowest step of derived rows; clock offsets belong to no step."""
    names = [name for name in ("job", "attempt", "step") if name in rows.column_names]
    if "step" not in names:
        found: list[dict[str, Any]] = rows.select(names).group_by(names).aggregate([]).to_pylist()
        return [one | {"low": BEYOND} for one in found]
    least = rows.select(names).group_by(["job", "attempt"]).aggregate([("step", "min")]).to_pylist()
    return [one | {"low": one["step_min"] if one["step_min"] >= 0 else BEYOND} for one in least]
