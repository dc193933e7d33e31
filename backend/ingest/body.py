"""Request bodies: inflated within bounds, or refused with the status that OTLP wants."""

from __future__ import annotations

import zlib

import zstandard

from lanterne import limits
from lanterne.errors import LanterneError


class BodyRefused(LanterneError):
    """A body that will never be accepted. ``status`` is the HTTP status to answer."""

    def __init__(self, status: int, says: str) -> None:
        super().__init__(says)
        self.status = status


_PIECE = 1024
_TOO_LARGE = f"the inflated body is larger than {limits.BODY_INFLATED_BYTES_MAX} bytes; send smaller batches"


def inflate(body: bytes, encoding: str, bound: int = limits.BODY_INFLATED_BYTES_MAX) -> bytes:
    """The plain body; never allocates more than ``bound`` bytes.

    Raises :class:`BodyRefused`: 413 beyond the bound, 415 for an encoding that is not identity, gzip or
    zstd, 400 for a broken, cut or many-membered stream.
    """
    encoding = encoding.strip().lower()
    if encoding in ("", "identity"):
        if len(body) > bound:
            raise BodyRefused(413, _TOO_LARGE)
        return body
    if encoding == "gzip":
        return _gunzip(body, bound)
    if encoding == "zstd":
        return _unzstd(body, bound)
    raise BodyRefused(415, f"Content-Encoding {encoding[:40]!r} is not one of identity, gzip, zstd")


def _gunzip(body: bytes, bound: int) -> bytes:
    inflater = zlib.decompressobj(wbits=31)
    try:
        plain = inflater.decompress(body, bound + 1)
    except zlib.error as error:
        raise BodyRefused(400, f"the gzip body is broken: {error}") from None
    if len(plain) > bound:
        raise BodyRefused(413, _TOO_LARGE)
    if not inflater.eof:
        raise BodyRefused(400, "the gzip body is cut short")
    if inflater.unused_data:
        raise BodyRefused(400, "the gzip body has more than one member")
    return plain


def _unzstd(body: bytes, bound: int) -> bytes:
    try:
        promised = zstandard.frame_content_size(body)
        if promised > bound:
            raise BodyRefused(413, _TOO_LARGE)
        if promised >= 0:
            return zstandard.ZstdDecompressor().decompress(body, max_output_size=bound, allow_extra_data=False)
        return _unzstd_stream(body, bound)
    except zstandard.ZstdError as error:
        raise BodyRefused(400, f"the zstd body is broken: {error}") from None


def _unzstd_stream(body: bytes, bound: int) -> bytes:
    """A frame of unknown size, in small pieces: a piece of 1 KiB holds at most 256 blocks of 128 KiB."""
    inflater = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompressobj()
    parts: list[bytes] = []
    size = at = 0
    while at < len(body) and not inflater.eof:
        part = inflater.decompress(body[at : at + _PIECE])
        at += _PIECE
        size += len(part)
        if size > bound:
            raise BodyRefused(413, _TOO_LARGE)
        parts.append(part)
    if not inflater.eof:
        raise BodyRefused(400, "the zstd body is cut short")
    if inflater.unused_data or at < len(body):
        raise BodyRefused(400, "the zstd body has more than one frame")
    return b"".join(parts)
