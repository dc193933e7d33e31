"""Stalls that only logs tell of: watchdog, store and barrier time-outs name the victims; the rest is the suspect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lanterne.causal import liveness_stacks
from lanterne.causal import words as w
from lanterne.causal.facts import FactEvent, Facts
from lanterne.causal.liveness import Wait
from lanterne.causal.streams import canonical
from lanterne.causal.words import Words, cause, evidence, line
from lanterne.nouns import Cause, Evidence
from lanterne.nouns import CauseCategory as C

ROUND_TIMEOUTS_S = (600.0, 1800.0)
"""Defaults of NCCL and gloo groups: a death there measures the time-out, not the fault."""

Explain = Callable[..., list[Cause]]


def boundary(wait: Wait) -> bool:
    """A one-element reduction or a barrier: end of an epoch, a save, the end of the job."""
    return wait.numel == 1 or "barrier" in wait.op.lower()


@dataclass(frozen=True, slots=True)
class Told:
    """Time-outs as the logs tell them."""

    rows: tuple[FactEvent, ...]
    waiters: tuple[int, ...]
    absent: tuple[int, ...]
    named: bool  # a report (desync, monitoredBarrier) named the absent ranks itself
    wait: Wait
    timeout_s: float


def _named_absent(words: Words) -> tuple[list[FactEvent], set[int]]:
    rows, named = [], set()
    for e in words.said("desync_report", "barrier_missing"):
        said = str(e.attributes.get("ranks", e.rank if e.rank >= 0 else ""))
        numbers = [int(n) for n in said.replace(",", " ").split() if n.isdigit()]
        if numbers:
            rows.append(e)
            named.update(numbers)
    return rows, named


def told(facts: Facts, words: Words) -> Told | None:
    """Collect who timed out where, and who did not speak of it."""
    progress = [e for e in words.said("collective_progress") if e.attributes.get("why")]
    rows = words.said("collective_timeout", "store_timeout") or progress
    reports, named = _named_absent(words)
    if not rows and not reports:
        return None
    waiters = {e.rank for e in rows if e.rank >= 0} - named
    calls = [e for e in rows if e.name == "log.collective_timeout"]
    sequences = Counter(int(w.number(e, "sequence", -1)) for e in calls or progress if "sequence" in e.attributes)
    done = Counter(int(w.number(e, "completed", -1)) for e in progress)
    sequence = sequences.most_common(1)[0][0] if sequences else done.most_common(1)[0][0] + 1 if done else -1
    for e in words.said("collective_progress"):
        if e.rank >= 0 and sequence > 0 and 0 <= w.number(e, "enqueued", -1) < sequence:
            waiters.discard(e.rank)
        elif e.rank >= 0 and e.rank not in named:
            waiters.add(e.rank)
    expected = max(facts.ranks_expected, max(waiters | named | set(facts.ranks), default=-1) + 1)
    absent = named or _missing_in_group(calls, waiters) or {r for r in range(expected) if r not in waiters}
    ops = Counter(str(e.attributes.get("op", "")) for e in calls if e.attributes.get("op"))
    numels = Counter(int(w.number(e, "numel", -1)) for e in calls)
    spans = [w.number(e, "timeout_ms") or w.number(e, "ran_ms") for e in (*rows, *reports)]
    wait = Wait(
        group="",
        sequence=sequence,
        op=(ops.most_common(1)[0][0] if ops else "collective").lower(),
        numel=numels.most_common(1)[0][0] if numels else 0,
        waiters=tuple(sorted(waiters)),
        absent=tuple(sorted(absent)),
        source="log",
    )
    return Told((*rows, *reports), wait.waiters, wait.absent, bool(named), wait, max(spans, default=0.0) / 1000)


def _missing_in_group(calls: Sequence[FactEvent], waiters: set[int]) -> set[int]:
    """Ranks of a part of the job that did not time out: ``[rank4] … Rank 0`` and ``[rank7] … Rank 3`` of one group.

    Places in a group go with ranks at one distance; an all-gather's sizes tell how many there are.
    """
    groups: dict[str, dict[int, int]] = {}
    for e in calls:
        if e.rank >= 0 and "group_rank" in e.attributes and "pg" in e.attributes:
            key = str(e.attributes["pg"])
            groups.setdefault(key, {})[int(w.number(e, "group_rank"))] = e.rank
    if len(groups) != 1 or len(places := next(iter(groups.values()))) < 2 or all(p == r for p, r in places.items()):
        return set()
    (a, rank_a), (b, rank_b) = min(places.items()), max(places.items())
    distance, rest = divmod(rank_b - rank_a, b - a)
    if rest or any(rank_a + (p - a) * distance != r for p, r in places.items()):
        return set()
    sizes = [sorted((w.number(e, "numel"), w.number(e, "numel_out"))) for e in calls]
    size = max([b + 1, *(round(high / low) for low, high in sizes if low > 0 and high % low == 0)])
    return {rank_a + (p - a) * distance for p in range(size)} - waiters


def _proof(t: Told) -> list[Evidence]:
    who = w.listed(t.waiters)
    what = f"{t.wait.op} number {t.wait.sequence}" if t.wait.sequence > 0 else t.wait.op
    proof = [
        evidence(
            f"{who} timed out in {what}"
            + (f" ({t.wait.numel:,} element{'s' * (t.wait.numel > 1)})" if t.wait.numel > 0 else "")
            + (": they are victims" if len(t.waiters) != 1 else ": a victim"),
            value=float(len(t.waiters)),
            unit="ranks",
            ref=t.rows[0].ref,
        )
    ]
    if any(abs(t.timeout_s - s) < 0.05 * s for s in ROUND_TIMEOUTS_S):
        proof.append(
            evidence(
                f"{t.timeout_s:.0f} s is the time-out's own length: it measures the time-out, not the fault",
                value=t.timeout_s,
                unit="s",
            )
        )
    return proof


def spoken(facts: Facts, words: Words, explain_root: Explain) -> list[Cause]:
    """Causes of the stalls in the logs, through the same questions as for recorded calls."""
    early = _store_barrier(words)
    if early:
        return early
    t = told(facts, words)
    if t is None:
        said = _watchdogs(words) or _silent(words) or liveness_stacks.spoken(facts, words, explain_root)
        return said or liveness_stacks.counted(facts, words, explain_root)
    proof = _proof(t)
    done = words.said("training_done")
    if done and boundary(t.wait) and not _others_in_training(words, t, done):
        return [_safe(done, proof)]
    differing = _different_calls(t, words)
    if differing:
        return differing
    if not t.absent:
        return _everybody(words, t, proof)
    return _suspects(facts, words, t, proof, explain_root)


def _safe(done: Sequence[FactEvent], proof: Sequence[Evidence]) -> Cause:
    """Training was over: what hangs is the way out."""
    says = evidence(
        f"training had finished, its results are safe, and the way out hangs: {w.quote(done[-1])}", ref=done[-1].ref
    )
    do = "the results are safe; the exit path hangs in a barrier-like call: destroy the process group before leaving"
    needs = ("stacks of all ranks at exit: which rank does not reach the last barrier",)
    return cause(C.UNKNOWN, 0.6, [says, *proof], do=do, needs=needs)


def _watchdogs(words: Words) -> list[Cause]:
    """Only the watchdogs' own monitors spoke: a CUDA call does not return there, and the text does not say why."""
    rows = words.said("watchdog_stuck")
    if not rows:
        return []
    ranks = sorted({e.rank for e in rows if e.rank >= 0})
    says = (
        f"the watchdog of {w.listed(ranks)} got no answer from a CUDA or NCCL call; a held GIL is only the text's guess"
    )
    proof = [evidence(says, value=float(len(ranks)), unit="ranks", ref=rows[0].ref), line(rows[0])]
    done = words.said("training_done")
    if done:
        return [_safe(done, proof)]
    needs = ("stacks (py-spy dump --native) of these ranks", "kernel logs of their hosts (Xid)", "dumps of all ranks")
    if len(ranks) == 1 and len(words.facts.ranks) > 2:
        return [cause(C.RANK_HUNG, 0.55, proof, rank=ranks[0], needs=needs)]
    return [cause(C.UNKNOWN, 0.5, proof, needs=needs)]


def _others_in_training(words: Words, t: Told, done: Sequence[FactEvent]) -> bool:
    """Only the absent say that they are done, while a waiter's progress bar stands before its end."""
    if not {e.rank for e in done} <= set(t.absent):
        return False
    bars = [words.of(r, "work_progress") for r in t.waiters]
    return any(w.number(b[-1], "done") < w.number(b[-1], "total") for b in bars if b)


def _suspects(facts: Facts, words: Words, t: Told, proof: list[Evidence], explain_root: Explain) -> list[Cause]:
    loud = [
        r
        for r in t.absent
        if words.of(
            r,
            "oom_caught",
            "batch_skipped",
            "early_return",
            "exception",
            "work_progress",
            "exclusive_work",
            "waiting_external",
            "epoch_end",
            "rank_failed",
            "fatal_signal",
            "task_exit",
            "device_oom",
        )
    ]
    suspects = list(t.absent) if len(t.absent) == 1 or t.named else loud
    out: list[Cause] = []
    for rank in suspects[:8]:
        out += explain_root(facts, words, rank, t.wait, proof, alone=len(t.absent) == 1)
    decisive = [c for c in out if c.category not in (C.RANK_HUNG, C.RANK_MISSING)]
    if decisive:
        return decisive
    if any(explained_by_crash(words, r) for r in suspects):
        return []
    if boundary(t.wait) and len(t.absent) == 1 and out and not t.named:
        lead = out[0]
        return [
            cause(
                C.UNEVEN_INPUTS, 0.5, [*proof, evidence("a one-element reduction is a boundary; a rank that ran "
                                                        "out of data leaves it so")],
                rank=lead.subject.rank, needs=("batches consumed per rank", "which boundary: end of epoch, save "
                                                                            "or end of job"),
            ),
            *out,
        ]  # fmt: skip
    if out and (len(t.absent) == 1 or t.named):
        return out
    if len(t.absent) <= max(1, (len(t.waiters) + len(t.absent)) // 4) and t.waiters:
        for rank in t.absent:
            out += explain_root(facts, words, rank, t.wait, proof, alone=False)
        return out
    return _quiet_logs(facts, words, t, proof, explain_root) or [_cannot(t, proof)]


def _quiet_logs(facts: Facts, words: Words, t: Told, proof: list[Evidence], explain_root: Explain) -> list[Cause]:
    """Not all logs are there, and of those that are, few do not speak of a time-out: a lead until the rest is read."""
    quiet = [r for r in t.absent if words.of(r, "last_line")]
    if not quiet or len(quiet) * 3 > len(t.waiters):
        return []
    out: list[Cause] = []
    for rank in quiet[:4]:
        out += explain_root(facts, words, rank, t.wait, proof, alone=False)
    unread = sorted(set(t.absent) - set(quiet))
    need = (f"logs or Flight Recorder dumps of {w.listed(unread)}",) if unread else ()
    return [replace(c, confidence=min(c.confidence, 0.55), needs=(*c.needs, *need)) for c in out]


def explained_by_crash(words: Words, rank: int) -> bool:
    return any(
        not w.is_victim(e)
        for e in words.of(rank, "rank_failed", "fatal_signal", "task_exit", "exception", "device_oom")
    )


def _cannot(t: Told, proof: list[Evidence]) -> Cause:
    return cause(
        C.UNKNOWN,
        0.5,
        proof,
        do="collect a Flight Recorder dump of every rank (TORCH_NCCL_DUMP_ON_TIMEOUT=1)",
        needs=(f"logs or Flight Recorder dumps of the silent {w.listed(t.absent)}",),
    )


def _everybody(words: Words, t: Told, proof: list[Evidence]) -> list[Cause]:
    from lanterne.causal.field_host import first_collective

    skipped = words.said("oom_caught", "batch_skipped", "early_return")
    who = {e.rank for e in skipped if e.rank >= 0}
    if len(who) == 1:
        rank = who.pop()
        says = evidence(f"rank {rank} skipped work by itself: {w.quote(skipped[-1])}", ref=skipped[-1].ref)
        return [
            cause(
                C.COLLECTIVE_DIVERGENCE,
                0.85,
                [says, *proof],
                rank=rank,
                do="agree on skips collectively: all ranks skip, or none",
            )
        ]
    found = first_collective(words, t.wait.sequence)
    if found is not None:
        return [found]
    if words.said("ib_error", "link_down", "xid", "ecc_error", "gpu_lost"):
        return []
    return [
        cause(
            C.UNKNOWN, 0.5, [*proof, evidence("every rank entered the call: no rank is missing, the transport is "
                                              "in question")],
            needs=("Flight Recorder dumps of all ranks", "NCCL_DEBUG=INFO logs", "kernel logs of the hosts"),
        )
    ]  # fmt: skip


def _different_calls(t: Told, words: Words) -> list[Cause]:
    """Time-outs in one slot with different descriptors."""
    calls: dict[int, tuple[int, str, int]] = {}
    first: dict[int, FactEvent] = {}
    for e in t.rows:
        if e.name == "log.collective_timeout" and e.rank >= 0 and e.attributes.get("op"):
            calls.setdefault(
                e.rank,
                (int(w.number(e, "sequence", -1)), canonical(str(e.attributes["op"])), int(w.number(e, "numel", -1))),
            )
            first.setdefault(e.rank, e)
    if len(calls) < 2 or len({c[0] for c in calls.values()}) != 1 or len({c[1:] for c in calls.values()}) < 2:
        return []
    counts = Counter(c[1:] for c in calls.values()).most_common()
    tie = len(counts) > 1 and counts[0][1] == counts[1][1]
    odd = sorted(r for r, c in calls.items() if c[1:] != counts[0][0])
    usual = next(r for r, c in calls.items() if c[1:] == counts[0][0])
    proof = [line(first[odd[0]]), line(first[usual])]
    own = words.of(odd[0], "batch_skipped", "early_return", "oom_caught", "checkpoint_saving", "exclusive_work")
    if calls[odd[0]][2] == 1 and own and not tie and not words.of(odd[0], "epoch_end"):
        says = evidence(f"rank {odd[0]} is in another call than its peers after: {w.quote(own[-1])}", ref=own[-1].ref)
        do = "every rank must reach the same calls: take the barrier or the skip out of the rank-local branch"
        return [cause(C.COLLECTIVE_DIVERGENCE, 0.8, [says, *proof], rank=odd[0], do=do)]
    if calls[odd[0]][2] == 1 and calls[usual][2] > 1:
        return [cause(C.UNEVEN_INPUTS, 0.75, proof, rank=None if tie else odd[0], needs=("batches consumed per rank",))]
    needs = ("which half is wrong: half of the ranks disagree with the other half",) if tie else ()
    return [cause(C.COLLECTIVE_MISMATCH, 0.85, proof, rank=None if tie else odd[0], needs=needs)]


def _store_barrier(words: Words) -> list[Cause]:
    for e in words.said("store_barrier_timeout"):
        world, workers = w.number(e, "world_size"), w.number(e, "worker_count")
        if workers > world:
            says = evidence(
                f"{workers:.0f} workers counted in a world of {world:.0f}: the store looks reused by a restarted job",
                value=workers,
                unit="workers",
                baseline=world,
                ref=e.ref,
            )
            return [
                cause(
                    C.UNKNOWN,
                    0.55,
                    [says, *map(line, words.said("terminated")[:1])],
                    do="give each restart a fresh store (new port or rendezvous id)",
                    needs=("the launcher's log of the restart: was the store of the earlier attempt still there?",),
                )
            ]
        if 0 < workers < world:
            says = evidence(
                f"{world - workers:.0f} of {world:.0f} ranks never came to the store",
                value=workers,
                unit="workers",
                baseline=world,
                ref=e.ref,
            )
            here = words.ranks("store_barrier_timeout")
            gone = [r for r in range(int(world)) if r not in here and not words.of(r)]
            rank = gone[0] if len(gone) == 1 else None
            return [cause(C.RANK_MISSING, 0.7, [says], rank=rank, needs=("the log of the ranks that did not come",))]
    for e in words.said("store_missing_clients"):
        joined, expected = w.number(e, "joined"), w.number(e, "expected")
        if joined < expected:
            says = evidence(
                f"only {joined:.0f} of {expected:.0f} clients joined the store",
                value=joined,
                unit="ranks",
                baseline=expected,
                ref=e.ref,
            )
            return [cause(C.RANK_MISSING, 0.65, [says], needs=("the logs of the ranks that did not join",))]
    return []


def _silent(words: Words) -> list[Cause]:
    """No time-out was reported, but a caught failure on one rank and the end of all other logs."""
    skipped = words.said("oom_caught")
    stuck = words.said("still_running", "watchdog_terminating", "peer_closed")
    if skipped and stuck:
        ranks: Sequence[int] = sorted({e.rank for e in skipped if e.rank >= 0})
        return [
            cause(
                C.COLLECTIVE_DIVERGENCE,
                0.7,
                [line(skipped[-1]), line(stuck[0])],
                rank=ranks[0] if len(ranks) == 1 else None,
            )
        ]
    return []
