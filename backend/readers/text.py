"""Text logs of one or many ranks: who speaks, when, and which known sentences were said.

Every matched pattern becomes a fact ``log.<event>``; besides, each rank leaves ``log.last_line`` (what it did
last) and exceptions leave ``log.exception``. Metrics in text go through :mod:`lanterne.backend.readers.metrics`.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from dataclasses import dataclass, field
from datetime import UTC, datetime

from lanterne import limits
from lanterne.backend.readers import forms, line_metrics, patterns
from lanterne.backend.readers.forms import Form
from lanterne.backend.readers.gather import Gather
from lanterne.backend.readers.metrics import parse_object
from lanterne.backend.readers.source import Source, masked_lines
from lanterne.causal.facts import FactEvent
from lanterne.nouns import NO_RANK, NO_STEP

FIRST_MAX, LAST_MAX = 400, 40
"""Facts of one sentence from one speaker: this many of the first and of the last; what lies between is counted."""


_Later = tuple[patterns.Pattern, int, int, str, str, bytes, bool]
"""A sentence kept for the end of the file: pattern, rank, step, ref, line, the line that last had a time, and whether
the line began with its rank."""


@dataclass
class _Speaker:
    """What a log has said for one rank (or for nobody in particular)."""

    lines: int = 0
    last: tuple[int, bytes, bytes] = (0, b"", b"")  # number, line, the line that last had a time
    step: int = NO_STEP
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    later: dict[str, deque[_Later]] = field(default_factory=dict)


class TextReader:
    """Reads one file; ``rank`` of the file name is the default speaker."""

    def __init__(self, source: Source, gather: Gather) -> None:
        self.source, self.gather = source, gather
        self.speakers: dict[int, _Speaker] = defaultdict(_Speaker)
        self.host, self.now_ns, self.traceback = "", 0, False
        self.stamp = b""
        self.block: dict[str, str] | None = None
        self.begun: dict[str, int] = {}
        self.by_pid: dict[tuple[str, str], int] = {}
        self.table = line_metrics.LineMetrics(source, gather)
        self.found = 0

    def run(self) -> int:
        """Read the whole file; the answer is how many facts it gave."""
        known, default = self.gather.forms, self.source.rank
        speakers = self.speakers
        for number, raw, mask in masked_lines(self.source):
            form = known.get(mask)
            if form is None:
                form = self._form(raw, mask)
            if form.escaped:
                raw = forms.plain_bytes(raw)
                mask = forms.masked(raw)
                form = known.get(mask) or self._form(raw, mask)
            if form.timed:
                self.stamp = raw
            if form.quiet:
                rank = default if form.rank is None else int(raw[form.rank[0] : form.rank[1]])
                speaker = speakers[rank]
                speaker.lines += 1
                speaker.last = (number, raw, self.stamp)
            else:
                self.line(number, raw, form)
        self._close_block("")
        self.table.close()
        self._close_speakers()
        return self.found + self.table.found

    def _form(self, raw: bytes, mask: bytes) -> Form:
        text = raw[: 2 * forms.LINE_CHARS_MAX].decode("utf-8", "replace").rstrip()
        form = forms.form_of(text)
        if not raw.isascii():
            form.quiet = False  # places are those of characters
        if len(self.gather.forms) >= forms.FORMS_MAX:
            self.gather.forms.clear()
        if len(mask) <= forms.LINE_CHARS_MAX:
            self.gather.forms[mask] = form
        return form

    def line(self, number: int, raw: bytes, form: Form) -> None:
        """Take one line: who speaks, when, what it says."""
        text = raw.decode("utf-8", "replace").rstrip()
        if not text:
            return
        rank, said = self._who(text, form)
        speaker = self.speakers[rank]
        speaker.lines += 1
        speaker.last = (number, raw, self.stamp)
        if form.quiet or form.silent:
            return
        ref = f"{self.source.name}:{number}"
        if form.elastic and self._elastic(said, ref):
            return
        if form.event_span and self._span(said, rank, ref):
            return
        if form.layout is not None:
            step = self.table.line(said, rank, form.layout)
            if step is not None:
                speaker.step = step
        step = int(said[form.step[0] : form.step[1]]) if form.step else speaker.step
        if form.traceback or form.exception:
            self._exception(said, rank, step, ref)
        for pattern in form.sentences:
            if speaker.counts[pattern.event] >= FIRST_MAX:
                later = speaker.later.setdefault(pattern.name, deque(maxlen=LAST_MAX))
                later.append((pattern, rank, step, ref, said, self.stamp, form.sure))
            else:
                self._sentence(pattern, rank, step, ref, said, sure=form.sure)

    def _sentence(
        self, pattern: patterns.Pattern, rank: int, step: int, ref: str, said: str, *, sure: bool = False
    ) -> None:
        for attributes in patterns.all_captured(pattern, said[: patterns.LINE_CHARS_MAX]):
            if not sure and "group_rank" in attributes:  # the only rank in the line; a group's own where it is a part
                attributes.setdefault("rank", attributes["group_rank"])
            self._fact(pattern.event, attributes, rank, step, ref, said)

    def _close_speakers(self) -> None:
        """The last facts of chatty sentences, and each rank's last line."""
        for later in [q for speaker in self.speakers.values() for q in speaker.later.values()]:
            for pattern, rank, step, ref, said, self.stamp, sure in later:
                self._sentence(pattern, rank, step, ref, said, sure=sure)
        if not (self.found or self.table.found or self.source.rank != NO_RANK):
            return
        for rank, speaker in self.speakers.items():
            number, raw, self.stamp = speaker.last
            if number and (rank != NO_RANK or len(self.speakers) == 1):
                text = forms.plain(raw[: 2 * forms.LINE_CHARS_MAX].decode("utf-8", "replace"))
                said = text[forms.form_of(text).said :].strip()
                self.gather.event(
                    "log.last_line",
                    rank=rank,
                    at_ns=self._now(),
                    host=self.host,
                    body=said[:500],
                    ref=f"{self.source.name}:{number}",
                    lines=speaker.lines,
                    step=speaker.step,
                )

    def _span(self, said: str, rank: int, ref: str) -> bool:
        """``[time] [pid] [id] [trainer] [#step] [BEGIN|END] {json}``: spans of an event log, paired by name."""
        found = forms.EVENT_SPAN.search(said)
        if found is None:
            return False
        if found["what"] == "BEGIN":
            self.begun[found["name"]] = self._now()
            return True
        begun = self.begun.pop(found["name"], 0)
        if found["what"] == "END" and begun and self._now() >= begun:
            row = parse_object(found["json"] or "") or {}
            step = row.get("global_step", NO_STEP)
            self.found += 1
            self.gather.event(
                f"{found['name']}_span",
                rank=rank,
                step=step if isinstance(step, int) else NO_STEP,
                at_ns=begun,
                ref=ref,
                seconds=(self._now() - begun) / 1e9,
            )
        return found["what"] == "END"

    def _who(self, text: str, form: Form) -> tuple[int, str]:
        rank = self.source.rank
        if form.host:
            self.host = text[form.host[0] : form.host[1]]
        if form.process:
            (a, b), (c, d) = form.process
            rank = self.by_pid.get((text[a:b], text[c:d]), rank)
        if form.rank:
            rank = int(text[form.rank[0] : form.rank[1]])
        return rank if rank < limits.RANKS_MAX else self.source.rank, text[form.said :]

    def _now(self) -> int:
        """Unix ns of the last time that a line had; 0 before the first."""
        if self.stamp:
            self._when(self.stamp[:800].decode("utf-8", "replace"))
            self.stamp = b""
        return self.now_ns

    def _when(self, text: str) -> None:
        found = forms.TIME.search(text[:200])
        try:
            if found:
                year, month, day, hour, minute, second = (int(g) for g in found.groups()[:6])
                fraction = int((found.group(7) or "0").ljust(9, "0"))
                base = datetime(year, month, day, hour, minute, second, tzinfo=UTC)
                self.now_ns = int(base.timestamp()) * 10**9 + fraction
                return
            found = forms.GLOG.search(text[:200])
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
        found = forms.EXCEPTION.match(body)
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
        for key, pattern in forms.ELASTIC.items():
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
                at_ns=self._now(),
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
        if event == "comm_init" and (nccl := forms.NCCL.match(said)):
            self.by_pid[(nccl["host"], nccl["pid"])] = rank
            self.gather.place(rank, host=nccl["host"], device=str(attributes.get("cuda_device", "")))
        if event in {"world_size", "comm_init"}:
            size = attributes.get("world_size")
            if isinstance(size, int) and 0 < size <= limits.RANKS_MAX and self.source.packed != "?":
                self.gather.expected = max(self.gather.expected, size)
        self._emit(event, rank, step, ref, said, **attributes)

    def _emit(self, event: str, rank: int, step: int, ref: str, said: str, **attributes: object) -> None:
        speaker = self.speakers[rank]
        speaker.counts[event] += 1
        self.found += 1
        plain = {k: v for k, v in attributes.items() if isinstance(v, (str, int, float, bool)) and k not in _RESERVED}
        if speaker.counts[event] > FIRST_MAX + LAST_MAX:
            return
        self.gather.add(
            FactEvent(
                name=f"log.{event}",
                rank=rank,
                step=step,
                job_ns=self._now(),
                host=self.host,
                attributes=plain,
                body=said.strip()[:1000],
                ref=ref,
            )
        )


_RESERVED = frozenset({"name", "rank", "step", "at_ns", "host", "body", "ref"})


def read(source: Source, gather: Gather) -> int:
    """Read a text log into ``gather``; the answer is how many facts it gave."""
    found = TextReader(source, gather).run()
    if found:
        gather.sources.add("log")
    return found
