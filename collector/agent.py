"""The host agent: one process a node that watches the host itself and reports what makes its work slow.

Readings and findings go out as OTLP under the job ``nodes``, through the same spool and exporter as the ranks'.
A finding is a ``training.event`` named ``host_finding`` with category, host and evidence; lines of the kernel log
keep the names that the log reader gives them (``log.xid``, …). The agent has no rank: its records carry rank -1.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lanterne.clock import Clock, SystemClock
from lanterne.collector.export import Exporter, batches, full_identity
from lanterne.collector.identity import base_dir, node_name
from lanterne.collector.sources.gpu import GpuSource
from lanterne.collector.sources.kernel_log import KernelEvent, KernelLog
from lanterne.collector.sources.node import NodeSource
from lanterne.collector.sources.node_findings import NodeFinding, judge
from lanterne.collector.spool import Spool
from lanterne.errors import UsageError
from lanterne.nouns import NO_RANK, AttributeValue, Event, EventName, Identity, Kind
from lanterne.quality import Quality
from lanterne.settings import CollectorSettings
from lanterne.wire import NODES_JOB

ONCE_S = 2.0
REPEAT_S = 60.0
"""A finding that lasts is told again this often."""
PATIENCE_S = 5.0
Sample = tuple[str, float, str]


@dataclass(frozen=True, slots=True)
class Round:
    """One look at the node."""

    samples: tuple[Sample, ...]
    kernel: tuple[KernelEvent, ...]
    findings: tuple[NodeFinding, ...]


def job_pids(base: Path) -> list[int]:
    """Process ids of the ranks that have a session folder below ``base`` on this host."""
    found = []
    for path in base.glob("*/*/rank-*.json"):
        try:
            found.append(int(json.loads(path.read_text(encoding="utf-8")).get("pid", 0)))
        except (OSError, ValueError, AttributeError):
            continue
    return [pid for pid in found if pid > 0]


class Agent:
    """Watches one node. ``look`` takes a round, ``run`` goes on until stopped and sends.

    ``root`` is where the kernel's files lie, ``paths`` are watched besides the mounts, ``pids`` are a job's own;
    ``trace`` lets bpftrace run.
    """

    def __init__(
        self,
        settings: CollectorSettings,
        *,
        root: str | Path = "/",
        paths: Sequence[str] = (),
        pids: Sequence[int] = (),
        kernel_log: str | Path = "",
        host: str = "",
        clock: Clock | None = None,
        trace: bool = False,
    ) -> None:
        self.settings = settings
        self.host = host or node_name()
        self.base = base_dir(settings)
        self._clock: Clock = clock or SystemClock()
        self.node = NodeSource(
            root,
            paths=paths,
            job_pids=lambda: [*pids, *job_pids(self.base)],
            clock=self._clock,
            tracing=True,
            bpf=trace,
        )
        self.kernel = KernelLog(kernel_log or Path(root) / "dev/kmsg", clock=self._clock)
        self.gpu = GpuSource()
        self.identity = full_identity(
            Identity(job=NODES_JOB, rank=NO_RANK, host=self.host, pid=os.getpid(), service_name="lanterne-agent")
        )
        self._told: dict[tuple[str, str, str], int] = {}

    @property
    def states(self) -> dict[str, str]:
        """Source -> "" while it works, else why it gives nothing."""
        return {**self.node.states, self.kernel.name: self.kernel.absent, "gpu": self.gpu.absent}

    def look(self) -> Round:
        """Samples, kernel lines and findings now. Rates need an earlier look."""
        samples = self.node.sample()
        if not self.gpu.absent:
            try:
                samples += self.gpu.sample()
            except Exception as error:  # a driver that fails takes its source away, not the agent
                self.gpu.absent = f"{type(error).__name__}: {error}"[:200]
        kernel = self.kernel.poll()
        findings = judge(samples, kernel, self.host, has_job=bool(self.node.processes.job_pids))
        return Round(tuple(samples), tuple(kernel), tuple(findings))

    def once(self, over_s: float = ONCE_S) -> dict[str, Any]:
        """Two looks ``over_s`` apart as JSON: ``host``, ``sources`` and ``findings``."""
        first = self.look()
        threading.Event().wait(over_s)
        second = self.look()
        told = {f.key: f for f in (*first.findings, *second.findings) if f.source == "kernel_log"}
        told |= {f.key: f for f in second.findings}
        sources = [
            {"source": name, "state": "absent" if reason else "works", "reason": reason}
            for name, reason in self.states.items()
        ]
        return {"host": self.host, "sources": sources, "findings": [f.plain() for f in told.values()]}

    # --- as events --------------------------------------------------------------------------------

    def _event(self, kind: Kind, name: str, **more: Any) -> Event:
        return Event(
            kind=kind, name=name, sequence=-1, lamport=-1, unix_ns=self._clock.unix_ns(),
            monotonic_ns=self._clock.monotonic_ns(), **more,
        )  # fmt: skip

    def events(self, found: Round) -> list[Event]:
        """A round as events; a finding is told when it begins, each minute while it lasts, and when it ends."""
        now = self._clock.monotonic_ns()
        out = [
            self._event(Kind.METRIC, name, value=value, attributes={"lanterne.label": label} if label else {})
            for name, value, label in found.samples
        ]
        for line in found.kernel:
            more: dict[str, AttributeValue] = {**line.attributes, "age_s": round(line.age_s, 1)}
            out.append(self._event(Kind.EVENT, f"log.{line.event}", body=line.line, attributes=more))
        lasting = {f.key for f in found.findings}
        for key in [k for k in self._told if k not in lasting]:
            del self._told[key]
            category, source, what = key
            ended: dict[str, AttributeValue] = {
                "state": "ended", "category": category, "source": source, "what": what, "host": self.host,
            }  # fmt: skip
            out.append(self._event(Kind.EVENT, EventName.HOST_FINDING, attributes=ended))
        for finding in found.findings:
            last = self._told.get(finding.key)
            if last is None or now - last >= REPEAT_S * 1e9:
                self._told[finding.key] = now
                out.append(self._finding(finding, "begun" if last is None else "lasts"))
        return out

    def _finding(self, finding: NodeFinding, state: str) -> Event:
        first = finding.evidence[0]
        attributes: dict[str, AttributeValue] = {
            "state": state, "category": finding.category.value, "host": finding.host, "source": finding.source,
            "what": finding.what, "unit": first.unit,
        }  # fmt: skip
        if first.value is not None:
            attributes["value"] = first.value
        if finding.remedy:
            attributes["remedy"] = finding.remedy
        body = "; ".join(e.says for e in finding.evidence)
        return self._event(Kind.EVENT, EventName.HOST_FINDING, body=body, attributes=attributes)

    def absences(self) -> list[Event]:
        return [
            self._event(Kind.EVENT, EventName.SOURCE_ABSENT, attributes={"source": name, "reason": reason})
            for name, reason in self.states.items()
            if reason
        ]

    # --- as a process -----------------------------------------------------------------------------

    def run(self, stop: threading.Event, interval_s: float) -> None:
        """Look every ``interval_s`` and send, until ``stop``.

        Raises :class:`UsageError` while another agent runs on this node.
        """
        folder = self.base / "agent"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = _lock(folder / "agent.lock")
        try:
            quality = Quality()
            spool = Spool(folder / "spool", quality=quality, bytes_max=self.settings.spool_bytes)
            exporter = Exporter(spool, self.settings, os.environ, quality=quality)
            wake, halt = threading.Event(), threading.Event()
            sender = threading.Thread(target=exporter.run, args=(halt, wake), name="lanterne-export", daemon=True)
            sender.start()
            self.look()
            events = self.absences()
            while not stop.wait(interval_s):
                events += self.events(self.look())
                spool.append(batches([(self.identity, events)], exporter.encodings, quality), {})
                wake.set()
                events = []
            self._deliver(spool, exporter)
            halt.set()
            wake.set()
            sender.join(timeout=1.0)
        finally:
            os.close(lock)

    def _deliver(self, spool: Spool, exporter: Exporter) -> None:
        """Give the backend a moment to take what is left; the rest stays in the spool for the next agent."""
        deadline = self._clock.monotonic_ns() + int(PATIENCE_S * 1e9)
        while spool.next() is not None and exporter.reachable() and self._clock.monotonic_ns() < deadline:
            threading.Event().wait(0.05)

    def close(self) -> None:
        self.node.close()
        self.kernel.close()
        self.gpu.close()


def _lock(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.pread(fd, 32, 0).decode(errors="replace").strip()
        os.close(fd)
        raise UsageError(
            f"agent: one runs on this node already (pid {pid or '?'}, {path}); one a node is enough"
        ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, str(os.getpid()).encode(), 0)
    return fd
