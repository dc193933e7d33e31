"""The rows of the job list: a handful of queries for a page of jobs, however many there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lanterne.backend.api import queries
from lanterne.backend.api.context import Context
from lanterne.backend.api.queries import Key
from lanterne.backend.api.states import Signs, job_state, signs
from lanterne.backend.store.records import JobRecord, rfc3339


def newest(job: JobRecord) -> Key:
    """The job with its newest attempt."""
    return job.id, job.attempt.attempt if job.attempt else 0


def all_signs(context: Context, keys: Sequence[Key]) -> tuple[dict[Key, dict[int, Signs]], dict[Key, set[str]]]:
    """Last signs of all ranks, heartbeats and registered times included, and their hosts, by (job, attempt)."""
    rows: dict[Key, list[dict[str, Any]]] = {key: [] for key in keys}
    for row in queries.sign_rows(context.store, keys):
        rows[row["job"], row["attempt"]].append(row)
    found = {key: signs(of_it) for key, of_it in rows.items()}
    beats = queries.beats(context.store, keys, context.clock.unix_ns())
    hosts: dict[Key, set[str]] = {key: set() for key in keys}
    for job, attempt, rank, host, last_seen_ns in context.control.rank_places(keys):
        mine = found[job, attempt]
        hosts[job, attempt].add(host)
        old = mine.get(rank, Signs(rank=rank))
        beat = int(beats.get((job, attempt, rank), {}).get("received_ns") or 0)
        mine[rank] = old.seen(max(last_seen_ns, beat))
    return found, hosts


def overviews(context: Context, jobs: Sequence[JobRecord]) -> list[dict[str, Any]]:
    """One row a job, in the given order."""
    keys = [newest(job) for job in jobs]
    found, hosts = all_signs(context, keys)
    paces = queries.paces(context.store, keys)
    values = queries.last_values(context.store, paces)
    incidents = context.control.incident_summary([job.id for job in jobs])
    accounts = context.accounts.of(jobs)
    now = context.clock.unix_ns()

    def show(job: JobRecord) -> dict[str, Any]:
        key, about = newest(job), incidents[job.id]
        step, step_ms = paces.get(key, (None, None))
        last = values.get(key, {})
        return {
            "id": job.id,
            "state": job_state(list(found[key].values()), now, hang_open=about.hang_open),
            "attempt": key[1],
            "attempts": len(job.attempts),
            "world_size": job.attempt.world_size if job.attempt else 0,
            "ranks_seen": len(found[key]),
            "host_count": len(hosts[key]),
            "first_seen": rfc3339(job.first_seen_ns),
            "last_seen": rfc3339(job.last_seen_ns),
            "step": step,
            "step_ms": queries.finite(step_ms),
            "throughput": queries.finite(last.get("training.throughput")),
            "loss": queries.finite(last.get("training.loss")),
            **accounts[job.id],
            "open_incidents": about.open,
            "gpu_hours_lost": queries.finite(about.gpu_hours_lost) or 0.0,
            "verdict": about.verdict,
        }

    return [show(job) for job in jobs]
