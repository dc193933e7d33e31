"""Signs of life and death inside the trainer: stacks on a signal, torch's worker server, exceptions, memory, garbage.

The stacks are written by faulthandler's C handler, so they come also while the main thread sits in C code or another
thread holds the interpreter's lock. The handler is on a real-time signal that nobody uses; the user's handlers stay.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic_ns
from types import TracebackType
from typing import Any

from lanterne import limits
from lanterne.blackbox_files import SEPARATOR
from lanterne.collector.sources.patches import Patches
from lanterne.collector.steps import Recorder
from lanterne.nouns import EventName

GC_EVENT_NS = 10_000_000
SOCKET_PATH_MAX = 100
LOG_ERROR = 2
_GC_KEYS = SEPARATOR.join(("generation", "duration_ms", "collected"))
_MEMORY_WORDS = ("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory")


def register_stacks(path: Path) -> int:
    """Dump all Python stacks into ``path`` on a free real-time signal; returns the signal, 0 where none is free.

    It is never taken back: a late signal that finds no handler would kill the trainer.
    """
    for number in range(signal.SIGRTMIN + 10, signal.SIGRTMAX):
        if signal.getsignal(number) is signal.SIG_DFL:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            faulthandler.register(number, file=fd, all_threads=True, chain=False)
            return int(number)
    return 0


class WorkerServer:
    """torch's control server on a private unix socket: C++ threads that answer while Python hangs. ``path`` or ""."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.path = ""
        self._server: Any = None
        try:
            from torch._C._distributed_c10d import _WorkerServer

            path = folder / f"rank-{rank}.sock"
            if len(str(path)) > SOCKET_PATH_MAX:
                path = Path(tempfile.gettempdir()) / f"lanterne-{os.getuid()}-{os.getpid()}.sock"
            path.unlink(missing_ok=True)
            with _hushed():
                self._server = _WorkerServer(str(path), -1)
            path.chmod(0o600)
            self.path = str(path)
        except Exception:  # private interface of torch: its absence is a source less
            self._server = None

    def stop(self) -> None:
        """Shut it down. One whose thread has not begun to serve would never notice: that one stays until the end."""
        server, self._server = self._server, None
        if server is None:
            return
        if _serves(self.path):
            with _hushed():
                server.shutdown()
        else:
            _unserved.append(server)
        Path(self.path).unlink(missing_ok=True)


_unserved: list[Any] = []


def _serves(path: str) -> bool:
    """Does the server behind this socket answer a request within a second?"""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
            door.settimeout(1.0)
            door.connect(path)
            door.sendall(b"GET / HTTP/1.0\r\n\r\n")
            return bool(door.recv(1))
    except OSError:
        return False


@contextmanager
def _hushed() -> Iterator[None]:
    """Keep torch's C++ from telling the user's stderr at level warning that our server comes and goes."""
    try:
        import torch

        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        level = ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    except (OSError, ValueError):  # another build of torch: it speaks, and nothing is lost
        yield
        return
    before = level.value
    level.value = max(before, LOG_ERROR)
    try:
        yield
    finally:
        level.value = before


class Exceptions:
    """Writes an exception that ends the process, and says out of memory where it is that; then the user's own hook."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.seen = False

    def install(self, patches: Patches) -> None:
        before = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            try:
                self.tell(kind, error, trace)
            except Exception as failure:
                self.recorder.failed("excepthook", failure)
            before(kind, error, trace)

        def undo() -> None:
            if sys.excepthook is hook:
                sys.excepthook = before

        sys.excepthook = hook
        patches.add(undo)

    def tell(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Write exception and, for a failed allocation, out_of_memory with what the allocator knows."""
        self.seen = True
        recorder, at = self.recorder, monotonic_ns()
        stack = "".join(traceback.format_exception(kind, error, trace))[-limits.STACK_BYTES_MAX :]
        message = str(error)[:2000]
        said = {"type": f"{kind.__module__}.{kind.__qualname__}", "message": message}
        recorder.ring.note(EventName.EXCEPTION, recorder.step, at, said, stack)
        if is_out_of_memory(error):
            recorder.ring.note(EventName.OUT_OF_MEMORY, recorder.step, at, out_of_memory_facts(message), stack)


def is_out_of_memory(error: BaseException) -> bool:
    """A failed allocation on host or device, by type or by the allocator's own words."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _MEMORY_WORDS)


def out_of_memory_facts(message: str) -> dict[str, Any]:
    """allocated_bytes, reserved_bytes and device where there is one, peak RSS, and the message."""
    import resource

    facts: dict[str, Any] = {"message": message}
    facts["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        facts["allocated_bytes"] = int(torch.cuda.memory_allocated())
        facts["reserved_bytes"] = int(torch.cuda.memory_reserved())
        facts["device"] = f"cuda:{torch.cuda.current_device()}"
    return facts


def install_oom_observer(recorder: Recorder) -> None:
    """Be told by the CUDA allocator at the moment it fails, also when the user catches the error."""
    import torch

    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is None or not torch.cuda.is_available():
        return

    def observe(device: int, alloc: int, device_alloc: int, device_free: int) -> None:
        facts = {
            "device": f"cuda:{device}", "wanted_bytes": alloc, "allocated_bytes": device_alloc,
            "free_bytes": device_free, "message": "CUDA out of memory (allocator observer)",
        }  # fmt: skip
        recorder.ring.note(EventName.OUT_OF_MEMORY, recorder.step, monotonic_ns(), facts)

    attach(observe)


class GarbageCollections:
    """Time in ``gc`` a step, and an event for a pause of 10 ms or more."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._began = 0

    def install(self, patches: Patches) -> None:
        gc.callbacks.append(self._called)
        patches.add(lambda: gc.callbacks.remove(self._called))

    def _called(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = monotonic_ns()
            return
        began, self._began = self._began, 0
        if not began:
            return
        took = monotonic_ns() - began
        recorder = self.recorder
        recorder.core.gc_ns += took
        if took >= GC_EVENT_NS:
            recorder.ring.event(
                EventName.GC_PAUSE, recorder.step, began, _GC_KEYS,
                (float(info["generation"]), took / 1e6, float(info["collected"])),
            )  # fmt: skip
