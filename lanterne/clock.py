"""Time is passed in. No module below the CLI and the servers' entry points calls ``time.*`` itself."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Two clocks of one host, in ns. ``unix_ns`` may step; ``monotonic_ns`` never runs backwards."""

    def unix_ns(self) -> int: ...

    def monotonic_ns(self) -> int: ...


class SystemClock:
    """The real clocks of this process (``time.time_ns``, ``time.monotonic_ns``)."""

    unix_ns = staticmethod(time.time_ns)
    monotonic_ns = staticmethod(time.monotonic_ns)


thread_cpu_ns = time.thread_time_ns
"""CPU time of the calling thread: what work cost, however long others kept it from the processor."""


class SimulatedClock:
    """A clock that moves only when told: ``advance`` moves both, ``step_wall`` is an NTP step."""

    def __init__(self, unix_ns: int = 1_700_000_000_000_000_000, monotonic_ns: int = 0) -> None:
        self._unix_ns = unix_ns
        self._monotonic_ns = monotonic_ns

    def unix_ns(self) -> int:
        return self._unix_ns

    def monotonic_ns(self) -> int:
        return self._monotonic_ns

    def advance(self, ns: int) -> None:
        if ns < 0:
            raise ValueError(f"advance: {ns} ns is negative; use step_wall for a wall clock that steps back")
        self._unix_ns += ns
        self._monotonic_ns += ns

    def step_wall(self, ns: int) -> None:
        self._unix_ns += ns
