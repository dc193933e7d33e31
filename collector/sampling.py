"""What the shipper measures by pid, so that the trainer pays nothing: host, memory, GPU. Each source may be absent."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from lanterne.collector.local_rank import LocalRank
from lanterne.collector.sources import memory, reads, sockets
from lanterne.collector.sources.gpu import GpuSource
from lanterne.collector.sources.host import CpuDelay, HostSource
from lanterne.collector.sources.node import NodeSource, worst
from lanterne.nouns import Event, EventName

Sample = tuple[str, float, str]
_FOR_EVERY_RANK = frozenset({"system.cpu.utilization", "system.cpu.steal", "system.cpu.runqueue"})
"""Host readings that explain a rank's own slowness; the rest is told once a host, by its lowest rank."""
_OF_NODE = (
    "system.psi.cpu", "system.psi.memory", "system.psi.io", "system.cgroup.throttled_share", "system.disk.utilization",
    "system.disk.latency", "process.neighbour.cpu",
)  # fmt: skip
"""What the job's own facts hold of its node: the worst value of each. The rest is the host agent's."""


def gpu_index(rank: LocalRank) -> int:
    """NVML's index of a rank's GPU: its CUDA ordinal through CUDA_VISIBLE_DEVICES; -1 = named by UUID (MIG too)."""
    device = rank.identity.device
    ordinal = int(device[5:]) if device.startswith("cuda:") and device[5:].isdigit() else rank.identity.local_rank
    visible = rank.process.variable("CUDA_VISIBLE_DEVICES")
    if not visible:
        return ordinal
    names = visible.split(",")
    return int(names[ordinal]) if ordinal < len(names) and names[ordinal].strip().isdigit() else -1


class Sampler:
    """All sources of one shipper. A source that fails is switched off and said once (``source_absent``)."""

    def __init__(self) -> None:
        self._absent: list[tuple[str, str]] = []
        self._told: set[int] = set()
        self._pids: list[int] = []
        self._host: HostSource | None = self._try("host", HostSource)
        self._node: NodeSource | None = self._try("node", lambda: NodeSource(job_pids=lambda: self._pids))
        self._delay = CpuDelay()
        folder = os.environ.get(reads.FOLDER, "")
        self._reads = reads.ReadTimes(folder) if folder else None
        self._gpu: GpuSource | None = self._try("gpu", GpuSource)
        if self._gpu is not None and self._gpu.absent:
            self._absent.append(("gpu", self._gpu.absent))
            self._gpu = None

    def _try(self, source: str, make: Callable[[], Any]) -> Any:
        try:
            return make()
        except Exception as error:  # a foreign driver or an odd /proc is a source less, not a shipper less
            self._absent.append((source, f"{type(error).__name__}: {error}"[:200]))
            return None

    def take(self, ranks: Iterable[LocalRank], now_ns: int) -> list[tuple[LocalRank, list[Event]]]:
        """One round of samples for the living ranks, as events of each."""
        ranks = sorted(ranks, key=lambda r: r.rank)
        host = (self._try("host", self._host.sample) or []) if self._host is not None else []
        self._pids = [r.process.pid for r in ranks]
        host = [*host, *worst((self._try("node", self._node.sample) or []) if self._node is not None else [], _OF_NODE)]
        gpu = (self._try("gpu", self._gpu.sample) or []) if self._gpu is not None else []
        out = []
        for place, rank in enumerate(ranks):
            samples: list[Sample] = [s for s in host if place == 0 or s[0] in _FOR_EVERY_RANK]
            samples += self._try("memory", partial(memory.sample, rank.process.pid)) or []
            samples += self._try("sockets", partial(sockets.sample, rank.process.pid)) or []
            samples += self._try("scheduler", partial(self._delay.sample, rank.process.pid)) or []
            if self._reads is not None:
                samples += self._try("reads", partial(self._reads.sample, rank.process.pid)) or []
            label = f"gpu{gpu_index(rank)}" if gpu else ""
            samples += [s for s in gpu if s[2] == label]
            step = rank.watch.look.step if rank.watch.look is not None else -1
            events = [rank.box.measure(n, v, now_ns, step=step, label=tag) for n, v, tag in samples]
            out.append((rank, self._absences(rank) + events))
        return out

    def _absences(self, rank: LocalRank) -> list[Event]:
        if rank.rank in self._told:
            return []
        self._told.add(rank.rank)
        return [rank.make(EventName.SOURCE_ABSENT, source=s, reason=r) for s, r in self._absent]
