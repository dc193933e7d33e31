"""Simulated jobs with clocks that are far off, drift, step and sleep, and the truth beside what the ranks report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lanterne.backend.align import matching
from lanterne.backend.align.clocks import Clocks, Snapshot
from lanterne.collector.sim.faults import simulate
from lanterne.collector.sim.model import Job, Shape

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
START_NS = 1_760_000_000_000_000_000
BOOT_NS = 10**12
ONE_WAY_US = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The wall clock of ``host`` is set by ``by_ns`` at true ``at_ns``; asleep = it sleeps so long, all wait."""

    host: int
    at_ns: int
    by_ns: int
    asleep: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Skewed:
    """What the ranks report, and the truth: arrays [N] parallel to ``calls``, true ns since the start."""

    job: Job
    calls: matching.Calls
    hosts: dict[int, str]
    snapshots: list[Snapshot]
    entered_ns: Ints
    completed_ns: Ints
    offset_ns: Floats  # of each host
    drift: Floats
    steps: Sequence[Step]

    def wall(self, host: Ints, true_ns: Ints, *, stepped: bool = True) -> Ints:
        """Wall clock minus ``START_NS`` of each host at true times."""
        own = true_ns + self.offset_ns[host].astype(np.int64) + (true_ns * self.drift[host]).astype(np.int64)
        for step in self.steps if stepped else ():
            if not step.asleep:
                own = own + np.where((host == step.host) & (true_ns >= step.at_ns), step.by_ns, 0)
        found: Ints = own
        return found

    def outside(self, clocks: Clocks) -> tuple[int, int]:
        """(entries whose true offset is outside its interval, entries with a known interval)."""
        host = self.calls.rank // 8
        truth = self.wall(host, self.entered_ns)
        if clocks.reference == "server":
            truth = truth - self.entered_ns
        else:
            truth = truth - self.wall(np.zeros_like(host), self.entered_ns, stepped=False)
        offset, error = clocks.offsets(self.calls.rank, self.calls.entered_ns, self.calls.monotonic_ns)
        known = error < 1e15
        return int((np.abs(offset - truth) > error + 1.0)[known].sum()), int(known.sum())


def skewed(
    shape: Shape, *, seed: int = 0, offset_s: float = 10.0, drift_ppm: float = 20.0, steps: Sequence[Step] = (),
    ping_every_ns: int = 0, monotonic: bool = True, missing: float = 0.0,
) -> Skewed:  # fmt: skip
    """Simulate ``shape`` (8 ranks a host) and report it through bad clocks; ``ping_every_ns`` 0 = no exchanges."""
    job = simulate(shape, (), seed=seed, missing=missing)
    c = job.collectives
    assert c is not None
    rng = np.random.default_rng([seed, 77])
    count = (shape.ranks - 1) // 8 + 1
    offset, drift = rng.uniform(-offset_s, offset_s, count) * 1e9, rng.uniform(-drift_ppm, drift_ppm, count) * 1e-6
    live = np.setdiff1d(np.arange(shape.ranks), np.array(job.silent, np.int64))
    t, b, _ = c.entered_ns.shape
    rank = np.tile(live, t * b)
    sequence = np.repeat(np.arange(t * b), len(live))
    entered, completed = (x[:, :, live].reshape(-1) for x in (c.entered_ns, c.completed_ns))
    steps = list(steps)
    for i, step in enumerate(steps):
        if step.asleep and (entered >= step.at_ns).any():
            later = sequence >= sequence[entered >= step.at_ns].min() + 1
            edge = int(completed[~later].max())
            entered, completed = (x + later * step.by_ns for x in (entered, completed))
            steps[i] = replace(step, at_ns=edge)
    blank = Skewed(
        job=job, calls=matching.from_collectives([]), hosts={int(r): job.host(int(r)) for r in live}, snapshots=[],
        entered_ns=entered, completed_ns=completed, offset_ns=offset, drift=drift, steps=steps,
    )  # fmt: skip
    host = rank // 8
    own = blank.wall(host, entered)
    mono = entered + (entered * drift[host]).astype(np.int64) + BOOT_NS
    mono -= _slept(blank, host, entered)
    length = completed - entered  # as the collector does it: durations by the monotonic clock, where there is one
    done = own + length + (length * drift[host]).astype(np.int64) if monotonic else blank.wall(host, completed)
    zero = np.zeros(len(rank), np.int64)
    calls = matching.arrange(
        groups=c.names, ops=("allreduce",), signatures=("bfloat16|",), group=c.group[rank].astype(np.int64),
        sequence=sequence, rank=rank, step=sequence // b, bytes_=zero + c.bytes, op=zero, signature=zero,
        entered_ns=own + START_NS, completed_ns=done + START_NS,
        monotonic_ns=mono if monotonic else zero,
    )  # fmt: skip
    order = np.lexsort((rank, sequence, c.group[rank]))
    return Skewed(
        job=job, calls=calls, hosts=blank.hosts,
        snapshots=_pings(blank, rng, ping_every_ns, int(completed.max()), monotonic) if ping_every_ns else [],
        entered_ns=entered[order], completed_ns=completed[order], offset_ns=offset, drift=drift, steps=steps,
    )  # fmt: skip


def _slept(job: Skewed, host: Ints, true_ns: Ints) -> Ints:
    """How much of the time each host has slept, ns."""
    total = np.zeros(len(host), np.int64)
    for step in job.steps:
        if step.asleep:
            total += np.where(host == step.host, np.clip(true_ns - step.at_ns, 0, step.by_ns), 0)
    return total


def _pings(job: Skewed, rng: np.random.Generator, every_ns: int, end_ns: int, monotonic: bool) -> list[Snapshot]:
    found = []
    hosts = sorted({rank // 8 for rank in job.hosts})
    lead = {host: min(rank for rank in job.hosts if rank // 8 == host) for host in hosts}
    jitter = job.job.shape.network_jitter_us
    for at in range(0, end_ns, every_ns):
        for host in hosts:
            there, back = (np.int64(1e3 * (ONE_WAY_US + rng.exponential(jitter))) for _ in range(2))
            times = np.array([at, at + there, at + there + 5_000, at + there + back + 5_000], np.int64)
            own = job.wall(np.full(4, host), times)
            mono = int(times[3]) + int(times[3] * job.drift[host]) + BOOT_NS
            mono -= int(_slept(job, np.array([host]), times[3:])[0])
            found.append(
                Snapshot(
                    rank=lead[host], t0_ns=int(own[0]) + START_NS, t1_ns=int(times[1]) + START_NS,
                    t2_ns=int(times[2]) + START_NS, t3_ns=int(own[3]) + START_NS, monotonic_ns=mono if monotonic else 0,
                )
            )  # fmt: skip
    return found
