"""The rows of the job list: a handful of queries for a page of jobs, however many there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lanterne import limits
from lanterne.backend.api import lines, queries, states
from lanterne.backend.api.context import Context
from lanterne.backend.api.queries import Key
from lanterne.backend.api.states import Signs
from lanterne.backend.store.records import JobRecord, rfc3339

SLACK_NS = 60_000_000_000
"""Commit times may step back by this much with the server's clock; what is read twice changes nothing."""


def newest(job: JobRecord) -> Key:
    """The job with its newest attempt."""
    return job.id, job.attempt.attempt if job.attempt else 0


@dataclass(frozen=True, slots=True)
class Seen:
    """What the stores know of an attempt: last signs by rank, hosts, (last step, its pace in ms), newest values."""

    signs: dict[int, Signs]
    hosts: set[str]
    pace: tuple[int, float | None] | None
    values: dict[str, float]


def seen(context: Context, job: JobRecord, attempt: int) -> Seen:
    """Read again only where the job said something since."""
    key = (job.id, attempt)
    return context.kept(key, ("seen", job.last_seen_ns), lambda: _read(context, key))


def _read(context: Context, key: Key) -> Seen:
    found, hosts = last_signs(context, key), set()
    beats = queries.beats(context.store, key, context.clock.unix_ns(), where=False)
    for _, _, rank, host, last_seen_ns in context.control.rank_places([key]):
        hosts.add(host)
        beat = int(beats.get(rank, {}).get("received_ns") or 0)
        found[rank] = found.get(rank, Signs(rank=rank)).seen(max(last_seen_ns, beat))
    last = lines.bounds(context, key)[1]
    store = context.store
    pace = queries.pace(store, key, max(0, last - 2 * queries.PACE_STEPS)) or queries.pace(store, key, 0)
    return Seen(found, hosts, pace, queries.last_values(store, key, pace[0]) if pace else {})


def last_signs(context: Context, key: Key) -> dict[int, Signs]:
    """By rank, without heartbeats; of an attempt known already only what came in since is read."""
    changes = context.store.changes
    version = context.store.version(*key)
    known = context.signs.get(key)
    old = known if known is not None and changes.lowest(*key, known[0]) is not None else (0, 0, {})
    rows = queries.sign_rows(context.store, key, old[1] - SLACK_NS)
    newest = max((row["received_ns"] or 0 for row in rows), default=old[1])
    if len(context.signs) > limits.PAGE_ROWS_MAX:
        context.signs.clear()
    context.signs[key] = (version, max(newest, old[1]), states.merged(old[2], rows))
    return states.signs(context.signs[key][2].values())


def overviews(context: Context, jobs: Sequence[JobRecord]) -> list[dict[str, Any]]:
    """One row a job, in the given order."""
    found = {job.id: seen(context, job, newest(job)[1]) for job in jobs}
    incidents = context.control.incident_summary([job.id for job in jobs])
    accounts = context.accounts.of(jobs)
    now = context.clock.unix_ns()

    def show(job: JobRecord) -> dict[str, Any]:
        about, known = incidents[job.id], found[job.id]
        step, step_ms = known.pace or (None, None)
        return {
            "id": job.id,
            "state": states.job_state(list(known.signs.values()), now, hang_open=about.hang_open),
            "attempt": newest(job)[1],
            "attempts": len(job.attempts),
            "world_size": job.attempt.world_size if job.attempt else 0,
            "ranks_seen": len(known.signs),
            "host_count": len(known.hosts),
            "first_seen": rfc3339(job.first_seen_ns),
            "last_seen": rfc3339(job.last_seen_ns),
            "step": step,
            "step_ms": queries.finite(step_ms),
            "throughput": queries.finite(known.values.get("training.throughput")),
            "loss": queries.finite(known.values.get("training.loss")),
            **accounts[job.id],
            "open_incidents": about.open,
            "gpu_hours_lost": queries.finite(about.gpu_hours_lost) or 0.0,
            "verdict": about.verdict,
        }

    return [show(job) for job in jobs]
