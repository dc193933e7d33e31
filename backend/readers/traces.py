"""Kineto and Chrome traces, as a stream: one event in memory at a time, whatever the size; gz; cut files are used.

The reader gives step times, collective calls and kernel time per rank; ``load`` hands the calls to who wants more.
"""

from __future__ import annotations

import codecs
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lanterne.backend.readers.gather import Gather
from lanterne.backend.readers.source import Source, chunks
from lanterne.backend.readers.trace_work import Work
from lanterne.errors import UnreadableInput
from lanterne.nouns import group_name

CALLS_MAX = 500_000
EVENT_CHARS_MAX = 4 << 20
SIDE_CHARS_MAX = 1 << 20
_STEP = re.compile(r"^ProfilerStep#(\d+)")
_CALL = re.compile(r"^(gloo:|nccl:|ncclDevKernel_|ncclKernel_)(\w+)")
_EVENTS = re.compile(r'"traceEvents"\s*:\s*\[')
_SPACE = " \t\r\n,"


@dataclass(frozen=True, slots=True)
class Call:
    """One NCCL or gloo call, times in us of the trace's own clock. ``where``: host (annotation) or device (kernel).

    A call of gloo has no kernel: its span on the host is the call itself, and counts as device.
    """

    name: str
    where: str
    ts_us: float
    dur_us: float
    elements: int
    dtype: str
    group: str
    group_size: int
    stream: int


@dataclass
class Trace:
    """What one trace file holds. ``cut_at``: characters read when the file ended too early, -1 = whole."""

    rank: int = -1
    world_size: int = 0
    backend: str = ""
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    steps: dict[int, tuple[float, float]] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    kernel_us: float = 0.0
    events: int = 0
    dropped: int = 0
    cut_at: int = -1
    host: str = ""
    graph_launches: int = 0
    work: Work = field(default_factory=Work)

    def pairwise(self) -> list[str]:
        """Groups in which ranks send to each other, as pipeline stages do; a group with unknown ranks is ``?``."""
        host = [c for c in self.calls if c.where == "host"]
        device = any(c.name.lower().startswith("send") for c in self.calls if c.where == "device")
        words = ("send", "recv", "coalesced") if device else ("send", "recv")  # a batch of sends has one annotation
        asked = [c for c in host or self.calls if c.name.lower().startswith(words)]
        return sorted({group_name(self.groups[c.group]) if c.group in self.groups else "?" for c in asked})


def sniff(source: Source) -> bool:
    """A JSON object or array with trace events near its start."""
    head = source.text_head
    if head.lstrip()[:1] not in ("{", "["):
        return False
    return '"traceEvents"' in head or '"schemaVersion"' in head or ('"ph"' in head[:4096] and '"ts"' in head[:4096])


class _Stream:
    """Characters of a file with a sliding buffer."""

    def __init__(self, source: Source) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pieces = (decoder.decode(c) for c in chunks(source.path, source.packed))
        self.text, self.at, self.read = "", 0, 0

    def more(self) -> bool:
        piece = next(self._pieces, None)
        if piece is None:
            return False
        self.text = self.text[self.at :] + piece
        self.at, self.read = 0, self.read + len(piece)
        return True

    def skip(self) -> str:
        """Step over white space and commas; the next character, or "" at the end."""
        while True:
            while self.at < len(self.text) and self.text[self.at] in _SPACE:
                self.at += 1
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.more():
                return ""


def _events(stream: _Stream, trace: Trace, side: list[str]) -> Iterator[Mapping[str, Any]]:
    """Yield events one by one; the text around the array goes to ``side``."""
    decoder = json.JSONDecoder()
    while True:
        found = _EVENTS.search(stream.text)
        if found:
            side.append(stream.text[: found.start()][:SIDE_CHARS_MAX])
            stream.at = found.end()
            break
        if stream.text.lstrip()[:1] == "[":
            stream.at = stream.text.index("[") + 1
            break
        if len(stream.text) > SIDE_CHARS_MAX or not stream.more():
            side.append(stream.text[:SIDE_CHARS_MAX])
            return
    while True:
        first = stream.skip()
        if first == "]":
            stream.at += 1
            break
        if first != "{":
            trace.cut_at = stream.read if first == "" else stream.read - len(stream.text) + stream.at
            return
        try:
            event, end = decoder.raw_decode(stream.text, stream.at)
        except (ValueError, RecursionError):
            if len(stream.text) - stream.at > EVENT_CHARS_MAX or not stream.more():
                trace.cut_at = stream.read
                return
            continue
        stream.at = end
        if isinstance(event, dict):
            yield event
    while len(stream.text) - stream.at < SIDE_CHARS_MAX and stream.more():
        pass
    side.append(stream.text[stream.at :][:SIDE_CHARS_MAX])


def load(source: Source) -> Trace:
    """Read one trace. Raises UnreadableInput when it holds no event at all."""
    trace = Trace()
    side: list[str] = []
    stream = _Stream(source)
    stream.more()
    for event in _events(stream, trace, side):
        trace.events += 1
        _take(event, trace)
    for text in side:
        _about(text, trace)
    if trace.rank < 0:
        trace.rank = source.rank
    if not trace.events:
        raise UnreadableInput(
            source.name, "no trace events", offset=max(trace.cut_at, 0), do="is it a Kineto or Chrome trace?"
        )
    return trace


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else 0.0


def _take(event: Mapping[str, Any], trace: Trace) -> None:
    name, category = str(event.get("name", "")), str(event.get("cat", ""))
    ts, dur = _number(event.get("ts")), _number(event.get("dur"))
    step = _STEP.match(name)
    if step:
        if category in ("", "user_annotation", "cpu_op", "gpu_user_annotation") and int(step[1]) not in trace.steps:
            trace.steps[int(step[1])] = (ts, dur)
        return
    if name == "cudaGraphLaunch":
        trace.graph_launches += 1
        return
    kernel = category.lower() == "kernel"
    if kernel:
        trace.kernel_us += dur
    call = _CALL.match(name)
    if call is None or category == "gpu_user_annotation":
        trace.work.take(name, category, ts, dur)
        return
    if len(trace.calls) >= CALLS_MAX:
        trace.dropped += 1
        return
    found = event.get("args")
    args: Mapping[str, Any] = found if isinstance(found, dict) else {}
    elements = args.get("In msg nelems", _elements(args.get("Input Dims")))
    trace.calls.append(
        Call(
            name=str(args.get("Collective name") or call[2]),
            where="device" if kernel or call[1] == "gloo:" else "host",
            ts_us=ts,
            dur_us=dur,
            elements=int(_number(elements)),
            dtype=str(args.get("dtype", "")),
            group=str(args.get("Process Group Name", "")),
            group_size=int(_number(args.get("Group size"))),
            stream=int(_number(args.get("stream"))),
        )
    )


def _elements(dims: Any) -> int:
    total = 0
    for shape in dims if isinstance(dims, list) else []:
        n = 1
        for d in shape if isinstance(shape, list) else []:
            n *= int(_number(d)) or 1
        total += n if isinstance(shape, list) and shape else 0
    return total


def _about(text: str, trace: Trace) -> None:
    """``distributedInfo`` from the text before or after the events."""
    at = text.find('"distributedInfo"')
    if at < 0:
        return
    try:
        info, _ = json.JSONDecoder().raw_decode(text, text.index("{", at))
    except (ValueError, RecursionError):
        return
    if not isinstance(info, dict):
        return
    rank, size = info.get("rank"), info.get("world_size")
    trace.rank = rank if isinstance(rank, int) and 0 <= rank < 131_072 else trace.rank
    trace.world_size = size if isinstance(size, int) and 0 < size <= 131_072 else 0
    trace.backend = str(info.get("backend", ""))
    for group in info.get("pg_config", []) if isinstance(info.get("pg_config"), list) else []:
        if isinstance(group, dict) and isinstance(group.get("ranks"), list):
            trace.groups[str(group.get("pg_name"))] = tuple(r for r in group["ranks"] if isinstance(r, int))
    host = re.search(r'"host_name"\s*:\s*"([^"]{1,200})"', text)
    trace.host = host[1] if host else ""


def read(source: Source, gather: Gather) -> int:
    """Step times and totals of one trace as series and a fact; a cut file is noted."""
    trace = load(source)
    rank = trace.rank if trace.rank >= 0 else 0
    for number, (_, dur) in trace.steps.items():
        gather.sample("step_ms", number, rank, dur / 1000)
    for series, by_step in trace.work.per_step(trace.steps).items():
        for number, spent_ms in by_step.items():
            gather.sample(series, number, rank, spent_ms)
    by_name: dict[str, float] = defaultdict(float)
    for call in trace.calls:
        if call.where == "device":
            by_name[call.name] += call.dur_us
    gather.event(
        "trace",
        rank=rank,
        host=trace.host,
        ref=source.name,
        events=trace.events,
        calls=len(trace.calls),
        kernel_ms=trace.kernel_us / 1000,
        communication_ms=sum(by_name.values()) / 1000,
        backend=trace.backend,
        work=trace.work.count() / max(1, len(trace.steps)),
        pairwise=" ".join(trace.pairwise()),
    )
    trace.work.spans.clear()  # told; what is kept for the comparison are the calls
    gather.place(rank, host=trace.host)
    gather.trace(trace)
    gather.dropped += trace.dropped + trace.work.left_out
    if trace.cut_at >= 0:
        gather.gap(f"{source.name} at character {trace.cut_at}: the trace is cut off; {trace.events} events are used")
    gather.sources.add("kineto")
    return trace.events
