"""The next attempt, started ahead: interpreters that have imported torch and wait before the script's first line.

``LANTERNE_STANDBY=1`` lets ``lanterne run`` keep one. It is the same command; our ``sitecustomize`` holds each of its
trainers (the ranks of ``torchrun --standalone``, or the process of a plain ``python`` command) at interpreter start.
A restart then says the attempt's environment over a unix socket, and what is left to do is the script's own start.
A held process whose launcher is gone ends; it never runs the script unbidden. That our hook runs at all under this
command is seen on the first attempt, which leaves a note (:data:`NOTE`): without the note no standby is started.

Costs: the memory of interpreters with torch imported, and their start beside that of the first attempt. What a script
sets in ``os.environ`` before it imports torch comes too late for what torch reads on import (``OMP_NUM_THREADS``).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

VARIABLE = "LANTERNE_HOLD"
"""``MODE:probe:FOLDER`` in the first attempt, ``MODE:wait:SOCKET`` in a standby; MODE: ``ranks`` or ``main``."""
NOTE = "holds"
AGAIN_S = 60.0
"""An attempt that was restarted is left alone for so long before the next standby is started beside it."""
LOOK_S = 0.1
PRELOADED = (
    "torch", "torch.distributed", "torch.nn.parallel", "torch.optim", "torch.utils.data", "torch._dynamo",
    "lanterne.collector.session", "lanterne.collector.commands",
)  # fmt: skip
"""``torch._dynamo`` because the first optimizer that is made imports it: as much work as all of torch besides."""
_FLAGS_WITHOUT_US = frozenset("EIS")
"""Python's options that ignore PYTHONPATH or ``sitecustomize``."""
_FIXED = ("--no-python", "--no_python", "--run-path", "--run_path")


def mode_of(command: Sequence[str], torchrun_at: int, options: Sequence[str]) -> str:
    """``ranks``, ``main``, or empty for a command of which no second one may be started beside the first.

    A torchrun that is not ``--standalone`` would meet the first one at its rendezvous.
    """
    words = set(options)
    if torchrun_at:
        return "ranks" if "--standalone" in words and not words & set(_FIXED) else ""
    if not Path(command[0]).name.startswith("python"):
        return ""
    flags = [word for word in command[1:3] if word.startswith("-") and not word.startswith("--")]
    return "" if any(_FLAGS_WITHOUT_US & set(flag[1:]) for flag in flags) else "main"


# --- in the trainer --------------------------------------------------------------------------------------------------


def hold() -> None:
    """At interpreter start: leave the note, or wait for the word to go on. Only trainers do either."""
    mode, _, rest = os.environ.get(VARIABLE, "").partition(":")
    what, _, path = rest.partition(":")
    if not path or (mode == "ranks" and not {"LOCAL_RANK", "TORCHELASTIC_RUN_ID"} <= set(os.environ)):
        return
    del os.environ[VARIABLE]  # what the script starts is no trainer
    if what == "probe":
        try:
            Path(path, NOTE).touch()
        except OSError:
            pass
        return
    try:
        _preload()
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(path)
            said = link.makefile("rb").readline()
        os.environ.update(json.loads(said))
    except BaseException:  # no word, no start
        os._exit(0)


def _preload() -> None:
    for name in PRELOADED:
        try:
            import_module(name)
        except Exception:
            continue


# --- in the launcher -------------------------------------------------------------------------------------------------


class Standby:
    """One attempt held ready. ``take`` lets it go; ``end`` kills what was not taken. Belongs to the main thread."""

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        folder: Path,
        mode: str,
        *,
        piped: bool,
        after_s: float,
    ) -> None:
        self.command, self.environ, self.folder, self.mode = list(command), dict(environ), folder, mode
        self.piped, self.after_s = piped, after_s
        self.process: subprocess.Popen[bytes] | None = None
        self._listen: socket.socket | None = None
        self._held: list[socket.socket] = []
        self._said = b""
        self._lock, self._stop = threading.Lock(), threading.Event()

    def start(self) -> bool:
        """Begin when the hook has shown itself and ``after_s`` is over; False where no unix socket can be made."""
        path = str(self.folder / f"standby-{id(self):x}.sock")
        listen = socket.socket(socket.AF_UNIX)
        try:
            listen.bind(path)
            listen.listen(1024)
        except OSError:
            listen.close()
            return False
        self._listen = listen
        self.environ[VARIABLE] = f"{self.mode}:wait:{path}"
        threading.Thread(target=self._begin, name="lanterne-standby", daemon=True).start()
        threading.Thread(target=self._serve, args=(listen,), name="lanterne-standby-door", daemon=True).start()
        return True

    def _begin(self) -> None:
        if self._stop.wait(self.after_s):
            return
        while not (self.folder / NOTE).exists():
            if self._stop.wait(LOOK_S):
                return
        with self._lock:
            if self._stop.is_set():
                return
            try:
                self.process = subprocess.Popen(
                    self.command, env=self.environ, stderr=subprocess.PIPE if self.piped else None
                )
            except OSError:
                return

    def _serve(self, listen: socket.socket) -> None:
        while True:
            try:
                link, _ = listen.accept()
            except OSError:
                return
            with self._lock:
                self._held.append(link)
                if self._said:
                    _tell(link, self._said)

    def take(self, environment: Mapping[str, str]) -> subprocess.Popen[bytes] | None:
        """Let it go with the attempt's environment; None where there is none (yet, or any more).

        Trainers that are still on their way to the door are let through when they come to it.
        """
        self._stop.set()
        with self._lock:
            if self.process is None or self.process.poll() is not None:
                return None
            self._said = json.dumps(dict(environment)).encode() + b"\n"
            for link in self._held:
                _tell(link, self._said)
            return self.process

    def end(self) -> None:
        """Close the door and kill what waits behind it; an attempt that was taken is not touched. Never raises."""
        self._stop.set()
        with self._lock:
            process = None if self._said else self.process
            if self._listen is not None:
                _close(self._listen)
            for link in self._held:
                _close(link)
        if process is not None:
            _kill(process)


def _tell(link: socket.socket, said: bytes) -> None:
    try:
        link.sendall(said)
    except OSError:
        pass  # that trainer is gone: torchrun sees it


def _close(link: socket.socket) -> None:
    try:
        link.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    link.close()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """At once: it has done nothing that could be lost, and a torchrun that is asked politely prints a traceback."""
    import psutil

    try:
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    except psutil.Error:
        family = []
    for member in family:
        try:
            member.send_signal(signal.SIGKILL)
        except psutil.Error:
            continue
    process.wait()
    if process.stderr is not None:
        process.stderr.close()
