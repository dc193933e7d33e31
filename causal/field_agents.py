"""What other tools measured: pauses that say so, hang gauges, NCCL RAS, what-if traces."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lanterne.causal import words as w
from lanterne.causal.facts import Facts
from lanterne.causal.words import Words, cause, evidence, line
from lanterne.nouns import Cause, Cost, group_name
from lanterne.nouns import CauseCategory as C

SHORT_CALLS_MIN = 20


def pauses(words: Words) -> list[Cause]:
    """Garbage collection and recompilation that say so themselves."""
    out = []
    pauses: dict[int, list[float]] = {}
    rows = words.said("gc_pause")
    for e in rows:
        seconds = w.number(e, "seconds") / (1000 if e.attributes.get("unit") == "ms" else 1)
        if seconds >= 0.2:
            pauses.setdefault(e.rank, []).append(seconds)
    if pauses:
        total = sum(sum(v) for v in pauses.values())
        says = evidence(
            f"{sum(map(len, pauses.values()))} garbage collections of up to "
            f"{max(max(v) for v in pauses.values()):.1f} s on {len(pauses)} rank(s), not at one step",
            value=total,
            unit="s",
            ref=rows[0].ref,
        )
        one = next(iter(pauses)) if len(pauses) == 1 else None
        out.append(
            cause(
                C.GC_PAUSE,
                0.82,
                [says],
                rank=one,
                do="collect on a common step on all ranks (gc.disable, then gc.collect every N steps)",
            )
        )
    again = words.said("recompile")
    if len(again) >= 3:
        out.append(
            cause(
                C.RECOMPILE,
                0.7,
                [
                    line(again[0]),
                    evidence(f"{len(again)} recompilations", value=float(len(again)), unit="recompilations"),
                ],
                rank=again[0].rank if len({e.rank for e in again}) == 1 else None,
            )
        )
    late = words.said("loader_slow")
    if late:
        ranks = {e.rank for e in late}
        out.append(cause(C.DATA_STALL, 0.6, map(line, late[:3]), rank=ranks.pop() if len(ranks) == 1 else None))
    return out


def gauges(words: Words) -> list[Cause]:
    """Hang gauges of a node agent, counters of NCCL RAS: who stands, and what would tell why."""
    rows = words.fact("hang_gauge")
    up = sorted({e.rank for e in rows if w.number(e, "value") > 0})
    out = []
    if up:
        ranks = sorted({e.rank for e in rows})
        which = "all" if len(up) == len(ranks) else f"{len(up)} of {len(ranks)}"
        first = next(e for e in rows if w.number(e, "value") > 0)
        says = evidence(
            f"{which} ranks report a hang ({first.attributes.get('gauge')}): {','.join(map(str, up[:32]))}",
            value=float(len(up)),
            unit="ranks",
            baseline=0.0,
            ref=first.ref,
        )
        quiet = [r for r in ranks if r not in up]
        needs = ["stacks or Flight Recorder dumps: a rank that reports a hang is a victim more often than not"]
        needs += [f"what ranks {','.join(map(str, quiet[:16]))} do: they report no hang"] if quiet else []
        out.append(
            cause(
                C.UNKNOWN,
                0.6,
                [says],
                needs=needs,
                do="dump stacks of all ranks now, before a restart destroys the evidence",
            )
        )
    out += _what_if(words)
    missing = words.fact("ras_missing")
    for e in missing[:4]:
        rank = int(w.number(e, "missing", -1))
        out.append(
            cause(
                C.RANK_MISSING,
                0.75,
                [evidence(f"NCCL RAS does not see rank {rank} of group {e.attributes.get('group')}", ref=e.ref)],
                rank=rank,
                group=str(e.attributes.get("group")),
            )
        )
    if not missing:
        out += _ras(words) or _inspector(words)
    return out


def _what_if(words: Words) -> list[Cause]:
    """The counterfactual of an operation trace: a worker, a stage, or nobody."""
    out = []
    for e in words.fact("what_if"):
        slowdown, share = w.number(e, "slowdown", 1.0), w.number(e, "share")
        total = evidence(
            f"the job is {slowdown:.3f} times slower than with even operations",
            value=slowdown,
            unit="1",
            baseline=1.0,
            ref=e.ref,
        )
        category = str(e.attributes.get("category", ""))
        if category:
            says = evidence(str(e.attributes.get("says")), value=share, unit="1", ref=e.ref)
            rank = int(w.number(e, "culprit", -1))
            found = cause(C(category), 0.5 + 0.45 * min(1.0, share), [says, total], rank=rank)
            out.append(replace(found, cost=Cost(slowdown=slowdown)))
        elif slowdown > 1.1:
            out.append(
                cause(
                    C.UNKNOWN,
                    0.5,
                    [total],
                    needs=("hardware counters of the workers: no worker and no stage alone explains it",),
                )
            )
    return out


def _behind(group: str, counts: dict[int, int], tool: str) -> list[Cause]:
    """The rank whose count of operations stands below that of its peers: they wait for it."""
    top = max(counts.values())
    behind = sorted(r for r, n in counts.items() if 0 <= n < top)
    if not behind or len(behind) * 2 >= len(counts):
        return []
    low = behind[0]
    says = f"rank {low} is at operation {counts[low]} of group {group}, the others at {top} ({tool})"
    proof = [evidence(says, value=float(counts[low]), unit="operations", baseline=float(top))]
    return [cause(C.RANK_HUNG, 0.75, proof, rank=low, group=group, needs=("a py-spy dump of that rank",))]


def _ras(words: Words) -> list[Cause]:
    groups: dict[str, dict[int, int]] = {}
    for e in words.fact("ras_rank"):
        groups.setdefault(str(e.attributes.get("group")), {})[e.rank] = int(w.number(e, "count", -1))
    for group, counts in groups.items():
        if found := _behind(group, counts, "NCCL RAS"):
            return found
    return []


def _inspector(words: Words) -> list[Cause]:
    """NCCL Inspector: the last call of each communicator and rank; a rank is global in the widest communicator."""
    rows = words.fact("inspector_last")
    world = max((int(w.number(e, "size")) for e in rows), default=0)
    owner = {
        (e.attributes.get("where"), e.attributes.get("pid")): int(w.number(e, "comm_rank"))
        for e in rows
        if w.number(e, "size") == world
    }
    comms: dict[str, dict[int, int]] = {}
    for e in rows:
        rank = owner.get((e.attributes.get("where"), e.attributes.get("pid")))
        if rank is not None:
            comms.setdefault(str(e.attributes.get("comm")), {})[rank] = int(w.number(e, "sequence"))
    for counts in comms.values():
        if len(counts) > 1 and (found := _behind(group_name(tuple(sorted(counts))), counts, "NCCL Inspector")):
            return found
    return _shortest(words.facts)


def _shortest(facts: Facts) -> list[Cause]:
    """The rank that all wait for comes last and so has the shortest collectives."""
    table = facts.get("collective_ms")
    full = table[np.isfinite(table).all(axis=1)] if table.size else np.zeros((0, 0))
    if len(full) < SHORT_CALLS_MIN or full.shape[1] < 3:
        return []
    least = full.argmin(axis=1)
    column = int(np.bincount(least).argmax())
    others = np.median(np.delete(full, column, axis=1), axis=1)
    waited = float(np.median(others - full[:, column]))
    if float(np.mean(least == column)) < 0.8 or waited < max(1.0, float(np.median(full[:, column]))):
        return []
    rank = facts.ranks[column]
    says = f"rank {rank} has the shortest collectives by {waited:.1f} ms: it enters last and the others wait for it"
    proof = [evidence(says, value=float(np.median(full[:, column])), unit="ms", baseline=float(np.median(others)))]
    return [cause(C.SLOW_COMPUTE, 0.65, proof, rank=rank, needs=("a profiler trace or phases of that rank",))]
