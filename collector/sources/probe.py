"""Kernel times from the CUPTI probe, by windows of one step: every k-th step, and on a trigger.

A window opens at a step boundary; at the next one it stops taking launches in, and when the device has done what was
launched in it (an event on its streams, asked and never waited for) it is closed. The longest kernels and copies
become ``cuda.kernel`` spans of their step, the sums of all go into an event ``kernels``. Where the probe cannot
collect, the reason is told once (``source_absent``); without a CUDA device there is nothing to tell. While
torch.profiler holds CUPTI the window is left out and counted. NVTX ranges come along where the process was started
with ``NVTX_INJECTION64_PATH`` (NVTX reads it at its first call, so it cannot be set later). Nothing here raises.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from time import monotonic_ns
from typing import Any, Protocol

from lanterne import limits
from lanterne.collector.ring import Ring
from lanterne.cuda_probe import builder
from lanterne.cuda_probe.abi import Kinds, Probe, Status, Taken
from lanterne.nouns import AttributeValue, EventName

EVERY_DEFAULT = 100
KERNELS_SHOWN = 20
FIRST_LOOKS = 64
"""Boundaries at which a CUDA device is looked for; a process that has not used one by then trains without."""
PASSING = frozenset({Status.BUSY, Status.IDLE})
"""Words after which a later window may succeed; all the others switch the source off."""
EVENT = "kernels"


def profiler_active() -> bool:
    """Does torch.profiler record in this process now? It holds CUPTI then."""
    autograd = sys.modules.get("torch.autograd.profiler")
    return bool(autograd is not None and getattr(autograd, "_is_profiler_enabled", False))


def _cuda() -> Any:
    """torch.cuda where this process uses a device, else None. Initialises nothing."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None


class Done(Protocol):
    """Has the device done what was launched before? (torch.cuda.Event)"""

    def query(self) -> bool: ...


class _NoDevice:
    def query(self) -> bool:
        return True


def _mark() -> Done:
    """An event behind everything that was launched on the current stream."""
    cuda = _cuda()
    if cuda is None:
        return _NoDevice()
    event: Done = cuda.Event()
    event.record()  # type: ignore[attr-defined]
    return event


class ProbeSource:
    """Opens windows at step boundaries. Hang :meth:`boundary` on ``session.on_step_boundary``.

    ``every`` = 0 collects on triggers only. ``library`` is the built probe, by default this machine's build; ``cupti``
    a CUPTI to load where the process has none mapped; given, no CUDA device is looked for beforehand.
    """

    def __init__(self, ring: Ring, *, every: int = EVERY_DEFAULT, library: str | Path = "", cupti: str = "") -> None:
        self._ring, self._every, self._cupti = ring, every, cupti
        self._library = Path(library) if library else None
        self._asked = self._looks = 0
        self._open_step = -1
        self._ranges = Kinds.RANGES if os.environ.get("NVTX_INJECTION64_PATH") else Kinds(0)
        self._stopped: Done | None = None
        self.passed_over = 0
        self.absent = ""
        self._probe: Probe | None = None

    @property
    def collects(self) -> bool:
        """Is the probe loaded and not given up?"""
        return self._probe is not None

    def trigger(self, steps: int = 1) -> None:
        """Collect the next ``steps`` steps whatever ``every`` says. From any thread."""
        self._asked = max(self._asked, steps)

    def boundary(self, step: int) -> None:
        """At the boundary before ``step``: close the open window, open the next one where it is due."""
        if self._probe is None and not (self._looks <= FIRST_LOOKS and not self.absent and self._load(step)):
            return
        probe = self._probe
        assert probe is not None
        try:
            if self._open_step >= 0 and not self._closed(probe, step):
                return
            if self._asked or (self._every and step % self._every == 0):
                self._asked = max(0, self._asked - 1)
                self._open(probe, step)
        except Exception as error:  # a probe that fails is a probe less
            self._leave(f"{type(error).__name__}: {error}", step)

    def _load(self, step: int) -> bool:
        """Load the probe once a device is in use. False as long as there is none, and for good after the last look."""
        self._looks += 1
        if not (self._cupti or self._asked or _cuda() is not None):
            return False
        path = self._library or builder.target_folder() / builder.LIBRARY
        try:
            if path.exists():
                self._probe = Probe(path)
            else:
                self._leave("not compiled yet; run: lanterne probe build", step)
        except (OSError, AttributeError) as error:
            self._leave(f"{path}: {error}", step)
        return self._probe is not None

    def _open(self, probe: Probe, step: int) -> None:
        if profiler_active():
            self.passed_over += 1
            return
        status = probe.open(Kinds.KERNELS | Kinds.MEMCPY | Kinds.MEMSET | self._ranges, self._cupti)
        if status is Status.COLLECTING:
            self._open_step = step
        elif status in PASSING:
            self.passed_over += 1
        else:
            self._leave(f"{status.word}: {probe.reason}", step)

    def _closed(self, probe: Probe, step: int) -> bool:
        """Go on with closing the window; True once it is closed and told."""
        if self._stopped is None:
            if step <= self._open_step:
                return False
            probe.stop()
            self._stopped = _mark()
        if not self._stopped.query():
            return False
        self._close(probe)
        return True

    def _close(self, probe: Probe) -> None:
        step, self._open_step, self._stopped = self._open_step, -1, None
        probe.close()
        taken = probe.take(limits.KERNEL_SPANS_MAX)
        for a in taken.activities:
            size = a.size if a.kind not in ("kernel", "range") else 0
            self._ring.kernel(
                a.name[: limits.KERNEL_NAME_CHARS_MAX], step, a.start_ns, max(0, a.end_ns - a.start_ns),
                device=a.device, stream=a.stream, size=size, kind=a.kind,
            )  # fmt: skip
        if taken.records or taken.lost:
            self._tell(taken, step, probe.clock[1])

    def _tell(self, taken: Taken, step: int, clock_error_ns: int) -> None:
        attributes: dict[str, AttributeValue] = {
            "kernels": taken.records, "device_ms": round(taken.busy_ns / 1e6, 6),
            "kernel_ms": round(sum(ns for *_, ns in taken.totals) / 1e6, 6), "lost": taken.lost,
            "shown": len(taken.activities), "clock_error_ns": clock_error_ns, "passed_over": self.passed_over,
        }  # fmt: skip
        if taken.totals:
            name, count, ns = taken.totals[0]
            attributes |= {"longest": name[: limits.KERNEL_NAME_CHARS_MAX], "longest_ms": round(ns / 1e6, 6)}
            attributes["longest_count"] = count
        lines = [f"{ns / 1e6:.6f} ms  {n}x  {name}" for name, n, ns in taken.totals[:KERNELS_SHOWN]]
        self._ring.note(EVENT, step, monotonic_ns(), attributes, "\n".join(lines))

    def _leave(self, reason: str, step: int) -> None:
        self.absent, self._probe = reason, None
        self._ring.note(EventName.SOURCE_ABSENT, step, monotonic_ns(), {"source": "cupti", "reason": reason})
        self._ring.count("source_absent")

    def close(self) -> None:
        """Close an open window; its kernels are told."""
        if self._probe is not None and self._open_step >= 0:
            try:
                self._close(self._probe)
            except Exception as error:
                self._leave(f"{type(error).__name__}: {error}", self._open_step)
