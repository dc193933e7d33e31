"""A simulated job as the Events that its ranks would have sent, in their own clocks, ready for ring or wire."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from lanterne import wire
from lanterne.collector.sim.model import Happening, Job
from lanterne.nouns import AttributeValue, Event, Identity, Kind, Phase, group_name

START_UNIX_NS = 1_760_000_000_000_000_000

METRICS = {
    "loss": "training.loss",
    "grad_norm": "training.grad_norm",
    "grad_norm_local": "training.grad_norm_local",
    "grad_nonfinite": "training.grad_nonfinite",
    "lr": "training.lr",
    "lr_planned": "training.lr_planned",
    "loss_scale": "training.loss_scale",
    "tokens": "training.tokens",
    "gc_ms": "process.gc.time",
    "rss_bytes": "process.memory.usage",
    "gpu_allocated_bytes": "hw.gpu.memory.usage",
    "gpu_reserved_bytes": "hw.gpu.memory.reserved",
    "gpu_clock_mhz": "hw.gpu.clock",
    "gpu_temperature_c": "hw.temperature",
    "gpu_throttle": "hw.gpu.throttle",
    "gpu_power_w": "hw.power",
    "host_cpu_percent": "system.cpu.utilization",
    "host_runqueue": "system.cpu.runqueue",
    "net_retries": "system.network.retransmits",
    "parameter_checksum": "training.parameter_checksum",
}
"""Series of the simulator -> metric names of the wire."""
SCALES = {"host_cpu_percent": 0.01, "gc_ms": 1e-3}
"""Host CPU goes out as a share (UCUM ``1``), time in seconds."""

SHARD_CALL_NS = 2_000

PHASES = (
    (Phase.DATA_WAIT, "data_wait_ms"),
    (Phase.FORWARD, "forward_ms"),
    (Phase.BACKWARD, "backward_ms"),
    (Phase.OPTIMIZER, "optimizer_ms"),
    (Phase.CHECKPOINT, "checkpoint_ms"),
    (Phase.EVAL, "eval_ms"),
)


class _Rank:
    """Numbers the events of one rank in the order in which they are made."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank, self.sequence, self.lamport = job, rank, 0, 0

    def make(self, kind: Kind, name: str, true_ns: int, step: int, **rest: Any) -> Event:
        own = int(self.job.own_clock_ns(self.rank, np.array(true_ns, np.int64)))
        event = Event(
            kind=kind, name=name, sequence=self.sequence, lamport=self.lamport, step=step,
            unix_ns=START_UNIX_NS + own, monotonic_ns=own + 10**12, **rest,
        )  # fmt: skip
        self.sequence += 1
        self.lamport += 1
        return event


def identity(job: Job, rank: int) -> Identity:
    return Identity(
        job=job.name, rank=rank, local_rank=rank % 8, world_size=job.ranks, host=job.host(rank), pid=10_000 + rank,
        backend="nccl", device=f"cuda:{rank % 8}", mesh=job.mesh(rank), extra={"lanterne.switch": job.switch(rank)},
    )  # fmt: skip


def _phases(job: Job, me: _Rank, step: int, at: int) -> Iterator[Event]:
    for phase, series in PHASES:
        ms = float(job.series[series][step, me.rank])
        if ms > 0:
            yield me.make(Kind.PHASE, phase.value, at, step, duration_ns=int(ms * 1e6))
            at += int(ms * 1e6)


def _shard_calls(job: Job, me: _Rank, step: int) -> Iterator[Event]:
    """The calls inside the operations of one pipeline stage, as one a step: who is done waits for the last shard."""
    c, tp = job.collectives, job.shape.tp
    if c is None or tp == 1:
        return
    done, waited = (
        int(c.entered_ns[step, 0, me.rank]) - 2 * SHARD_CALL_NS,
        int(job.series["tp_wait_ms"][step, me.rank] * 1e6),
    )
    attributes: dict[str, AttributeValue] = {
        wire.GROUP: _shards(me.rank, tp),
        wire.GROUP_SEQUENCE: step,
        wire.BYTES: c.bytes // 16,
        wire.DTYPE: "bfloat16",
    }
    yield me.make(
        Kind.COLLECTIVE, "allreduce", done - waited, step, duration_ns=waited + SHARD_CALL_NS, attributes=attributes
    )


def _shards(rank: int, tp: int) -> str:
    """Name of the tensor-parallel group of a rank."""
    first = rank - rank % tp
    return group_name(range(first, first + tp))


def _reductions(job: Job, me: _Rank, step: int) -> Iterator[Event]:
    c = job.collectives
    if c is None:
        return
    for b in range(c.entered_ns.shape[1]):
        entered, completed = int(c.entered_ns[step, b, me.rank]), int(c.completed_ns[step, b, me.rank])
        attributes: dict[str, AttributeValue] = {
            wire.GROUP: c.names[int(c.group[me.rank])],
            wire.GROUP_SEQUENCE: step * c.entered_ns.shape[1] + b,
            wire.BYTES: c.bytes,
            wire.DTYPE: "bfloat16",
        }
        yield me.make(
            Kind.COLLECTIVE, "allreduce", entered, step, duration_ns=completed - entered, attributes=attributes
        )


def _numbers(job: Job, me: _Rank, step: int, at: int) -> Iterator[Event]:
    for series, name in METRICS.items():
        value = float(job.series[series][step, me.rank])
        if series == "parameter_checksum" and np.isnan(value):
            continue
        yield me.make(
            Kind.METRIC, name, at, step, value=value * SCALES.get(series, 1.0), attributes=_device(series, me.rank)
        )


def _device(series: str, rank: int) -> dict[str, AttributeValue]:
    """The label under which the allocator (``cuda:N``) or NVML (``gpuN``) tells of the rank's device."""
    if not series.startswith("gpu_"):
        return {}
    kind = "cuda:" if series in {"gpu_allocated_bytes", "gpu_reserved_bytes"} else "gpu"
    return {wire.LABEL: f"{kind}{rank % 8}"}


def to_events(job: Job) -> Iterator[tuple[Identity, int, list[Event]]]:
    """Yield (identity, step, events) step by step, rank by rank; silent ranks are left out.

    The Lamport counters of all members of a collective meet at its completion.
    """
    ranks = [_Rank(job, r) for r in range(job.ranks) if r not in job.silent]
    who = {me.rank: identity(job, me.rank) for me in ranks}
    happenings: dict[tuple[int, int], list[Any]] = {}
    for h in job.happenings:
        happenings.setdefault((h.step, h.rank), []).append(h)
    steps = len(job.step_start_ns)
    for step in range(steps):
        batches: list[tuple[_Rank, list[Event]]] = []
        for me in ranks:
            begin = int(job.step_start_ns[step, me.rank])
            length = int(job.series["step_ms"][step, me.rank] * 1e6)
            batch = [*_phases(job, me, step, begin), *_shard_calls(job, me, step), *_reductions(job, me, step)]
            batch += _numbers(job, me, step, begin + length)
            batch += _events_of(happenings.pop((step, me.rank), []), me, begin + length)
            batch.append(me.make(Kind.STEP, "step", begin, step, duration_ns=length))
            batches.append((me, batch))
        meet = max(me.lamport for me in ranks)
        for me, batch in batches:
            me.lamport = meet + 1
            yield who[me.rank], step, batch
    end = int(job.step_start_ns[-1].max()) if steps else 0
    for (step, rank), left in sorted(happenings.items()):
        speaker = next((m for m in ranks if m.rank == rank), None)
        if speaker is not None:
            told = [one for h in left for one in (h, *_open_calls(job, h))]
            yield who[rank], step, list(_events_of(told, speaker, end))


def _open_calls(job: Job, stall: Happening) -> list[Happening]:
    """The call in which a rank that waits stands: its shards' where the silent one is of them, else its replicas'."""
    c, tp = job.collectives, job.shape.tp
    if stall.name != "stall" or not stall.attributes.get("waiting") or c is None:
        return []
    silent = {h.rank for h in job.happenings if h.name == "stall" and not h.attributes.get("waiting")}
    mine = stall.rank - stall.rank % tp
    held = tp > 1 and any(rank - rank % tp == mine for rank in silent)
    attributes: dict[str, AttributeValue] = {
        "op": "allreduce",
        "group": _shards(stall.rank, tp) if held else c.names[int(c.group[stall.rank])],
        "group_sequence": stall.step * (1 if held else c.entered_ns.shape[1]),
        "bytes": c.bytes // 16 if held else c.bytes,
    }
    return [Happening(name="collective_pending", rank=stall.rank, step=stall.step, attributes=attributes)]


def _events_of(happenings: list[Any], me: _Rank, at: int) -> Iterator[Event]:
    for h in happenings:
        yield me.make(Kind.EVENT, h.name, h.at_ns or at, h.step, attributes=h.attributes, body=h.body)
