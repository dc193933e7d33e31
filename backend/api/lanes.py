"""Swim lanes of one step on the job clock, its critical path, waits and what-if, and the same as a Chrome trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lanterne.backend.align import step_view
from lanterne.backend.align.critical_path import Stretch
from lanterne.backend.align.replay import WhatIf
from lanterne.backend.align.step_view import StepView
from lanterne.backend.align.waits import Attribution
from lanterne.backend.store.events import EventStore
from lanterne.nouns import Kind

SPANS_MAX = 60_000
_SPANS = """
SELECT rank, kind, name, start_ns, end_ns, monotonic_ns, group_name, group_sequence, bytes FROM spans
WHERE job = ? AND attempt = ? AND step = ? AND rank >= 0 ORDER BY rank, start_ns LIMIT ?
"""
Call = tuple[str, int, int]


def lanes(
    store: EventStore, job: str, attempt: int, step: int, stages: Mapping[int, int] | None = None
) -> dict[str, Any] | None:
    """The answer of ``jobs/{id}/steps/{n}``; None when no span of the step is stored. ``stages``: rank -> stage."""
    spans = store.rows(_SPANS, [job, attempt, step, SPANS_MAX])
    if not spans:
        return None
    view = step_view.read(store, job, attempt, step, len(spans))
    ranks, own = (np.array([s[c] for s in spans], np.int64) for c in ("rank", "start_ns"))
    monotonic = np.array([s["monotonic_ns"] or 0 for s in spans], np.int64)
    offset, error = view.aligned.clocks.offsets(ranks, own, monotonic)
    at = own - offset.astype(np.int64)
    start = view.begin_ns() or int(at.min())
    calls = view.aligned.calls
    mine = np.flatnonzero(calls.step == step).tolist()
    row = {(calls.groups[calls.group[i]], int(calls.sequence[i]), int(calls.rank[i])): i for i in mine}
    blur: dict[int, int] = {}
    by_rank: dict[int, list[dict[str, Any]]] = {}
    for span, begin, unsure in zip(spans, at.tolist(), error.tolist(), strict=True):
        blur[span["rank"]] = max(blur.get(span["rank"], 0), int(unsure))
        found = row.get((span["group_name"], span["group_sequence"], span["rank"]))
        shown = _shown(span, begin - start, found, view.aligned.attribution)
        by_rank.setdefault(span["rank"], []).append(shown)
    path = view.path()
    return {
        "step": step,
        "job_start_ns": start,
        "lanes": [
            {"rank": rank, "error_ns": blur[rank] if blur[rank] < 1 << 59 else None, "spans": found}
            for rank, found in by_rank.items()
        ],
        "critical_path": [_stretch(s, start) for s in path],
        "waits": _waits(view),
        "what_if": _what_if(view, path, stages or {}),
        "truncated": len(spans) == SPANS_MAX,
    }


def _shown(span: Mapping[str, Any], at_ns: int, row: int | None, a: Attribution) -> dict[str, Any]:
    found: dict[str, Any] = {
        "kind": span["kind"],
        "name": span["name"],
        "start_ms": at_ns / 1e6,
        "duration_ms": max(0, span["end_ns"] - span["start_ns"]) / 1e6,
        "group": span["group_name"] or None,
        "sequence": None,
        "bytes": span["bytes"],
        "waited_for": None,
        "wait_ms": None,
    }
    if span["kind"] == Kind.COLLECTIVE:
        found["sequence"] = span["group_sequence"]
        if row is not None and a.whole[row]:
            last = int(a.last[row])
            found["wait_ms"] = float(a.wait_ns[row]) / 1e6
            found["waited_for"] = None if last in (-1, span["rank"]) else last
    return found


def _stretch(s: Stretch, start: int) -> dict[str, Any]:
    return {
        "rank": s.rank,
        "name": s.name,
        "start_ms": (s.start_ns - start) / 1e6,
        "duration_ms": (s.end_ns - s.start_ns) / 1e6,
        "group": s.group or None,
        "sequence": s.sequence if s.sequence >= 0 else None,
    }


def _waits(view: StepView) -> list[dict[str, Any]]:
    return [
        {"rank": w.rank, "waited_for": w.waited_for, "wait_ms": w.wait_ns / 1e6, "calls": w.calls} for w in view.waits()
    ]


def _what_if(view: StepView, path: Sequence[Stretch], stages: Mapping[int, int]) -> dict[str, Any] | None:
    """Step times with one thing repaired, the most worth first; None where the step cannot be replayed."""
    found: WhatIf | None = view.what_if(path, stages)
    if found is None:
        return None
    observed = found.observed_ns

    def ranked(name: str, values: Mapping[Any, float]) -> list[dict[str, Any]]:
        order = sorted(values.items(), key=lambda item: item[1])
        return [{name: k, "step_ms": v / 1e6, "saving_ms": max(0.0, observed - v) / 1e6} for k, v in order]

    return {
        "step_ms": observed / 1e6,
        "all_normal_ms": found.all_normal_ns / 1e6,
        "ranks": ranked("rank", found.ranks),
        "stages": ranked("stage", found.stages),
        "phases": ranked("phase", found.phases),
    }


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
