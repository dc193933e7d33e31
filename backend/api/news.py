"""What is new, for the live streams: steps from the store's commits, incidents and commands from the control store."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import pyarrow.compute as pc

from lanterne.backend.api.hub import Hub
from lanterne.backend.store.batch import Batch
from lanterne.backend.store.control import ControlStore
from lanterne.backend.store.events import EventStore
from lanterne.errors import LanterneError
from lanterne.nouns import Kind

log = logging.getLogger(__name__)
_PERIOD_S = 0.5
_LOOK_BACK = 200


class News:
    """A daemon thread that asks twice a second while somebody listens, and does nothing otherwise."""

    def __init__(self, store: EventStore, control: ControlStore, hub: Hub) -> None:
        self._control, self._hub = control, hub
        self._steps: dict[str, int] = {}
        self._told: dict[str, int] = {}
        self._incidents: dict[str, int] = {}
        self._commands: dict[str, str] = {}
        self._stop = threading.Event()
        self._unsubscribe = store.subscribe(self._committed)
        self._thread = threading.Thread(target=self._run, name="lanterne-news", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._unsubscribe()
        self._stop.set()
        self._thread.join(timeout=5)

    def _committed(self, batches: Sequence[Batch]) -> None:
        if not self._hub.listeners:
            return
        for batch in batches:
            if batch.signal != "spans" or not batch.rows:
                continue
            rows = batch.table.filter(pc.equal(batch.table.column("kind"), str(Kind.STEP)))
            for job in rows.column("job").unique().to_pylist():
                step = pc.max(rows.filter(pc.equal(rows.column("job"), job)).column("step")).as_py()
                self._steps[job] = max(self._steps.get(job, -1), step)

    def _run(self) -> None:
        listened = False
        while not self._stop.wait(_PERIOD_S):
            if not self._hub.listeners:
                listened = False
                continue
            try:
                self._look(tell=listened)
            except LanterneError as error:
                log.warning("live news: %s", error)
            listened = True

    def _look(self, *, tell: bool) -> None:
        """Compare with the last look; the first one after a pause only takes note."""
        for job, step in list(self._steps.items()):
            if self._told.get(job) != step:
                self._told[job] = step
                self._hub.publish("step", job, {"step": step})
        incidents = self._control.incidents(limit=_LOOK_BACK)
        commands = self._control.commands(limit=_LOOK_BACK)
        if tell:
            for record in incidents:
                if self._incidents.get(record.incident.id) != record.updated_ns:
                    body = {"id": record.incident.id, "status": str(record.incident.status), "verdict": record.verdict}
                    self._hub.publish("incident", record.job, body)
            for command in commands:
                if self._commands.get(command.id) != command.state:
                    self._hub.publish("command", command.job, {"id": command.id, "state": command.state})
        self._incidents = {r.incident.id: r.updated_ns for r in incidents}
        self._commands = {c.id: c.state for c in commands}
