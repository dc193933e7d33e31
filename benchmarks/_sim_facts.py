"""A simulated job as Facts, without going over the wire: for benchmarks of the causal engine and detectors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lanterne.backend.align import clocks, matching, series, waits
from lanterne.causal.facts import FactEvent, Facts, Place, Waits
from lanterne.collector.sim.events import START_UNIX_NS
from lanterne.collector.sim.model import Job
from lanterne.nouns import Collective, Quality


def _waits(job: Job, ranks: list[int]) -> Waits:
    c = job.collectives
    if c is None:
        return Waits()
    entered = c.entered_ns[:, :, ranks] / 1e6
    completed = c.completed_ns[:, :, ranks] / 1e6
    t, b, r = entered.shape
    group = c.group[ranks]
    median, last = np.zeros_like(entered), np.zeros_like(entered)
    for g in np.unique(group):
        member = group == g
        median[:, :, member] = np.median(entered[:, :, member], axis=2, keepdims=True)
        last[:, :, member] = entered[:, :, member].max(2, keepdims=True)
    noise = job.rng.normal(0, job.shape.network_jitter_us * 1e-3, entered.shape)
    step = np.broadcast_to(np.arange(t)[:, None, None], entered.shape)
    sequence = step * b + np.arange(b)[None, :, None]
    return Waits(
        group=c.names,
        group_index=np.broadcast_to(group, entered.shape).reshape(-1).astype(np.int64),
        sequence=sequence.reshape(-1).astype(np.int64),
        step=step.reshape(-1).astype(np.int64),
        rank=np.broadcast_to(np.array(ranks), entered.shape).reshape(-1).astype(np.int64),
        bytes=np.full(t * b * r, c.bytes, np.int64),
        lateness_ms=(entered - median + noise).reshape(-1),
        wait_ms=(last - entered).reshape(-1),
        transfer_ms=(completed - last).reshape(-1),
        error_ms=np.full(t * b * r, 2 * job.shape.network_jitter_us * 1e-3),
    )


def _pending(job: Job, ranks: list[int]) -> list[Collective]:
    """Last completed call of each rank and, after a hang or crash, the call in which the others wait."""
    c = job.collectives
    if c is None or not len(c.entered_ns):
        return []
    buckets = c.entered_ns.shape[1]
    last = len(c.entered_ns) - 1
    dead = {t.rank for t in job.truths if t.category in {"rank_hung", "rank_crashed", "out_of_memory"}}
    found: list[Collective] = []
    for r in ranks:
        name = c.names[int(c.group[r])]
        found += [
            Collective(
                rank=r, group=name, sequence=last * buckets + b, op="allreduce", step=last, bytes=c.bytes,
                entered_ns=START_UNIX_NS + int(c.entered_ns[last, b, r]),
                completed_ns=START_UNIX_NS + int(c.completed_ns[last, b, r]),
            )
            for b in range(buckets)
        ]  # fmt: skip
        if job.stopped_at is not None and dead and r not in dead:
            found.append(
                Collective(
                    rank=r, group=name, sequence=(last + 1) * buckets, op="allreduce", step=last + 1, bytes=c.bytes,
                    entered_ns=START_UNIX_NS + int(c.completed_ns[last, -1, r]) + 50_000_000,
                )
            )  # fmt: skip
    return found


def aligned_facts(job: Job) -> Facts:
    """As :func:`facts_of`, but lateness, waits and busy time come from the ranks' own skewed clocks through alignment,
    so that groups with silent members are seen as a live store sees them."""
    facts = facts_of(job)
    c = job.collectives
    if c is None or not len(facts.steps):
        return facts
    live = np.array(facts.ranks)
    t, b, _ = c.entered_ns.shape
    rank, call = np.tile(live, t * b), np.repeat(np.arange(t * b), len(live))
    entered, completed = (x[:, :, live].reshape(-1) for x in (c.entered_ns, c.completed_ns))
    own = entered + job.clock_offset_ns[rank].astype(np.int64) + (entered * job.clock_drift[rank]).astype(np.int64)
    zero = np.zeros(len(rank), np.int64)
    calls = matching.arrange(
        groups=c.names, ops=("allreduce",), signatures=("bfloat16|",), group=c.group[rank], sequence=call, rank=rank,
        step=call // b, bytes_=zero + c.bytes, op=zero, signature=zero, entered_ns=own + START_UNIX_NS,
        completed_ns=own + (completed - entered) + START_UNIX_NS, monotonic_ns=own + 10**12,
    )  # fmt: skip
    found = clocks.estimate(calls, hosts={r: job.host(r) for r in facts.ranks})
    attribution = waits.attribute(calls, found)
    start = job.step_start_ns[:, live]
    axes = series.Grid(steps=facts.steps, ranks=live, start_ns=start, end_ns=start)
    seen = {k: v for k, v in facts.series.items() if k not in {"lateness_ms", "wait_ms", "transfer_ms", "busy_ms"}}
    seen |= series.waiting(calls, attribution, axes, facts.series["step_ms"])
    if job.shape.pp > 1 or job.shape.tp > 1:  # own time under a pipeline comes from the device, not from reductions
        seen["busy_ms"] = facts.series["busy_ms"]
    return replace(facts, series=seen, waits=waits.as_facts(calls, attribution))


def facts_of(job: Job) -> Facts:
    """Facts of the whole run; silent ranks are missing columns."""
    ranks = [r for r in range(job.ranks) if r not in job.silent]
    steps = len(job.step_start_ns)
    series = {k: np.ascontiguousarray(v[:steps, ranks]) for k, v in job.series.items()}
    c = job.collectives
    groups = {} if c is None else {n: tuple(np.flatnonzero(c.group == i).tolist()) for i, n in enumerate(c.names)}
    end = int(job.step_start_ns[-1].max()) if steps else 0
    return Facts(
        job=job.name,
        ranks_expected=job.ranks,
        ranks=tuple(ranks),
        steps=np.arange(steps),
        series=series,
        places={
            r: Place(host=job.host(r), device=f"cuda:{r % 8}", switch=job.switch(r), mesh=job.mesh(r)) for r in ranks
        },
        waits=_waits(job, ranks),
        collectives=_pending(job, ranks),
        events=[
            FactEvent(
                name=h.name, rank=h.rank, step=h.step, host=job.host(h.rank), attributes=h.attributes, body=h.body,
                job_ns=START_UNIX_NS + (h.at_ns or end),
            )
            for h in job.happenings
            if h.rank in ranks
        ],
        groups=groups,
        now_ns=START_UNIX_NS + end,
        ended=job.stopped_at is not None,
        sources=("simulator",),
        quality=Quality(missing_ranks=job.silent, clock_error_ns=40_000),
    )  # fmt: skip
