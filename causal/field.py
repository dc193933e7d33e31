"""Causes that stand in log lines and in trainer files: one rule a family, then precedence between them.

Messages lie politely: what follows from something else (an allocation on a bad device, a port in use after a
preemption, a signal to the survivors, a time-out of a victim) is not a cause while its cause is there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from lanterne.causal import field_agents, field_device, field_host, field_known, field_memory, field_numerics
from lanterne.causal import words as w
from lanterne.causal.facts import FactEvent, Facts
from lanterne.causal.words import Words, cause, evidence, line
from lanterne.nouns import Anomaly, Cause
from lanterne.nouns import CauseCategory as C

LIVE = frozenset({"live", "simulator", "spool"})
"""Sources with full series: there the engine's own stages judge the numbers, not the rules for trainer files."""

SLOW_SAVE_FACTOR, SLOW_SAVE_S = 5.0, 30.0
"""A save this many times the usual one, and at least this long, is a stall."""
ABORTED = (-6, 134)
_WORLD = re.compile(r"world_size_(\d+)_rank_(\d+)")


def candidates(facts: Facts, anomalies: Sequence[Anomaly] = ()) -> list[Cause]:
    """Causes from log facts and from series of trainer files; empty on a healthy job."""
    del anomalies
    words = Words(facts)
    refuted = _refuted(words)
    rules = [
        *field_device.device(words), *field_device.thermal(words), *_ended_outside(words), *field_host.launch(words),
        *field_host.host(words), *field_memory.candidates(words), *_storage(words), *_blamed_network(words),
        *field_known.candidates(words),
    ]  # fmt: skip
    out = _precede(rules)
    if all(c.category is C.UNKNOWN for c in out) and (crashed := _crash(words)):
        out = crashed
    if not any(c.confidence >= 0.5 and c.category is not C.UNKNOWN for c in out):
        out += [] if LIVE & set(facts.sources) else field_numerics.candidates(facts, words)
        out += field_agents.pauses(words)
        out += field_agents.gauges(words)
    out += [] if out else _only_victims(words)
    if refuted:
        out = [
            *refuted,
            *(c for c in out if c.category not in (C.NETWORK_FAILURE, C.SLOW_LINK, C.INTERFACE_MISCONFIGURED)),
        ]
    return out


def _precede(rules: list[Cause]) -> list[Cause]:
    """Drop effects: allocation and crash after a bad device, everything after a preemption."""
    have = {c.category for c in rules}
    drop: set[C] = set()
    if C.DEVICE_FAULT in have:
        drop |= {C.OUT_OF_MEMORY, C.RANK_CRASHED, C.NETWORK_FAILURE, C.INTERFACE_MISCONFIGURED}
    if C.EXTERNAL_TERMINATION in have:
        drop |= {C.INTERFACE_MISCONFIGURED, C.RANK_CRASHED}
    if C.SHARED_MEMORY_EXHAUSTED in have:
        drop |= {C.RANK_CRASHED, C.OUT_OF_MEMORY}
    if C.HOST_MISCONFIGURED in have or C.ENV_MISMATCH in have:
        drop |= {C.NETWORK_FAILURE, C.INTERFACE_MISCONFIGURED, C.OUT_OF_MEMORY}
    if have & {C.CHECKPOINT_INCOMPLETE, C.CHECKPOINT_CORRUPT} and C.EXTERNAL_TERMINATION in have:
        drop.add(C.EXTERNAL_TERMINATION)
    if C.RANK_CRASHED in have:
        drop.add(C.UNKNOWN)  # the program's own error answers what an Xid left open
    return [c for c in rules if c.category not in drop]


def _blamed_network(words: Words) -> list[Cause]:
    """Completion errors alone do not blame a link when a rank had failed by itself: its peers see them too."""
    own = [e for e in words.said("exception") if e.rank >= 0 and not w.is_victim(e) and not _handled(words, e)]
    if own and words.said("ib_error") and not words.said("link_down", "port_counter", "bad_gid", "no_interface"):
        return []
    return field_host.network(words)


def _only_victims(words: Words) -> list[Cause]:
    """Errors that speak of a peer, and no trace of that peer's own: not healthy, and not enough to judge."""
    rows = [e for e in words.said("exception") if w.is_victim(e)]
    if not rows or words.said("collective_timeout", "store_timeout", "terminated", "training_done"):
        return []
    return [
        cause(
            C.UNKNOWN,
            0.5,
            map(line, rows[:3]),
            needs=("the logs of the other ranks: this error speaks of a peer", "the launcher's report of exit codes"),
        )
    ]


def _refuted(words: Words) -> list[Cause]:
    """A remedy that did not help lowers the cause it was meant for."""
    rows = words.said("action_without_effect")
    if not rows:
        return []
    return [
        cause(
            C.UNKNOWN,
            0.6,
            [evidence(f"a hypothesis is refuted: {w.quote(e)}", ref=e.ref) for e in rows[:2]],
            do="drop that hypothesis; collect per-rank arrival and transfer times before the next action",
            needs=("collective entry times per rank and transfer times per group", "port counters over time"),
        )
    ]


def _ended_outside(words: Words) -> list[Cause]:
    """Preemption, cancellation, time limit; a bare SIGTERM counts only when nobody failed first."""
    rows = words.said("terminated")
    reused = [e for e in words.said("store_barrier_timeout") if w.number(e, "worker_count") > w.number(e, "world_size")]
    if words.said("node_failed"):
        return [_node_failed(words)]
    if not rows or reused:  # what failed after a restart is another matter
        return []
    clear = [
        e
        for e in rows
        if any(
            x in w.text(e)
            for x in (
                "cancelled",
                "preempt",
                "time limit",
                "evict",
                "spot",
                "reclaim",
                "maintenance",
                "node_fail",
                "walltime",
                "term_",
                "h_rt",
            )
        )
    ]
    failed = [e for e in words.said("exception", "rank_failed", "fatal_signal", "device_oom") if not w.is_victim(e)]
    if not clear and (failed or words.said("collective_timeout")):
        return []
    first = (clear or rows)[0]
    proof = [
        line(first),
        *(
            evidence(f"a port is still in use: it follows the restart: {w.quote(e)}", ref=e.ref)
            for e in words.said("address_in_use")[:1]
        ),
    ]
    return [
        cause(
            C.EXTERNAL_TERMINATION,
            0.9 if clear else 0.75,
            proof,
            host=first.host or None,
            do="no fault in the job: requeue it from its last complete checkpoint",
        )
    ]


def _node_failed(words: Words) -> Cause:
    """The scheduler lost a node: what its ranks did is not known here."""
    first = words.said("node_failed")[0]
    do = f"requeue without {first.host}; read its kernel log and its management controller before it comes back"
    needs = (f"the kernel log of {first.host}", "its hardware events (BMC)")
    return cause(C.EXTERNAL_TERMINATION, 0.8, [line(first)], host=first.host, do=do, needs=needs)


def _unseen_shards(words: Words) -> list[Cause]:
    """Shards of other ranks that this node does not see: lost, or the folder is not shared; undecidable."""
    zero = words.said("zero_paths_missing")
    if not zero:
        return []
    paths = str(zero[0].attributes.get("paths", ""))[:200]
    says = evidence(f"checkpoint shards of other ranks are not visible here: {paths}", ref=zero[0].ref)
    return [
        cause(
            C.UNKNOWN,
            0.55,
            [says],
            do="do not train on from a partial load; see whether the checkpoint folder is one shared disk",
            needs=("a listing of the checkpoint folder on every node: node-local disks or a real loss of files",),
        ),
        cause(C.CHECKPOINT_INCOMPLETE, 0.45, [says], needs=("a listing of the checkpoint folder on every node",)),
    ]


def _storage(words: Words) -> list[Cause]:
    """Missing or broken pieces of a checkpoint; a full or slow disk."""
    unseen = _unseen_shards(words)
    if unseen:
        return unseen
    out = []
    for e in words.fact("checkpoint_problem"):
        kind = C.CHECKPOINT_CORRUPT if e.attributes.get("kind") == "corrupt" else C.CHECKPOINT_INCOMPLETE
        out.append(
            cause(
                kind,
                0.92,
                [evidence(e.body, ref=e.ref)],
                parameter=str(e.attributes.get("path", "")) or None,
                do="resume from the last complete checkpoint",
            )
        )
    broken, missing = (
        words.said("checkpoint_corrupt"),
        [e for e in words.said("checkpoint_file_missing") if "zero checkpoints" not in w.text(e)],
    )
    if not out and broken:
        first = broken[0]
        out.append(
            cause(
                C.CHECKPOINT_CORRUPT,
                0.88,
                [line(first)],
                rank=first.rank,
                parameter=_path(first),
                do="verify it (lanterne checkpoint verify) and resume from the last one that passes",
            )
        )
    elif not out and missing:
        out.append(_missing_piece(words, missing))
    full = words.said("disk_full")
    if full and not words.said("shm_bus_error"):
        out.append(
            cause(
                C.CHECKPOINT_INCOMPLETE if words.said("checkpoint_saving", "checkpoint_saved") else C.STORAGE_SLOW,
                0.7,
                [line(full[0])],
                rank=full[0].rank,
                host=full[0].host,
                do="free space, then verify the newest checkpoint before resuming from it",
            )
        )
    out += [] if out else _slow_saves(words)
    slow = words.said("storage_slow")
    if slow and not out:
        out.append(cause(C.STORAGE_SLOW, 0.75, map(line, slow[:2]), host=slow[0].host))
    return out


def _slow_saves(words: Words) -> list[Cause]:
    """Saves that take many times what the earlier ones took."""
    rows = [e for e in words.said("checkpoint_took") if w.number(e, "seconds") > 0]
    seconds = [w.number(e, "seconds") for e in rows]
    for i in range(2, len(rows)):
        usual = sorted(seconds[:i])[i // 2]
        if seconds[i] > max(SLOW_SAVE_FACTOR * usual, SLOW_SAVE_S):
            says = f"a checkpoint took {seconds[i]:.0f} s, the {i} before it {usual:.1f} s"
            proof = [evidence(says, value=seconds[i], unit="s", baseline=usual, ref=rows[i].ref)]
            needs = ("throughput of the checkpoint's disk at that time, per host",)
            return [cause(C.CHECKPOINT_STALL, 0.75, proof, rank=rows[i].rank, step=rows[i].step, needs=needs)]
    return []


def _path(e: FactEvent) -> str | None:
    found = re.search(r"(/[\w./-]+|\b[\w-]*(?:checkpoint|ckpt|iter_|global_step)[\w./-]*)", e.body)
    return found.group(1)[:300] if found else None


def _missing_piece(words: Words, rows: list[FactEvent]) -> Cause:
    first = rows[0]
    path = str(first.attributes.get("path", ""))
    layout = _WORLD.search(first.body)
    if layout:
        says = evidence(
            f"the load looks for rank {layout[2]} of a world of {layout[1]}: the world size changed between save "
            f"and load",
            value=float(layout[1]),
            unit="ranks",
            ref=first.ref,
        )
        return cause(
            C.CHECKPOINT_INCOMPLETE,
            0.85,
            [says, line(first)],
            rank=first.rank,
            parameter=path,
            do="compare saved and current layout; load with the saved world size, or reshard",
        )
    ended = [
        evidence(f"the save was cut off: {w.quote(e)}", ref=e.ref)
        for e in words.said("terminated", "checkpoint_saving")[:2]
    ]
    return cause(
        C.CHECKPOINT_INCOMPLETE,
        0.85,
        [line(first), *ended],
        rank=first.rank,
        parameter=path,
        do='resume from the last *complete* checkpoint; "latest" by name is not enough',
    )


def _failed_rows(words: Words) -> list[FactEvent]:
    rows = [
        e
        for e in words.said("rank_failed", "task_exit", "process_exit", "fatal_signal")
        if e.rank >= 0 and not w.is_victim(e)
    ]
    return [e for e in rows if int(w.number(e, "exit_code", 1)) not in (0, -15, 143)]


def _crash(words: Words) -> list[Cause]:
    """The first rank that failed by itself; ranks that speak of others are victims."""
    own = [e for e in words.said("exception") if not w.is_victim(e) and not _handled(words, e)]
    failed = _failed_rows(words)
    timeouts = words.ranks("collective_timeout", "store_timeout")
    failed = [e for e in failed if not (e.rank in timeouts and int(w.number(e, "exit_code")) in (-6, 134, 1))]
    if any(words.said("oom_caught", "batch_skipped", "early_return")) and words.said("collective_timeout"):
        return []
    named = [e for e in own if e.rank >= 0]
    start = min(
        (*named, *failed), key=lambda e: (not bool(e.attributes.get("first", False)), e.job_ns or 1 << 62), default=None
    )
    if start is None:
        return _nameless(words, own)
    rank = start.rank
    proof = [line(e) for e in (*[x for x in named if x.rank == rank][:1], *[x for x in failed if x.rank == rank][:1])]
    codes = [int(w.number(e, "exit_code")) for e in failed if e.rank == rank]
    alive = words.said("still_running")
    do = _KILL_ON_BAD_EXIT if alive or timeouts else ""
    if alive:
        says = f"rank {rank} is dead and the job stays up around it: {w.quote(alive[0])}"
        proof.insert(0, evidence(says, ref=alive[0].ref))
        do = "end the job from outside now (scancel, kill), then: " + do
        return [cause(C.EXTERNAL_TERMINATION, 0.8, proof, rank=rank, host=start.host or None, step=start.step, do=do)]
    needs = _of_exit(codes[0] if codes else 0, rank, named)
    sure = 0.55 if codes and codes[0] in ABORTED and needs else 0.85
    return [cause(C.RANK_CRASHED, sure, proof, rank=rank, host=start.host or None, step=start.step, do=do, needs=needs)]


def _of_exit(code: int, rank: int, named: list[FactEvent]) -> tuple[str, ...]:
    """What would settle an exit code that several causes share."""
    if code in (-9, 137):
        return ("the kernel log of its host: SIGKILL is the out-of-memory killer's signal",)
    if code in ABORTED and not any(e.rank == rank for e in named):
        return (f"stderr of rank {rank}: SIGABRT is also how a watchdog ends a rank that waits for another",)
    return ()


_KILL_ON_BAD_EXIT = (
    "read the rank's own traceback; switch on kill-on-bad-exit (srun --kill-on-bad-exit=1, torchrun) and "
    "TORCH_NCCL_ASYNC_ERROR_HANDLING so that a dead rank ends the job"
)


def _handled(words: Words, e: FactEvent) -> bool:
    """Exceptions that other rules own, by their text."""
    said = w.text(e)
    return "out of memory" in said or ("stopiteration" in said and bool(words.said("collective_timeout")))


def _nameless(words: Words, own: list[FactEvent]) -> list[Cause]:
    seg = words.said("segfault")
    if seg:
        says = evidence(
            f"{seg[0].attributes.get('process')} crashed in {seg[0].attributes.get('library')}", ref=seg[0].ref
        )
        return [
            cause(
                C.RANK_CRASHED,
                0.6,
                [says, line(seg[0])],
                host=seg[0].host,
                needs=("which rank had that pid", "its core dump or stderr"),
            )
        ]
    unsaid = [e for e in own if "actor died unexpectedly" in w.text(e) or "worker died" in w.text(e)]
    codes = [
        e
        for e in words.said("child_failed", "fatal_signal", "process_exit", "task_exit")
        if not w.is_victim(e) and int(w.number(e, "exit_code", 1)) not in (0, -15)
    ]
    if words.said("collective_timeout", "store_timeout") or not (own or codes):
        return []
    rows = own[:1] or codes[:1]
    local = next((int(w.number(e, "local_rank")) for e in words.said("child_failed")), None)
    hosts = len({e.host for e in words.facts.events if e.host}) <= 1
    needs: tuple[str, ...] = (
        () if local is not None else ("which rank wrote it: start with torchrun --tee 3 or --log-dir",)
    )
    killed = rows[0] in unsaid or (not own and int(w.number(codes[0], "exit_code")) in (-9, 137))
    if killed:
        needs = ("the kernel log of its host: SIGKILL is the out-of-memory killer's signal", "stderr of that process")
    proof = [line(e) for e in (*rows, *codes[:1])]
    rank = local if hosts else None
    return [cause(C.RANK_CRASHED, 0.55 if killed else 0.65, proof, rank=rank, host=rows[0].host, needs=needs)]
