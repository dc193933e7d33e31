"""A whole backend in one process: simulated ranks -> wire -> intake -> event store -> pipeline -> report."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from lanterne import wire
from lanterne.backend.ingest.intake import Intake
from lanterne.backend.pipeline import LiveRunner, report
from lanterne.backend.store import migrate
from lanterne.backend.store.access import LOCAL
from lanterne.backend.store.control import ControlStore
from lanterne.backend.store.events import EventStore
from lanterne.clock import SimulatedClock
from lanterne.collector.sim.events import START_UNIX_NS, to_events
from lanterne.collector.sim.model import Job
from lanterne.nouns import Event, Identity, Report
from lanterne.settings import ServerSettings


class House:
    """Store, control, intake and runner over one folder, on a simulated clock."""

    def __init__(self, folder: Path) -> None:
        self.settings = ServerSettings(data=str(folder), policy="observe")
        migrate.upgrade(self.settings)
        self.clock = SimulatedClock(START_UNIX_NS)
        self.store = EventStore.open(self.settings, clock=self.clock)
        self.control = ControlStore.open(self.settings, clock=self.clock)
        self.intake = Intake(self.store, self.control)
        self.runner = LiveRunner(self.store, self.control, self.settings, clock=self.clock)

    def close(self) -> None:
        self.runner.stop()
        self.store.close()

    def send(self, identity: Identity, events: Iterable[Event]) -> None:
        """One rank's events over the wire, durable when this returns."""
        encoded = wire.encode(identity, events)
        bodies = {"traces": encoded.traces, "metrics": encoded.metrics, "logs": encoded.logs}
        for signal, request in bodies.items():
            if request is not None:
                self.intake.take(signal, request.SerializeToString(), LOCAL).stored.result()
        self.control.touch([identity], self.clock.unix_ns())

    def play(self, job: Job, *, evaluate_every: int = 0, settle_s: float = 1.0) -> None:
        """Send a simulated job step by step; evaluate every so many steps, as the runner would."""
        pending: dict[int, tuple[Identity, list[Event]]] = {}
        sent = 0
        for identity, step, events in to_events(job):
            pending.setdefault(identity.rank, (identity, []))[1].extend(events)
            if evaluate_every and step >= sent + evaluate_every and identity.rank == 0:
                sent = step
                self._flush(pending)
                self.runner.evaluate(job.name, 0)
        self._flush(pending)
        self.clock.advance(int(settle_s * 1e9))
        self.runner.evaluate(job.name, 0)

    def _flush(self, pending: dict[int, tuple[Identity, list[Event]]]) -> None:
        latest = 0
        for identity, events in pending.values():
            self.send(identity, events)
            latest = max([latest, *(e.unix_ns + e.duration_ns for e in events)])
        pending.clear()
        self.clock.advance(max(0, latest - self.clock.unix_ns()))

    def report(self, job: str) -> Report:
        return report(self.store, self.control, job, clock=self.clock)
