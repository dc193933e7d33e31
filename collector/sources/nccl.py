"""GPU times of NCCL's calls from the profiler plugin, by the same windows of one step as the kernels.

``lanterne run`` names the plugin to NCCL (``NCCL_PROFILER_PLUGIN``) where it is built and a device is there. Each call
of a window becomes a ``cuda.kernel`` span named after function, algorithm and protocol. The device's globaltimer is
brought to our clock by causality: a call starts after it was enqueued and has ended before it is read, so every call
narrows the interval in which the offset lies; half its width is told as the error.
"""

from __future__ import annotations

import os
from pathlib import Path
from time import monotonic_ns
from typing import Protocol

from lanterne import limits
from lanterne.collector.ring import Ring
from lanterne.cuda_probe import builder
from lanterne.cuda_probe.nccl import NcclCall, NcclRing

EVENT = "nccl_times"
LOOKS_MAX = 256


class Calls(Protocol):
    """The plugin's ring."""

    lost: int

    @property
    def abi_version(self) -> int: ...

    def skip(self) -> None: ...

    def drain(self) -> list[NcclCall]: ...


class Offset:
    """``host = device + ns`` within ``error_ns``; each call narrows the interval."""

    def __init__(self) -> None:
        self._low, self._high = -(1 << 62), 1 << 62

    def learn(self, call: NcclCall, read_ns: int) -> None:
        low, high = call.enqueued_ns - call.gpu_first_ns, read_ns - call.gpu_last_ns
        if low > self._high or high < self._low:  # the clocks drifted apart or one was set: begin anew
            self._low, self._high = low, high
        self._low, self._high = max(self._low, low), min(self._high, high)

    @property
    def ns(self) -> int:
        return (self._low + self._high) // 2

    @property
    def error_ns(self) -> int:
        return (self._high - self._low + 1) // 2


def plugin_in_use() -> NcclRing | None:
    """The ring of our plugin where this process names it to NCCL; None otherwise. Raises OSError."""
    path = os.environ.get("NCCL_PROFILER_PLUGIN", "")
    if Path(path).name != builder.NCCL_LIBRARY or not Path(path).exists():
        return None
    return NcclRing(path)


class NcclSource:
    """Reads the calls of every ``every``-th step, one step later so that they are done."""

    def __init__(self, ring: Ring, *, every: int, calls: Calls | None = None) -> None:
        self._ring, self._every = ring, every
        self._calls, self._looks = calls, 0
        self._offset = Offset()
        self._step, self._until_ns = -1, 0

    def boundary(self, step: int) -> None:
        """At the boundary before ``step``."""
        if not self._every or (self._calls is None and not self._load()):
            return
        calls = self._calls
        assert calls is not None
        if self._step >= 0 and not self._until_ns:
            self._until_ns = monotonic_ns()
        elif self._step >= 0:
            self._tell(calls)
        if self._step < 0 and step % self._every == 0:
            calls.skip()
            self._step = step

    def _load(self) -> bool:
        """Find the plugin that NCCL loaded; given up after some looks."""
        self._looks += 1
        if self._looks > LOOKS_MAX:
            return False
        found = plugin_in_use()
        if found is None:
            self._looks = LOOKS_MAX
        elif found.abi_version:
            self._calls = found
        return self._calls is not None

    def _tell(self, calls: Calls) -> None:
        found = [c for c in calls.drain() if c.enqueued_ns < self._until_ns]
        step, self._step, self._until_ns = self._step, -1, 0
        done, now = [c for c in found if c.done], monotonic_ns()
        for call in done:
            self._offset.learn(call, now)
        for call in done[: limits.KERNEL_SPANS_MAX]:
            name = " ".join(filter(None, ("nccl", call.function, call.algorithm, call.protocol)))
            self._ring.kernel(
                name, step, call.gpu_first_ns + self._offset.ns, max(0, call.gpu_last_ns - call.gpu_first_ns),
                device=0, stream=0, size=call.bytes, kind="nccl",
            )  # fmt: skip
        if found:
            took = sum(c.gpu_last_ns - c.gpu_first_ns for c in done) / 1e6
            said = {"calls": len(found), "done": len(done), "gpu_ms": round(took, 6), "lost": calls.lost}
            said |= {"clock_error_ns": self._offset.error_ns} if done else {}
            self._ring.note(EVENT, step, now, said)
