"""One step of a job on the job clock: who waited for whom, its critical path, and what if somebody had been normal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lanterne.backend.align import frame as rows
from lanterne.backend.align import matching, replay, stream
from lanterne.backend.align.clocks import snapshots_of
from lanterne.backend.align.critical_path import WORK, Stretch, critical_path
from lanterne.backend.align.frame import Frame, Ints, Store
from lanterne.backend.align.stream import Aligned

AROUND_STEPS = 8
"""Steps before and after that say what is normal, and tie the clocks."""
ROWS_MAX = 400_000
CANDIDATES_MAX = 32
PAIRS_MAX = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """``rank`` was blocked for ``wait_ns`` in ``calls`` calls of the step by ``waited_for``, who entered them last."""

    rank: int
    waited_for: int
    wait_ns: int
    calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """A step with what is around it; times are ns on the job clock."""

    step: int
    aligned: Aligned
    bounds: replay.Bounds
    phases: Sequence[replay.Phase]

    def begin_ns(self) -> int:
        """The first rank's start of the step; 0 where no step is stored."""
        mine = self.bounds.begin_ns[self.bounds.step == self.step]
        return int(mine.min()) if len(mine) else 0

    def path(self) -> list[Stretch]:
        """The critical path; own work carries the name of the phase that fills most of it, else ``other``."""
        here = self.bounds.step == self.step
        ends = dict(zip(self.bounds.rank[here].tolist(), self.bounds.end_ns[here].tolist(), strict=True))
        found = critical_path(self.aligned.calls, self.aligned.attribution, self.step, self.begin_ns(), ends)
        return [replace(s, name=self._doing(s)) if s.name == WORK else s for s in found]

    def _doing(self, stretch: Stretch) -> str:
        best, name = 0, "other"
        for phase in self.phases:
            mine = (phase.step == self.step) & (phase.rank == stretch.rank)
            shared = np.minimum(phase.end_ns[mine], stretch.end_ns) - np.maximum(phase.start_ns[mine], stretch.start_ns)
            total = int(np.maximum(shared, 0).sum())
            best, name = max((best, name), (total, phase.name), key=lambda found: found[0])
        return name

    def waits(self, most: int = PAIRS_MAX) -> list[Wait]:
        """Who waited for whom, the longest first; calls whose last member the clocks cannot tell apart are left out."""
        calls, a = self.aligned.calls, self.aligned.attribution
        mine = np.flatnonzero((calls.step == self.step) & a.whole & (a.last >= 0) & (a.last != calls.rank))
        packed = calls.rank[mine] * (1 << 32) + a.last[mine]
        pairs, at = np.unique(packed, return_inverse=True)
        blocked = np.bincount(at.reshape(-1), a.blocked_ns()[mine], len(pairs))
        count = np.bincount(at.reshape(-1), minlength=len(pairs))
        order = [i for i in np.argsort(-blocked, kind="stable")[:most].tolist() if blocked[i] > 0]
        who = [divmod(int(pairs[i]), 1 << 32) for i in order]
        return [
            Wait(rank=rank, waited_for=last, wait_ns=int(blocked[i]), calls=int(count[i]))
            for i, (rank, last) in zip(order, who, strict=True)
        ]

    def what_if(self, path: Sequence[Stretch], stages: Mapping[int, int]) -> replay.WhatIf | None:
        """Step time had a rank on the path, a stage or a phase been normal. Off the path nothing would have helped."""
        share: dict[int, int] = {}
        for stretch in path:
            share[stretch.rank] = share.get(stretch.rank, 0) + stretch.end_ns - stretch.start_ns
        ranks = sorted(share, key=lambda r: -share[r])[:CANDIDATES_MAX]
        return replay.what_if(
            self.aligned.calls, self.aligned.attribution, self.bounds, self.step, ranks=sorted(ranks), stages=stages,
            phases=self.phases,
        )  # fmt: skip


def read(store: Store, job: str, attempt: int, step: int, rows_of_step: int) -> StepView:
    """Read and align a step and its surroundings; fewer of them where a step has many rows."""
    around = max(1, min(AROUND_STEPS, ROWS_MAX // max(1, 2 * rows_of_step)))
    return of(rows.read_steps(store, job, attempt, max(0, step - around), step + around), step)


def of(frame: Frame, step: int) -> StepView:
    """The same of a frame's rows."""
    aligned = stream.whole(matching.from_frame(frame), snapshots_of(frame), frame.hosts, sorted(frame.hosts))
    spans, clocks = frame.spans, aligned.clocks

    def on_job_clock(mask: np.ndarray) -> tuple[Ints, Ints]:
        own = spans.start_ns[mask]
        offset, _ = clocks.offsets(spans.rank[mask], own, spans.monotonic_ns[mask])
        begin = own - offset.astype(np.int64)
        return begin, begin + np.maximum(spans.end_ns[mask] - own, 0)

    whole = np.flatnonzero(spans.kind.where("training.step") & (spans.rank >= 0))
    whole = whole[np.lexsort((spans.start_ns[whole], spans.rank[whole], spans.step[whole]))]
    first = np.ones(len(whole), bool)
    first[1:] = (np.diff(spans.rank[whole]) != 0) | (np.diff(spans.step[whole]) != 0)
    whole = whole[first]
    begin, end = on_job_clock(whole)
    phases = []
    kind = spans.kind.where("training.phase") & (spans.rank >= 0)
    for name in sorted({spans.name.values[c] for c in np.unique(spans.name.codes[kind])}):
        mask = np.flatnonzero(kind & spans.name.where(name))
        start, stop = on_job_clock(mask)
        phases.append(
            replay.Phase(name=name, step=spans.step[mask], rank=spans.rank[mask], start_ns=start, end_ns=stop)
        )
    bounds = replay.Bounds(step=spans.step[whole], rank=spans.rank[whole], begin_ns=begin, end_ns=end)
    return StepView(step=step, aligned=aligned, bounds=bounds, phases=phases)
