"""Service levels: what share of its time a job trained, what took the rest, and how fast it came back."""

from __future__ import annotations

from lanterne.backend.sla.levels import Goodput, Report, fleet, report, report_of
from lanterne.backend.sla.objectives import LEVELS, Objective, Targets
from lanterne.backend.sla.read import throughput
from lanterne.backend.sla.scaling import Efficiency, efficiency
from lanterne.backend.sla.schedulers import READERS, SchedulerJob, success_rate

__all__ = [
    "LEVELS", "READERS", "Efficiency", "Goodput", "Objective", "Report", "SchedulerJob", "Targets", "efficiency",
    "fleet", "report", "report_of", "success_rate", "throughput",
]  # fmt: skip
