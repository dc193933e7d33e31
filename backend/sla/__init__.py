"""Service levels: what share of its time a job trained, what took the rest, and how fast it came back."""

from __future__ import annotations

from lanterne.backend.sla.levels import Goodput, Report, fleet, report, report_of
from lanterne.backend.sla.objectives import LEVELS, Objective, Targets

__all__ = ["LEVELS", "Goodput", "Objective", "Report", "Targets", "fleet", "report", "report_of"]
