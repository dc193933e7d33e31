"""Finding, opening and sniffing evidence files. Content decides what a file is, never its name.

Every read is bounded: text lines are cut at ``limits.LINE_BYTES_MAX``, inflated gzip and zstd at
``INFLATED_BYTES_MAX``. A file that is cut off is used as far as it goes and reported as a gap.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from lanterne import limits
from lanterne.errors import UnreadableInput

INFLATED_BYTES_MAX = 4 << 30
FILES_MAX = 100_000
HEAD_BYTES = 64 << 10

_RANK_IN_NAME = (
    re.compile(r"(?:^|[^a-z])(?:global[_-]?)?rank[._=-]?(\d{1,6})(?!\d)", re.IGNORECASE),
    re.compile(r"_dump_(\d{1,6})(?:\.\w+)*$"),
    re.compile(r"nccl_trace_rank_(\d{1,6})$"),
    re.compile(r"(?:trainer|worker|proc|process|gpu|r)[._-]?(\d{1,6})(?:\.\w+)*$", re.IGNORECASE),
)
_ATTEMPT_DIR = re.compile(r"attempt_(\d+)")
_LOCAL_DIR = re.compile(r"^\d{1,6}$")


@dataclass(frozen=True, slots=True)
class Source:
    """One file. ``rank`` is the rank its name suggests (-1 = none); the content may say better."""

    path: Path
    size: int
    head: bytes  # first HEAD_BYTES, inflated
    packed: str  # "", "gzip" or "zstd"
    rank: int

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def text_head(self) -> str:
        return self.head.decode("utf-8", "replace")


def rank_of_name(path: Path) -> int:
    """The rank that a file name or a torchrun log folder (``attempt_0/3/stderr.log``) suggests, else -1."""
    for pattern in _RANK_IN_NAME:
        found = pattern.search(path.name)
        if found:
            return int(found.group(1))
    parents = path.parts[:-1]
    if len(parents) >= 2 and _LOCAL_DIR.match(parents[-1]) and _ATTEMPT_DIR.match(parents[-2]):
        return int(parents[-1])
    for folder in reversed(parents[-2:]):
        found = _RANK_IN_NAME[0].search(folder)
        if found:
            return int(found.group(1))
    return -1


def walk(paths: Sequence[Path]) -> list[Path]:
    """Every file under ``paths``, in a stable order. Raises UnreadableInput for a path that is not there."""
    files: list[Path] = []
    for path in paths:
        if path.is_file():
            files.append(path)
        elif path.is_dir():
            files.extend(sorted(p for p in path.rglob("*") if p.is_file()))
        else:
            raise UnreadableInput(str(path), "no such file or directory", do="give files or folders of the job")
        if len(files) > FILES_MAX:
            raise UnreadableInput(str(path), f"more than {FILES_MAX} files", do="give a narrower folder")
    return list(dict.fromkeys(files))


def probe(path: Path) -> Source:
    """Read the head of a file. Raises UnreadableInput when it cannot be opened or inflated at all."""
    try:
        size = path.stat().st_size
        with path.open("rb") as raw:
            magic = raw.read(4)
        packed = "gzip" if magic[:2] == b"\x1f\x8b" else "zstd" if magic == b"\x28\xb5\x2f\xfd" else ""
        head = b"".join(chunks(path, packed, limit=HEAD_BYTES))
    except OSError as error:
        raise UnreadableInput(str(path), f"cannot be read ({error.strerror or error})") from error
    return Source(path=path, size=size, head=head, packed=packed, rank=rank_of_name(path))


def chunks(path: Path, packed: str, *, limit: int = INFLATED_BYTES_MAX, block: int = 1 << 20) -> Iterator[bytes]:
    """Yield the inflated content up to ``limit`` bytes; a cut archive gives all it holds and ends without an error."""
    left = limit
    for piece in _inflated(path, packed, block):
        yield piece[:left]
        left -= len(piece)
        if left <= 0:
            return


def _inflated(path: Path, packed: str, block: int) -> Iterator[bytes]:
    with path.open("rb") as raw:
        if packed == "gzip":
            yield from _gunzip(raw, block)
        elif packed == "zstd":
            import zstandard

            try:
                with zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True) as stream:
                    while piece := stream.read(min(block, 64 << 10)):
                        yield piece
            except zstandard.ZstdError:
                return
        else:
            while piece := raw.read(block):
                yield piece


def _gunzip(raw: BinaryIO, block: int) -> Iterator[bytes]:
    """gzip members one after the other; unlike the gzip module it hands out what stands before a cut."""
    inflate, data = zlib.decompressobj(31), b""
    while data := data or raw.read(64 << 10):
        try:
            piece = inflate.decompress(data, block)
        except zlib.error:
            return
        if piece:
            yield piece
        data = inflate.unconsumed_tail or inflate.unused_data
        if inflate.eof:
            inflate = zlib.decompressobj(31)


def read_all(source: Source, limit: int = limits.READER_MEMORY_BYTES) -> bytes:
    """The whole inflated file. Raises UnreadableInput when it is larger than ``limit`` bytes."""
    parts, total = [], 0
    for piece in chunks(source.path, source.packed, limit=limit + 1):
        total += len(piece)
        parts.append(piece)
    if total > limit:
        raise UnreadableInput(source.name, f"larger than {limit} bytes", offset=limit, do="split it")
    return b"".join(parts)


_NO_DIGITS = bytes.maketrans(b"123456789", b"000000000")


def masked_lines(source: Source) -> Iterator[tuple[int, bytes, bytes]]:
    r"""Yield ``(line number from 1, line, its form)``; the form has ``0`` for every digit, at the same places.

    ``\r`` also ends a line (progress bars); a line is cut at ``limits.LINE_BYTES_MAX`` bytes.
    """
    number, rest = 0, b""
    for piece in chunks(source.path, source.packed):
        data = rest + piece
        half = data.endswith(b"\r")  # its \n may stand in the next piece
        if b"\r" in data:
            data = data[: len(data) - half].replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *whole, rest = data.split(b"\n")
        for line, form in zip(whole, data.translate(_NO_DIGITS).split(b"\n"), strict=False):
            number += 1
            yield number, line[: limits.LINE_BYTES_MAX], form[: limits.LINE_BYTES_MAX]
        rest = rest[: limits.LINE_BYTES_MAX] + b"\r" * half
    if rest.strip(b"\r"):
        line = rest.rstrip(b"\r")
        yield number + 1, line, line.translate(_NO_DIGITS)


def lines(source: Source) -> Iterator[tuple[int, str]]:
    """Yield ``(line number from 1, text)`` of :func:`masked_lines`."""
    for number, line, _ in masked_lines(source):
        yield number, line.decode("utf-8", "replace")
