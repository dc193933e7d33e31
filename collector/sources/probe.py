"""Kernel times from the CUPTI probe, by windows of one step: every k-th step, and on a trigger.

A window opens at a step boundary and closes at the next one; its kernels become ``cuda.kernel`` totals in an event
``kernels`` of the rank (count and ms a name). Where the probe cannot collect, the reason is told once
(``source_absent``). While torch.profiler holds CUPTI the window is left out and counted. Nothing here raises.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from lanterne.cuda_probe import builder
from lanterne.cuda_probe.abi import Activity, Kinds, Probe, Status
from lanterne.nouns import AttributeValue, EventName

EVERY_DEFAULT = 100
KERNELS_SHOWN = 20
PASSING = frozenset({Status.BUSY, Status.IDLE})
"""Words after which a later window may succeed; all the others switch the source off."""


class Host(Protocol):
    """What the source needs of the session."""

    def put_event(self, name: EventName | str, /, body: str = "", attributes: Any = None) -> None: ...


def profiler_active() -> bool:
    """Does torch.profiler record in this process now? It holds CUPTI then."""
    autograd = sys.modules.get("torch.autograd.profiler")
    return bool(autograd is not None and getattr(autograd, "_is_profiler_enabled", False))


def totals(activities: Iterable[Activity]) -> list[tuple[str, int, float]]:
    """(name, count, ms) of each kernel, copy or other activity, longest first."""
    count: dict[str, int] = defaultdict(int)
    spent: dict[str, int] = defaultdict(int)
    for a in activities:
        count[a.name] += 1
        spent[a.name] += a.end_ns - a.start_ns
    return sorted(((n, count[n], spent[n] / 1e6) for n in count), key=lambda row: -row[2])


class ProbeSource:
    """Opens windows at step boundaries. Hang :meth:`boundary` on ``session.on_step_boundary``.

    ``every`` = 0 collects on triggers only. ``library`` is the built probe, by default this machine's build.
    """

    def __init__(self, host: Host, *, every: int = EVERY_DEFAULT, library: str | Path = "", cupti: str = "") -> None:
        self._host, self._every, self._cupti = host, every, cupti
        self._asked = 0
        self._open_step = -1
        self.passed_over = 0
        self.absent = ""
        self._probe: Probe | None = None
        path = Path(library) if library else builder.target_folder() / builder.LIBRARY
        try:
            if path.exists():
                self._probe = Probe(path)
            else:
                self._leave("not compiled yet; run: lanterne probe build")
        except (OSError, AttributeError) as error:
            self._leave(f"{path}: {error}")

    def trigger(self, steps: int = 1) -> None:
        """Collect the next ``steps`` steps whatever ``every`` says."""
        self._asked = max(self._asked, steps)

    def boundary(self, step: int) -> None:
        """At the boundary before ``step``: close the open window, open the next one where it is due."""
        if self._probe is None:
            return
        try:
            if self._open_step >= 0:
                self._close(self._probe)
            if self._asked or (self._every and step % self._every == 0):
                self._asked = max(0, self._asked - 1)
                self._open(self._probe, step)
        except Exception as error:  # a probe that fails is a probe less
            self._leave(f"{type(error).__name__}: {error}")

    def _open(self, probe: Probe, step: int) -> None:
        if profiler_active():
            self.passed_over += 1
            return
        status = probe.open(Kinds.KERNELS | Kinds.MEMCPY | Kinds.MEMSET, self._cupti)
        if status is Status.COLLECTING:
            self._open_step = step
        elif status in PASSING:
            self.passed_over += 1
        else:
            self._leave(f"{status.word}: {probe.reason}")

    def _close(self, probe: Probe) -> None:
        step, self._open_step = self._open_step, -1
        probe.close()
        rows = totals(probe.drain())
        _, error_ns = probe.clock
        attributes: dict[str, AttributeValue] = {
            "step": step, "kernels": sum(n for _, n, _ in rows), "device_ms": round(sum(ms for *_, ms in rows), 6),
            "lost": probe.lost, "clock_error_ns": error_ns, "passed_over": self.passed_over,
        }  # fmt: skip
        body = "\n".join(f"{ms:.6f} ms  {n}x  {name}" for name, n, ms in rows[:KERNELS_SHOWN])
        self._host.put_event("kernels", body, attributes)

    def _leave(self, reason: str) -> None:
        self.absent, self._probe = reason, None
        self._host.put_event(EventName.SOURCE_ABSENT, "", {"source": "cupti", "reason": reason})

    def close(self) -> None:
        """Close an open window; its kernels are told."""
        if self._probe is not None and self._open_step >= 0:
            try:
                self._close(self._probe)
            except Exception as error:
                self._leave(f"{type(error).__name__}: {error}")
