"""How a rank and a job are doing, from their last words. Pure: rows in, words out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

SILENT_S = 30.0
"""A rank whose heartbeat (1 a second) is this late says nothing any more."""


@dataclass(frozen=True, slots=True)
class Signs:
    """The last signs of one rank. ``exit_code`` None = not known."""

    rank: int
    ended: bool = False
    closed: bool = False
    exit_code: int | None = None
    signal: int | None = None
    stalled: bool = False
    last_seen_ns: int = 0

    def seen(self, at_ns: int) -> Signs:
        """The same signs, with another one at ``at_ns``."""
        return replace(self, last_seen_ns=max(self.last_seen_ns, at_ns))


def signs(rows: Iterable[Mapping[str, Any]]) -> dict[int, Signs]:
    """From rows (rank, exited_at, closed_at, exit_code, signal, stall_at, ended_at, received_ns), one a rank."""
    found: dict[int, Signs] = {}
    for row in rows:
        stall, moved = row["stall_at"], row["stall_ended_at"]
        found[row["rank"]] = Signs(
            rank=row["rank"],
            ended=row["exited_at"] is not None,
            closed=row["closed_at"] is not None,
            exit_code=row["exit_code"],
            signal=row["signal"],
            stalled=stall is not None and (moved is None or moved < stall),
            last_seen_ns=row["received_ns"] or 0,
        )
    return found


_LATER: Mapping[str, Sequence[str]] = {
    "exited_at": ("exit_code", "signal"), "closed_at": (), "stall_at": (), "stall_ended_at": (), "received_ns": (),
}  # fmt: skip


def merged(old: Mapping[int, dict[str, Any]], rows: Iterable[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Rows of :func:`signs` by rank, with later ones of the same ranks taken in; repeated ones change nothing."""
    found = dict(old)
    for row in rows:
        before = found.get(row["rank"])
        if before is None:
            found[row["rank"]] = row
            continue
        joined = dict(before)
        for name, along in _LATER.items():
            if (row[name] or 0) > (before[name] or 0):
                joined |= {n: row[n] for n in (name, *along)}
        found[row["rank"]] = joined
    return found


def rank_state(sign: Signs, now_ns: int) -> str:
    """running, finished, failed, hung or silent."""
    if sign.signal or sign.exit_code:
        return "failed"
    if sign.ended or sign.closed:
        return "finished" if sign.exit_code == 0 or sign.closed else "failed"
    if now_ns - sign.last_seen_ns > SILENT_S * 1e9:
        return "silent"
    return "hung" if sign.stalled else "running"


def job_state(found: Sequence[Signs], now_ns: int, *, hang_open: bool = False) -> str:
    """The job's state from its ranks': one failed rank fails it; it is finished when all ranks are."""
    states = {rank_state(s, now_ns) for s in found}
    if "failed" in states:
        return "failed"
    if states == {"finished"}:
        return "finished"
    if not states or states <= {"silent", "finished"}:
        return "silent"
    return "hung" if hang_open or "hung" in states else "running"
