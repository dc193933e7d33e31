"""The nouns of Lanterne: every part speaks in these types. Standard library only.

Times are integer nanoseconds and carry their clock domain in the name: ``unix_ns`` (the rank's own
wall clock), ``monotonic_ns`` (the rank's own CLOCK_MONOTONIC), ``job_ns`` (after alignment).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from lanterne.limits import RANKS_MAX

NO_STEP = -1
NO_RANK = -1

AttributeValue = str | int | float | bool


class Phase(StrEnum):
    """What a rank does inside a step; ``other`` is the rest of the step's time."""

    DATA_WAIT = "data_wait"
    H2D = "h2d"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    CHECKPOINT = "checkpoint"
    EVAL = "eval"
    COMPILE = "compile"
    OTHER = "other"


LONG_PHASES = frozenset({Phase.CHECKPOINT, Phase.EVAL, Phase.COMPILE})
"""Phases that may last long without being a hang: each has its own learned bound."""


class Kind(StrEnum):
    """Kinds of Event. The first four are spans, METRIC is a point, EVENT is a log record."""

    STEP = "training.step"
    PHASE = "training.phase"
    COLLECTIVE = "training.collective"
    KERNEL = "cuda.kernel"
    METRIC = "metric"
    EVENT = "training.event"


class EventName(StrEnum):
    """``event.name`` of a ``training.event`` record. Attributes are listed in docs/wire.md."""

    ATTACHED = "attached"  # settings, seed, world size, host, versions, env fingerprint
    CLOSED = "closed"
    EXITED = "exited"  # written by the shipper: exit_code | signal, stderr_tail
    STALL = "stall"  # watchdog: phase, stalled_s, bound_s, stacks in the body, pending collective
    STALL_ENDED = "stall_ended"
    HEARTBEAT = "heartbeat"
    NONFINITE = "nonfinite"  # parameter, count, where = gradient | loss | parameter; before the reduction
    OVERFLOW = "overflow"  # GradScaler skipped the step: scale_before, scale_after
    OUT_OF_MEMORY = "out_of_memory"  # allocated_bytes, reserved_bytes, message
    GC_PAUSE = "gc_pause"  # generation, duration_ms
    COMPILE = "recompile"
    CHECKPOINT_SAVED = "checkpoint_saved"  # path, bytes, duration_ms, checksum
    CHECKPOINT_VERIFIED = "checkpoint_verified"  # ok, path, detail
    BATCH = "batch"  # fingerprint, sample_ids, size
    CHECKSUM = "checksum"  # of replicated parameters: value, what = parameters | gradients
    SEED = "seed"  # seeds per library, data_fingerprint
    EXCEPTION = "exception"  # type, message, stack
    COLLECTIVE_PENDING = "collective_pending"  # entered and not completed: op, group, group_sequence, …
    CLOCK_SNAPSHOT = "clock_snapshot"  # monotonic_ns and unix_ns read together; backend offsets
    STACKS = "stacks"  # Python stacks of all threads in the body, collected on order
    DEVICE_PROBE = "device_probe"  # the fixed GEMM and copy, on order: device, gemm_ms, copy_ms | error
    COMMAND = "command"  # id, phase = prepared | voted | committed | applied | refused | undone, detail
    OUTCOME = "outcome"  # id, metric, before, after
    SHED = "shed"  # the overhead meter switched a source off
    SOURCE_ABSENT = "source_absent"  # source, reason
    HOST_FINDING = "host_finding"  # of the host agent: state = begun | lasts | ended, category, host, source, what


class CauseCategory(StrEnum):
    """The closed list of causes (docs/causes.md has a page section for each)."""

    DATA_STALL = "data_stall"
    DATA_ORDER = "data_order"
    UNEVEN_INPUTS = "uneven_inputs"
    SLOW_COMPUTE = "slow_compute"
    THERMAL_THROTTLE = "thermal_throttle"
    HOST_CONTENTION = "host_contention"
    GC_PAUSE = "gc_pause"
    RECOMPILE = "recompile"
    GIL_HELD = "gil_held"
    SLOW_LINK = "slow_link"
    TOPOLOGY_MISMATCH = "topology_mismatch"
    NETWORK_FAILURE = "network_failure"
    SEQUENCE_IMBALANCE = "sequence_imbalance"
    PARTITION_IMBALANCE = "partition_imbalance"
    EXCLUSIVE_WORK = "exclusive_work"
    RANK_CRASHED = "rank_crashed"
    RANK_HUNG = "rank_hung"
    RANK_MISSING = "rank_missing"
    COLLECTIVE_MISMATCH = "collective_mismatch"
    COLLECTIVE_DIVERGENCE = "collective_divergence"
    EXTERNAL_TERMINATION = "external_termination"
    DEVICE_FAULT = "device_fault"
    OUT_OF_MEMORY = "out_of_memory"
    MEMORY_LEAK = "memory_leak"
    FRAGMENTATION = "fragmentation"
    SHARED_MEMORY_EXHAUSTED = "shared_memory_exhausted"
    BAD_BATCH = "bad_batch"
    LR_MISCONFIGURED = "lr_misconfigured"
    RESUME_STATE_LOST = "resume_state_lost"
    ACCUMULATION_ERROR = "accumulation_error"
    GRADIENT_EXPLOSION = "gradient_explosion"
    GRADIENT_VANISHING = "gradient_vanishing"
    NONFINITE_VALUES = "nonfinite_values"
    FP16_OVERFLOW = "fp16_overflow"
    LOSS_SCALE_COLLAPSE = "loss_scale_collapse"
    SCALER_MISUSE = "scaler_misuse"
    TRAINING_INSTABILITY = "training_instability"
    REPLICA_DIVERGENCE = "replica_divergence"
    SEED_MISMATCH = "seed_mismatch"
    CHECKPOINT_STALL = "checkpoint_stall"
    CHECKPOINT_CORRUPT = "checkpoint_corrupt"
    CHECKPOINT_INCOMPLETE = "checkpoint_incomplete"
    STORAGE_SLOW = "storage_slow"
    ENV_MISMATCH = "env_mismatch"
    VERSION_MISMATCH = "version_mismatch"
    DEVICE_MISASSIGNED = "device_misassigned"
    PARALLEL_CONFIG_INVALID = "parallel_config_invalid"
    INTERFACE_MISCONFIGURED = "interface_misconfigured"
    HOST_MISCONFIGURED = "host_misconfigured"
    UNKNOWN = "unknown"


class Severity(StrEnum):
    """P0 stops or ruins the job, P1 costs more than a tenth of it, P2 is the rest."""

    P0 = "P0"
    P1 = "P1"
    P2 = "P2"


class IncidentStatus(StrEnum):
    OPEN = "open"
    DIAGNOSED = "diagnosed"
    ACTING = "acting"
    VERIFYING = "verifying"
    RESOLVED = "resolved"
    DISMISSED = "dismissed"


MESH_AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who speaks: one worker process of one attempt of one job. Becomes the OTLP resource."""

    job: str
    attempt: int = 0
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    host: str = ""
    pid: int = 0
    backend: str = ""
    service_name: str = "lanterne"
    device: str = ""
    mesh: Mapping[str, int] = field(default_factory=dict)
    extra: Mapping[str, AttributeValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One immutable fact from one rank in that rank's own clock.

    ``sequence`` counts from 0 within (job, attempt, rank): the store is idempotent by it.
    ``unix_ns`` is the start; ``duration_ns`` is 0 for points and logs. ``value`` belongs to metrics,
    ``body`` (text) to log events. ``name`` is the phase, op, kernel, metric or event name.
    """

    kind: Kind
    name: str
    sequence: int
    lamport: int
    unix_ns: int
    monotonic_ns: int
    duration_ns: int = 0
    step: int = NO_STEP
    value: float | None = None
    body: str = ""
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)


# --- collectives ---------------------------------------------------------------------------------


def group_name(ranks: Iterable[int]) -> str:
    """Name a process group by its rank set: ``0-3`` or ``0,2,4-7``. Rank-local names never match.

    >>> group_name([3, 0, 1, 2])
    '0-3'
    """
    ordered = sorted(set(ranks))
    parts: list[str] = []
    start = previous = None
    for rank in ordered:
        if previous is not None and rank == previous + 1:
            previous = rank
            continue
        if start is not None:
            parts.append(str(start) if start == previous else f"{start}-{previous}")
        start = previous = rank
    if start is not None:
        parts.append(str(start) if start == previous else f"{start}-{previous}")
    return ",".join(parts)


def group_ranks(name: str) -> tuple[int, ...]:
    """Inverse of :func:`group_name`. Raises ValueError on text that is not a rank set of at most ``RANKS_MAX``."""
    ranks: list[int] = []
    for part in filter(None, name.split(",")):
        first, _, last = part.partition("-")
        low, high = int(first), int(last or first)
        if len(ranks) + high - low >= RANKS_MAX:
            raise ValueError(f"a group of more than {RANKS_MAX} ranks: {name[:40]!r}")
        ranks.extend(range(low, high + 1))
    return tuple(ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One call of one rank in one process group. Times in the rank's own Unix ns; 0 = not known.

    ``sequence`` is the order of the call within the group, counted from the attempt's start.
    ``entered_ns`` is the arrival (enqueue) and the only honest ground for naming a straggler;
    ``completed_ns`` 0 with ``entered_ns`` set is a pending call, the evidence of a hang.
    """

    rank: int
    group: str
    sequence: int
    op: str
    step: int = NO_STEP
    bytes: int = 0
    dtype: str = ""
    shape: str = ""
    scheduled_ns: int = 0
    entered_ns: int = 0
    completed_ns: int = 0
    site: str = ""


# --- clocks --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """``job_ns = unix_ns - offset_ns``, true within ``+- error_ns`` at ``at_ns`` (rank's own clock)."""

    rank: int
    offset_ns: int
    error_ns: int
    at_ns: int = 0
    drift_ppm: float = 0.0


# --- findings ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What a finding is about; None where it does not apply."""

    rank: int | None = None
    host: str | None = None
    group: str | None = None
    parameter: str | None = None
    batch: str | None = None
    device: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One sentence with a number behind it and a reference to the rows it came from."""

    says: str
    value: float | None = None
    unit: str = ""
    baseline: float | None = None
    ref: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """``action`` is a name from docs/actions.md or ``none``; ``says`` is the first step for a person."""

    action: str
    says: str
    parameters: Mapping[str, AttributeValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """``slowdown`` = observed / counterfactual step time (1.0 = none); ``gpu_hours`` lost so far."""

    slowdown: float | None = None
    gpu_hours: float | None = None
    saving_ms_per_step: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A ranked hypothesis. ``needs`` says what would settle it when the category is ``unknown``."""

    category: CauseCategory
    subject: Subject = Subject()
    since_step: int | None = None
    confidence: float = 0.0
    cost: Cost = Cost()
    evidence: Sequence[Evidence] = ()
    remedy: Remedy = Remedy(action="none", says="")
    needs: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptom:
    """Something visible that follows from a cause: victims are listed here, never as causes."""

    kind: str
    says: str
    subject: Subject = Subject()


@dataclass(frozen=True, slots=True, kw_only=True)
class Anomaly:
    """A detector's finding. ``score`` is unitless and comparable only within one ``kind``."""

    kind: str
    subject: Subject
    severity: Severity
    first_step: int
    last_step: int
    score: float
    says: str
    at_unix_ns: int = 0
    value: float | None = None
    unit: str = ""
    baseline: float | None = None
    fired_by: str = ""  # "level", "baseline" or "event": which rule of the two fired


LEDGER = ("onset", "detected", "diagnosed", "decided", "acted", "verified")


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    id: str
    kind: str
    severity: Severity
    status: IncidentStatus
    opened_step: int | None
    opened_at: str
    ledger: Mapping[str, str] = field(default_factory=dict)
    causes: Sequence[Cause] = ()
    symptoms: Sequence[Symptom] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """What the verdict rests on: counted loss, missing ranks, clock error (ns, median half-width)."""

    dropped_events: int = 0
    missing_ranks: Sequence[int] = ()
    clock_error_ns: int | None = None
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerState:
    """Whether a process group may be trusted: ``closed``, ``open`` or ``half_open`` (docs/detectors.md).

    ``failures`` are its standstills and mismatches of the last five minutes, at most three.
    """

    group: str
    state: str
    since_step: int | None = None
    opened_times: int = 0
    failures: int = 0
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    """What a service rule measured and whether it is broken. ``value`` and ``threshold`` share ``unit``."""

    rule: str
    broken: bool
    value: float
    threshold: float
    unit: str
    says: str
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The product. One JSON schema for CLI, REST and files (docs/report.schema.json)."""

    job: str
    healthy: bool
    verdict: str
    incidents: Sequence[Incident] = ()
    ranks_seen: int = 0
    ranks_expected: int = 0
    quality: Quality = Quality()
    breakers: Sequence[BreakerState] = ()  # those that moved; the rest are closed
    rules: Sequence[Ruling] = ()  # those that are broken


REPORT_SCHEMA = "lanterne.report/1"


def to_json(value: Any) -> Any:
    """Turn nouns into plain JSON containers; a Report gains its ``schema`` field. NaN and inf become None."""
    from dataclasses import fields, is_dataclass
    from math import isfinite

    if is_dataclass(value) and not isinstance(value, type):
        plain = {f.name: to_json(getattr(value, f.name)) for f in fields(value)}
        return {"schema": REPORT_SCHEMA, **plain} if isinstance(value, Report) else plain
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, str):
        return str(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_json(v) for v in value]
    if isinstance(value, float) and not isfinite(value):
        return None
    return value
