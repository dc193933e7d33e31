"""Text logs of one or many ranks: who speaks, when, and which known sentences were said.

Every matched pattern becomes a fact ``log.<event>``; besides, each rank leaves ``log.last_line`` (what it did
last) and exceptions leave ``log.exception``. Metrics in text go through :mod:`lanterne.backend.readers.metrics`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import UTC, datetime

from lanterne.backend.readers import metrics, patterns
from lanterne.backend.readers.gather import Gather
from lanterne.backend.readers.source import Source, lines
from lanterne.nouns import NO_RANK, NO_STEP

PER_PATTERN_MAX = 2_000  # facts of one pattern from one speaker: the rest is counted
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PREFIXES = (
    re.compile(r"^\s*\[(?:rank|Rank|RANK)[ _]?(?P<rank>\d+)\]:?\s?"),
    re.compile(r"^\s*\[[\w-]*?(?P<local>\d+)\]:\s?"),  # torchrun --tee: [default3]:
    re.compile(r"^\s*\[\d+,(?P<rank>\d+)\](?:<std(?:err|out|diag)>)?:?\s?"),  # mpirun --tag-output
    re.compile(r"^\s*(?P<rank>\d{1,5}):\s"),  # srun --label
    re.compile(r"^\s*(?:rank|Rank|RANK)[ _=:#-]?(?P<rank>\d+)\s*[|:\]>-]\s?"),
)
_INLINE = (
    re.compile(r"\bRank (?P<rank>\d+)\]"),
    re.compile(r"\[(?:global_?)?rank[ =:]?(?P<rank>\d+)\]", re.IGNORECASE),
    re.compile(r"\((?:global )?rank[ =:]?(?P<rank>\d+)\)", re.IGNORECASE),
    re.compile(r"\bRankID[: ](?P<rank>\d+)"),
    re.compile(r"(?<![\w-])(?:global_)?rank[=: ]\s?(?P<rank>\d+)\b(?! (?:and|is running))", re.IGNORECASE),
)
_NCCL = re.compile(r"^(?:\[[\d: .T-]+\] )?(?P<host>[\w.-]+):(?P<pid>\d+):\d+ \[(?P<device>\d+)\] (?:[\w./]+:\d+ )?NCCL")
_HOST_PREFIX = re.compile(r"^\s*\[?(?P<host>(?:node|gpu|host|worker|ip|compute|dgx|hgx)[\w.-]*\d)[\]:|]\s")
_SYSLOG = re.compile(r"(?:^|\s)(?P<host>[A-Za-z][\w.-]*) kernel:")
_TIME = re.compile(r"(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?")
_GLOG = re.compile(r"\b[IWEF](\d\d)(\d\d) (\d\d):(\d\d):(\d\d)\.(\d{1,9})")
_EXCEPTION = re.compile(
    r"^(?P<type>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Timeout|Fault|Failure|Expired))(?::\s*(?P<message>.*))?$"
)
_STEP = re.compile(r"\b(?:global_?step|step|iteration|iter)\b[ =:#]*(\d{1,12})(?:/\d+)?", re.IGNORECASE)
_SPAN = re.compile(r"\[#(?P<name>\w+)\] \[(?P<what>BEGIN|END|INSTANT)\]\s*(?P<json>\{.*\})?")
_ELASTIC = {
    "rank": re.compile(r"^\s*rank\s+:\s*(\d+)"),
    "host": re.compile(r"^\s*host\s+:\s*(\S+)"),
    "exit": re.compile(r"^\s*exitcode\s+:\s*(-?\d+)"),
    "why": re.compile(r"^\s*traceback\s+:\s*(.*)"),
}


@dataclass
class _Speaker:
    """What a log has said for one rank (or for nobody in particular)."""

    lines: int = 0
    last: str = ""
    last_ref: str = ""
    last_ns: int = 0
    step: int = NO_STEP
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))


class TextReader:
    """Reads one file; ``rank`` of the file name is the default speaker."""

    def __init__(self, source: Source, gather: Gather) -> None:
        self.source, self.gather = source, gather
        self.speakers: dict[int, _Speaker] = defaultdict(_Speaker)
        self.host, self.now_ns, self.traceback = "", 0, False
        self.block: dict[str, str] | None = None
        self.begun: dict[str, int] = {}
        self.by_pid: dict[tuple[str, str], int] = {}
        self.table = metrics.LineMetrics(source, gather)
        self.found = 0

    def run(self) -> int:
        """Read the whole file; the answer is how many facts it gave."""
        for number, raw in lines(self.source):
            text = _ANSI.sub("", raw).rstrip() if "\x1b" in raw else raw.rstrip()
            if text:
                self.line(number, text)
        self._close_block("")
        self.table.close()
        if self.found or self.table.found or self.source.rank != NO_RANK:
            for rank, speaker in self.speakers.items():
                if rank != NO_RANK or len(self.speakers) == 1:
                    self.gather.event(
                        "log.last_line",
                        rank=rank,
                        at_ns=speaker.last_ns,
                        host=self.host,
                        body=speaker.last[:500],
                        ref=speaker.last_ref,
                        lines=speaker.lines,
                        step=speaker.step,
                    )
        return self.found + self.table.found

    def line(self, number: int, text: str) -> None:
        """Take one line: who speaks, when, what it says."""
        rank, said = self._who(text)
        self._when(text)
        ref = f"{self.source.name}:{number}"
        speaker = self.speakers[rank]
        speaker.lines += 1
        speaker.last, speaker.last_ref, speaker.last_ns = said.strip(), ref, self.now_ns
        if self._elastic(said, ref) or self._span(said, rank, ref):
            return
        if metrics.worth(said):
            step = self.table.line(said, rank)
            if step is not None:
                speaker.step = step
        found = _STEP.search(said)
        step = int(found.group(1)) if found else speaker.step
        self._exception(said, rank, step, ref)
        for pattern, attributes in patterns.match(said):
            self._fact(pattern.event, attributes, rank, step, ref, said)

    def _span(self, said: str, rank: int, ref: str) -> bool:
        """``[time] [pid] [id] [trainer] [#step] [BEGIN|END] {json}``: spans of an event log, paired by name."""
        found = _SPAN.search(said)
        if found is None:
            return False
        if found["what"] == "BEGIN":
            self.begun[found["name"]] = self.now_ns
            return True
        begun = self.begun.pop(found["name"], 0)
        if found["what"] == "END" and begun and self.now_ns >= begun:
            row = metrics.parse_object(found["json"] or "") or {}
            step = row.get("global_step", NO_STEP)
            self.found += 1
            self.gather.event(
                f"{found['name']}_span",
                rank=rank,
                step=step if isinstance(step, int) else NO_STEP,
                at_ns=begun,
                ref=ref,
                seconds=(self.now_ns - begun) / 1e9,
            )
        return found["what"] == "END"

    def _who(self, text: str) -> tuple[int, str]:
        rank, said = self.source.rank, text
        for prefix in _PREFIXES:
            found = prefix.match(text)
            if found:
                groups = found.groupdict()
                rank = int(groups.get("rank") or groups.get("local") or rank)
                return rank, text[found.end() :]
        nccl = _NCCL.match(text)
        if nccl:
            self.host = nccl["host"]
            known = self.by_pid.get((nccl["host"], nccl["pid"]))
            return (known if known is not None else rank), text
        host = _HOST_PREFIX.match(text)
        kernel = _SYSLOG.search(text[:120]) if " kernel:" in text[:140] else None
        if kernel:
            self.host = kernel["host"]
        elif host:
            self.host, said = host["host"], text[host.end() :]
        if "ank" in text or "RANK" in text:
            for inline in _INLINE:
                found = inline.search(text[:2_000])
                if found:
                    return int(found["rank"]), said
        return rank, said

    def _when(self, text: str) -> None:
        found = _TIME.search(text[:200])
        try:
            if found:
                year, month, day, hour, minute, second = (int(g) for g in found.groups()[:6])
                fraction = int((found.group(7) or "0").ljust(9, "0"))
                base = datetime(year, month, day, hour, minute, second, tzinfo=UTC)
                self.now_ns = int(base.timestamp()) * 10**9 + fraction
                return
            found = _GLOG.search(text[:200])
            if found:
                month, day, hour, minute, second = (int(g) for g in found.groups()[:5])
                base = datetime(2000, month, day, hour, minute, second, tzinfo=UTC)  # glog writes no year
                self.now_ns = int(base.timestamp()) * 10**9 + int(found.group(6).ljust(9, "0"))
        except ValueError:
            return

    def _exception(self, said: str, rank: int, step: int, ref: str) -> None:
        if said.startswith("Traceback (most recent call last)"):
            self.traceback = True
            return
        body = said.strip() if self.traceback else said
        found = _EXCEPTION.match(body)
        if found:
            self.traceback = False
            self._emit("exception", rank, step, ref, body, type=found["type"], message=(found["message"] or "")[:400])

    def _elastic(self, said: str, ref: str) -> bool:
        """The ``Root Cause (first observed failure)`` block of torchrun; True while a line belongs to it."""
        if "Root Cause (first observed failure)" in said or re.match(r"^\s*(?:\[\d+\]:|Other Failures:)\s*$", said):
            self._close_block(ref)
            self.block = {"first": "1"} if "Root Cause" in said else {**({"first": "1"} if self._first_open() else {})}
            return True
        if self.block is None:
            return False
        for key, pattern in _ELASTIC.items():
            found = pattern.match(said)
            if found:
                self.block[key] = found.group(1)
                self.block.setdefault("ref", ref)
                return True
        if re.match(r"^\s*(?:time|error_file)\s+:", said):
            return True
        if "rank" in self.block and re.match(r"^[=-]{10,}$", said.strip()):
            self._close_block(ref)
        return False

    def _first_open(self) -> bool:
        return self.block is not None and "first" in self.block and "rank" not in self.block

    def _close_block(self, ref: str) -> None:
        if self.block and "rank" in self.block:
            code = int(self.block.get("exit", "1"))
            self.gather.event(
                "log.rank_failed",
                rank=int(self.block["rank"]),
                at_ns=self.now_ns,
                host=self.block.get("host", ""),
                ref=self.block.get("ref", ref),
                exit_code=code,
                first=bool(self.block.get("first")),
                message=self.block.get("why", "")[:400],
            )
            self.found += 1
        if self.block is not None and "rank" in self.block:
            self.block = {}
        elif not ref:
            self.block = None

    def _fact(self, event: str, attributes: dict, rank: int, step: int, ref: str, said: str) -> None:  # type: ignore[type-arg]
        named = attributes.pop("rank", None)
        rank = named if isinstance(named, int) else rank
        at = attributes.pop("step", None)
        if isinstance(at, int):
            step = at
        host = attributes.pop("host", None)
        if isinstance(host, str):
            self.host = host
        if event == "comm_init" and (nccl := _NCCL.match(said)):
            self.by_pid[(nccl["host"], nccl["pid"])] = rank
            self.gather.place(rank, host=nccl["host"], device=str(attributes.get("cuda_device", "")))
        if event in {"world_size", "comm_init"}:
            size = attributes.get("world_size")
            if isinstance(size, int) and 0 < size <= 131_072 and self.source.packed != "?":
                self.gather.expected = max(self.gather.expected, size)
        self._emit(event, rank, step, ref, said, **attributes)

    def _emit(self, event: str, rank: int, step: int, ref: str, said: str, **attributes: object) -> None:
        speaker = self.speakers[rank]
        speaker.counts[event] += 1
        if speaker.counts[event] > PER_PATTERN_MAX:
            return
        self.found += 1
        plain = {k: v for k, v in attributes.items() if isinstance(v, (str, int, float, bool)) and k not in _RESERVED}
        self.gather.event(
            f"log.{event}",
            rank=rank,
            step=step,
            at_ns=self.now_ns,
            host=self.host,
            body=said.strip()[:1000],
            ref=ref,
            extra=plain,
        )


_RESERVED = frozenset({"name", "rank", "step", "at_ns", "host", "body", "ref"})


def read(source: Source, gather: Gather) -> int:
    """Read a text log into ``gather``; the answer is how many facts it gave."""
    found = TextReader(source, gather).run()
    if found:
        gather.sources.add("log")
    return found
