"""Processes that ended: the first to die by itself is the cause, the others followed.

A launcher ends the survivors with SIGTERM, and a survivor's own exception speaks of a lost peer: both are
victims. A job in which everybody got SIGTERM was ended from outside.
"""

from __future__ import annotations

from lanterne.causal.facts import FactEvent
from lanterne.causal.finding import Finding, Link, make
from lanterne.causal.frame import Frame
from lanterne.causal.memory import is_out_of_memory
from lanterne.nouns import CauseCategory, EventName, Evidence, Subject, Symptom

SIGNALS = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV", 2: "SIGINT", 15: "SIGTERM"}
FOLLOWER_SIGNALS = frozenset({2, 15})
PEER_LOST = (
    "connection closed by peer",
    "connection reset",
    "broken pipe",
    "connection refused",
    "remote process exited",
    "nccl communicator was aborted",
    "watchdog caught collective",
    "timed out waiting",
    "read error",
    "socket closed",
    "peer closed",
    "failed to recv",
    "unhandled system error",
    "store might be shut down",
    "heartbeat monitor",
)


def findings(frame: Frame) -> list[Finding]:
    """The crash that started it, or a termination from outside; nothing when all exits were clean."""
    exits = {e.rank: e for e in frame.facts.events if e.name == EventName.EXITED and e.rank >= 0}
    exceptions: dict[int, FactEvent] = {}
    for e in sorted(frame.facts.events, key=lambda e: (e.job_ns, e.step)):
        if e.name == EventName.EXCEPTION and e.rank >= 0:
            exceptions.setdefault(e.rank, e)
    failed = {r: e for r, e in exits.items() if _signal(e) or _code(e)}
    own = {r: e for r, e in failed.items() if not _followed(e, exceptions.get(r))}
    if not own:
        own = {
            r: e for r, e in exceptions.items() if r not in exits and not _followed(e, e) and not is_out_of_memory(e)
        }
    if own:
        return _crash(frame, own, failed, exceptions)
    everybody = failed and all(_signal(e) in FOLLOWER_SIGNALS for e in failed.values())
    if everybody and len(failed) >= 0.9 * max(len(frame.ranks), 1):
        return [_terminated(failed)]
    return []


def _signal(event: FactEvent) -> int:
    try:
        signal = int(event.attributes.get("signal", 0) or 0)
        code = int(event.attributes.get("exit_code", 0) or 0)
    except (TypeError, ValueError):
        return 0
    return abs(signal) or (-code if code < 0 else code - 128 if 128 < code < 160 else 0)


def _code(event: FactEvent) -> int:
    try:
        return int(event.attributes.get("exit_code", 0) or 0)
    except (TypeError, ValueError):
        return 0


def _text(event: FactEvent | None) -> str:
    if event is None:
        return ""
    a = event.attributes
    return f"{a.get('type', '')} {a.get('message', '')} {a.get('stderr_tail', '')} {event.body}".strip()


def _followed(event: FactEvent, exception: FactEvent | None) -> bool:
    if _signal(event) in FOLLOWER_SIGNALS:
        return True
    text = f"{_text(exception)} {_text(event) if exception is None else ''}".lower()
    return any(word in text for word in PEER_LOST)


def _crash(
    frame: Frame, own: dict[int, FactEvent], failed: dict[int, FactEvent], exceptions: dict[int, FactEvent]
) -> list[Finding]:
    def when(rank: int) -> tuple[int, int, int]:
        event, exception = own[rank], exceptions.get(rank)
        times = [e.job_ns for e in (event, exception) if e is not None and e.job_ns]
        return (0 if _signal(event) else 1, min(times, default=1 << 62), rank)

    order = sorted(own, key=when)
    rank = order[0]
    event, exception = own[rank], exceptions.get(rank)
    signal = _signal(event)
    how = f"was killed by {SIGNALS.get(signal, f'signal {signal}')}" if signal else f"exited with code {_code(event)}"
    if event.name == EventName.EXCEPTION:
        how = "raised an exception"
    step = max(event.step, exception.step if exception else -1)
    if step < 0 and len(frame.facts.steps):
        step = int(frame.facts.steps[-1])
    says = f"rank {rank} {how}" + (f" at step {step}" if step >= 0 else "")
    evidence = [
        Evidence(
            says=says, value=float(signal or _code(event)), unit="signal" if signal else "exit code", ref=event.ref
        )
    ]
    last = _text(exception).strip().splitlines()
    if last:
        evidence.append(
            Evidence(says=f"its exception: {last[-1].strip()[:200]}", ref=exception.ref if exception else "")
        )
    followers = [r for r in failed if r != rank]
    symptoms = tuple(
        Symptom(kind="exit", says=f"rank {r} ended after it", subject=Subject(rank=r)) for r in followers[:8]
    )
    alone = len(order) == 1 or signal or when(order[1])[1] > when(rank)[1]
    return [
        make(
            CauseCategory.RANK_CRASHED,
            "crash",
            confidence=0.95 if alone else 0.6,
            subject=Subject(rank=rank, host=event.host or None),
            since_step=step if step >= 0 else None,
            evidence=evidence,
            symptom="job ended",
            stops=True,
            symptoms=symptoms,
            path=(Link(metric="process", label="process ended", weight=0.99, says=says),),
        )
    ]


def _terminated(failed: dict[int, FactEvent]) -> Finding:
    says = f"all {len(failed)} ranks that ended got SIGTERM or SIGINT; none failed by itself"
    return make(
        CauseCategory.EXTERNAL_TERMINATION,
        "crash",
        confidence=0.85,
        symptom="job ended",
        stops=True,
        since_step=max((e.step for e in failed.values()), default=-1)
        if any(e.step >= 0 for e in failed.values())
        else None,
        evidence=(Evidence(says=says, value=float(len(failed)), unit="ranks"),),
        path=(Link(metric="process", label="ended from outside", weight=0.95, says=says),),
    )
