"""The live feed of alignment: what the store has got of one attempt since the last look goes to its Aligner.

The store stamps every commit with its own time, so new rows are those stamped since the last look. A server clock
that was set back would hide some: the look reaches back as far again as the time since the last one, and after a
visible set-back everything that is kept is read anew. Repeated rows do no harm.
"""

from __future__ import annotations

from collections.abc import Sequence

from lanterne.backend.align import frame as rows
from lanterne.backend.align import matching
from lanterne.backend.align.clocks import snapshots_of
from lanterne.backend.align.frame import Store
from lanterne.backend.align.pending import pending_calls
from lanterne.backend.align.stream import BLOCK_STEPS, Aligned, Aligner


class Follower:
    """Alignment of the newest steps of one attempt. Not thread-safe."""

    def __init__(self, store: Store, job: str, attempt: int, keep_steps: int) -> None:
        self.store, self.job, self.attempt = store, job, attempt
        self.aligner = Aligner(keep_steps=keep_steps)
        self._looked_ns = 0
        self._since_ns = 0
        self._first = -1

    def catch_up(self, now_ns: int) -> None:
        """Read what is new. ``now_ns``: the server's Unix time. Raises what the store raises."""
        keep = self.aligner.keep_steps or 0
        if now_ns < self._looked_ns:
            self._since_ns = 0
        if self._first < 0:
            self._first = max(0, rows.last_step(self.store, self.job, self.attempt) - keep + 1)
            self._first -= self._first % BLOCK_STEPS
        first = max(self._first, self.aligner.first_step)
        frame, newest = rows.read_calls(self.store, self.job, self.attempt, first, self._since_ns)
        calls = matching.from_frame(frame, [c for c in pending_calls(frame.logs) if c.step < 0 or c.step >= first])
        self.aligner.push(calls, snapshots_of(frame), frame.hosts)
        if newest:
            self._since_ns = max(0, newest - max(0, now_ns - self._looked_ns)) if self._looked_ns else newest
        self._looked_ns = now_ns

    def aligned(self, ranks: Sequence[int] = (), *, since: int = 0) -> Aligned:
        """The answer on all that was read, without calls of steps before ``since`` (those of no step stay)."""
        return self.aligner.aligned(ranks).since(since)
