"""The fault library of the simulator: each fault changes true durations or numbers before the run.

``FAULTS`` maps a name to its injector. An injector takes the blank job, the culprit rank, the onset step
and a magnitude (1.0 = a moderate fault, about a third of the step) and records the :class:`Truth`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from lanterne.collector.sim.model import RANKS_PER_HOST, Happening, Job, Shape, Truth, blank, run
from lanterne.collector.sim.rough import roughen
from lanterne.errors import UsageError

Injector = Callable[[Job, int, int, float], None]


def _truth(
    job: Job, kind: str, category: str, onset: int, rank: int | None = None, ranks: tuple[int, ...] = ()
) -> None:
    host = None if rank is None else job.host(rank)
    job.truths.append(Truth(kind=kind, category=category, rank=rank, host=host, onset=onset))


def _compute_ms(job: Job) -> float:
    return job.shape.forward_ms + job.shape.backward_ms


def slow_compute(job: Job, rank: int, onset: int, size: float) -> None:
    for part in ("forward", "backward"):
        job.work[part][onset:, rank] *= 1 + 0.35 * size
    _truth(job, "slow_compute", "slow_compute", onset, rank)


def slow_backward(job: Job, rank: int, onset: int, size: float) -> None:
    job.work["backward"][onset:, rank] *= 1 + 0.5 * size
    _truth(job, "slow_backward", "slow_compute", onset, rank)


def thermal(job: Job, rank: int, onset: int, size: float) -> None:
    """Temperature climbs over ten steps, then the clock drops and compute follows."""
    heat = np.clip(np.arange(job.shape.steps - onset) / 10, 0, 1)
    job.series["gpu_temperature_c"][onset:, rank] += 28 * heat
    drop = np.where(heat >= 0.6, 0.26 * size, 0.0)
    job.series["gpu_clock_mhz"][onset:, rank] *= 1 - drop
    job.series["gpu_throttle"][onset:, rank] = np.where(drop > 0, 0x40, 0)
    for part in ("forward", "backward"):
        job.work[part][onset:, rank] /= 1 - drop
    _truth(job, "thermal", "thermal_throttle", onset + 6, rank)


def slow_data(job: Job, rank: int, onset: int, size: float) -> None:
    extra = 0.35 * size * _compute_ms(job) * np.exp(job.rng.normal(0, 0.1, job.shape.steps - onset))
    job.work["data"][onset:, rank] += extra
    job.series["loader_ms"][onset:, rank] += extra * 4
    _truth(job, "slow_data", "data_stall", onset, rank)


def gc_pause(job: Job, rank: int, onset: int, size: float) -> None:
    """A long collection on one rank every seventh step."""
    job.work["gc"][onset::7, rank] += 1.2 * size * _compute_ms(job)
    _truth(job, "gc_pause", "gc_pause", onset, rank)


def host_contention(job: Job, rank: int, onset: int, size: float) -> None:
    """A neighbour eats the CPUs of one host: all its ranks slow down together."""
    first = rank // RANKS_PER_HOST * RANKS_PER_HOST
    ranks = range(first, min(first + RANKS_PER_HOST, job.ranks))
    for r in ranks:
        for part in ("forward", "backward"):
            job.work[part][onset:, r] *= 1 + 0.3 * size * np.exp(job.rng.normal(0, 0.1, job.shape.steps - onset))
        job.series["host_cpu_percent"][onset:, r] += 55
        job.series["host_runqueue"][onset:, r] += 90
    job.truths.append(
        Truth(
            kind="host_contention", category="host_contention", rank=None, host=job.host(rank), onset=onset,
            ranks=tuple(ranks),
        )
    )  # fmt: skip


def slow_link(job: Job, rank: int, onset: int, size: float) -> None:
    """One host's link degrades: the transfers of every group that it is in take longer, nobody is late."""
    first = rank // RANKS_PER_HOST * RANKS_PER_HOST
    ranks = tuple(range(first, min(first + RANKS_PER_HOST, job.ranks)))
    hurt = list(ranks)
    job.work["transfer"][onset:, hurt] += 0.3 * size * _compute_ms(job)
    job.series["net_retries"][onset:, hurt] += job.rng.poisson(40 * size, (job.shape.steps - onset, len(hurt)))
    job.truths.append(
        Truth(kind="slow_link", category="slow_link", rank=None, host=job.host(rank), onset=onset, ranks=ranks)
    )


def sequence_imbalance(job: Job, rank: int, onset: int, size: float) -> None:
    """Token counts differ from step to step and rank to rank: a different rank is last each time."""
    del rank
    spread = np.exp(job.rng.normal(0, 0.28 * size, (job.shape.steps - onset, job.ranks)))
    job.series["tokens"][onset:] *= spread
    for part in ("forward", "backward"):
        job.work[part][onset:] *= spread
    _truth(job, "sequence_imbalance", "sequence_imbalance", onset)


def partition_imbalance(job: Job, rank: int, onset: int, size: float) -> None:
    """The last pipeline stage has more layers; needs pp > 1."""
    del rank
    if job.shape.pp < 2:
        raise UsageError("simulate: partition_imbalance needs pp of at least 2")
    last = [r for r in range(job.ranks) if job.mesh(r)["pp"] == job.shape.pp - 1]
    for part in ("forward", "backward"):
        job.work[part][onset:, last] *= 1 + 0.45 * size
    job.truths.append(
        Truth(
            kind="partition_imbalance", category="partition_imbalance", rank=None, host=None, onset=onset,
            ranks=tuple(last),
        )
    )  # fmt: skip


def checkpoint_stall(job: Job, rank: int, onset: int, size: float) -> None:
    every = job.shape.checkpoint_every or 50
    first = (onset // every + 1) * every - 1
    job.work["checkpoint"][first::every, rank] += 12_000 * size
    _truth(job, "checkpoint_stall", "checkpoint_stall", min(first, job.shape.steps - 1), rank)


def storage_slow(job: Job, rank: int, onset: int, size: float) -> None:
    del rank
    every = job.shape.checkpoint_every or 50
    first = (onset // every + 1) * every - 1
    job.work["checkpoint"][first::every] *= 1 + 9 * size
    _truth(job, "storage_slow", "storage_slow", min(first, job.shape.steps - 1))


def memory_leak(job: Job, rank: int, onset: int, size: float) -> None:
    """Host memory grows; near the end the allocator retries and compute slows."""
    n = job.shape.steps - onset
    job.series["rss_bytes"][onset:, rank] += np.arange(n) * 6e7 * size
    job.series["gpu_allocated_bytes"][onset:, rank] += np.arange(n) * 5e7 * size
    late = np.clip((np.arange(n) - 0.5 * n) / (0.5 * n), 0, 1)
    for part in ("forward", "backward"):
        job.work[part][onset:, rank] *= 1 + 0.25 * size * late
    _truth(job, "memory_leak", "memory_leak", onset, rank)


def out_of_memory(job: Job, rank: int, onset: int, size: float) -> None:
    del size
    job.series["gpu_allocated_bytes"][onset:, rank] = 7.95e10
    job.happenings.append(
        Happening(
            name="out_of_memory", rank=rank, step=onset,
            attributes={"allocated_bytes": int(7.95e10), "reserved_bytes": int(8e10)},
            body="CUDA out of memory. Tried to allocate 2.00 GiB",
        )
    )  # fmt: skip
    job.stopped_at = onset + 1
    _truth(job, "out_of_memory", "out_of_memory", onset, rank)


def bad_batch(job: Job, rank: int, onset: int, size: float) -> None:
    """One rank's batch has a huge gradient: local norm first, then the global norm, then everybody's loss."""
    local, total, loss = job.series["grad_norm_local"], job.series["grad_norm"], job.series["loss"]
    loss[onset, rank] += 6 * size
    local[onset, rank] *= 1 + 39 * size
    total[onset] = np.sqrt((local[onset] ** 2).mean())
    after = np.exp(-np.arange(min(12, job.shape.steps - onset - 1)) / 4)
    loss[onset + 1 : onset + 1 + len(after)] += 1.5 * size * after[:, None]
    job.happenings.append(
        Happening(name="batch", rank=rank, step=onset, attributes={"fingerprint": f"batch-{onset}-{rank}", "size": 8})
    )
    _truth(job, "bad_batch", "bad_batch", onset, rank)


def lr_jump(job: Job, rank: int, onset: int, size: float) -> None:
    del rank
    job.series["lr"][onset:] *= 1 + 9 * size
    loss = job.series["loss"]
    grow = 1 - np.exp(-np.arange(job.shape.steps - onset - 1) / 6)
    loss[onset + 1 :] += 3 * size * grow[:, None]
    job.series["grad_norm"][onset + 1 :] *= 1 + 3 * grow[:, None]
    job.series["grad_norm_local"][onset + 1 :] *= 1 + 3 * grow[:, None]
    _truth(job, "lr_jump", "lr_misconfigured", onset)


def overflow(job: Job, rank: int, onset: int, size: float) -> None:
    """The FP16 gradients of one rank overflow again and again; the scale collapses."""
    del size
    steps = range(onset, min(onset + 12, job.shape.steps))
    scale = 65536.0
    for step in steps:
        before, scale = scale, scale / 2
        job.series["loss_scale"][step:] = scale
        job.series["grad_nonfinite"][step, rank] = 320
        job.happenings.append(
            Happening(name="overflow", rank=rank, step=step, attributes={"scale_before": before, "scale_after": scale})
        )
    _truth(job, "overflow", "fp16_overflow", onset, rank)


def nonfinite(job: Job, rank: int, onset: int, size: float) -> None:
    """NaN in one rank's gradient; after the reduction every rank has it."""
    del size
    job.series["grad_nonfinite"][onset, rank] = 17
    job.series["loss"][onset, rank] = np.nan
    job.series["loss"][onset + 1 :] = np.nan
    job.series["grad_norm"][onset:] = np.nan
    job.happenings.append(
        Happening(
            name="nonfinite", rank=rank, step=onset,
            attributes={"parameter": "layers.3.mlp.weight", "count": 17, "where": "gradient"},
        )
    )  # fmt: skip
    _truth(job, "nonfinite", "nonfinite_values", onset, rank)


def replica_divergence(job: Job, rank: int, onset: int, size: float) -> None:
    del size
    every = 10
    checks = job.rng.random(job.shape.steps)[::every]
    job.series["parameter_checksum"][::every] = checks[:, None]
    first = -(-onset // every)
    job.series["parameter_checksum"][first * every :: every, rank] += 1e-3
    _truth(job, "replica_divergence", "replica_divergence", first * every, rank)


def hang(job: Job, rank: int, onset: int, size: float) -> None:
    """The rank stops inside the step; all others enter the collective and wait."""
    del size
    job.stopped_at = onset
    for r in range(job.ranks):
        job.happenings.append(
            Happening(
                name="stall", rank=r, step=onset,
                attributes={"phase": "forward" if r == rank else "backward", "waiting": r != rank, "stalled_s": 6.0},
            )
        )  # fmt: skip
    _truth(job, "hang", "rank_hung", onset, rank)


def crash(job: Job, rank: int, onset: int, size: float) -> None:
    del size
    job.stopped_at = onset
    job.happenings.append(Happening(name="exited", rank=rank, step=onset, attributes={"signal": 11}))
    _truth(job, "crash", "rank_crashed", onset, rank)


FAULTS: dict[str, Injector] = {
    f.__name__: f
    for f in (
        slow_compute, slow_backward, thermal, slow_data, gc_pause, host_contention, slow_link, sequence_imbalance,
        partition_imbalance, checkpoint_stall, storage_slow, memory_leak, out_of_memory, bad_batch, lr_jump, overflow,
        nonfinite, replica_divergence, hang, crash,
    )
}  # fmt: skip


def add_distractors(job: Job, level: float = 1.0) -> None:
    """Harmless coincidences: hot but unthrottled devices, one busy host, a benign overflow, far too small delays."""
    rng, t = job.rng, job.shape.steps
    for r in rng.choice(job.ranks, min(3, job.ranks), replace=False):
        at = int(rng.integers(20, max(21, t - 20)))
        job.series["gpu_temperature_c"][at:, r] += 6 * level
        job.series["host_cpu_percent"][at:, r] += 12 * level
        job.series["loader_ms"][at:, r] *= 1 + 0.5 * level
    at = int(rng.integers(20, max(21, t - 20)))
    job.series["loss_scale"][at:] /= 2
    victim = int(rng.integers(job.ranks))
    job.happenings.append(
        Happening(name="overflow", rank=victim, step=at, attributes={"scale_before": 65536.0, "scale_after": 32768.0})
    )
    job.work["data"][at:, int(rng.integers(job.ranks))] += 2.0 * level
    job.work["forward"][t // 2 :] *= 1.008


def _inject(job: Job, kind: str, rank: int, onset: int, size: float, heal_after: int | None) -> None:
    """One fault; where it heals, the rows after it are as if it had never been."""
    until = onset + (heal_after or job.shape.steps)
    well = {} if until >= job.shape.steps else {k: v[until:].copy() for k, v in (job.work | job.series).items()}
    before = len(job.happenings)
    FAULTS[kind](job, rank, onset, size)
    if not well or job.stopped_at is not None:
        return
    for name, rows in well.items():
        (job.work if name in job.work else job.series)[name][until:] = rows
    job.happenings[before:] = [h for h in job.happenings[before:] if h.step < until]
    job.truths[-1] = replace(job.truths[-1], until=until)


def simulate(
    shape: Shape,
    faults: tuple[tuple[str, int, int], ...] = (),
    *,
    seed: int = 0,
    size: float = 1.0,
    distract: bool = False,
    missing: float = 0.0,
    rough: float = 0.0,
    heal_after: int | None = None,
    name: str = "simulated",
) -> Job:
    """Simulate a job. ``faults`` are (kind, rank, onset step); ``missing``: share of silent ranks, never a culprit.

    ``rough``: level of healthy variability (``rough.py``). ``heal_after``: the faults last so many steps only.
    Raises :class:`UsageError` on an unknown fault, rank or step.
    """
    job = blank(name, seed, shape)
    if rough > 0:
        roughen(job, rough)
    for kind, rank, onset in faults:
        if kind not in FAULTS:
            raise UsageError(f"simulate: unknown fault {kind!r}; known: {', '.join(sorted(FAULTS))}")
        if not 0 <= rank < shape.ranks or not 0 <= onset < shape.steps:
            raise UsageError(
                f"simulate: rank {rank} or step {onset} is outside {shape.ranks} ranks, {shape.steps} steps"
            )
        _inject(job, kind, rank, onset, size, heal_after)
    if distract:
        add_distractors(job)
    if missing > 0:
        culprits = {t.rank for t in job.truths} | {r for t in job.truths for r in t.ranks}
        free = [r for r in range(job.ranks) if r not in culprits]
        count = min(len(free), round(missing * job.ranks))
        job.silent = tuple(sorted(int(r) for r in job.rng.choice(free, count, replace=False))) if count else ()
    return run(job)
