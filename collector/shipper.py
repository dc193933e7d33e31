"""The shipper: one light process a node that drains the black boxes of all local ranks and outlives them.

This module is what the trainer imports, so it stays light; the work itself is in ``shipping``. Whoever
gets the lock of the session folder starts the shipper and hands the locked file over to it: there is never
a second one, and the lock is free again the moment the shipper is gone, however it went.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from lanterne.settings import CollectorSettings, load

if TYPE_CHECKING:
    from lanterne.collector.shipping import Shipper

LOCK, LOG = "shipper.lock", "shipper.log"
LOG_BYTES_MAX = 1 << 20
KEEP_S = 10.0
"""A killed shipper is replaced after this at most."""

_threads: dict[str, tuple[int, Shipper]] = {}  # folder -> (pid that started it, shipper): thread mode only
_guard = threading.Lock()


def try_lock(folder: Path) -> int:
    """The locked descriptor of ``shipper.lock``, or -1 while a shipper holds it. Raises OSError."""
    fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return -1
    return fd


def is_running(folder: Path) -> bool:
    """Whether a shipper process serves ``folder`` now."""
    try:
        fd = try_lock(folder)
    except OSError:
        return False
    if fd >= 0:
        os.close(fd)
    return fd < 0


def ensure_running(folder: Path, settings: CollectorSettings) -> None:
    """See to it that exactly one shipper serves ``folder``; cheap and safe to call again and again.

    Never raises and never waits: where no process can be started, a thread of this process does the work
    for this process's own rank.
    """
    if settings.shipper == "none" or settings.disabled:
        return
    try:
        if settings.shipper == "process":
            try:
                fd = try_lock(folder)
                if fd < 0:
                    return
                try:
                    _start_process(folder, settings, fd)
                finally:
                    os.close(fd)
                return
            except OSError as error:
                sys.stderr.write(f"lanterne: no shipper process ({error}); a thread does its work\n")
        _start_thread(folder, settings)
    except Exception as error:
        sys.stderr.write(f"lanterne: no shipper ({type(error).__name__}: {error}); {folder} keeps the records\n")


def keep_running(folder: Path, settings: CollectorSettings, stop: threading.Event) -> None:
    """From a daemon thread: start a shipper again within ``KEEP_S`` of its end, until ``stop`` is set."""

    def keep() -> None:
        while not stop.wait(KEEP_S):
            ensure_running(folder, settings)

    if settings.shipper == "process":
        threading.Thread(target=keep, name="lanterne-keeper", daemon=True).start()


def child_environment(settings: CollectorSettings, environ: Mapping[str, str]) -> dict[str, str]:
    """The trainer's environment with these settings in it, without what would attach to the shipper itself."""
    child = {k: v for k, v in environ.items() if k not in {"PYTHONSTARTUP", "PYTHONINSPECT", "LD_PRELOAD"}}
    child["LANTERNE_AUTO_ATTACH"] = "0"
    default = CollectorSettings()
    for spec in fields(CollectorSettings):
        value = getattr(settings, spec.name)
        if value != getattr(default, spec.name):
            child[f"LANTERNE_{spec.name.upper()}"] = str(value)
    root = str(Path(__file__).absolute().parents[2])
    child["PYTHONPATH"] = os.pathsep.join(filter(None, [root, child.get("PYTHONPATH", "")]))
    return child


def _start_process(folder: Path, settings: CollectorSettings, lock_fd: int) -> None:
    log = folder / LOG
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    with open(os.open(log, flags, 0o600), "ab", buffering=0) as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "lanterne.collector.shipper", str(folder), "--lock-fd", str(lock_fd)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd="/",
            env=child_environment(settings, os.environ),
            pass_fds=(lock_fd,),
            start_new_session=True,
        )
    _tell_launcher(folder)
    # it forks once and leaves at once, so that the trainer never has a child that it did not make
    threading.Thread(target=process.wait, name="lanterne-reap", daemon=True).start()


def _start_thread(folder: Path, settings: CollectorSettings) -> None:
    import atexit

    from lanterne.collector.shipping import Shipper

    with _guard:
        key = str(folder)
        if _threads.get(key, (0, None))[0] == os.getpid():
            return
        shipper = Shipper(folder, settings, only_pid=os.getpid())
        _threads[key] = (os.getpid(), shipper)
        threading.Thread(target=shipper.run, name="lanterne-shipper", daemon=True).start()
        atexit.register(shipper.finish, 2.0)


def _bound_log(folder: Path) -> None:
    """Keep the log within ``LOG_BYTES_MAX``: cut it at the start of each shipper."""
    try:
        if (folder / LOG).stat().st_size > LOG_BYTES_MAX // 2:
            os.truncate(folder / LOG, 0)
    except OSError:
        pass


def _tell_launcher(folder: Path) -> None:
    """Let ``lanterne run`` know whom to wait a moment for: a container ends with its first process."""
    notes = os.environ.get("LANTERNE_EXITS", "")
    try:
        if notes:
            Path(notes, f"shipper-{os.getpid()}").write_text(str(folder), encoding="utf-8")
    except OSError:
        pass


def main(arguments: Sequence[str]) -> int:
    """``python -m lanterne.collector.shipper FOLDER [--lock-fd N]``; without a descriptor it takes the lock itself."""
    folder = Path(arguments[0])
    if "--lock-fd" in arguments:
        fd = int(arguments[arguments.index("--lock-fd") + 1])
        if os.fork():
            os._exit(0)
        os.set_inheritable(fd, False)
    else:
        fd = try_lock(folder)
        if fd < 0:
            sys.stderr.write(f"{folder}: a shipper is running already\n")
            return 0
    _bound_log(folder)
    try:
        os.nice(5)  # the trainer comes first
    except OSError:
        pass
    from lanterne.collector.shipping import Shipper

    shipper = Shipper(folder, load(CollectorSettings))
    for name in ("SIGINT", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: shipper.hurry())
    shipper.run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
