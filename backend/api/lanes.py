"""Swim lanes of one step on the job clock, its critical path, and the same as a Chrome trace. Rows in, JSON out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lanterne.backend.api.queries import finite
from lanterne.backend.store.events import EventStore
from lanterne.nouns import Kind

SPANS_MAX = 60_000
_SPANS = """
SELECT rank, kind, name, start_ns, end_ns, group_name, group_sequence, bytes FROM spans
WHERE job = ? AND attempt = ? AND step = ? AND rank >= 0 ORDER BY rank, start_ns LIMIT ?
"""
_WAITS = """
SELECT group_name, group_sequence, rank, lateness_ms, wait_ms, transfer_ms FROM waits
WHERE job = ? AND attempt = ? AND step = ?
"""
_CLOCKS = "SELECT rank, offset_ns, error_ns FROM rank_clocks WHERE job = ? AND attempt = ?"
Call = tuple[str, int]


def lanes(store: EventStore, job: str, attempt: int, step: int) -> dict[str, Any] | None:
    """The answer of ``jobs/{id}/steps/{n}``; None when no span of the step is stored."""
    spans = store.rows(_SPANS, [job, attempt, step, SPANS_MAX])
    if not spans:
        return None
    clocks = {r["rank"]: (r["offset_ns"], r["error_ns"]) for r in store.rows(_CLOCKS, [job, attempt])}
    waits = store.rows(_WAITS, [job, attempt, step])
    for span in spans:
        offset = clocks.get(span["rank"], (0, 0))[0]
        span["at_ns"] = span["start_ns"] - offset
        span["for_ns"] = max(0, span["end_ns"] - span["start_ns"])
    steps = [s for s in spans if s["kind"] == Kind.STEP]
    start = min(s["at_ns"] for s in steps or spans)
    last = _last_arrivals(waits)
    own = {(w["group_name"], w["group_sequence"], w["rank"]): w["wait_ms"] for w in waits}
    by_rank: dict[int, list[dict[str, Any]]] = {}
    for span in spans:
        by_rank.setdefault(span["rank"], []).append(_shown(span, start, last, own))
    return {
        "step": step,
        "job_start_ns": start,
        "lanes": [
            {"rank": rank, "error_ns": clocks[rank][1] if rank in clocks else None, "spans": found}
            for rank, found in by_rank.items()
        ],
        "critical_path": _critical_path(spans, last, start),
        "truncated": len(spans) == SPANS_MAX,
    }


def _last_arrivals(waits: Sequence[Mapping[str, Any]]) -> dict[Call, int]:
    """The rank that entered each call last."""
    last: dict[Call, tuple[float, int]] = {}
    for row in waits:
        call = (row["group_name"], row["group_sequence"])
        late = row["lateness_ms"] if row["lateness_ms"] is not None else float("-inf")
        if call not in last or late > last[call][0]:
            last[call] = (late, row["rank"])
    return {call: rank for call, (_, rank) in last.items()}


def _shown(
    span: Mapping[str, Any], start: int, last: Mapping[Call, int], own: Mapping[tuple[str, int, int], float | None]
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "kind": span["kind"],
        "name": span["name"],
        "start_ms": (span["at_ns"] - start) / 1e6,
        "duration_ms": span["for_ns"] / 1e6,
        "group": span["group_name"] or None,
        "sequence": None,
        "bytes": span["bytes"],
        "waited_for": None,
        "wait_ms": None,
    }
    if span["kind"] == Kind.COLLECTIVE:
        call = (span["group_name"], span["group_sequence"])
        slowest = last.get(call)
        found["sequence"] = span["group_sequence"]
        found["wait_ms"] = finite(own.get((*call, span["rank"])))
        found["waited_for"] = None if slowest == span["rank"] else slowest
    return found


def _critical_path(spans: Sequence[Mapping[str, Any]], last: Mapping[Call, int], start: int) -> list[dict[str, Any]]:
    """From barrier to barrier the path runs through the rank that came last; then to the end of the step.

    A call is left at its last member's completion, so the next stretch starts there.
    """
    entries: dict[Call, dict[int, Mapping[str, Any]]] = {}
    for span in spans:
        if span["kind"] == Kind.COLLECTIVE:
            entries.setdefault((span["group_name"], span["group_sequence"]), {})[span["rank"]] = span
    arrivals = sorted(
        (entries[call][rank]["at_ns"], call, rank) for call, rank in last.items() if rank in entries.get(call, ())
    )
    path: list[dict[str, Any]] = []
    at = start
    for arrived, call, rank in arrivals:
        done = max(s["at_ns"] + s["for_ns"] for s in entries[call].values())
        if arrived > at:
            path.append(_stretch(rank, _doing(spans, rank, at, arrived), at, arrived, start))
        if done > max(at, arrived):
            path.append(_stretch(rank, str(entries[call][rank]["name"]), max(at, arrived), done, start))
        at = max(at, done)
    ends = [(s["at_ns"] + s["for_ns"], s["rank"]) for s in spans if s["kind"] == Kind.STEP]
    if ends and max(ends)[0] > at:
        path.append(_stretch(max(ends)[1], _doing(spans, max(ends)[1], at, max(ends)[0]), at, max(ends)[0], start))
    return path


def _doing(spans: Sequence[Mapping[str, Any]], rank: int, low: int, high: int) -> str:
    """The phase that fills most of the stretch on that rank; ``other`` where none does."""
    best, name = 0, "other"
    for span in spans:
        if span["rank"] == rank and span["kind"] == Kind.PHASE:
            shared = min(high, span["at_ns"] + span["for_ns"]) - max(low, span["at_ns"])
            if shared > best:
                best, name = shared, str(span["name"])
    return name


def _stretch(rank: int, name: str, low: int, high: int, start: int) -> dict[str, Any]:
    return {"rank": rank, "name": name, "start_ms": (low - start) / 1e6, "duration_ms": (high - low) / 1e6}


def chrome_trace(job: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """Trace Event Format (opens in Perfetto): a process a rank, a thread a kind of span; times in us."""
    events: list[dict[str, Any]] = []
    threads = {kind: n for n, kind in enumerate((Kind.STEP, Kind.PHASE, Kind.COLLECTIVE, Kind.KERNEL), start=1)}
    for lane in found["lanes"]:
        pid = lane["rank"]
        events.append({"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": f"rank {pid}"}})
        for kind, tid in threads.items():
            events.append({"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": str(kind)}})
        for span in lane["spans"]:
            arguments = {k: span[k] for k in ("group", "sequence", "bytes", "waited_for", "wait_ms") if span[k]}
            events.append(
                {
                    "name": span["name"],
                    "cat": span["kind"],
                    "ph": "X",
                    "pid": pid,
                    "tid": threads.get(span["kind"], 9),
                    "ts": span["start_ms"] * 1000,
                    "dur": span["duration_ms"] * 1000,
                    "args": arguments,
                }
            )
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"job": job, "step": found["step"], "job_start_ns": str(found["job_start_ns"])},
    }
