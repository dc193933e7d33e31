"""What the logs said, indexed: facts named ``log.<event>`` by event and by rank. Shared by the field rules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from lanterne.causal.facts import FactEvent, Facts
from lanterne.causal.remedies import remedy_for
from lanterne.nouns import NO_RANK, Cause, CauseCategory, Evidence, Remedy, Subject

_OTHER_READINGS = frozenset(
    {"log.exception", "log.checkpoint_file_missing", "log.replica_mismatch", "log.loss_scale_minimum", "log.nonfinite"}
)
"""Facts that a line of fixed meaning would give besides."""

VICTIM = (
    "watchdog caught",
    "timed out",
    "timeout",
    "time out",
    "connection closed by peer",
    "connection reset",
    "broken pipe",
    "connection refused",
    "remote process exited",
    "communicator was aborted",
    "socket closed",
    "heartbeat monitor",
    "unhandled system error",
    "ncclremoteerror",
    "ncclsystemerror",
    "childfailederror",
    "process group watchdog",
    "signal: 15",
    "signal: 2",
    "monitoredbarrier",
    "sigterm",
    "store->get",
    "socket timeout",
    "recvvalue failed",
    "distbackenderror",
    "diststoreerror",
    "work_wait",
    "peer",
    "rendezvousclosed",
    "failed to recv",
    "keyboardinterrupt",
)
"""Texts of a rank that speaks of others: it is a victim, whatever its exit code."""


class Words:
    """Read-only view of the log facts of one :class:`Facts`. A line of fixed meaning is read as nothing else."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self._by_name: dict[str, list[FactEvent]] = defaultdict(list)
        self._by_rank: dict[int, list[FactEvent]] = defaultdict(list)
        fixed = {(e.ref, e.body) for e in facts.events if e.name == "log.known_error" and e.ref}
        for event in facts.events:
            if event.name in _OTHER_READINGS and (event.ref, event.body) in fixed:
                continue
            name = event.name.removeprefix("log.")
            if name != event.name:
                self._by_rank[event.rank].append(event)
                self._by_name[name].append(event)
            else:
                self._by_name[f"fact:{name}"].append(event)

    def said(self, *names: str) -> list[FactEvent]:
        """All log facts of these events, in order of reading."""
        return [e for name in names for e in self._by_name.get(name, ())]

    def fact(self, name: str) -> list[FactEvent]:
        """Facts that are not from a log line (gauges, dumps, settings)."""
        return self._by_name.get(f"fact:{name}", [])

    def of(self, rank: int, *names: str) -> list[FactEvent]:
        """Log facts of one rank, of these events (all when none is given)."""
        return [e for e in self._by_rank.get(rank, ()) if not names or e.name.removeprefix("log.") in names]

    def ranks(self, *names: str) -> set[int]:
        return {e.rank for e in self.said(*names) if e.rank != NO_RANK}

    def last_line(self, rank: int) -> str:
        rows = self.of(rank, "last_line")
        return rows[-1].body if rows else ""

    def setting(self, key: str) -> object:
        """A value of a configuration that stood in the files, or None."""
        for event in self.fact("setting"):
            if event.attributes.get("key") == key:
                return event.attributes.get("value")
        return None


def text(event: FactEvent) -> str:
    """Body and message of a fact, lower case, for looking into."""
    return f"{event.body} {event.attributes.get('message', '')} {event.attributes.get('type', '')}".lower()


def is_victim(event: FactEvent) -> bool:
    """True when the words speak of a peer's failure."""
    said = text(event)
    return any(v in said for v in VICTIM)


def quote(event: FactEvent, limit: int = 200) -> str:
    """The line itself, cut."""
    body = " ".join(event.body.split())
    return body if len(body) <= limit else body[: limit - 1] + "…"


def listed(ranks: Iterable[int], limit: int = 16) -> str:
    """Ranks for a sentence, runs drawn together: ``ranks 0,4-7``; ``rank 3`` when it is one."""
    known = sorted(set(ranks))
    runs: list[list[int]] = []
    for n in known:
        if runs and n == runs[-1][-1] + 1:
            runs[-1][1:] = [n]
        else:
            runs.append([n])
    shown = ",".join("-".join(map(str, run)) for run in runs[:limit]) + (",…" if len(runs) > limit else "")
    return f"rank{'s' * (len(known) > 1)} {shown}" if known else "some ranks"


def number(event: FactEvent, key: str, default: float = 0.0) -> float:
    """A captured attribute as a number."""
    value = event.attributes.get(key, default)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else default


def evidence(
    says: str, *, value: float | None = None, unit: str = "", baseline: float | None = None, ref: str = ""
) -> Evidence:
    return Evidence(says=says, value=value, unit=unit, baseline=baseline, ref=ref)


def line(event: FactEvent) -> Evidence:
    """The line as evidence."""
    return Evidence(says=f"log: {quote(event)}", ref=event.ref)


def cause(
    category: CauseCategory,
    confidence: float,
    proof: Iterable[Evidence],
    *,
    rank: int | None = None,
    host: str | None = None,
    group: str | None = None,
    device: str | None = None,
    parameter: str | None = None,
    step: int | None = None,
    do: str = "",
    needs: Iterable[str] = (),
) -> Cause:
    """A cause with its remedy; ``do`` replaces the category's standard sentence."""
    subject = Subject(
        rank=None if rank is None or rank < 0 else rank,
        host=host or None,
        device=device or None,
        group=None if group is None else group.split("#")[0],
        parameter=parameter,
    )
    remedy = remedy_for(category, subject)
    if do:
        remedy = Remedy(action=remedy.action, says=do, parameters=remedy.parameters)
    return Cause(
        category=category,
        subject=subject,
        since_step=step if step is not None and step >= 0 else None,
        confidence=confidence,
        evidence=tuple(proof)[:8],
        remedy=remedy,
        needs=tuple(needs),
    )
