"""Calls of profiler traces as collectives, so that traces of several ranks stand on one job clock.

A trace shows a call twice: as an annotation on the host, when it is handed to the device, and as a kernel, when
the device runs it. The kernel is what others wait for, so it gives entry and completion. Traces begin and end
anywhere, so calls are numbered within the profiler's steps, by group and order, never from the file's start.
Kernels of a replayed CUDA graph have no annotation: they are numbered by their own time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from lanterne.nouns import NO_STEP, Collective, group_name

PER_STEP = 1 << 20
"""Numbers kept for the calls of one step and group."""


class TraceCall(Protocol):
    """One NCCL call of a trace: ``where`` is host or device, times in us of the trace's own clock."""

    @property
    def name(self) -> str: ...
    @property
    def where(self) -> str: ...
    @property
    def ts_us(self) -> float: ...
    @property
    def dur_us(self) -> float: ...
    @property
    def elements(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def group(self) -> str: ...


class Trace(Protocol):
    """What is needed of one rank's trace: ``steps`` maps a step to (start, length) on the host, us."""

    @property
    def rank(self) -> int: ...
    @property
    def groups(self) -> Mapping[str, tuple[int, ...]]: ...
    @property
    def steps(self) -> Mapping[int, tuple[float, float]]: ...
    @property
    def calls(self) -> Sequence[TraceCall]: ...
    @property
    def graph_launches(self) -> int: ...


def collectives(trace: Trace) -> list[Collective]:
    """Device calls of one trace in its own clock (Unix ns where the profiler used it). A group whose ranks the trace
    does not say is told by the operation alone."""
    found: list[Collective] = []
    for group, (host, device) in by_group(trace).items():
        asked = host if len(host) == len(device) else device  # else some were replayed, or cut off
        found += from_device(trace, group, list(zip(asked, device, strict=True)))
    return found


def by_group(trace: Trace) -> dict[str, tuple[list[TraceCall], list[TraceCall]]]:
    """(host calls, device calls) of each group, in order of time."""
    found: dict[str, tuple[list[TraceCall], list[TraceCall]]] = {}
    for call in sorted(trace.calls, key=lambda c: c.ts_us):
        found.setdefault(_group(trace, call), ([], []))[call.where == "device"].append(call)
    return found


def from_device(trace: Trace, group: str, pairs: Sequence[tuple[TraceCall, TraceCall]]) -> list[Collective]:
    """Collectives of (host call, its kernel), numbered within the step in which the host made the call."""
    edges = sorted((start, number) for number, (start, _) in trace.steps.items())
    count: dict[int, int] = {}
    found = []
    for asked, call in pairs:
        step = _step(edges, asked.ts_us)
        number = count[step] = count.get(step, -1) + 1
        found.append(
            Collective(
                rank=max(trace.rank, 0), group=group, sequence=(step + 1) * PER_STEP + number, op=_op(call.name),
                step=step, bytes=asked.elements or call.elements, dtype=asked.dtype or call.dtype,
                entered_ns=max(1, round(call.ts_us * 1e3)), completed_ns=round((call.ts_us + call.dur_us) * 1e3),
            )
        )  # fmt: skip
    return found


def _group(trace: Trace, call: TraceCall) -> str:
    ranks = trace.groups.get(call.group)
    return group_name(ranks) if ranks else f"?{call.group or family(call.name)}"


def family(name: str) -> str:
    """One word for an operation on host, device and in records; ``SendRecv`` is what all_to_all is on the device."""
    op = _op(name)
    return "sendrecv" if op in {"sendrecv", "alltoall"} else op


def _op(name: str) -> str:
    """``AllReduce_Sum_bf16_RING_LL`` or ``_allgather_base`` -> ``allreduce``, ``allgather``."""
    plain = name.lower().replace("_", "").replace("base", "")
    known = ("reducescatter", "allreduce", "allgather", "alltoall", "broadcast", "sendrecv", "reduce", "barrier")
    return next((op for op in known if plain.startswith(op)), plain[:40] or "collective")


def _step(edges: Sequence[tuple[float, int]], at_us: float) -> int:
    """The step that had begun at this time."""
    found = NO_STEP
    for start, number in edges:
        if start > at_us:
            break
        found = number
    return found
