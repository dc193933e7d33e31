"""A seeded simulator of a synchronous training job: one call gives every rank's step as arrays.

A job is DP x PP x TP. Inside a step each rank loads data, runs the 1F1B pipeline over its micro-batches
(tensor-parallel peers wait for each other inside every operation), reduces gradients with its replicas
and runs the optimizer. Everything is a max-plus recurrence over the true clock; what a rank *reports* is
then taken through its own skewed, drifting clock. Faults (``faults.py``) change the true durations or
the numbers before the recurrence runs, so victims wait for culprits as they do in reality.

Nuisances that are always on: jitter, persistent small differences between ranks, natural one-off
stragglers, warm-up steps, a learning rate with warm-up and decay, periodic checkpoints, and a share of
each victim's wait leaking into its measured backward (overlapped buckets). ``rough.py`` adds heavier ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lanterne.errors import UsageError
from lanterne.nouns import group_name

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

RANKS_PER_HOST = 8
HOSTS_PER_SWITCH = 4
WARM_UP_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What is simulated. ``ranks = dp * pp * tp``; rank = (replica * pp + stage) * tp + shard. Times in ms."""

    dp: int = 8
    pp: int = 1
    tp: int = 1
    steps: int = 400
    micro_batches: int = 8
    data_ms: float = 4.0
    forward_ms: float = 80.0
    backward_ms: float = 160.0
    optimizer_ms: float = 8.0
    transfer_ms: float = 12.0
    checkpoint_every: int = 100
    checkpoint_ms: float = 900.0
    jitter: float = 0.012
    rank_spread: float = 0.008
    straggle_share: float = 0.03
    wait_leak: float = 0.15
    clock_offset_ms: float = 5.0
    clock_drift_ppm: float = 5.0
    network_jitter_us: float = 20.0

    def __post_init__(self) -> None:
        for name in ("dp", "pp", "tp", "steps", "micro_batches"):
            if getattr(self, name) < 1:
                raise UsageError(f"simulate: {name} is {getattr(self, name)}; it must be at least 1")

    @property
    def ranks(self) -> int:
        return self.dp * self.pp * self.tp


@dataclass(slots=True, kw_only=True)
class Collectives:
    """The data-parallel reductions. Arrays are ``[steps, buckets, ranks]`` in true ns since the start."""

    group: Ints  # [ranks] index into names
    names: tuple[str, ...]
    entered_ns: Ints
    completed_ns: Ints
    bytes: int


@dataclass(slots=True, kw_only=True)
class Happening:
    """A discrete event of a rank: ``name`` is an EventName, ``at_ns`` true ns since the start."""

    name: str
    rank: int
    step: int
    at_ns: int = 0
    attributes: dict[str, Any] = field(default_factory=dict)
    body: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """What was injected: the answer the engine must give. ``rank`` None = not one rank's fault."""

    kind: str
    category: str
    rank: int | None
    host: str | None
    onset: int
    ranks: tuple[int, ...] = ()
    until: int | None = None  # first step without the fault again; None = it lasts


@dataclass(slots=True, kw_only=True)
class Job:
    """A simulated job. ``work`` holds true durations (ms, ``[steps, ranks]``), ``series`` what was reported."""

    name: str
    seed: int
    shape: Shape
    rng: np.random.Generator
    work: dict[str, Floats]
    series: dict[str, Floats]
    happenings: list[Happening] = field(default_factory=list)
    truths: list[Truth] = field(default_factory=list)
    collectives: Collectives | None = None
    step_start_ns: Ints = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    clock_offset_ns: Floats = field(default_factory=lambda: np.zeros(0))
    clock_drift: Floats = field(default_factory=lambda: np.zeros(0))
    silent: tuple[int, ...] = ()
    stopped_at: int | None = None  # the step in which the job hung or died

    @property
    def ranks(self) -> int:
        return self.shape.ranks

    def host(self, rank: int) -> str:
        return f"node{rank // RANKS_PER_HOST:03d}"

    def switch(self, rank: int) -> str:
        return f"leaf{rank // (RANKS_PER_HOST * HOSTS_PER_SWITCH):02d}"

    def mesh(self, rank: int) -> dict[str, int]:
        s = self.shape
        return {"dp_replicate": rank // (s.pp * s.tp), "pp": rank // s.tp % s.pp, "tp": rank % s.tp}

    def own_clock_ns(self, rank: int, true_ns: Ints | int) -> Any:
        """True ns -> the rank's own clock: offset plus drift."""
        return true_ns + np.int64(self.clock_offset_ns[rank]) + (true_ns * self.clock_drift[rank]).astype(np.int64)


def blank(name: str, seed: int, shape: Shape) -> Job:
    """A healthy job before the recurrence: true durations and numeric series, no fault yet."""
    rng = np.random.default_rng(seed)
    t, r = shape.steps, shape.ranks
    spread = 1 + rng.normal(0, shape.rank_spread, r)

    def noisy(base: float, share: float = shape.jitter) -> Floats:
        return base * spread * np.exp(rng.normal(0, share, (t, r)))

    work = {
        "data": noisy(shape.data_ms, 0.08),
        "forward": noisy(shape.forward_ms),
        "backward": noisy(shape.backward_ms),
        "optimizer": noisy(shape.optimizer_ms, 0.03),
        "transfer": shape.transfer_ms * np.exp(rng.normal(0, 0.04, (t, r))),
        "checkpoint": np.zeros((t, r)),
        "eval": np.zeros((t, r)),
        "gc": np.zeros((t, r)),
    }
    lucky = rng.random((t, r)) < shape.straggle_share / max(r, 1)
    work["forward"] += lucky * shape.forward_ms * rng.uniform(0.1, 0.4, (t, r))
    work["forward"][:WARM_UP_STEPS] *= np.linspace(3, 1.2, min(WARM_UP_STEPS, t))[:, None][:t]
    if shape.checkpoint_every:
        work["checkpoint"][shape.checkpoint_every - 1 :: shape.checkpoint_every] = shape.checkpoint_ms
        work["checkpoint"] *= np.exp(rng.normal(0, 0.05, (t, r)))
    job = Job(name=name, seed=seed, shape=shape, rng=rng, work=work, series=_numbers(rng, shape))
    hosts = np.arange(r) // RANKS_PER_HOST
    scale = shape.clock_offset_ms * 1e6
    job.clock_offset_ns = rng.normal(0, scale, hosts[-1] + 1)[hosts]
    job.clock_drift = rng.normal(0, shape.clock_drift_ppm * 1e-6, hosts[-1] + 1)[hosts]
    return job


def _numbers(rng: np.random.Generator, shape: Shape) -> dict[str, Floats]:
    t, r = shape.steps, shape.ranks
    step = np.arange(t)
    warm = np.minimum(1, (step + 1) / max(1, t // 20))
    planned = 3e-4 * warm * (0.55 + 0.45 * np.cos(np.pi * step / t))
    common = 2 + 6 * np.exp(-step / (0.3 * t)) + rng.normal(0, 0.02, t)
    local = common[:, None] + rng.normal(0, 0.05, (t, r))
    norm = 1.2 + 1.5 * np.exp(-step / (0.2 * t))
    column = np.ones((1, r))
    tokens = np.full((t, r), 8192.0)
    return {
        "loss": local,
        "grad_norm_local": norm[:, None] * np.exp(rng.normal(0, 0.08, (t, r))),
        "grad_norm": (norm * np.exp(rng.normal(0, 0.04, t)))[:, None] * column,
        "grad_nonfinite": np.zeros((t, r)),
        "lr": planned[:, None] * column,
        "lr_planned": planned[:, None] * column,
        "loss_scale": np.full((t, r), 65536.0),
        "tokens": tokens,
        "rss_bytes": 8e9 + rng.normal(0, 4e6, (t, r)).cumsum(0) * 0.05,
        "gpu_allocated_bytes": 5e10 + rng.normal(0, 2e7, (t, r)),
        "gpu_reserved_bytes": np.full((t, r), 6e10),
        "gpu_clock_mhz": 1755 + rng.normal(0, 4, (t, r)),
        "gpu_temperature_c": 62 + rng.normal(0, 3, (1, r)) + rng.normal(0, 0.5, (t, r)),
        "gpu_throttle": np.zeros((t, r)),
        "gpu_power_w": 560 + rng.normal(0, 12, (t, r)),
        "host_cpu_percent": 38 + rng.normal(0, 3, (t, r)),
        "host_runqueue": 6 + rng.normal(0, 1, (t, r)),
        "net_retries": rng.poisson(0.2, (t, r)).astype(float),
        "loader_ms": 20 * np.exp(rng.normal(0, 0.08, (t, r))),
        "parameter_checksum": np.full((t, r), np.nan),
    }


def _pipeline_order(stage: int, pp: int, m: int) -> Iterator[tuple[str, int]]:
    """1F1B order of one stage: warm-up forwards, one forward one backward, the remaining backwards."""
    warm = min(m, pp - 1 - stage)
    yield from (("F", i) for i in range(warm))
    for i in range(m - warm):
        yield "F", warm + i
        yield "B", i
    yield from (("B", i) for i in range(m - warm, m))


def _schedule(pp: int, m: int) -> list[tuple[str, int, int]]:
    """All (kind, stage, micro-batch) in an order in which every dependency comes first."""
    queues = [list(_pipeline_order(s, pp, m)) for s in range(pp)]
    done: set[tuple[str, int, int]] = set()
    order: list[tuple[str, int, int]] = []
    while any(queues):
        for s, queue in enumerate(queues):
            while queue:
                kind, i = queue[0]
                before = ("F", s - 1, i) if kind == "F" else ("B", s + 1, i)
                if 0 <= before[1] < pp and before not in done:
                    break
                if kind == "B" and ("F", s, i) not in done:
                    break
                done.add((kind, s, i))
                order.append((kind, s, i))
                queue.pop(0)
    return order


def _compute(job: Job, t: int, ready: Floats) -> tuple[Floats, Floats]:
    """Run one step's pipeline from ``ready`` [ranks] (ms); returns end of backward and tensor-parallel wait."""
    s = job.shape
    cube = (s.dp, s.pp, s.tp)
    fwd = job.work["forward"][t].reshape(cube) / s.micro_batches
    bwd = job.work["backward"][t].reshape(cube) / s.micro_batches
    fwd_group, bwd_group = fwd.max(2), bwd.max(2)
    wait = ((fwd_group[:, :, None] - fwd) + (bwd_group[:, :, None] - bwd)) * s.micro_batches
    free = ready.reshape(cube).max(2)  # [dp, pp]
    hop = 0.3 if s.pp > 1 else 0.0
    ends: dict[tuple[str, int, int], Floats] = {}
    for kind, stage, i in _schedule_cached(s.pp, s.micro_batches):
        before = ends.get(("F", stage - 1, i) if kind == "F" else ("B", stage + 1, i))
        begin = free[:, stage] if before is None else np.maximum(free[:, stage], before + hop)
        end = begin + (fwd_group if kind == "F" else bwd_group)[:, stage]
        ends[kind, stage, i] = end
        free[:, stage] = end
    return np.repeat(free[:, :, None], s.tp, 2).reshape(-1), wait.reshape(-1)


_SCHEDULES: dict[tuple[int, int], list[tuple[str, int, int]]] = {}


def _schedule_cached(pp: int, m: int) -> list[tuple[str, int, int]]:
    if pp == 1:
        m = min(m, 8)
    key = (pp, m)
    if key not in _SCHEDULES:
        _SCHEDULES[key] = _schedule(pp, m)
    return _SCHEDULES[key]


def run(job: Job) -> Job:
    """Run the recurrence over all steps and fill ``series``, ``collectives`` and the step starts."""
    s = job.shape
    t_total, r = s.steps if job.stopped_at is None else min(s.steps, job.stopped_at), s.ranks
    buckets = 2 if s.pp == 1 and s.tp == 1 else 1
    groups = np.arange(r) % (s.pp * s.tp)
    names = tuple(group_name(np.flatnonzero(groups == g).tolist()) for g in range(s.pp * s.tp))
    now = np.zeros(r)
    starts = np.zeros((t_total, r))
    entered = np.zeros((t_total, buckets, r))
    completed = np.zeros((t_total, buckets, r))
    out = {k: np.zeros((t_total, r)) for k in ("step_ms", "wait_ms", "lateness_ms", "transfer_ms", "busy_ms")}
    out |= {k: np.zeros((t_total, r)) for k in ("forward_ms", "backward_ms", "gc_ms", "p2p_wait_ms", "tp_wait_ms")}
    for t in range(t_total):
        starts[t] = now
        own = {k: v[t] for k, v in job.work.items()}
        ready = now + own["data"] + own["gc"]
        back, tp_wait = _compute(job, t, ready)
        pipe_wait = np.maximum(back - ready - own["forward"] - own["backward"] - tp_wait, 0)
        for b in range(buckets):
            enter = back - own["backward"] * (0.5 if b < buckets - 1 else 0.0)
            if b:
                enter = np.maximum(enter, completed[t, b - 1])
            last = np.full(len(names), -np.inf)
            np.maximum.at(last, groups, enter)
            slow = np.zeros(len(names))
            np.maximum.at(slow, groups, own["transfer"] / buckets)
            exit_jitter = job.rng.exponential(s.network_jitter_us * 1e-3, r)
            entered[t, b], completed[t, b] = enter, (last + slow)[groups] + exit_jitter
        _report(out, t, entered[t], completed[t], own, groups, pipe_wait, tp_wait, s)
        pause = own["checkpoint"] + own["eval"]
        now = completed[t, -1] + own["optimizer"] + pause
        if pause.any():
            now = np.full(r, now.max())
        out["step_ms"][t] = now - starts[t]
    _finish(job, out, starts, entered, completed, groups, names, t_total)
    return job


def _report(
    out: Mapping[str, Floats], t: int, entered: Floats, completed: Floats, own: Mapping[str, Floats],
    groups: Ints, pipe_wait: Floats, tp_wait: Floats, s: Shape,
) -> None:  # fmt: skip
    late = np.zeros_like(entered)
    last = np.zeros_like(entered)
    for g in range(int(groups.max()) + 1):
        member = groups == g
        late[:, member] = entered[:, member] - np.median(entered[:, member], axis=1, keepdims=True)
        last[:, member] = entered[:, member].max(1, keepdims=True)
    wait = last - entered
    out["wait_ms"][t] = wait.sum(0) + pipe_wait + tp_wait
    out["p2p_wait_ms"][t] = pipe_wait
    out["tp_wait_ms"][t] = tp_wait
    out["lateness_ms"][t] = late.max(0)
    out["transfer_ms"][t] = (completed - last).sum(0)
    out["gc_ms"][t] = own["gc"]
    out["busy_ms"][t] = own["data"] + own["gc"] + own["forward"] + own["backward"]
    out["forward_ms"][t] = own["forward"] + own["gc"]
    out["backward_ms"][t] = own["backward"] + s.wait_leak * wait.sum(0) + pipe_wait + tp_wait


def _finish(
    job: Job, out: dict[str, Floats], starts: Floats, entered: Floats, completed: Floats,
    groups: Ints, names: tuple[str, ...], t_total: int,
) -> None:  # fmt: skip
    noise = job.shape.network_jitter_us * 1e-3
    out["lateness_ms"] += job.rng.normal(0, noise, out["lateness_ms"].shape)
    for name in list(job.series):
        job.series[name] = job.series[name][:t_total]
    job.series |= out
    job.series["data_wait_ms"] = job.work["data"][:t_total]
    job.series["optimizer_ms"] = job.work["optimizer"][:t_total]
    job.series["checkpoint_ms"] = job.work["checkpoint"][:t_total]
    job.series["eval_ms"] = job.work["eval"][:t_total]
    job.step_start_ns = (starts * 1e6).astype(np.int64)
    job.collectives = Collectives(
        group=groups,
        names=names,
        entered_ns=(entered * 1e6).astype(np.int64),
        completed_ns=(completed * 1e6).astype(np.int64),
        bytes=int(25e6),
    )
