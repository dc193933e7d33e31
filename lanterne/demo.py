"""``lanterne demo``: an embedded server, a real torchrun job with a real fault in it, and the verdict.

Nothing here knows the answer: the fault is switched on in the culprit's process, the collector and the
server do what they do in production, and the report that the API gives is printed as it is.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from lanterne.collector.sim.inject import KINDS
from lanterne.errors import LanterneError, UsageError
from lanterne.settings import ServerSettings, load

HANG_WAIT_S = 40.0
START_WAIT_S = 300.0
"""A loaded machine may take minutes to import torch in every rank."""
DRAIN_S = 25.0
SETTLE_S = 2.0
TAP_BUILD_S = 300
POLL_S = 0.4
STEPS, STEPS_WITH_REMEDY = 200, 500
RESTARTED = frozenset({"hang", "crash", "oom", "leak"})
"""Faults that stop the job, sooner or later: what mends them is the next attempt."""
REMEDIED = RESTARTED | {"lr-jump", "bad-batch", "nan", "overflow", "gc", "replica-divergence", "checkpoint-corrupt"}
"""Faults that a default policy mends by itself under ``--policy auto``: the run ends when that is verified."""
SNAPSHOT_EVERY, SNAPSHOT_KEEP = 20, 4
"""Steps between the snapshots that ``rollback`` goes back to, where a remedy is wanted."""
STOPPING = frozenset({"hang"})
"""Faults after which the job never ends by itself: the demo ends it once the verdict is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What the command line asks for. ``onset`` is the first faulty step; ``policy`` the server's ceiling.

    ``steps`` 0 takes :data:`STEPS`, or more where a remedy needs time to be verified. Without ``policy`` nothing is
    restarted (``suggest``) where the fault stops the job, and the ceiling is ``auto`` elsewhere.
    """

    fault: str = "none"
    rank: int = 2
    ranks: int = 4
    steps: int = 0
    onset: int = 60
    seed: int = 1234
    port: int = 0
    data: str = ""
    policy: str = ""
    keep: bool = False

    def __post_init__(self) -> None:
        if self.fault not in KINDS:
            raise UsageError(f"--fault {self.fault!r} is unknown; choose one of: {', '.join(KINDS)}")
        if self.ranks < 2:
            raise UsageError(f"--ranks {self.ranks}: a distributed job has at least 2 ranks")
        if not 0 <= self.rank < self.ranks:
            raise UsageError(f"--rank {self.rank} is outside 0 to {self.ranks - 1}")
        if not 0 < self.onset < self.length:
            raise UsageError(f"--onset {self.onset} is outside 1 to {self.length - 1} (see --steps)")

    @property
    def length(self) -> int:
        """Steps of the run."""
        return self.steps or (STEPS_WITH_REMEDY if self.mends or self.fault == "lr-jump" else STEPS)

    @property
    def ceiling(self) -> str:
        return self.policy or ("suggest" if self.fault in RESTARTED else "auto")

    @property
    def mends(self) -> bool:
        """Is a remedy wanted, and is there one for this fault?"""
        return self.policy == "auto" and self.fault in REMEDIED


@dataclass
class Demo:
    """One demo: server, job and what came of it. ``console`` writes to stderr."""

    options: DemoOptions
    console: Console = field(default_factory=lambda: Console(stderr=True))
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="lanterne-demo-")))
    base: str = ""
    job: str = ""
    report: dict[str, Any] = field(default_factory=dict)

    def run(self) -> dict[str, Any]:
        """Start the server, run the job, return the report. Raises LanterneError when the job cannot start."""
        self.job = f"demo-{self.options.fault}-{time.strftime('%H%M%S')}-{os.getpid() % 1000:03d}"
        with self.server() as base:
            self.base = base
            self.console.print(f"page and API: [bold]{base}[/]   job: {self.job}")
            self._build_tap()
            self.report = self._train()
            if not self.options.keep:
                return self.report
            self._keep_serving()
        return self.report

    def _build_tap(self) -> None:
        """Compile the collective tap if this torch has none yet: once a machine, so that the first run sees all."""
        with self.console.status("compiling the collective tap (once for this torch, up to a minute)"):
            command = [sys.executable, "-m", "lanterne.collector.native"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=TAP_BUILD_S, check=False)
        if done.returncode:
            self.console.print(f"the tap was not built, Python wrapping is used: {done.stderr.strip()[-300:]}")

    @contextlib.contextmanager
    def server(self) -> Iterator[str]:
        """The embedded server on loopback in a daemon thread; yields its base URL."""
        from lanterne.serving import EmbeddedServer

        settings = load(
            ServerSettings,
            port=self.options.port or _free_port(),
            grpc_port=0,
            data=self.options.data or str(self.folder / "data"),
            policy=self.options.ceiling,
        )
        server = EmbeddedServer(settings)
        try:
            yield server.start()
        finally:
            server.stop()

    def clean(self) -> None:
        """Remove what the demo wrote, unless ``--data`` asked to keep it."""
        shutil.rmtree(self.folder, ignore_errors=True)

    # --- the job ---------------------------------------------------------------------------------

    def _command(self) -> list[str]:
        o = self.options
        return [
            sys.executable, "-m", "lanterne", "run", "--",
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={o.ranks}",
            "-m", "lanterne.collector.sim.train", f"--steps={o.length}", f"--fault={o.fault}", f"--rank={o.rank}",
            f"--onset={o.onset}", f"--seed={o.seed}", f"--checkpoints={self.folder / 'checkpoints'}",
        ]  # fmt: skip

    def _environment(self) -> dict[str, str]:
        wanted = {"LANTERNE_SNAPSHOT_EVERY": str(SNAPSHOT_EVERY), "LANTERNE_SNAPSHOT_KEEP": str(SNAPSHOT_KEEP)}
        wanted |= {"LANTERNE_STANDBY": "1"} if self.options.fault in RESTARTED else {}
        return {
            **os.environ,
            **(wanted if self.options.mends else {"LANTERNE_RESTARTS": "0"}),
            "OMP_NUM_THREADS": "1",
            "LANTERNE_ENDPOINT": self.base,
            "LANTERNE_JOB": self.job,
            "LANTERNE_DIR": str(self.folder / "session"),
            "NO_PROXY": "*",
        }

    def _train(self) -> dict[str, Any]:
        log = (self.folder / "train.log").open("wb")
        process = subprocess.Popen(
            self._command(), env=self._environment(), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            with Progress(
                SpinnerColumn(), TextColumn("{task.description}"), BarColumn(),
                TextColumn("step {task.completed}/{task.total}"), TimeElapsedColumn(),
                console=self.console, transient=True,
            ) as bar:  # fmt: skip
                task = bar.add_task(f"training on {self.options.ranks} ranks", total=self.options.length)
                return self._follow(process, lambda step: bar.update(task, completed=step))
        finally:
            _end(process)
            log.close()

    def _follow(self, process: subprocess.Popen[bytes], show: Any) -> dict[str, Any]:
        """Follow the job until it ended and its last events are judged, or until a hang is named."""
        hung_since: float | None = None
        last_step, last_move = -1, time.monotonic()
        while process.poll() is None:
            step = self._step()
            if step != last_step:
                last_step, last_move = step, time.monotonic()
                show(step + 1)
            if self.options.mends and self._mended():
                return self._final(wait_for_end=False)
            if self.options.fault in STOPPING and not self.options.mends and self._diagnosed():
                return self._final(wait_for_end=False)
            patience = HANG_WAIT_S + 20 if last_step >= 0 and not self.options.mends else START_WAIT_S
            hung_since = last_move if time.monotonic() - last_move > patience else None
            if hung_since is not None:
                break
            time.sleep(POLL_S)
        if last_step < 0 and process.poll() not in (None, 0) and self.options.onset > 1:
            report = self._final(wait_for_end=True)
            if not report.get("ranks_seen"):
                tail = (self.folder / "train.log").read_text(encoding="utf-8", errors="replace")[-2000:]
                raise LanterneError(f"the training job did not start (exit {process.returncode}):\n{tail}")
            return report
        return self._final(wait_for_end=True)

    def _get(self, path: str) -> Any:
        try:
            answer = httpx.get(self.base + path, timeout=10.0)
        except httpx.HTTPError:
            return None
        return answer.json() if answer.status_code == 200 else None

    def _step(self) -> int:
        job = self._get(f"/api/v1/jobs/{self.job}") or {}
        step = job.get("step")
        return step if isinstance(step, int) else -1

    def _diagnosed(self) -> bool:
        incidents = (self._get(f"/api/v1/jobs/{self.job}/incidents") or {}).get("items", [])
        return any(i.get("causes") for i in incidents)

    def _mended(self) -> bool:
        """Is some remedy over, one way or the other? Then the rest of the run shows nothing more."""
        incidents = (self._get(f"/api/v1/jobs/{self.job}/incidents") or {}).get("items", [])
        return any("acted" in i["ledger"] and i["status"] in {"resolved", "dismissed"} for i in incidents)

    def _final(self, *, wait_for_end: bool) -> dict[str, Any]:
        """The report once it stands still: the last events are in and the verdict no longer changes."""
        deadline = time.monotonic() + DRAIN_S
        since, last = time.monotonic(), None
        while time.monotonic() < deadline:
            state = (self._get(f"/api/v1/jobs/{self.job}") or {}).get("state")
            report = self._get(f"/api/v1/jobs/{self.job}/report") or {}
            ended = not wait_for_end or state in {"finished", "failed"}
            verdict = report.get("verdict")
            if verdict != last:
                since, last = time.monotonic(), verdict
            if ended and verdict is not None and time.monotonic() - since > SETTLE_S:
                return report
            time.sleep(POLL_S)
        return self._get(f"/api/v1/jobs/{self.job}/report") or {}

    def _keep_serving(self) -> None:
        from lanterne.cli_report import print_report

        print_report(self.report, Console())
        self.console.print(f"\nThe page stays at [bold]{self.base}[/] until Ctrl-C.")
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the job's whole process group: politely, then for good."""
    for sig, wait in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, sig)
        try:
            process.wait(wait)
            return
        except subprocess.TimeoutExpired:
            continue
