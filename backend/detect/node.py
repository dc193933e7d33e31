"""What the host agent found on the job's hosts: neighbours, quotas, full or slow disks (docs/agent.md)."""

from __future__ import annotations

import numpy as np

from lanterne.backend.detect.base import finding
from lanterne.causal.facts import Facts
from lanterne.causal.nodes import present
from lanterne.nouns import Anomaly, Severity


def detect(facts: Facts) -> list[Anomaly]:
    """One anomaly for each host and category that the agent's last word says is still so."""
    found: dict[tuple[str, str], Anomaly] = {}
    for event in present(facts):
        host, category = str(event.attributes["host"]), str(event.attributes["category"])
        first, last = _step_at(facts, event.job_ns), int(facts.steps[-1]) if len(facts.steps) else 0
        found.setdefault(
            (host, category),
            finding(
                facts, category, f"{host}: {event.body}", severity=Severity.P2, first=first, last=last, score=1.0,
                at_ns=event.job_ns, fired_by="event", host=host,
            ),
        )  # fmt: skip
    return list(found.values())


def _step_at(facts: Facts, job_ns: int) -> int:
    """The step under way at a moment; the first of the window where it is not known."""
    if not len(facts.steps):
        return 0
    if not len(facts.step_start_ns):
        return int(facts.steps[0])
    at = int(np.searchsorted(facts.step_start_ns, job_ns, side="right")) - 1
    return int(facts.steps[max(at, 0)])
