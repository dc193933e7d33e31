"""``lanterne run -- COMMAND``: any launcher, any script, not a line of the user's code changed.

The command runs as a child with two additions to its environment: the folder with our ``sitecustomize``
on PYTHONPATH and the ``LANTERNE_*`` settings. Signals go through to it, its exit code comes back, and
when it died of a signal so does the launcher. What the backend orders of a launcher (``launch_orders``) is
carried out here: the command is ended and started again as the next attempt, or ended for good.

stderr is kept for the black box: by torchrun itself
(``--tee 2``) where the command is torchrun, by us otherwise.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from lanterne import cuda_probe, limits
from lanterne.collector.integrations.auto import note_exit
from lanterne.collector.integrations.launch_orders import Orders
from lanterne.collector.integrations.standby import AGAIN_S, Standby, mode_of
from lanterne.collector.integrations.standby import VARIABLE as HOLD
from lanterne.collector.shipper import is_running
from lanterne.collector.sources import reads
from lanterne.errors import LanterneError, UsageError
from lanterne.settings import CollectorSettings, load

_FORWARDED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
_FROM_TERMINAL = frozenset({"SIGINT", "SIGQUIT", "SIGHUP"})
_ENDING = frozenset({"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"})
_TEE_OPTIONS = ("-r", "--redirects", "-t", "--tee", "--log-dir", "--log_dir", "--logs-specs", "--logs_specs")
_JOB_OPTIONS = ("--rdzv-id", "--rdzv_id")
SHIPPER_PATIENCE_S = 5.0
_KEEP_S = 3600.0
_JOB_VARIABLES = ("LANTERNE_JOB", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")


def torchrun_at(command: Sequence[str]) -> int:
    """Index behind the word(s) that start torchrun, where its options may stand; 0 when it is not torchrun."""
    for index, word in enumerate(command[:8]):
        if os.path.basename(word) == "torchrun":
            return index + 1
        if word == "-m" and command[index + 1 : index + 2] in (["torch.distributed.run"], ["torch.distributed.launch"]):
            return index + 2
    return 0


def _options(command: Sequence[str], start: int) -> Iterable[str]:
    """Option words of torchrun itself, before the script's name."""
    for word in command[start:]:
        if word.endswith(".py") or word == "--":
            return
        yield word.partition("=")[0]


def with_tee(command: Sequence[str], log_dir: str) -> list[str]:
    """torchrun's command with stderr of every rank kept in files, unless the user chose something of the kind."""
    at = torchrun_at(command)
    if not at or any(word in _TEE_OPTIONS for word in _options(command, at)):
        return list(command)
    return [*command[:at], "--tee", "2", "--log-dir", log_dir, *command[at:]]


def job_name(command: Sequence[str], environ: Mapping[str, str]) -> str:
    """A job id for a launch on one node that has none yet: script and start time; empty where nodes must agree."""
    at = torchrun_at(command)
    words = list(_options(command, at)) if at else []
    several = any(w in ("--nnodes", "--rdzv-endpoint", "--rdzv_endpoint", *_JOB_OPTIONS) for w in words)
    if several or any(environ.get(name) for name in _JOB_VARIABLES):
        return ""
    script = next((Path(w).stem for w in command if w.endswith(".py")), Path(command[0]).name)
    plain = "".join(c if c.isalnum() or c in "._-" else "-" for c in script)[:80]
    return f"{plain}-{time.strftime('%Y%m%d-%H%M%S')}"


def environment(settings: CollectorSettings, command: Sequence[str], exits: str) -> dict[str, str]:
    """The child's environment: ours plus the injected folder and the settings."""
    environ = dict(os.environ)
    folder = str(Path(__file__).parent / "inject")
    environ["PYTHONPATH"] = os.pathsep.join([folder, *filter(None, [environ.get("PYTHONPATH", "")])])
    environ["LANTERNE_AUTO_ATTACH"] = "1"
    environ["LANTERNE_ROOT"] = str(Path(__file__).absolute().parents[3])
    environ["LANTERNE_EXITS"] = exits
    default = CollectorSettings()
    for spec in fields(CollectorSettings):
        value = getattr(settings, spec.name)
        if value != getattr(default, spec.name):
            environ[f"LANTERNE_{spec.name.upper()}"] = str(value)
    plugin = cuda_probe.nccl_plugin()
    if plugin:
        environ.setdefault("NCCL_PROFILER_PLUGIN", plugin)
    name = settings.job or job_name(command, environ)
    if name:
        environ["LANTERNE_JOB"] = name
    try:
        environ |= reads.preload(settings, exits, environ.get("LD_PRELOAD", ""))
    except (LanterneError, OSError) as error:  # the training goes on without
        sys.stderr.write(f"lanterne: file reads are not timed: {error}\n")
    return environ


class _Forwarder:
    """Passes signals to the child while it lives; puts the old handlers back afterwards."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []
        self.told = False
        """A person or the scheduler wants the end: nothing is started again."""
        self._old = {getattr(signal, n): signal.signal(getattr(signal, n), self._handle) for n in _FORWARDED}

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.told |= signal.Signals(number).name in _ENDING
        if self._process is None:
            self._early.append(number)
        elif not (signal.Signals(number).name in _FROM_TERMINAL and _in_foreground()):
            self._send(number)

    def _send(self, number: int) -> None:
        assert self._process is not None
        try:
            self._process.send_signal(number)
        except OSError:
            pass

    def to(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        for number in self._early:
            self._send(number)

    def undo(self) -> None:
        for number, old in self._old.items():
            signal.signal(number, old if old is not None else signal.SIG_DFL)


def _in_foreground() -> bool:
    """Whether a terminal sent its signal to the whole group already, the child included."""
    try:
        with open("/dev/tty", "rb") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


def _tee(source: BinaryIO, tail: Path) -> None:
    """Copy bytes to our stderr as they come; keep the last ``limits.STDERR_TAIL_BYTES`` in ``tail``."""
    kept = bytearray()
    shown = True
    with tail.open("wb", buffering=0) as file:
        while chunk := os.read(source.fileno(), 64 << 10):
            if shown:
                try:
                    sys.stderr.buffer.write(chunk)
                    sys.stderr.buffer.flush()
                except OSError:
                    shown = False
            kept += chunk
            del kept[: -limits.STDERR_TAIL_BYTES]
            try:
                os.pwrite(file.fileno(), kept, 0)
            except OSError:
                pass


def _stderr_is_file() -> bool:
    try:
        return os.path.isfile(os.readlink("/proc/self/fd/2"))
    except OSError:
        return False


def run(
    command: Sequence[str], environ: Mapping[str, str], folder: Path, *, tee: bool = True, orders: Orders | None = None
) -> int:
    """Run the command to its end; returns Popen's return code (negative = signal).

    With ``orders`` it is started again when the backend orders that, from a standby where one is kept, and the code is
    that of the last attempt. ``folder`` takes the exit notes and the stderr tail. Raises UsageError when the command
    cannot start.
    """
    piped = tee and not torchrun_at(command) and not _stderr_is_file()
    full = dict(environ)
    if piped:
        full["LANTERNE_STDERR"] = str(folder / "stderr")
    forwarder = _Forwarder()
    standbys: list[Standby] = []
    process: subprocess.Popen[bytes] | None = None
    try:
        while True:
            mode = _standby_mode(command, orders)
            process = process or _start(command, full | ({HOLD: f"{mode}:probe:{folder}"} if mode else {}), piped=piped)
            ahead = Standby(command, full, folder, mode, piped=piped, after_s=AGAIN_S if standbys else 0.0)
            if mode and ahead.start():
                standbys.append(ahead)
            code = _attempt(process, folder, forwarder, orders)
            after = None if orders is None else orders.ended(code, lambda: forwarder.told)
            if after is None:
                return code
            if after.attempt < 0:
                return after.code
            full |= after.environment
            process = ahead.take(after.environment)
            sys.stderr.write(f"lanterne: attempt {after.attempt} starts{' from standby' if process else ''}\n")
    finally:
        for standby in standbys:
            standby.end()
        forwarder.undo()


def _standby_mode(command: Sequence[str], orders: Orders | None) -> str:
    """How the attempt after this one is held ready; empty where it is not."""
    if orders is None or not orders.settings.standby or orders.restarts >= orders.settings.restarts:
        return ""
    at = torchrun_at(command)
    return mode_of(command, at, list(_options(command, at)) if at else [])


def _start(command: Sequence[str], environ: Mapping[str, str], *, piped: bool) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(list(command), env=environ, stderr=subprocess.PIPE if piped else None)
    except OSError as error:
        raise UsageError(f"{command[0]}: cannot be started: {error.strerror}; check the name and PATH") from error


def _attempt(process: subprocess.Popen[bytes], folder: Path, forwarder: _Forwarder, orders: Orders | None) -> int:
    """Wait for the end of one attempt."""
    forwarder.to(process)
    if orders is not None:
        orders.started(process)
    pump = None
    if process.stderr is not None:
        pump = threading.Thread(target=_tee, args=(process.stderr, folder / "stderr"), daemon=True)
        pump.start()
    code = process.wait()
    note_exit(str(folder), process.pid, code)
    if pump is not None:
        pump.join(timeout=1.0)  # a grandchild may hold the pipe open; what it still writes is its own affair
    return code


def _run_prefix() -> str:
    return f"lanterne-run-{os.getuid()}-"


def _clean_up() -> None:
    """Remove the folders of launches that ended an hour ago or more: their shippers have read them."""
    for old in Path(tempfile.gettempdir()).glob(_run_prefix() + "*"):
        try:
            pid = int(old.name.removeprefix(_run_prefix()).partition("-")[0])
            aged = old.stat().st_mtime < time.time() - _KEEP_S and old.stat().st_uid == os.getuid()
            if aged and not os.path.exists(f"/proc/{pid}"):
                shutil.rmtree(old, ignore_errors=True)
        except (OSError, ValueError):
            continue


def _wait_for_shippers(folder: Path) -> bool:
    """Give the shippers of this launch a moment to deliver the end: in a container they die with us.

    True when none of them is left, so that nobody reads the notes and logs in ``folder`` any more.
    """
    deadline = time.monotonic() + SHIPPER_PATIENCE_S
    served = [Path(note.read_text(encoding="utf-8")) for note in folder.glob("shipper-*")]
    while any(is_running(session) for session in served):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def main(argv: list[str]) -> int:
    """Run ``argv`` (a command, with or without a leading ``--``) with Lanterne attached; returns its exit code.

    Dies of the same signal as the command did. Raises :class:`UsageError` for an empty or unknown command.
    """
    command = argv[1:] if argv[:1] == ["--"] else list(argv)
    if not command:
        raise UsageError("run: no command; write it behind two dashes: lanterne run -- torchrun train.py")
    settings = load(CollectorSettings)
    _clean_up()
    folder = Path(tempfile.mkdtemp(prefix=f"{_run_prefix()}{os.getpid()}-"))
    environ: Mapping[str, str] = os.environ
    orders: Orders | None = None
    if not settings.disabled:
        environ = environment(settings, command, str(folder))
        command = with_tee(command, str(folder / "ranks"))
        if settings.commands and settings.restarts > 0:
            orders = Orders(settings, command, environ, folder, torchrun=torchrun_at(command) > 0)
            orders.start()
    try:
        code = run(command, environ, folder, tee=not settings.disabled, orders=orders)
    finally:
        if orders is not None:
            orders.close()
    if _wait_for_shippers(folder):
        shutil.rmtree(folder, ignore_errors=True)
    if code >= 0:
        return code
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))  # one core is enough
    if -code not in {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    return 128 - code  # reached only by signals that end no process
