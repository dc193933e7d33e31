"""Burn rates of the jobs that are watched, told through the alerter: a budget that is spent too fast is news as well.

Each (job, window) is one lasting alert: it begins when both windows of the pair burn above their rate, and is over when
they do not any more. "page" is told as P1, "ticket" as P2. It is no incident: it says how much time is lost, not why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from lanterne.backend.alerts import BURN, Alerter
from lanterne.backend.sla.levels import report
from lanterne.backend.sla.objectives import BURN_WINDOWS, BurnAlert
from lanterne.backend.store.control import ControlStore
from lanterne.backend.store.events import EventStore
from lanterne.backend.store.records import rfc3339
from lanterne.nouns import Incident, IncidentStatus, Severity

EVERY_S = 60.0
SEVERITY = {"page": Severity.P1, "ticket": Severity.P2}
Read = Callable[[str], Iterable[BurnAlert]]


def burning(store: EventStore, control: ControlStore) -> Read:
    """The burn alerts of a job as its service levels have them now."""

    def read(job: str) -> Iterable[BurnAlert]:
        return report(store, control, job).alerts

    return read


class BurnWatch:
    """Asks for each job at most once a minute; ``look`` is called by the live runner's thread."""

    def __init__(self, alerter: Alerter, read: Read) -> None:
        self.alerter, self.read = alerter, read
        self._asked_ns: dict[str, int] = {}
        self._open: dict[str, dict[float, Incident]] = {}

    def look(self, job: str, now_ns: int) -> None:
        """Tell what began or is over. Raises what reading the stores raises."""
        if not self.alerter.targets or now_ns - self._asked_ns.get(job, 0) < EVERY_S * 1e9:
            return
        self._asked_ns[job] = now_ns
        known = self._open.setdefault(job, {})
        burns = {alert.window_s: alert for alert in self.read(job)}
        for window_s, *_ in BURN_WINDOWS:
            if window_s in burns:
                self._burns(job, burns[window_s], known, now_ns)
            elif window_s in known:
                self._tell(
                    job, known.pop(window_s), IncidentStatus.RESOLVED, "the error budget no longer burns too fast"
                )

    def _burns(self, job: str, alert: BurnAlert, known: dict[float, Incident], now_ns: int) -> None:
        if alert.window_s not in known:
            known[alert.window_s] = Incident(
                id=f"burn-{job}-{alert.window_s:.0f}-{now_ns}", kind=BURN, severity=SEVERITY[alert.action],
                status=IncidentStatus.OPEN, opened_step=None, opened_at=rfc3339(now_ns),
            )  # fmt: skip
        says = (
            f"{alert.objective}: the error budget burns {alert.burn_rate:.1f} times too fast over the last "
            f"{alert.window_s / 3600:g} h (alert from {alert.threshold:g}, {alert.action})"
        )
        self._tell(job, known[alert.window_s], IncidentStatus.OPEN, says)

    def _tell(self, job: str, incident: Incident, status: IncidentStatus, says: str) -> None:
        fingerprint = f"{BURN}:{incident.severity}"
        self.alerter.notify(replace(incident, status=status), job, fingerprint=fingerprint, says=says)
