"""From a stall to a category: what was the rank doing that did not come?

Order of the questions, each with its own evidence: dead device stream, streams that differ, exit or exception
(left to the crash rules), caught exception or skip, long work done alone, end of its data, a stack, nothing at
all. With nothing at all the honest category is ``rank_hung`` (it left a trace) or ``rank_missing`` (none).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from lanterne.causal import liveness_stacks
from lanterne.causal import words as w
from lanterne.causal.facts import FactEvent, Facts
from lanterne.causal.liveness import Stall, Wait, live
from lanterne.causal.liveness_text import boundary, spoken
from lanterne.causal.streams import Divergence
from lanterne.causal.words import Words, cause, evidence, line
from lanterne.nouns import Cause, EventName, Evidence
from lanterne.nouns import CauseCategory as C

_FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')
STALL_S = 5.0  # DESIGN.md section 6: no progress for max(5 s, …); only for facts of a job that still runs
STACK_NEED = "a py-spy dump (with --native) of rank {rank}: only a stack tells a held GIL from other host work"


def explain(facts: Facts, seen: Stall) -> list[Cause]:
    """All causes of the liveness kind, best first."""
    words = Words(facts)
    if (live(facts) or not facts.ended) and not _stands_still(facts, seen):
        seen = Stall(divergences=seen.divergences)
    out = _dead(facts, seen)
    if seen.divergences:
        return [*out, *(c for d in seen.divergences[:3] if (c := _diverged(d, words)) is not None)]
    if seen.waits:
        out += _roots(facts, seen, words)
    elif seen.all_present and not out:
        out += _all_present(seen.all_present[0], words)
    if not out:
        out += spoken(facts, words, explain_root)
    if not out and not seen.waits:
        out += liveness_stacks.stalled(facts, words, explain_root)
    out += _reported(words)
    return out


def _stands_still(facts: Facts, seen: Stall) -> bool:
    if any(e.name == EventName.STALL for e in facts.events):
        return True
    started = [x.started_ns for x in (*seen.waits, *seen.all_present) if x.started_ns]
    ends = [e.job_ns for e in facts.events if e.name == EventName.EXITED and e.job_ns]
    until = min([facts.now_ns, *ends]) if live(facts) else facts.now_ns  # who is ended from outside is in some call
    return bool(started) and until - min(started) > STALL_S * 1e9


def _dead(facts: Facts, seen: Stall) -> list[Cause]:
    out = []
    for rank, (group, sequence, lag) in sorted(seen.dead.items()):
        waits = [x for x in seen.waits if rank in x.absent]
        proof = [
            evidence(
                f"rank {rank} shows {lag} calls of group {group.split('#')[0]} from sequence {sequence} as not "
                f"completed,"
                f" all of which its peers have completed: its device stream is dead",
                value=float(lag),
                unit="calls",
                baseline=0.0,
                ref="flight_recorder",
            )
        ]
        proof += [_waiting(x) for x in waits[:2]]
        place = facts.places.get(rank)
        out.append(
            cause(
                C.DEVICE_FAULT,
                0.88,
                proof,
                rank=rank,
                host=place.host if place else None,
                device=place.device if place else None,
                group=waits[0].group if waits else group,
                do=f"drain the device of rank {rank}; read its kernel log for Xid and ECC lines before reuse",
                needs=("the kernel log (dmesg) of the host of rank " + str(rank),),
            )
        )
    return out


def _waiting(wait: Wait) -> Evidence:
    who = w.listed(wait.waiters)
    return evidence(
        f"{who} wait{'s' * (len(wait.waiters) == 1)} in {wait.op} number {wait.sequence} of group "
        f"{wait.group.split('#')[0]}; not entered by {w.listed(wait.absent)}",
        value=float(len(wait.waiters)),
        unit="ranks",
        ref=f"{wait.source}:{wait.group}/{wait.sequence}" if wait.source == "collectives" else wait.source,
    )


def _diverged(d: Divergence, words: Words) -> Cause | None:
    group = d.group.split("#")[0]
    calls = [c for c in words.facts.collectives if (c.group, c.sequence) == (d.group, d.sequence)]
    step = max((c.step for c in calls), default=-1)
    proof = [
        evidence(
            f"call {d.sequence} of group {group}: rank {','.join(map(str, d.ranks[:8]))} runs {d.theirs}, the others"
            f" {d.majority}",
            value=float(d.sequence),
            unit="sequence",
            ref=f"collectives:{d.group}/{d.sequence}" if live(words.facts) else "flight_recorder",
        )
    ]
    for rank in d.ranks[:2]:
        proof += [line(e) for e in words.of(rank, "oom_caught", "batch_skipped", "early_return", "exception")[:2]]
    if d.what == "shape" and len(set(d.sizes)) > 2:
        sizes = "/".join(map(str, d.sizes[:16]))
        proof.insert(
            0,
            evidence(
                f"members bring {sizes} elements to one {d.majority.split('(')[0]}: equal sizes are assumed",
                ref="flight_recorder",
            ),
        )
        return cause(
            C.COLLECTIVE_MISMATCH,
            0.9,
            proof,
            group=group,
            rank=None,
            do="pad to equal sizes or use the variable-size form of the call",
        )
    odd = None if d.tie else d.ranks[0]
    needs = ("half of the members disagree with the other half: which half is wrong cannot be told",) if d.tie else ()
    if d.one_element and d.what != "dtype":
        proof.append(
            evidence(
                "the odd call is a one-element or barrier call, a boundary: that rank has run out of batches",
                ref="flight_recorder",
            )
        )
        return cause(C.UNEVEN_INPUTS, 0.8, proof, rank=odd, group=group, needs=(*needs, "batches consumed per rank"))
    if d.shift:
        proof.append(
            evidence(
                f"shifted by {d.shift:+d} calls the streams agree: rank {d.ranks[0]} skipped or added calls",
                value=float(d.shift),
                unit="calls",
            )
        )
        return cause(C.COLLECTIVE_DIVERGENCE, 0.88, proof, rank=odd, group=group, needs=needs, step=step)
    if any(words.of(r, "oom_caught", "batch_skipped", "early_return") for r in d.ranks):
        return cause(C.COLLECTIVE_DIVERGENCE, 0.9, proof, rank=odd, group=group, needs=needs, step=step)
    return cause(C.COLLECTIVE_MISMATCH, 0.9, proof, rank=odd, group=group, needs=needs, step=step)


def _roots(facts: Facts, seen: Stall, words: Words) -> list[Cause]:
    out = []
    stands = [e.rank for e in facts.events if e.name == EventName.STALL and not e.attributes.get("waiting", True)]
    known = [r for r in seen.roots if r in stands]  # who tells that it stands by itself clears those that tell nothing
    for rank in (known or seen.roots)[:16]:
        waits = [x for x in seen.waits if rank in x.absent] or list(seen.waits[:1])
        proof = [_waiting(x) for x in waits[:2]]
        out += explain_root(facts, words, rank, waits[0], proof, alone=len(known or seen.roots) == 1)
    return out


def explain_root(
    facts: Facts, words: Words, rank: int, wait: Wait, proof: Sequence[Evidence], *, alone: bool
) -> list[Cause]:
    """Category for one rank that did not come. Empty when it crashed: the crash rules have it."""
    shared = words.of(-1) if alone else []
    own = [*words.of(rank), *shared]
    if _crashed(facts, words, rank):
        return []
    group = wait.group or None
    found = (
        _skipped(own, rank, group, proof) or _alone(own, rank, group, proof) or _finished(words, own, rank, wait, proof)
    )
    found = found or _raised(words, rank, group, proof) or _stack(facts, rank, group, proof)
    if found is not None:
        return [found]
    if rank not in facts.ranks and not words.of(rank):
        says = f"rank {rank} left no dump and no log: a missing dump is a first suspect, not the absence of data"
        return [
            cause(
                C.RANK_MISSING,
                0.55,
                [*proof, evidence(says)],
                rank=rank,
                group=group,
                needs=(f"log and exit code of rank {rank}", STACK_NEED.format(rank=rank)),
            )
        ]
    extra = [evidence(f"last line of rank {rank}: {last}") for last in [words.last_line(rank)] if last]
    dump = [e for e in words.fact("flight_recorder_dump") if e.rank == rank and e.attributes.get("entries") == 0]
    extra += [
        evidence(
            f"the dump of rank {rank} has zero entries: its host side stopped; by the dump alone a held GIL looks "
            f"like a rank that never started",
            value=0.0,
            unit="entries",
            ref=e.ref,
        )
        for e in dump
    ]
    return [
        cause(
            C.RANK_HUNG,
            0.85 if wait.source in {"flight_recorder", "collectives"} else 0.6,
            [*proof, *extra],
            rank=rank,
            group=group,
            needs=(STACK_NEED.format(rank=rank),),
        )
    ]


def _crashed(facts: Facts, words: Words, rank: int) -> bool:
    stalled = any(e.rank == rank and e.name == EventName.STALL for e in facts.events)
    for e in facts.events:
        if e.rank == rank and e.name in {EventName.EXCEPTION, EventName.OUT_OF_MEMORY}:
            return True
        if e.rank == rank and e.name == EventName.EXITED and not (stalled and _ended_politely(e)):
            return True
    gone = [e for e in words.of(rank, "rank_failed", "task_exit", "fatal_signal", "process_exit") if not w.is_victim(e)]
    signalled = [e for e in gone if int(w.number(e, "exit_code", 1)) not in (0, -6, 134, -15, 143)]
    raised = [e for e in words.of(rank, "exception") if not w.is_victim(e)]
    last = words.last_line(rank)
    ended = bool(raised) and raised[-1].body[:60] in last
    return bool(signalled) or ended


def _ended_politely(event: FactEvent) -> bool:
    """By SIGINT or SIGTERM: whoever had it enough of the stall, not the rank itself."""
    signal, code = w.number(event, "signal", 0), w.number(event, "exit_code", 0)
    return abs(int(signal)) in {2, 15} or int(code) in {-2, -15, 130, 143}


def _skipped(own: Sequence[FactEvent], rank: int, group: str | None, proof: Sequence[Evidence]) -> Cause | None:
    """A caught out-of-memory, a skipped batch, an early return: the rank's stream lacks calls."""
    names = {"log.oom_caught", "log.batch_skipped", "log.early_return"}
    rows = [e for e in own if e.name in names and e.rank in (rank, -1)]
    if not rows:
        return None
    says = [evidence(f"rank {rank} skipped work by itself: {w.quote(rows[-1])}", ref=rows[-1].ref)]
    step = rows[-1].step
    return cause(
        C.COLLECTIVE_DIVERGENCE,
        0.88,
        [*says, *proof],
        rank=rank,
        group=group,
        step=step,
        do="agree on skips collectively: all ranks skip, or none",
    )


def _alone(own: Sequence[FactEvent], rank: int, group: str | None, proof: Sequence[Evidence]) -> Cause | None:
    """Long work by one rank while the rest wait."""
    names = {"log.work_progress", "log.exclusive_work", "log.waiting_external"}
    rows = [e for e in own if e.name in names and not (e.name == "log.work_progress" and _is_training_bar(e))]
    if not rows:
        return None
    last = rows[-1]
    shown = evidence(
        f"rank {rank} was doing work of its own while the rest waited: {w.quote(last)}",
        value=w.number(last, "percent", -1.0) if "percent" in last.attributes else None,
        unit="%" if "percent" in last.attributes else "",
        ref=last.ref,
    )
    do = f"do not touch the network: let rank {rank} do it before the job (or on all ranks), or raise the time-out"
    if last.name == "log.waiting_external":
        do = f"look at what rank {rank} waits for; the ranks that timed out are victims"
    return cause(C.EXCLUSIVE_WORK, 0.85, [shown, *proof], rank=rank, group=group, do=do)


def _is_training_bar(event: FactEvent) -> bool:
    what = str(event.attributes.get("what", "")).lower()
    tools = (
        "token",
        "map",
        "download",
        "load",
        "process",
        "pack",
        "filter",
        "convert",
        "build",
        "index",
        "cach",
        "sav",
        "eval",
        "group",
        "copy",
        "extract",
        "generat",
        "upload",
    )
    moves_bytes = re.search(r"[kMGT]?i?B/s\b|\b(?:examples|files|docs|tokens)/s\b", event.body) is not None
    return not moves_bytes and not any(t in what for t in tools)


def _finished(words: Words, own: Sequence[FactEvent], rank: int, wait: Wait, proof: Sequence[Evidence]) -> Cause | None:
    """Its data ended: the others wait at a boundary, or it says so itself."""
    ended = [e for e in own if e.name == "log.epoch_end"]
    counts = {e.rank: w.number(e, "count") for e in words.said("batches") if e.rank >= 0 and w.number(e, "count") > 0}
    uneven = len(set(counts.values())) > 1 and rank in counts
    around = words.said("epoch_end")
    if not (ended or uneven or (boundary(wait) and around) or _odd_shards(words)):
        return None
    says = [evidence(f"rank {rank} reached the end of its data: {w.quote(e)}", ref=e.ref) for e in ended[-1:]]
    if uneven:
        usual = max(set(counts.values()), key=list(counts.values()).count)
        says.append(
            evidence(
                f"rank {rank} had {counts[rank]:.0f} batches, the others {usual:.0f}",
                value=counts[rank],
                unit="batches",
                baseline=usual,
            )
        )
    if boundary(wait):
        says.append(
            evidence(
                f"the others wait in a one-element {wait.op}: a boundary (end of an epoch)",
                value=float(wait.numel),
                unit="elements",
            )
        )
    says += [evidence(f"shards do not divide by ranks: {w.quote(e)}", ref=e.ref) for e in _odd_shards(words)[:1]]
    if around and not ended:
        says.append(evidence(f"an epoch ends there: {w.quote(around[-1])}", ref=around[-1].ref))
    return cause(
        C.UNEVEN_INPUTS, 0.85 if ended or uneven else 0.75, [*says, *proof], rank=rank, group=wait.group or None
    )


def _odd_shards(words: Words) -> list[FactEvent]:
    world = words.facts.ranks_expected
    return [
        e for e in words.said("shards") if world > 1 and w.number(e, "shards") > 0 and w.number(e, "shards") % world
    ]


def _raised(words: Words, rank: int, group: str | None, proof: Sequence[Evidence]) -> Cause | None:
    """An exception that the rank survived: it left the stream."""
    rows = [e for e in words.of(rank, "exception") if not w.is_victim(e)]
    if not rows:
        return None
    says = evidence(f"rank {rank} raised and went on or sits in shutdown: {w.quote(rows[0])}", ref=rows[0].ref)
    return cause(C.RANK_CRASHED, 0.8, [says, *proof], rank=rank, group=group)


def _stack(facts: Facts, rank: int, group: str | None, proof: Sequence[Evidence]) -> Cause | None:
    """What a stack of the rank shows: a held GIL, a loader, a save, another collective."""
    rows = [e for e in facts.events if e.name in {"stack", EventName.STALL} and e.rank == rank and e.body]
    for row in rows:
        frames = frames_of(row.body)
        top = "\n".join(frames)[:4000].lower()
        says = [*proof[:1], *_standing(row, rank)]
        says += [evidence(f"stack of rank {rank}: {' < '.join(frames[:6])[:500]}", ref=row.ref), *proof[1:]]
        if row.attributes.get("gil") is True and row.attributes.get("others_waiting"):
            return cause(C.GIL_HELD, 0.85, says, rank=rank, group=group)
        if any(x in top for x in ("_next_data", "dataloader", "queue.get", "_try_get_data")):
            return cause(C.DATA_STALL, 0.8, says, rank=rank, group=group)
        if any(x in top for x in ("torch/serialization", "save_checkpoint", "torch.save")):
            return cause(C.CHECKPOINT_STALL, 0.75, says, rank=rank, group=group)
        if any(x in top for x in ("tokeniz", "download", "load_dataset", "snapshot_download")):
            return cause(C.EXCLUSIVE_WORK, 0.85, says, rank=rank, group=group)
        if any(x in top for x in ("all_reduce", "all_gather", "barrier", "broadcast", "recv (", "send (")):
            return cause(C.COLLECTIVE_DIVERGENCE, 0.75, says, rank=rank, group=group)
        return cause(C.RANK_HUNG, 0.85 if row.name == "stack" else 0.92, says, rank=rank, group=group)
    return None


def _standing(row: FactEvent, rank: int) -> list[Evidence]:
    """Phase and seconds of a stall, as its own shipper measured them."""
    seconds = w.number(row, "stalled_s", -1.0)
    if row.name != EventName.STALL or seconds < 0:
        return []
    phase, bound = row.attributes.get("phase", ""), w.number(row, "bound_s", STALL_S)
    says = f"rank {rank} has made no progress for {seconds:.1f} s in {phase or 'its own code'}"
    return [evidence(f"{says} (bound {bound:.1f} s)", value=seconds, unit="s", baseline=bound, ref=row.ref)]


def frames_of(stack: str) -> list[str]:
    """Innermost frames first of the thread that trains: ``function (file:line)``; the lines themselves in other forms.

    faulthandler lists the newest thread first; the current one carries the signal and is the main thread.
    """
    blocks = [b for b in stack.split("\n\n") if b.strip()]
    chosen = next((b for b in blocks if b.lstrip().startswith("Current thread")), blocks[-1] if blocks else "")
    found = _FRAME.findall(chosen)
    if not found:
        return [line.strip() for line in chosen.splitlines() if line.strip()]
    return [f"{name} ({'/'.join(path.split('/')[-2:])}:{at})" for path, at, name in found]


def _all_present(wait: Wait, words: Words) -> list[Cause]:
    """Everybody is in the call and nobody comes out: transport, not a rank."""
    from lanterne.causal.field_host import first_collective

    found = first_collective(words, wait.sequence)
    if found is not None:
        return [found]
    says = evidence(
        f"all {len(wait.waiters)} members entered {wait.op} number {wait.sequence} of group "
        f"{wait.group.split('#')[0]} and none completed it",
        value=float(len(wait.waiters)),
        unit="ranks",
        ref=wait.source,
    )
    return [
        cause(
            C.UNKNOWN,
            0.5,
            [says],
            group=wait.group,
            do="look at the transport between the members, not at one rank",
            needs=(
                "NCCL_DEBUG=INFO logs of the members (which transport, which peer)",
                "kernel logs (Xid, link down) of their hosts",
            ),
        )
    ]


def _reported(words: Words) -> list[Cause]:
    """Torch's own check (TORCH_DISTRIBUTED_DEBUG=DETAIL) named two ranks with different calls."""
    out = []
    for e in words.said("collective_mismatch")[:1]:
        a, b = int(w.number(e, "rank_a", -1)), int(w.number(e, "rank_b", -1))
        rows = words.said("collective_mismatch")
        texts: dict[int, str] = {}
        for row in rows:
            for side, call in (("rank_a", "first"), ("rank_b", "second")):
                said = str(row.attributes.get(call, "")).split("Collectives differ")[0]
                texts[int(w.number(row, side, -1))] = said.strip(" .,")
        values = list(texts.values())
        odd = [r for r, t in texts.items() if values.count(t) == 1]
        named = odd[0] if len(odd) == 1 and len(texts) > 2 else None
        needs = () if named is not None else (f"a third rank: of ranks {a} and {b} either may be wrong",)
        out.append(cause(C.COLLECTIVE_MISMATCH, 0.92, [line(e)], rank=named, needs=needs))
    sizes = words.said("size_mismatch")
    tokens = {e.rank: w.number(e, "tokens") for e in words.said("rank_tokens") if e.rank >= 0}
    if not out and (sizes or len(set(tokens.values())) > 1):
        proof = [line(e) for e in sizes[:2]]
        if len(set(tokens.values())) > 1:
            says = "/".join(f"{tokens[r]:.0f}" for r in sorted(tokens))
            proof.append(
                evidence(f"ranks {min(tokens)} to {max(tokens)} hold {says} tokens; a gather assumes equal chunks")
            )
        if sizes or words.said("collective_timeout") or words.said("exception"):
            own = {e.rank for e in sizes if "split sizes" in w.text(e)}  # it checks its own sizes only
            out.append(
                cause(
                    C.COLLECTIVE_MISMATCH,
                    0.85,
                    proof,
                    rank=own.pop() if len(own) == 1 else None,
                    do="compare sizes per rank; pad, or use the variable-size form of the call",
                )
            )
    return out
