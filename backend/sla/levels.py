"""The service-level report of a job and of the fleet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lanterne.backend.sla.account import Account, account
from lanterne.backend.sla.objectives import (
    BurnAlert,
    Objective,
    Targets,
    availability,
    burn_alerts,
    ettr,
    failures,
    job_success,
    objective,
    recoveries,
    recovery_objectives,
)
from lanterne.backend.sla.read import Record, read
from lanterne.backend.store.control import ControlStore
from lanterne.backend.store.events import EventStore

FOR_EVER_NS = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Seconds of wall time: productive, and lost by cause."""

    productive_s: float
    badput: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """``GET jobs/{id}/sla`` (docs/seams.md, section 6). None = not measured, with the reason in ``notes``."""

    objectives: Sequence[Objective]
    goodput: Goodput
    mtbf_s: float | None
    mttr_s: float | None
    ettr: float | None
    failures: int
    wall_s: float
    gpu_hours: float
    alerts: Sequence[BurnAlert] = ()
    notes: Sequence[str] = ()


def report(
    store: EventStore, control: ControlStore, job: str, *, from_ns: int | None = None, to_ns: int | None = None,
    targets: Targets | None = None,
) -> Report:  # fmt: skip
    """Service levels of ``job`` between two Unix times (ns; None = from its beginning, until now).

    A job that has not taken a step yet has None where a number would be a guess. Raises StoreUnavailable.
    """
    start, end = from_ns or 0, FOR_EVER_NS if to_ns is None else to_ns
    record = read(store, control, job, start, end)
    return report_of(record, targets or Targets())


def report_of(record: Record, targets: Targets) -> Report:
    """The report of a record; pure."""
    spent = account(record.steps, record.lives, record.troubles)
    took = recoveries(record.steps, record.lives, record.troubles)
    failed = failures(record.lives, record.troubles)
    last = max((life.last_ns for life in record.lives), default=0)
    return Report(
        objectives=[
            objective("availability", targets.availability, availability(spent)),
            objective("job_success", targets.job_success, job_success(record.lives)),
            objective("ettr", targets.ettr, ettr(spent)),
            objective("liveness", targets.liveness, record.liveness),
            objective("checkpoint_success", targets.checkpoint_success, record.checkpoint_success),
            *recovery_objectives(took, targets, record.checks),
        ],
        goodput=Goodput(productive_s=spent.productive_s, badput=spent.badput),
        mtbf_s=_up_s(spent) / failed if failed else None,
        mttr_s=sum(took) / len(took) if took else None,
        ettr=ettr(spent),
        failures=failed,
        wall_s=spent.wall_s,
        gpu_hours=spent.wall_s * record.world_size / 3600,
        alerts=burn_alerts("ettr", targets.ettr, spent, last),
        notes=_notes(record, failed, took),
    )


def _up_s(spent: Account) -> float:
    """Seconds in operation: wall time less restarts."""
    return spent.wall_s - spent.total("restart")


def _notes(record: Record, failed: int, took: Sequence[float]) -> list[str]:
    notes = []
    if not len(record.steps.step):
        notes.append("no finished step lies in the window: goodput and ETTR are not measured")
    if not failed:
        notes.append("no failure lies in the window: MTBF is not measured")
    if failed and not took:
        notes.append("no failure in the window was recovered from: MTTR is not measured")
    if record.liveness is None:
        notes.append("no heartbeat lies in the window: liveness is not measured")
    if record.checkpoint_success is None:
        notes.append("no checkpoint was saved in the window: their success is not measured")
    return notes


def fleet(
    store: EventStore, control: ControlStore, *, from_ns: int | None = None, to_ns: int | None = None,
    targets: Targets | None = None, jobs_max: int = 200, only: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Service levels over the newest ``jobs_max`` jobs that were seen in the window; sums weigh by wall time.

    ``only``: this job alone. Keys: jobs, and objectives, goodput, mtbf_s, mttr_s, ettr, failures, gpu_hours as in
    :class:`Report`.
    """
    goals, start, end = targets or Targets(), from_ns or 0, FOR_EVER_NS if to_ns is None else to_ns
    records = [
        read(store, control, job.id, start, end)
        for job in control.jobs(only=only, limit=jobs_max)
        if job.last_seen_ns >= start and job.first_seen_ns <= end
    ]
    accounts = [account(r.steps, r.lives, r.troubles) for r in records]
    whole = Account(slices=tuple(s for a in accounts for s in a.slices), wall_s=sum(a.wall_s for a in accounts))
    took = [s for r in records for s in recoveries(r.steps, r.lives, r.troubles)]
    failed = sum(failures(r.lives, r.troubles) for r in records)
    up = [(availability(a), a.wall_s) for a in accounts]
    weights = sum(w for v, w in up if v is not None)
    live = [r.liveness for r in records if r.liveness is not None]
    return {
        "jobs": len(records),
        "objectives": [
            objective(
                "availability", goals.availability,
                sum(v * w for v, w in up if v is not None) / weights if weights > 0 else None,
            ),
            objective("job_success", goals.job_success, job_success([x for r in records for x in r.lives])),
            objective("ettr", goals.ettr, ettr(whole)),
            objective("liveness", goals.liveness, sum(live) / len(live) if live else None),
            *recovery_objectives(took, goals, {}),
        ],
        "goodput": Goodput(productive_s=whole.productive_s, badput=whole.badput),
        "mtbf_s": sum(_up_s(a) for a in accounts) / failed if failed else None,
        "mttr_s": sum(took) / len(took) if took else None,
        "ettr": ettr(whole),
        "failures": failed,
        "gpu_hours": sum(a.wall_s * r.world_size / 3600 for a, r in zip(accounts, records, strict=True)),
    }  # fmt: skip
