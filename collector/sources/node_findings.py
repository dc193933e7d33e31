"""From readings of a node to findings: what alone explains that work on this host is slow or fails, with numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lanterne.collector.sources.kernel_log import KernelEvent
from lanterne.nouns import CauseCategory, Evidence, to_json

Sample = tuple[str, float, str]

QUEUE_FACTOR = 1.5
"""Runnable processes a core from which on a host is crowded."""
BUSY_SHARE = 0.9
FOREIGN_SHARE = 0.25
"""Share of the host's cores that processes outside the job must use to be named."""
THROTTLED_SHARE, THROTTLED_CORES = 0.25, 0.3
"""A quota hurts when it stops the group in a quarter of its periods and costs this many cores."""
STEAL_SHARE = 0.1
FREE_SHARE, FREE_BYTES = 0.02, 1 << 30
INODES_SHARE = 0.99
DISK_BUSY_SHARE, DISK_LATENCY_S = 0.9, 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFinding:
    """A cause that one host shows. ``what`` is the file system, group, device or process that it is about.

    ``remedy``: what to do there, in one sentence.
    """

    category: CauseCategory
    host: str
    source: str
    what: str
    evidence: tuple[Evidence, ...]
    remedy: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.category.value, self.source, self.what

    def plain(self) -> dict[str, Any]:
        """As JSON: category, host, source, what, evidence, remedy."""
        found: dict[str, Any] = to_json(self)
        return found


def _named(samples: Iterable[Sample], metric: str) -> dict[str, float]:
    return {label: value for name, value, label in samples if name == metric}


def judge(samples: Sequence[Sample], kernel: Sequence[KernelEvent], host: str, *, has_job: bool) -> list[NodeFinding]:
    """Findings of one round, worst kinds first. ``has_job`` tells whether some processes are known to be a job's own.

    Empty on a healthy node.
    """
    return [
        *_kernel(kernel, host), *_crowded(samples, host, has_job), *_throttled(samples, host), *_stolen(samples, host),
        *_full(samples, host), *_slow_disks(samples, host),
    ]  # fmt: skip


def _kernel(kernel: Sequence[KernelEvent], host: str) -> list[NodeFinding]:
    found: dict[tuple[str, str, str], NodeFinding] = {}
    for e in kernel:
        if e.category is not None:
            device = str(e.attributes.get("device") or e.attributes.get("disk") or e.attributes.get("process") or "")
            says = Evidence(says=f"kernel, {e.age_s:.0f} s ago: {e.line}", value=e.age_s, unit="s")
            made = NodeFinding(category=e.category, host=host, source="kernel_log", what=device, evidence=(says,))
            found[made.key] = made
    return list(found.values())


def _crowded(samples: Sequence[Sample], host: str, has_job: bool) -> list[NodeFinding]:
    cores = _named(samples, "system.cpu.count").get("", 0.0)
    queue = _named(samples, "system.cpu.runqueue").get("", 0.0)
    busy = _named(samples, "system.cpu.utilization").get("", 0.0)
    pressure = _named(samples, "system.psi.cpu").get("", 0.0)
    others = _named(samples, "process.neighbour.cpu")
    foreign = others.pop("all", 0.0)
    crowded = queue > QUEUE_FACTOR * cores or pressure > 0.5
    if not cores or busy < BUSY_SHARE or not crowded or foreign < FOREIGN_SHARE * cores or not others:
        return []
    who = max(others, key=lambda name: others[name])
    whose = "processes outside the job" if has_job else "processes (no job of Lanterne's is known on this host)"
    return [
        NodeFinding(
            category=CauseCategory.HOST_CONTENTION,
            host=host,
            source="neighbours",
            what=who,
            evidence=(
                Evidence(
                    says=f"{whose} use {foreign:.1f} of {cores:.0f} cores; the busiest is {who} with {others[who]:.1f}",
                    value=foreign, unit="{cpu}", baseline=cores,
                ),
                Evidence(
                    says=f"{queue:.0f} processes want to run on {cores:.0f} cores; some task waited for a core in "
                    f"{pressure:.0%} of the last ten seconds",
                    value=queue, unit="{process}", baseline=cores,
                ),
            ),
            remedy=f"Move {who} off {host}, or keep it to cores of its own (cpuset, taskset).",
        )
    ]  # fmt: skip


def _throttled(samples: Sequence[Sample], host: str) -> list[NodeFinding]:
    lost = _named(samples, "system.cgroup.throttled_time")
    out = []
    for group, share in _named(samples, "system.cgroup.throttled_share").items():
        if share >= THROTTLED_SHARE and lost.get(group, 0.0) >= THROTTLED_CORES:
            says = (
                f"the CPU quota of cgroup {group} stopped it in {share:.0%} of its periods: "
                f"{lost[group]:.1f} cores' worth of time"
            )
            proof = (Evidence(says=says, value=share, unit="1", baseline=0.0),)
            out.append(
                NodeFinding(
                    category=CauseCategory.HOST_CONTENTION,
                    host=host,
                    source="cgroup",
                    what=group,
                    evidence=proof,
                    remedy=f"Raise or remove the CPU limit of {group} on {host}; loaders and shipper need theirs too.",
                )
            )
    return out


def _stolen(samples: Sequence[Sample], host: str) -> list[NodeFinding]:
    steal = _named(samples, "system.cpu.steal").get("", 0.0)
    if steal < STEAL_SHARE:
        return []
    proof = (Evidence(says=f"the hypervisor took {steal:.0%} of the CPU time", value=steal, unit="1", baseline=0.0),)
    return [
        NodeFinding(category=CauseCategory.HOST_CONTENTION, host=host, source="cpu", what="hypervisor", evidence=proof)
    ]


def _full(samples: Sequence[Sample], host: str) -> list[NodeFinding]:
    used, inodes = _named(samples, "system.disk.utilization"), _named(samples, "system.disk.inodes")
    says: dict[str, Evidence] = {}
    remedy: dict[str, str] = {}
    for path, free in _named(samples, "system.disk.free").items():
        share = used.get(path, 0.0)
        if free <= FREE_BYTES and share >= 1 - FREE_SHARE:
            text = f"{path} is full: {share:.1%} in use, {free / 2**20:.1f} MiB left"
            says[path] = Evidence(says=text, value=free, unit="By", baseline=FREE_BYTES)
            remedy[path] = (
                f"Free space on {path} of {host}, old checkpoints first, or save elsewhere; then save again and "
                "verify: what was written while it was full may be cut off."
            )
        elif inodes.get(path, 0.0) >= INODES_SHARE:
            text = f"{path} has no room for more files: {inodes[path]:.1%} of its inodes in use"
            says[path] = Evidence(says=text, value=inodes[path], unit="1", baseline=INODES_SHARE)
            remedy[path] = (
                f"Delete small files on {path} of {host} (caches, logs), or pack the data set into few files."
            )
    for path in _named(samples, "system.disk.silent"):
        says[path] = Evidence(says=f"{path} does not answer when asked for its size", value=1.0, unit="s")
        remedy[path] = f"Mount {path} of {host} again or mend its server; who reads or writes there waits for it."
    return [
        NodeFinding(
            category=CauseCategory.STORAGE_SLOW,
            host=host,
            source="disk_space",
            what=path,
            evidence=(proof,),
            remedy=remedy[path],
        )
        for path, proof in says.items()
    ]


def _slow_disks(samples: Sequence[Sample], host: str) -> list[NodeFinding]:
    busy = _named(samples, "system.disk.busy")
    out = []
    for device, latency in _named(samples, "system.disk.latency").items():
        if latency >= DISK_LATENCY_S and busy.get(device, 0.0) >= DISK_BUSY_SHARE:
            says = f"{device} is busy {busy[device]:.0%} of the time and takes {latency * 1e3:.0f} ms an operation"
            proof = (Evidence(says=says, value=latency, unit="s", baseline=DISK_LATENCY_S),)
            out.append(
                NodeFinding(
                    category=CauseCategory.STORAGE_SLOW, host=host, source="disk_io", what=device, evidence=proof
                )
            )
    return out
