"""What-if on operation-level times: replay a pipeline step as a max-plus recurrence with some operations repaired.

One optimizer step of DP x PP training under 1F1B is: gather parameters, run the pipeline of each replica, then
synchronise each stage over the replicas, and update. With the durations of the single operations that is a
recurrence of maxima and sums; the counterfactual of a worker or a stage replaces its durations by the ideal ones
(the mean over all workers and steps, as in the What-if analysis of stragglers, OSDI 2025) and replays. All
candidates are replayed in one batch.

Arrays: ``forward``, ``backward`` ``[steps, replicas, stages, micro-batches]``; times in one unit, any.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lanterne.nouns import CauseCategory, Cost, Evidence, Subject

Floats = NDArray[np.float64]

NAMED_SHARE = 0.5
"""A worker or stage is named when repairing it alone wins back half of what is lost."""
SLOWDOWN_MIN = 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """Durations of one job. ``head``: before the pipeline, ``tail``: after it, both ``[steps]`` and free of waits;
    ``sync`` ``[steps, stages]``: reduction over the replicas of a stage, from its last arrival on."""

    forward: Floats
    backward: Floats
    head: Floats
    sync: Floats
    tail: Floats

    def __post_init__(self) -> None:
        steps, _, stages, _ = self.forward.shape
        if self.backward.shape != self.forward.shape:
            raise ValueError(f"forward {self.forward.shape} and backward {self.backward.shape} must have one shape")
        if self.head.shape != (steps,) or self.tail.shape != (steps,) or self.sync.shape != (steps, stages):
            raise ValueError(f"head and tail must be [{steps}], sync [{steps}, {stages}]")
        if not (np.isfinite(self.forward).all() and np.isfinite(self.backward).all()):
            raise ValueError("operations: a duration is missing; leave out steps that were not traced whole")


def schedule_1f1b(stages: int, micro_batches: int) -> list[tuple[str, int, int]]:
    """(kind, stage, micro-batch) of a 1F1B step in an order in which every dependency comes first; kind F or B."""
    queues: list[list[tuple[str, int]]] = []
    for s in range(stages):
        warm = min(stages - s - 1, micro_batches)
        queue = [("F", i) for i in range(warm)]
        for i in range(micro_batches - warm):
            queue += [("F", warm + i), ("B", i)]
        queues.append(queue + [("B", i) for i in range(micro_batches - warm, micro_batches)])
    done: set[tuple[str, int, int]] = set()
    order: list[tuple[str, int, int]] = []
    while any(queues):
        for s, queue in enumerate(queues):
            while queue:
                kind, i = queue[0]
                before = ("F", s - 1, i) if kind == "F" else ("B", s + 1, i)
                if (0 <= before[1] < stages and before not in done) or (kind == "B" and ("F", s, i) not in done):
                    break
                queue.pop(0)
                done.add((kind, s, i))
                order.append((kind, s, i))
    return order


def pipeline(forward: Floats, backward: Floats, order: list[tuple[str, int, int]]) -> Floats:
    """When each stage finishes: ``[..., stages, micro-batches] -> [..., stages]``; all start at 0."""
    shape, stages = forward.shape[:-2], forward.shape[-2]
    ends: dict[tuple[str, int, int], Floats] = {}
    free: list[Floats] = [np.zeros(shape) for _ in range(stages)]
    for kind, s, i in order:
        before = ends.get(("F", s - 1, i) if kind == "F" else ("B", s + 1, i))
        begin = free[s] if before is None else np.maximum(free[s], before)
        free[s] = ends[kind, s, i] = begin + (forward if kind == "F" else backward)[..., s, i]
    return np.stack(free, -1)


def step_times(operations: Operations, forward: Floats, backward: Floats) -> Floats:
    """Step durations ``[..., steps]`` for ``[..., steps, replicas, stages, micro-batches]`` durations."""
    order = schedule_1f1b(forward.shape[-2], forward.shape[-1])
    ends = pipeline(forward, backward, order).max(-2)
    return np.asarray(operations.head + (ends + operations.sync).max(-1) + operations.tail)


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """``slowdown`` = observed / ideal. ``worker_share [replicas, stages]``, ``stage_share [stages]``: how much of the
    loss repairing it alone wins back. ``worker`` and ``stage`` are named only where that is half of it or more."""

    observed: float
    ideal: float
    worker_share: Floats
    stage_share: Floats
    worker: tuple[int, int] | None
    stage: int | None

    @property
    def slowdown(self) -> float:
        return self.observed / self.ideal


def what_if(operations: Operations) -> WhatIf:
    """Replay the job as it was, ideal, and with each worker and each stage repaired."""
    forward, backward = operations.forward, operations.backward
    good_f, good_b = float(forward.mean()), float(backward.mean())
    observed = float(step_times(operations, forward, backward).mean())
    still = Operations(
        forward=np.full_like(forward, good_f),
        backward=np.full_like(backward, good_b),
        head=np.full_like(operations.head, np.median(operations.head)),
        sync=np.full_like(operations.sync, np.median(operations.sync)),
        tail=np.full_like(operations.tail, np.median(operations.tail)),
    )
    ideal = float(step_times(still, still.forward, still.backward).mean())
    lost = max(observed - ideal, 1e-12)
    _, replicas, stages, _ = forward.shape
    workers = [np.arange(replicas * stages) == k for k in range(replicas * stages)]
    masks = [m.reshape(replicas, stages) for m in workers]
    masks += [np.tile(np.arange(stages) == s, (replicas, 1)) for s in range(stages)]
    repaired = np.stack([_repaired(operations, m, good_f, good_b) for m in masks])
    share = (observed - repaired) / lost
    worker_share = share[: replicas * stages].reshape(replicas, stages)
    stage_share = share[replicas * stages :]
    worker, stage = _named(observed / ideal, worker_share, stage_share)
    return WhatIf(
        observed=observed, ideal=ideal, worker_share=worker_share, stage_share=stage_share, worker=worker, stage=stage
    )


def _repaired(operations: Operations, mask: NDArray[np.bool_], good_f: float, good_b: float) -> float:
    """Mean step with the masked workers at the ideal duration."""
    where = mask[None, :, :, None]
    return float(
        step_times(
            operations, np.where(where, good_f, operations.forward), np.where(where, good_b, operations.backward)
        ).mean()
    )


def _named(slowdown: float, workers: Floats, stages: Floats) -> tuple[tuple[int, int] | None, int | None]:
    """The smallest locus that explains the loss: a worker before its stage, nobody when neither does."""
    if slowdown < SLOWDOWN_MIN:
        return None, None
    best = int(workers.argmax())
    if workers.flat[best] >= NAMED_SHARE and workers.flat[best] >= 0.8 * stages.max():
        return (best // workers.shape[1], best % workers.shape[1]), None
    stage = int(stages.argmax())
    return None, stage if stages[stage] >= NAMED_SHARE else None


def cause_of(
    result: WhatIf, rank_of: dict[tuple[int, int], int]
) -> tuple[CauseCategory, Subject, Cost, Evidence] | None:
    """Category, subject, cost and sentence of a what-if; ``rank_of`` maps (replica, stage) to a rank. None = nobody."""
    cost = Cost(slowdown=result.slowdown)
    if result.worker is not None:
        share = float(result.worker_share[result.worker])
        rank = rank_of.get(result.worker)
        says = f"repairing replica {result.worker[0]}, stage {result.worker[1]} alone wins back {share:.0%} of the loss"
        return CauseCategory.SLOW_COMPUTE, Subject(rank=rank), cost, Evidence(says=says, value=share, unit="1")
    if result.stage is not None:
        share = float(result.stage_share[result.stage])
        best = float(result.worker_share.max())
        says = f"repairing stage {result.stage} wins back {share:.0%} of the loss, the best single worker {best:.0%}"
        evidence = Evidence(says=says, value=share, unit="1", baseline=best)
        return CauseCategory.PARTITION_IMBALANCE, Subject(), cost, evidence
    return None
