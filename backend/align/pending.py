"""Calls that are entered and not completed, as ``collective_pending`` events tell them."""

from __future__ import annotations

from collections.abc import Sequence

from lanterne import wire
from lanterne.backend.align.frame import Log
from lanterne.nouns import Collective, EventName


def attribute(log: Log, *names: str) -> object:
    """The first of these attributes that the event has; None where it has none."""
    for name in names:
        if name in log.attributes:
            return log.attributes[name]
    return None


def number(value: object, default: int) -> int:
    """An attribute as an integer, ``default`` where it is none."""
    return int(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else default


def pending_calls(logs: Sequence[Log]) -> list[Collective]:
    """The calls that ``collective_pending`` events say were entered and not completed; the newest report of each."""
    found: dict[tuple[int, str, int], Collective] = {}
    for log in logs:
        if log.name != EventName.COLLECTIVE_PENDING:
            continue
        group = str(attribute(log, wire.GROUP, "group") or "")
        sequence = number(attribute(log, wire.GROUP_SEQUENCE, "group_sequence", "sequence"), -1)
        if not group or sequence < 0:
            continue
        found[log.rank, group, sequence] = Collective(
            rank=log.rank,
            group=group,
            sequence=sequence,
            op=str(attribute(log, wire.NAME, "op", "name") or "collective"),
            step=number(attribute(log, wire.STEP, "step"), log.step),
            bytes=number(attribute(log, wire.BYTES, "bytes"), 0),
            dtype=str(attribute(log, wire.DTYPE, "dtype") or ""),
            shape=str(attribute(log, "lanterne.shape", "shape") or ""),
            entered_ns=number(attribute(log, "entered_ns", "lanterne.entered_ns"), log.time_ns),
            site=str(attribute(log, "site") or ""),
        )
    return list(found.values())
