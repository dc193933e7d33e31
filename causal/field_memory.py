"""Memory rules over log facts: shared memory, device memory and its fragments, host memory, crowded devices."""

from __future__ import annotations

import re
from collections import Counter

from lanterne.causal import words as w
from lanterne.causal.facts import FactEvent
from lanterne.causal.words import Words, cause, evidence, line
from lanterne.nouns import Cause
from lanterne.nouns import CauseCategory as C


def candidates(words: Words) -> list[Cause]:
    """Shared memory, device memory, host memory; extra processes on a device."""
    out = []
    shm = words.said("shm_bus_error")
    if shm:
        full = [e for e in words.said("shm_usage") if w.number(e, "percent") >= 80]
        proof = [
            line(shm[0]),
            *(
                evidence(
                    f"/dev/shm is {w.number(e, 'percent'):.0f}% full", value=w.number(e, "percent"), unit="%", ref=e.ref
                )
                for e in full[:1]
            ),
        ]
        return [
            cause(
                C.SHARED_MEMORY_EXHAUSTED,
                0.93,
                proof,
                rank=next((e.rank for e in shm if e.rank >= 0), -1),
                host=shm[0].host,
                do="give the container more shared memory (--shm-size, --ipc=host) or use fewer loader workers",
            )
        ]
    crowd = _crowded(words)
    if crowd is not None:
        out.append(crowd)
    caught = {(e.rank, e.body) for e in words.said("oom_caught", "batch_skipped")}
    hung = bool(words.said("collective_timeout", "store_timeout", "oom_caught"))
    rows = [
        e
        for e in words.said("device_oom")
        if (e.rank, e.body) not in caught and not (hung and any(r == e.rank for r, _ in caught))
    ]
    if rows and crowd is None:
        out.append(_device_oom(words, rows))
    killed = words.said("host_oom") + [e for e in words.said("loader_worker_killed") if "kill" in w.text(e)]
    if not out and killed and (words.said("host_oom") or words.said("loader_worker_killed")):
        proof = [line(e) for e in killed[:2]]
        failed = [e for e in words.said("rank_failed", "child_failed") if int(w.number(e, "exit_code")) in (-9, 137)]
        proof += [line(e) for e in failed[:1]]
        tasks = [e for e in words.said("task_exit", "tasks_exit") if "out of memory" in w.text(e)]
        rank = next((e.rank for e in (*failed, *tasks, *killed) if e.rank >= 0), -1)
        out.append(
            cause(
                C.OUT_OF_MEMORY,
                0.85,
                proof,
                rank=rank,
                host=killed[0].host or next((e.host for e in tasks if e.host), ""),
                do="host memory ran out: look at loader workers and pinned buffers of that host",
            )
        )
    return out


_MIB = {"MiB": 1.0, "GiB": 1024.0}


def _unallocated(text: str) -> float | None:
    """MiB reserved and not allocated: said so by torch 2.x, the difference of two figures in 1.x."""
    found = re.search(r"([\d.]+) (MiB|GiB) (?:is )?reserved (?:by PyTorch )?but unallocated", text)
    if found:
        return float(found[1]) * _MIB[found[2]]
    have = re.search(r"([\d.]+) (MiB|GiB) already allocated", text)
    held = re.search(r"([\d.]+) (MiB|GiB) reserved in total", text)
    return float(held[1]) * _MIB[held[2]] - float(have[1]) * _MIB[have[2]] if have and held else None


def _device_oom(words: Words, rows: list[FactEvent]) -> Cause:
    first = min(rows, key=lambda e: e.job_ns or 1 << 62)
    found = _unallocated(first.body)
    tried = re.search(r"[Tt]ried to allocate ([\d.]+) (MiB|GiB)", first.body)
    asked = float(tried[1]) * _MIB[tried[2]] if tried else 0.0
    if found is not None and found > 2 * asked > 0:
        free = found
        says = evidence(
            f"{free:.0f} MiB are reserved and unallocated, {asked:.0f} MiB were asked for",
            value=free,
            unit="MiB",
            baseline=asked,
            ref=first.ref,
        )
        return cause(C.FRAGMENTATION, 0.8, [says, line(first)], rank=first.rank, host=first.host)
    return cause(C.OUT_OF_MEMORY, 0.88, [line(first)], rank=first.rank, host=first.host or None, step=first.step)


def _crowded(words: Words) -> Cause | None:
    """Device 0 carries a context of every other local rank: loads without mapping, or no default device."""
    per: dict[str, dict[int, float]] = {}
    for e in words.said("device_process"):
        per.setdefault(str(e.attributes.get("device")), {})[int(w.number(e, "pid"))] = w.number(e, "mib")
    if len(per) < 2:
        return None
    owners = Counter(pid for procs in per.values() for pid in procs)
    for where, procs in per.items():
        extra = {pid: mib for pid, mib in procs.items() if owners[pid] > 1}
        others = [len([p for p in x if owners[p] == 1]) for d, x in per.items() if d != where]
        if len(extra) >= 2 or (len(extra) == 1 and len(per) == 2 and len(procs) > 1):
            small = sum(extra.values()) / len(extra)
            says = evidence(
                f"device {where} holds {len(procs)} processes, {len(extra)} of them at home on other devices "
                f"({small:.0f} MiB each)",
                value=float(len(procs)),
                unit="processes",
                baseline=float(max(others, default=1)) or 1.0,
            )
            oom = [line(e) for e in words.said("device_oom")[:1]]
            rank = int(where) if where.isdigit() else None
            return cause(
                C.OUT_OF_MEMORY,
                0.8,
                [says, *oom],
                rank=rank,
                device=where,
                do="load checkpoints with map_location and call torch.cuda.set_device(local_rank) first; list "
                "processes per device",
            )
    return None
