"""Goodput of many jobs, kept from one request to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lanterne.backend import sla
from lanterne.backend.api.queries import finite
from lanterne.backend.store.control import ControlStore
from lanterne.backend.store.events import EventStore
from lanterne.backend.store.records import JobRecord
from lanterne.clock import Clock
from lanterne.nouns import to_json

_FRESH_NS = 15_000_000_000
_BUDGET_NS = 100_000_000
_KEPT_MAX = 10_000


@dataclass(frozen=True, slots=True)
class _Known:
    last_seen_ns: int
    at_ns: int
    values: dict[str, float | None]


class Accounts:
    """Goodput and ETTR by job. A job that said nothing since is not computed again, a running one each 15 s at most.

    An account takes several queries, so one request spends at most about 100 ms on them, on those unknown or oldest
    first; a job that had no turn yet is shown with null and gets it with the next request.
    """

    def __init__(self, store: EventStore, control: ControlStore, clock: Clock) -> None:
        self._store, self._control, self._clock = store, control, clock
        self._known: dict[str, _Known] = {}

    def of(self, jobs: Sequence[JobRecord]) -> dict[str, dict[str, float | None]]:
        """``goodput`` and ``ettr`` of each job, by id."""
        if len(self._known) > _KEPT_MAX:
            self._known.clear()
        began = self._clock.monotonic_ns()
        for n, job in enumerate(sorted((j for j in jobs if self._due(j, began)), key=self._age)):
            if n and self._clock.monotonic_ns() - began > _BUDGET_NS:
                break
            self._known[job.id] = _Known(job.last_seen_ns, began, self._account(job.id))
        nothing: dict[str, float | None] = {"goodput": None, "ettr": None}
        return {job.id: self._known[job.id].values if job.id in self._known else nothing for job in jobs}

    def _due(self, job: JobRecord, now_ns: int) -> bool:
        known = self._known.get(job.id)
        return known is None or (known.last_seen_ns != job.last_seen_ns and now_ns - known.at_ns > _FRESH_NS)

    def _age(self, job: JobRecord) -> int:
        known = self._known.get(job.id)
        return known.at_ns if known else -1

    def _account(self, job: str) -> dict[str, float | None]:
        report = to_json(sla.report(self._store, self._control, job))
        goodput = report.get("goodput") or {}
        productive = float(goodput.get("productive_s") or 0.0)
        total = productive + sum(float(v or 0.0) for v in (goodput.get("badput") or {}).values())
        return {
            "goodput": finite(productive / total) if total else None,
            "ettr": finite(report.get("ettr")),
        }
