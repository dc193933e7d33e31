"""Counted loss, in one closed table: every verdict shows the counters it rests on.

A counter has a severity (``info`` < ``notice`` < ``data_loss`` < ``error``), an origin and an advice.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Counter:
    name: str
    severity: str
    origin: str
    advice: str


COUNTERS: Mapping[str, Counter] = {
    c.name: c
    for c in (
        Counter("ring_dropped", "data_loss", "collector", "raise LANTERNE_RING_RECORDS or lower the detail"),
        Counter("ring_torn", "data_loss", "collector", "a record was overwritten while it was read"),
        Counter("held_dropped", "notice", "collector", "values were not ready in time and were skipped"),
        Counter("notes_dropped", "data_loss", "collector", "too many events a second; see docs/settings.md"),
        Counter("spool_dropped", "data_loss", "shipper", "the backend was away too long: raise LANTERNE_SPOOL_BYTES"),
        Counter("export_retried", "info", "shipper", "the backend answered late or refused; nothing is lost"),
        Counter("export_rejected", "data_loss", "shipper", "the backend refused records for good: read its log"),
        Counter("collector_error", "notice", "collector", "a hook failed and was skipped: see the rank's notes"),
        Counter("shed", "notice", "collector", "the collector was over its budget and switched a source off"),
        Counter("source_absent", "info", "collector", "a source has nothing to read here (no GPU, no cgroup, …)"),
        Counter("body_refused", "data_loss", "ingest", "a request could not be decoded or was too large"),
        Counter("record_refused", "data_loss", "ingest", "a record was outside the limits of docs/security.md"),
        Counter("duplicate", "info", "ingest", "a record came again after a retry and was stored once"),
        Counter("late", "notice", "align", "a record came after its window was closed"),
        Counter("unmatched", "notice", "align", "a collective had members that never reported"),
        Counter("reader_gap", "notice", "readers", "a file was cut or partly unreadable"),
    )
}


class Quality:
    """Thread-safe counts of the table above. ``add`` on a name that is not in it raises KeyError."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()

    def add(self, name: str, n: int = 1) -> None:
        COUNTERS[name]
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + n

    def counts(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    def lost(self) -> int:
        """How many records are gone for good (severity ``data_loss`` and above)."""
        return sum(n for name, n in self.counts().items() if COUNTERS[name].severity in {"data_loss", "error"})
