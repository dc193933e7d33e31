"""From an inflated body to rows on their way to the disk; the same for HTTP and gRPC."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from lanterne import limits
from lanterne.backend.ingest import walker
from lanterne.backend.ingest.admit import Admitted
from lanterne.backend.ingest.body import BodyRefused
from lanterne.backend.ingest.decode import decode
from lanterne.backend.store.access import Principal
from lanterne.backend.store.control import ControlStore
from lanterne.backend.store.events import EventStore
from lanterne.errors import LanterneError
from lanterne.nouns import Identity

log = logging.getLogger(__name__)

_TOUCH_EVERY_S = 2.0
Place = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class Taken:
    """A body on its way: the future ends when it is on disk."""

    stored: Future[None]
    refused: int
    reasons: str


class Intake:
    """Decodes, admits, registers who speaks, and queues. ``take`` is thread-safe."""

    def __init__(self, store: EventStore, control: ControlStore) -> None:
        self._store, self._control = store, control
        self._lock = threading.Lock()
        self._known: dict[Place, Identity] = {}
        self._due: dict[Place, Identity] = {}
        self._jobs: set[str] = {job.id for job in control.jobs(limit=limits.JOBS_MAX)}
        self._names: dict[str, set[str]] = {}
        walker.load_soon()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._touch_often, name="lanterne-seen", daemon=True)
        self._thread.start()

    def take(self, signal: str, body: bytes, principal: Principal, *, is_json: bool = False) -> Taken:
        """Queue one body of ``traces``, ``metrics`` or ``logs``.

        Raises :class:`BodyRefused` (400, 403, 413, 429), ``QueueFull`` and :class:`StoreUnavailable` (503).
        """
        try:
            admitted = decode(signal, body, is_json=is_json)
        except BodyRefused:
            self._store.quality.add("body_refused")
            raise
        if admitted.refused:
            self._store.quality.add("record_refused", admitted.refused)
        for job in {run.job for run in admitted.batch.runs}:
            if not principal.sees(job):
                raise BodyRefused(403, f"this token may send for job {principal.job} only, not for {job}")
        self._bound(admitted)
        self._see(admitted.batch.identities)
        if admitted.batch.rows == 0:
            done: Future[None] = Future()
            done.set_result(None)
            return Taken(done, admitted.refused, admitted.reasons)
        return Taken(self._store.accept(admitted.batch), admitted.refused, admitted.reasons)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5)
        self._flush()

    def _bound(self, admitted: Admitted) -> None:
        """Cardinality: a body that would bring a job or a metric name too many is refused whole."""
        batch = admitted.batch
        with self._lock:
            fresh = {run.job for run in batch.runs} - self._jobs
            if len(self._jobs) + len(fresh) > limits.JOBS_MAX:
                raise BodyRefused(429, f"more than {limits.JOBS_MAX} jobs; delete old ones or use one job id a run")
            self._jobs |= fresh
            if batch.signal != "points":
                return
            for run in batch.runs:
                names = self._names.setdefault(run.job, set())
                part = batch.table.column("name").slice(run.start, run.stop - run.start)
                sent = set(part.unique().to_pylist())
                if not sent <= names:
                    if len(names | sent) > limits.SERIES_NAMES_PER_JOB_MAX:
                        why = f"more than {limits.SERIES_NAMES_PER_JOB_MAX} metric names in job {run.job}"
                        raise BodyRefused(429, f"{why}; put what varies into a label")
                    names |= sent

    def _see(self, identities: Sequence[Identity]) -> None:
        """Register unknown or changed speakers now, the others with the next round."""
        fresh: list[Identity] = []
        with self._lock:
            for identity in identities:
                place = (identity.job, identity.attempt, identity.rank)
                if self._known.get(place) == identity:
                    self._due[place] = identity
                else:
                    fresh.append(identity)
        if fresh:
            self._control.touch(fresh)
            with self._lock:
                self._known.update({(i.job, i.attempt, i.rank): i for i in fresh})

    def _touch_often(self) -> None:
        while not self._stop.wait(_TOUCH_EVERY_S):
            self._flush()

    def _flush(self) -> None:
        with self._lock:
            due, self._due = self._due, {}
        try:
            self._control.touch(due.values())
        except LanterneError as error:
            log.warning("last-seen times were not written: %s", error)
