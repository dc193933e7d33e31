"""What the service levels need from the two stores, read in a handful of queries."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lanterne.backend.sla.account import Life, Steps, Trouble
from lanterne.backend.store.control import ControlStore
from lanterne.backend.store.events import EventStore
from lanterne.backend.store.records import AttemptRecord, IncidentRecord
from lanterne.nouns import IncidentStatus, Severity

SAMPLED_RANKS = 32
"""Median step times are taken over at most this many ranks, evenly spread: a synchronous job has one step time."""
HEARTBEAT_NS = 1_000_000_000
GOES_ON = frozenset(
    {
        "straggler", "intermittent_straggler", "step_time", "data_stall", "gc_pause", "slow_transfer", "sync_delay",
        "sync_skew", "loss_variance", "loss_spike", "grad_spike", "lr_drift",
    }
)  # fmt: skip
"""Kinds that may be P0 by a fixed level of the contract while the job goes on: no failures in the sense of MTBF."""

_STEPS = """
WITH pace AS (
  SELECT attempt, step, median(start_ns) FILTER (metric = 'step_ms')::BIGINT AS start_ns,
    median(value) FILTER (metric = 'step_ms') AS step_ms, median(value) FILTER (metric = 'data_wait_ms') AS data_wait
  FROM rank_steps WHERE job = $job AND metric IN ('step_ms', 'data_wait_ms') AND rank % $stride = 0
  GROUP BY attempt, step),
long AS (
  SELECT attempt, step, max(value) FILTER (metric = 'checkpoint_ms') AS checkpoint,
    max(value) FILTER (metric = 'eval_ms') AS eval, max(value) FILTER (metric = 'compile_ms') AS compile
  FROM rank_steps WHERE job = $job AND metric IN ('checkpoint_ms', 'eval_ms', 'compile_ms') GROUP BY attempt, step)
SELECT p.attempt, p.step, p.start_ns, p.step_ms, p.data_wait, l.checkpoint, l.eval, l.compile
FROM pace p LEFT JOIN long l ON p.attempt = l.attempt AND p.step = l.step
WHERE p.step_ms IS NOT NULL AND p.start_ns BETWEEN $from_ns AND $to_ns ORDER BY p.start_ns
"""
_ENDS = """
SELECT attempt, max(time_ns) AS at_ns, count(DISTINCT rank) FILTER (name = 'closed') AS closed,
  count(*) FILTER (name = 'exited' AND (coalesce(TRY_CAST(attributes['exit_code'] AS INTEGER), 0) <> 0
    OR coalesce(TRY_CAST(attributes['signal'] AS INTEGER), 0) <> 0)) AS bad,
  count(DISTINCT rank) FILTER (name = 'exited') AS exited
FROM logs WHERE job = $job AND name IN ('exited', 'closed') AND rank >= 0 GROUP BY attempt
"""
_CHECKPOINTS = """
SELECT count(*) FILTER (name = 'checkpoint_saved') AS saved,
  count(*) FILTER (name = 'checkpoint_verified' AND lower(attributes['ok']) IN ('true', '1')) AS verified,
  count(*) FILTER (name = 'checkpoint_verified' AND lower(attributes['ok']) IN ('false', '0')) AS damaged
FROM logs WHERE job = $job AND time_ns BETWEEN $from_ns AND $to_ns
  AND name IN ('checkpoint_saved', 'checkpoint_verified')
"""
_BEATS = """
SELECT count(*) AS beats, sum(greatest(round((time_ns - before) / $interval) - 1, 0)) AS missed FROM (
  SELECT time_ns, lag(time_ns) OVER (PARTITION BY attempt, rank ORDER BY time_ns) AS before FROM logs
  WHERE job = $job AND name = 'heartbeat' AND rank >= 0 AND time_ns BETWEEN $from_ns AND $to_ns)
"""
_LAST_CHECKS = """
SELECT count(*) AS sums, count(DISTINCT value) AS different FROM (
  SELECT attributes['value'] AS value, step FROM logs
  WHERE job = $job AND attempt = $attempt AND name = 'checksum' AND rank >= 0 AND coalesce(attributes['what'], '') <> ''
  QUALIFY step = max(step) OVER ())
"""
_LAST_LOSS = """
SELECT arg_max(value, time_ns) AS loss, count(*) AS n FROM points
WHERE job = $job AND attempt = $attempt AND name = 'training.loss' AND label = ''
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """All that is known about a job's life in a window."""

    steps: Steps
    lives: tuple[Life, ...]
    troubles: tuple[Trouble, ...]
    liveness: float | None
    checkpoint_success: float | None
    checks: dict[str, bool | None] = field(default_factory=dict)
    world_size: int = 0


def read(store: EventStore, control: ControlStore, job: str, from_ns: int, to_ns: int) -> Record:
    """The record of ``job`` in ``[from_ns, to_ns]`` (Unix ns). Raises StoreUnavailable."""
    found = control.job(job)
    attempts = [] if found is None else [a for a in found.attempts if a.last_seen_ns >= from_ns]
    attempts = [a for a in attempts if a.first_seen_ns <= to_ns]
    world = max((a.world_size for a in attempts), default=0)
    span = {"job": job, "from_ns": from_ns, "to_ns": to_ns}
    return Record(
        steps=_steps(store, span, max(1, world // SAMPLED_RANKS)),
        lives=_lives(store, job, attempts, from_ns, to_ns),
        troubles=tuple(_trouble(r) for r in control.incidents(job) if _counts(r, from_ns, to_ns)),
        liveness=_liveness(store, span),
        checkpoint_success=_checkpoint_success(store, span),
        checks=_checks(store, control, job, attempts),
        world_size=world,
    )


def _steps(store: EventStore, span: dict[str, Any], stride: int) -> Steps:
    table = store.query(_STEPS, span | {"stride": stride})

    def floats(name: str) -> Any:
        return np.asarray(table.column(name).to_numpy(zero_copy_only=False), np.float64)

    return Steps(
        attempt=np.asarray(table.column("attempt").to_numpy(), np.int64),
        step=np.asarray(table.column("step").to_numpy(), np.int64),
        start_ns=np.asarray(table.column("start_ns").to_numpy(), np.int64),
        duration_ms=floats("step_ms"),
        phases={name: floats(name) for name in ("checkpoint", "eval", "compile", "data_wait")},
    )


def _lives(store: EventStore, job: str, attempts: list[AttemptRecord], from_ns: int, to_ns: int) -> tuple[Life, ...]:
    ends = {row["attempt"]: row for row in store.rows(_ENDS, {"job": job})}
    found = []
    for i, a in enumerate(attempts):
        end = ends.get(a.attempt)
        replaced = i + 1 < len(attempts)
        succeeded: bool | None = None
        if end is not None and end["bad"]:
            succeeded = False
        elif end is not None and max(end["closed"], end["exited"]) >= max(a.world_size, 1):
            succeeded = True
        elif replaced:
            succeeded = False  # somebody had to start it again
        found.append(
            Life(
                attempt=a.attempt, first_ns=max(a.first_seen_ns, from_ns), last_ns=min(a.last_seen_ns, to_ns),
                succeeded=succeeded if a.last_seen_ns <= to_ns else None,
            )
        )  # fmt: skip
    return tuple(found)


def _counts(record: IncidentRecord, from_ns: int, to_ns: int) -> bool:
    dismissed = record.incident.status is IncidentStatus.DISMISSED
    return not dismissed and record.opened_ns <= to_ns and (record.open or record.updated_ns >= from_ns)


def _stamp(record: IncidentRecord, name: str) -> int:
    text = record.incident.ledger.get(name, "")
    try:
        return int(np.datetime64(text.removesuffix("Z"), "ns").astype(np.int64)) if text else 0
    except ValueError:
        return 0


def _trouble(record: IncidentRecord) -> Trouble:
    incident = record.incident
    cause = str(incident.causes[0].category) if incident.causes else incident.kind
    return Trouble(
        cause=cause if cause != "unknown" else incident.kind,
        start_ns=_stamp(record, "onset") or record.opened_ns,
        end_ns=0 if record.open else _stamp(record, "verified") or record.updated_ns,
        fatal=incident.severity is Severity.P0 and incident.kind not in GOES_ON,
    )


def _liveness(store: EventStore, span: dict[str, Any]) -> float | None:
    row = store.rows(_BEATS, span | {"interval": HEARTBEAT_NS})[0]
    if not row["beats"]:
        return None
    missed = float(row["missed"] or 0.0)
    return float(row["beats"] / (row["beats"] + missed))


def _checkpoint_success(store: EventStore, span: dict[str, Any]) -> float | None:
    """Saved checkpoints that nobody found damaged; None where none was saved."""
    row = store.rows(_CHECKPOINTS, span)[0]
    return 1 - min(row["damaged"], row["saved"]) / row["saved"] if row["saved"] else None


def _checks(
    store: EventStore, control: ControlStore, job: str, attempts: list[AttemptRecord]
) -> dict[str, bool | None]:
    """State of the mandatory checks after the last recovery, on the newest attempt."""
    if not attempts:
        return {}
    newest = attempts[-1]
    key = {"job": job, "attempt": newest.attempt}
    sums, loss = store.rows(_LAST_CHECKS, key)[0], store.rows(_LAST_LOSS, key)[0]
    whole = store.rows(_CHECKPOINTS, {"job": job, "from_ns": 0, "to_ns": 2**62})[0]
    seen = len(control.ranks(job, newest.attempt))
    return {
        "ranks_report": seen >= newest.world_size if newest.world_size else None,
        "loss_finite": bool(loss["loss"] is not None and np.isfinite(loss["loss"])) if loss["n"] else None,
        "replicas_agree": sums["different"] == 1 if sums["sums"] > 1 else None,
        "checkpoint_verified": whole["damaged"] == 0 if whole["verified"] or whole["damaged"] else None,
    }


_THROUGHPUT = """
SELECT median(total) AS rate FROM (
  SELECT step, sum(value) AS total FROM points
  WHERE job = $job AND attempt = $attempt AND name = 'training.throughput' AND label = '' AND rank >= 0
    AND step >= (SELECT quantile_cont(step, 0.1) FROM points
      WHERE job = $job AND attempt = $attempt AND name = 'training.throughput')
  GROUP BY step)
"""


def throughput(store: EventStore, job: str, attempt: int) -> float | None:
    """Samples a second of an attempt: the ranks' rates summed, median over its steps after the first tenth."""
    rate = store.rows(_THROUGHPUT, {"job": job, "attempt": attempt})[0]["rate"]
    return float(rate) if rate is not None and np.isfinite(rate) and rate > 0 else None
