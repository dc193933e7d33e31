"""torch.compile at work: the phase ``compile``, and an event for a frame that is compiled again and again.

The first compilation of a frame is what the user asked for, the second is how dynamic shapes are found out; from the
third on it is told as ``recompile`` (guards fail at every new shape).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from time import monotonic_ns
from typing import Any

from lanterne.collector.core import COMPILE
from lanterne.collector.sources.patches import Patches
from lanterne.collector.steps import Recorder
from lanterne.nouns import EventName

TOLD_MAX = 64
USUAL_COMPILATIONS = 2


class CompileSource:
    """Listens to dynamo's start and end of compilation. Installed when ``torch._dynamo`` is there, never imports it."""

    def __init__(self, recorder: Recorder, patches: Patches) -> None:
        self.recorder, self._patches = recorder, patches
        self._installed = False
        self._began: dict[int, int] = {}
        self._times: dict[str, int] = {}
        self._told = 0

    def look(self, _step: int = 0) -> None:
        """At attach and at step boundaries: listen as soon as dynamo is loaded."""
        if self._installed:
            return
        callback = sys.modules.get("torch._dynamo.callback")
        if callback is None:
            return
        self._installed = True
        handler = getattr(callback, "callback_handler", None)
        if handler is None:
            return
        for register, remove, call in (
            ("register_start_callback", "remove_start_callback", self._starts),
            ("register_end_callback", "remove_end_callback", self._ends),
        ):
            getattr(handler, register)(call)
            self._patches.add(_removal(getattr(handler, remove), call))

    def _starts(self, *_: Any) -> None:
        try:
            began = self.recorder.enter(COMPILE) if self.recorder.core.user_phase < 0 else monotonic_ns()
            self._began[threading.get_ident()] = began
        except Exception as error:
            self.recorder.failed("compile", error)

    def _ends(self, *given: Any) -> None:
        try:
            began = self._began.pop(threading.get_ident(), 0)
            if not began:
                return
            if self.recorder.core.user_phase < 0:
                self.recorder.leave(COMPILE, began)
            self._count(str(getattr(given[0], "compile_id", "")) if given else "", monotonic_ns() - began)
        except Exception as error:
            self.recorder.failed("compile", error)

    def _count(self, compile_id: str, took_ns: int) -> None:
        """``compile_id`` is "frame/compilation" ("3/0" is the first of frame 3), with a prefix in some versions."""
        frame, _, number = compile_id.rpartition("/")
        times = int(number) + 1 if number.isdigit() else self._times.get(frame, 0) + 1
        self._times[frame] = times
        if times <= USUAL_COMPILATIONS or self._told >= TOLD_MAX:
            return
        self._told += 1
        said = {"frame": frame, "times": times, "duration_ms": round(took_ns / 1e6, 3)}
        self.recorder.ring.note(EventName.COMPILE, self.recorder.step, monotonic_ns(), said)


def _removal(remove: Callable[[Any], None], call: Callable[..., None]) -> Callable[[], None]:
    return lambda: remove(call)
