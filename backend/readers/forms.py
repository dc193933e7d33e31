"""What lines of one form can say. Logs repeat themselves: two lines that differ only in their digits are of one form,
and everything but the digits (who speaks, which sentences, where the numbers stand) is worked out once a form.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lanterne.backend.readers import line_metrics, patterns

FORMS_MAX = 30_000
"""Forms kept at a time; a log with more starts afresh."""
LINE_CHARS_MAX = patterns.LINE_CHARS_MAX
Span = tuple[int, int]
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_ANSI_BYTES = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
_ZERO_BYTES = bytes.maketrans(b"123456789", b"000000000")
_PREFIXES = (
    re.compile(r"^\s*\[(?:rank|Rank|RANK)[ _]?(?P<rank>\d+)\]:?\s?"),
    re.compile(r"^\s*\[[\w-]*?(?P<rank>\d+)\]:\s?"),  # torchrun --tee: [default3]:
    re.compile(r"^\s*\[\d+,(?P<rank>\d+)\](?:<std(?:err|out|diag)>)?:?\s?"),  # mpirun --tag-output
    re.compile(r"^\s*(?P<rank>\d{1,5}):\s"),  # srun --label
    re.compile(r"^\s*(?:rank|Rank|RANK)[ _=:#-]?(?P<rank>\d+)\s*[|:\]>-]\s?"),
)
_LEADS = (
    re.compile(
        r"^\s*\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:?\d\d)\s+(?:(?:stdout|stderr) [FP] )?"
    ),  # docker, CRI, kubectl
    re.compile(r"^\s*\d\d:\d\d:\d\d\.\d{3}\s"),
    re.compile(r"^\s*\([\w.:<>-]+ pid=\d+(?:, ip=[\d.]+)?\)\s?"),  # Ray
    re.compile(r"^\s*\[pod/(?P<host>[\w.-]+)/[\w.-]+\]\s"),  # kubectl logs --prefix
)
"""What other tools put before a line; none of it is said by the rank."""
_INLINE = (
    re.compile(r"\bRank (?P<rank>\d+)\]"),
    re.compile(r"\[(?:global_?)?rank[ =:]?(?P<rank>\d+)\]", re.IGNORECASE),
    re.compile(r"\((?:global )?rank[ =:]?(?P<rank>\d+)\)", re.IGNORECASE),
    re.compile(r"\bRankID[: ](?P<rank>\d+)"),
    re.compile(r"(?<![\w-])(?:global_)?rank[=: ]\s?(?P<rank>\d+)\b(?! (?:and|is running))", re.IGNORECASE),
)
NCCL = re.compile(r"^(?:\[[\d: .T-]+\] )?(?P<host>[\w.-]+):(?P<pid>\d+):\d+ \[(?P<device>\d+)\] (?:[\w./]+:\d+ )?NCCL")
_HOST_PREFIX = re.compile(r"^\s*\[?(?P<host>(?:node|gpu|host|worker|ip|compute|dgx|hgx)[\w.-]*\d)[\]:|]\s")
_SYSLOG = re.compile(r"(?:^|\s)(?P<host>[A-Za-z][\w.-]*) kernel:")
TIME = re.compile(r"(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?")
GLOG = re.compile(r"\b[IWEF](\d{1,2})(\d\d) (\d\d):(\d\d):(\d\d)\.(\d{1,9})")
EXCEPTION = re.compile(
    r"^(?P<type>(?:[A-Za-z_]\w*\.)*_?[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Timeout|Fault|Failure|Expired|OfResources))(?::\s*(?P<message>.*))?$"
)
STEP = re.compile(r"\b(?:global_?step|step|iteration|iter)\b[ =:#]*(\d{1,12})(?:/\d+)?", re.IGNORECASE)
EVENT_SPAN = re.compile(r"\[#(?P<name>\w+)\] \[(?P<what>BEGIN|END|INSTANT)\]\s*(?P<json>\{.*\})?")
ELASTIC = {
    "rank": re.compile(r"^\s*rank\s+:\s*(\d+)"),
    "host": re.compile(r"^\s*host\s+:\s*(\S+)"),
    "exit": re.compile(r"^\s*exitcode\s+:\s*(-?\d+)"),
    "why": re.compile(r"^\s*traceback\s+:\s*(.*)"),
}
ELASTIC_START = re.compile(r"Root Cause \(first observed failure\)|^\s*(?:\[\d+\]:|Other Failures:)\s*$")
ELASTIC_OTHER = re.compile(r"^\s*(?:time|error_file)\s+:|^\s*[=-]{10,}\s*$")


@dataclass(slots=True)
class Form:
    """Places are offsets in the line. ``quiet``: nothing in such a line is a fact, it only counts as spoken."""

    said: int = 0
    rank: Span | None = None
    sure: bool = False  # ``[rank3]:``, which is the rank of the job
    host: Span | None = None
    process: tuple[Span, Span] | None = None
    timed: bool = False
    elastic: bool = False
    event_span: bool = False
    traceback: bool = False
    exception: bool = False
    step: Span | None = None
    layout: line_metrics.Layout | None = None
    sentences: tuple[patterns.Pattern, ...] = ()
    escaped: bool = False
    quiet: bool = False

    @property
    def silent(self) -> bool:
        """No question to ask of such a line."""
        return not (
            self.elastic or self.event_span or self.traceback or self.exception or self.layout or self.sentences
            or self.host or self.process
        )  # fmt: skip


def plain(text: str) -> str:
    """Without terminal colours."""
    return _ANSI.sub("", text)


def plain_bytes(line: bytes) -> bytes:
    """The same of a line that is not decoded yet; no escape is left."""
    return _ANSI_BYTES.sub(b"", line).replace(b"\x1b", b"")


def masked(line: bytes) -> bytes:
    """A line with ``0`` for every digit: the name of its form."""
    return line.translate(_ZERO_BYTES)


def form_of(text: str) -> Form:
    """Work out the form of one line (any line of the form will do)."""
    form = Form()
    if "\x1b" in text:
        form.escaped = True
        return form
    if not text.strip():
        form.quiet = True
        return form
    _speaker(form, text)
    form.timed = bool(TIME.search(text[:200]) or GLOG.search(text[:200]))
    said = text[form.said :]
    form.elastic = bool(
        ELASTIC_START.search(said) or ELASTIC_OTHER.match(said) or any(p.match(said) for p in ELASTIC.values())
    )
    form.event_span = EVENT_SPAN.search(said) is not None
    form.traceback = said.startswith("Traceback (most recent call last)")
    form.exception = EXCEPTION.match(said.strip()) is not None
    found = STEP.search(said)
    form.step = found.span(1) if found else None
    form.layout = line_metrics.layout_of(said)
    form.sentences = patterns.candidates(_zeros(said[:LINE_CHARS_MAX]))
    form.quiet = form.silent
    return form


_ZEROS = str.maketrans("123456789", "000000000")


def _zeros(text: str) -> str:
    return text.translate(_ZEROS)


def _speaker(form: Form, text: str) -> None:
    """Who speaks: a prefix, NCCL's host and process, a host, a rank somewhere in the line."""
    for lead in _LEADS:
        found = lead.match(text[form.said :])
        if found and found.re.groups:
            form.host = (form.said + found.start("host"), form.said + found.end("host"))
        form.said += found.end() if found else 0
    begun = form.said
    for prefix in _PREFIXES:
        found = prefix.match(text[begun:])
        if found:
            form.rank, form.said = (begun + found.start("rank"), begun + found.end("rank")), begun + found.end()
            form.sure = prefix is _PREFIXES[0]
            inner = _PREFIXES[0].match(text[form.said :])  # [default0]:[rank12]: says both, and local rank 0 is no rank
            if inner:
                form.rank = (form.said + inner.start("rank"), form.said + inner.end("rank"))
                form.sure = True
                form.said += inner.end()
            return
    nccl = NCCL.match(text[begun:])
    if nccl:
        places = [(begun + a, begun + b) for a, b in (nccl.span("host"), nccl.span("pid"))]
        form.host, form.process = places[0], (places[0], places[1])
        return
    kernel = _SYSLOG.search(text[:120]) if " kernel:" in text[:140] else None
    host = _HOST_PREFIX.match(text) if not form.said else None
    if kernel:
        form.host = kernel.span("host")
    elif host:
        form.host, form.said = host.span("host"), host.end()
    if ("ank" in text or "RANK" in text) and "num_replicas" not in text:  # a sampler's rank is what it was given
        for inline in _INLINE:
            found = inline.search(text[:2_000])
            if found:
                form.rank = found.span("rank")
                return
