"""What a scheduler says about a job, in one form: Kubernetes objects, Slurm ``sacct --json``, YARN's REST answer.

Seconds and bytes throughout; times are Unix ns, 0 = not yet. A state that is not known is ``unknown``, never a guess.
Each reader takes the decoded JSON and raises :class:`UsageError` when it is something else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from lanterne.errors import UsageError

STATES = ("queued", "running", "succeeded", "failed", "preempted", "cancelled", "unknown")
_SLURM = {
    "PENDING": "queued", "CONFIGURING": "queued", "REQUEUED": "queued", "RUNNING": "running", "COMPLETING": "running",
    "SUSPENDED": "running", "COMPLETED": "succeeded", "FAILED": "failed", "TIMEOUT": "failed", "NODE_FAIL": "failed",
    "OUT_OF_MEMORY": "failed", "BOOT_FAIL": "failed", "DEADLINE": "failed", "PREEMPTED": "preempted",
    "CANCELLED": "cancelled", "REVOKED": "cancelled",
}  # fmt: skip
_YARN = {
    "NEW": "queued", "NEW_SAVING": "queued", "SUBMITTED": "queued", "ACCEPTED": "queued", "RUNNING": "running",
    "FINISHED": "succeeded", "FAILED": "failed", "KILLED": "cancelled",
}  # fmt: skip
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60}
_DECIMAL = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_QUANTITY = re.compile(r"^([+-]?\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)([A-Za-z]{0,2})$")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerJob:
    """One job of a scheduler. ``cpus``, ``gpus``, ``memory_bytes``: granted; None = not told."""

    source: str  # kubernetes | slurm | yarn
    id: str
    name: str
    state: str
    submitted_ns: int = 0
    started_ns: int = 0
    ended_ns: int = 0
    restarts: int = 0
    exit_code: int | None = None
    cpus: float | None = None
    gpus: float | None = None
    memory_bytes: int | None = None
    reason: str = ""

    @property
    def queued_s(self) -> float | None:
        return (self.started_ns - self.submitted_ns) / 1e9 if self.started_ns and self.submitted_ns else None

    @property
    def ran_s(self) -> float | None:
        return (self.ended_ns - self.started_ns) / 1e9 if self.ended_ns and self.started_ns else None


def quantity(text: str | float) -> float:
    """A Kubernetes quantity (``500m``, ``16Gi``, ``2``) in its base unit. Raises :class:`UsageError`."""
    match = _QUANTITY.match(str(text).strip())
    scale = (_BINARY | _DECIMAL).get(match.group(2)) if match else None
    if match is None or scale is None:
        raise UsageError(f"{str(text)[:40]!r} is not a Kubernetes quantity like 500m or 16Gi")
    return float(match.group(1)) * scale


def _list(body: Any, what: str, *path: str) -> list[dict[str, Any]]:
    found = body
    for key in path:
        found = (found or {}).get(key) if isinstance(found, Mapping) else None
    if not isinstance(found, list) or not all(isinstance(x, dict) for x in found):
        raise UsageError(f"{what}: no list at {'.'.join(path)}; pass the JSON answer as it came")
    return found


def _rfc3339_ns(text: Any) -> int:
    if not text:
        return 0
    try:
        return int(datetime.fromisoformat(str(text)).timestamp() * 1e9)
    except ValueError:
        raise UsageError(f"{str(text)[:40]!r} is not an RFC 3339 time") from None


def _number(value: Any) -> int:
    """Slurm writes numbers plainly or, since 23.02, as {"set", "infinite", "number"}."""
    if isinstance(value, Mapping):
        return int(value.get("number") or 0) if value.get("set", True) and not value.get("infinite") else 0
    return int(value or 0)


def slurm(body: Any) -> list[SchedulerJob]:
    """Jobs of ``sacct --json`` or slurmrestd ``/slurmdb/.../jobs``; memory is told in MiB there."""
    return [_slurm_job(row) for row in _list(body, "sacct", "jobs")]


def _slurm_job(row: Mapping[str, Any]) -> SchedulerJob:
    times = row.get("time") or {}
    state = row.get("state") or {}
    current = state.get("current") if isinstance(state, Mapping) else state
    word = str(current[0] if isinstance(current, list) and current else current or "").split(" ")[0].upper()
    granted = {str(t.get("type", "")) + ("/" + t["name"] if t.get("name") else ""): float(t.get("count") or 0)
               for t in (row.get("tres") or {}).get("allocated") or []}  # fmt: skip
    code = (row.get("exit_code") or {}).get("return_code") if isinstance(row.get("exit_code"), Mapping) else None
    return SchedulerJob(
        source="slurm", id=str(row.get("job_id", "")), name=str(row.get("name", "")),
        state=_SLURM.get(word, "unknown"), submitted_ns=_number(times.get("submission")) * 10**9,
        started_ns=_number(times.get("start")) * 10**9, ended_ns=_number(times.get("end")) * 10**9,
        restarts=_number(row.get("restart_cnt")), exit_code=_number(code) if code is not None else None,
        cpus=granted.get("cpu"), gpus=granted.get("gres/gpu"),
        memory_bytes=int(granted["mem"] * 2**20) if "mem" in granted else None,
        reason=str(state.get("reason", "")) if isinstance(state, Mapping) else "",
    )  # fmt: skip


def yarn(body: Any) -> list[SchedulerJob]:
    """Applications of ``/ws/v1/cluster/apps``; times in ms, memory in MB (MiB) there."""
    return [_yarn_job(row) for row in _list(body, "yarn", "apps", "app")]


def _yarn_job(row: Mapping[str, Any]) -> SchedulerJob:
    state = _YARN.get(str(row.get("state", "")).upper(), "unknown")
    final = str(row.get("finalStatus", "")).upper()
    if state == "succeeded" and final != "SUCCEEDED":
        state = {"FAILED": "failed", "KILLED": "cancelled"}.get(final, "unknown")
    if int(row.get("preemptedResourceVCores") or 0) > 0 and state == "cancelled":
        state = "preempted"
    resources = {str(r.get("name")): float(r.get("value") or 0) for r in _granted(row)}
    memory = row.get("allocatedMB")
    known = memory is not None and int(memory) >= 0
    return SchedulerJob(
        source="yarn", id=str(row.get("id", "")), name=str(row.get("name", "")), state=state,
        submitted_ns=int(row.get("startedTime") or 0) * 10**6, started_ns=int(row.get("launchTime") or 0) * 10**6,
        ended_ns=int(row.get("finishedTime") or 0) * 10**6,
        cpus=float(row["allocatedVCores"]) if int(row.get("allocatedVCores", -1)) >= 0 else None,
        gpus=resources.get("yarn.io/gpu"),
        memory_bytes=int(memory) * 2**20 if known and memory is not None else None,
        reason=str(row.get("diagnostics", ""))[:500],
    )  # fmt: skip


def _granted(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    by_partition = (row.get("resourceInfo") or {}).get("resourceUsagesByPartition") or []
    used = by_partition[0].get("used") if by_partition else None
    found: list[Mapping[str, Any]] = ((used or {}).get("resourceInformations") or {}).get("resourceInformation") or []
    return found


def kubernetes(body: Any) -> list[SchedulerJob]:
    """Pods or batch Jobs of ``kubectl get pods|jobs -o json`` (a List, or one object)."""
    if isinstance(body, Mapping) and body.get("kind") in ("Pod", "Job"):
        body = {"items": [body]}
    items = _list(body, "kubernetes", "items")
    return [_batch_job(item) if item.get("kind") == "Job" else _pod(item) for item in items]


def _requests(containers: list[Mapping[str, Any]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for container in containers:
        resources = container.get("resources") or {}
        for name, value in ((resources.get("limits") or {}) | (resources.get("requests") or {})).items():
            total[name] = total.get(name, 0.0) + quantity(value)
    return total


def _common(item: Mapping[str, Any], containers: list[Mapping[str, Any]], copies: int) -> dict[str, Any]:
    meta, total = item.get("metadata") or {}, _requests(containers)
    gpus = [v for k, v in total.items() if k.endswith("/gpu")]
    return {
        "source": "kubernetes",
        "id": str(meta.get("uid", "")),
        "name": f"{meta.get('namespace', 'default')}/{meta.get('name', '')}",
        "submitted_ns": _rfc3339_ns(meta.get("creationTimestamp")),
        "cpus": total["cpu"] * copies if "cpu" in total else None,
        "gpus": sum(gpus) * copies if gpus else None,
        "memory_bytes": int(total["memory"]) * copies if "memory" in total else None,
    }


def _pod(item: Mapping[str, Any]) -> SchedulerJob:
    status = item.get("status") or {}
    ended = [s for c in status.get("containerStatuses") or [] if (s := (c.get("state") or {}).get("terminated"))]
    state = {"Pending": "queued", "Running": "running", "Succeeded": "succeeded", "Failed": "failed"}
    reason = str(status.get("reason") or next((e.get("reason") for e in ended if e.get("exitCode")), "") or "")
    disrupted = any(
        c.get("type") == "DisruptionTarget" and c.get("status") == "True" for c in status.get("conditions") or []
    )
    word = state.get(str(status.get("phase")), "unknown")
    if word == "failed" and (disrupted or reason in ("Evicted", "Preempting", "Preempted")):
        word = "preempted"
    return SchedulerJob(
        **_common(item, (item.get("spec") or {}).get("containers") or [], 1), state=word,
        started_ns=_rfc3339_ns(status.get("startTime")),
        ended_ns=max((_rfc3339_ns(e.get("finishedAt")) for e in ended), default=0),
        restarts=sum(int(c.get("restartCount") or 0) for c in status.get("containerStatuses") or []),
        exit_code=max((int(e.get("exitCode") or 0) for e in ended), default=None), reason=reason,
    )  # fmt: skip


def _batch_job(item: Mapping[str, Any]) -> SchedulerJob:
    spec, status = item.get("spec") or {}, item.get("status") or {}
    holds = {c.get("type"): c for c in status.get("conditions") or [] if c.get("status") == "True"}
    over = holds.get("Complete") or holds.get("Failed") or {}
    state = "succeeded" if "Complete" in holds else "failed" if "Failed" in holds else "queued"
    state = "running" if state == "queued" and int(status.get("active") or 0) else state
    return SchedulerJob(
        **_common(
            item, ((spec.get("template") or {}).get("spec") or {}).get("containers") or [],
            int(spec.get("parallelism") or 1),
        ),
        state=state, started_ns=_rfc3339_ns(status.get("startTime")),
        ended_ns=_rfc3339_ns(status.get("completionTime") or over.get("lastTransitionTime")),
        restarts=int(status.get("failed") or 0), reason=str(over.get("reason", "")),
    )  # fmt: skip


READERS: Mapping[str, Callable[[Any], list[SchedulerJob]]] = {"kubernetes": kubernetes, "slurm": slurm, "yarn": yarn}


def success_rate(jobs: list[SchedulerJob]) -> float | None:
    """Jobs that succeeded among those that ended on their own; cancelled ones count for nobody."""
    ended = [j.state for j in jobs if j.state in ("succeeded", "failed", "preempted")]
    return ended.count("succeeded") / len(ended) if ended else None
