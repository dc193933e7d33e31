"""TensorBoard event files: TFRecord frames around ``Event`` messages, decoded by hand (scalars only).

Frame: length (u64 LE), masked CRC-32C of the length, data, masked CRC-32C of the data. A cut last record ends the
file without an error and is noted.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from lanterne.backend.readers.gather import Gather
from lanterne.backend.readers.metrics import RowMetrics
from lanterne.backend.readers.source import Source, chunks

RECORD_BYTES_MAX = 64 << 20
CHECKED_BYTES_MAX = 4 << 10  # data checksums of larger records are not worth their time in Python
_TABLE = []
for _byte in range(256):
    _value = _byte
    for _ in range(8):
        _value = (_value >> 1) ^ (0x82F63B78 if _value & 1 else 0)
    _TABLE.append(_value)


def masked_crc(data: bytes) -> int:
    """CRC-32C (Castagnoli), rotated and offset as in TFRecord."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ _TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def sniff(source: Source) -> bool:
    """The first length carries its own checksum."""
    head = source.head
    return len(head) >= 16 and struct.unpack("<I", head[8:12])[0] == masked_crc(head[:8])


def _records(source: Source, gather: Gather) -> Iterator[bytes]:
    data, offset = b"", 0
    for piece in chunks(source.path, source.packed):
        data += piece
        while len(data) >= 12:
            (length,) = struct.unpack("<Q", data[:8])
            if struct.unpack("<I", data[8:12])[0] != masked_crc(data[:8]) or length > RECORD_BYTES_MAX:
                gather.gap(f"{source.name} at byte {offset}: broken record, the rest is left out")
                return
            if len(data) < 16 + length:
                break
            body = data[12 : 12 + length]
            if length <= CHECKED_BYTES_MAX and struct.unpack("<I", data[12 + length : 16 + length])[0] != masked_crc(
                body
            ):
                gather.gap(f"{source.name} at byte {offset}: record with a wrong checksum left out")
            else:
                yield body
            data, offset = data[16 + length :], offset + 16 + length
    if data:
        gather.gap(f"{source.name} at byte {offset}: the last record is cut off")


def fields(data: bytes) -> Iterator[tuple[int, int, bytes | int]]:
    """Protobuf wire fields as (number, wire type, value). Raises ValueError on a cut message."""
    at, end = 0, len(data)

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            if at >= end or shift > 63:
                raise ValueError("cut varint")
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    while at < end:
        key = varint()
        number, wire = key >> 3, key & 7
        if wire == 0:
            yield number, wire, varint()
            continue
        size = {1: 8, 5: 4}.get(wire)
        if wire == 2:
            size = varint()
        if size is None or at + size > end:
            raise ValueError("cut or unknown field")
        yield number, wire, data[at : at + size]
        at += size


def _tensor(data: bytes) -> float | None:
    dtype, content = 0, b""
    for number, wire, value in fields(data):
        if number == 1 and isinstance(value, int):
            dtype = value
        elif number in (4, 5, 6) and isinstance(value, bytes):
            content = value
            if number == 6:
                dtype = 2
        del wire
    if dtype == 1 and len(content) == 4:
        return float(struct.unpack("<f", content)[0])
    if dtype == 2 and len(content) == 8:
        return float(struct.unpack("<d", content)[0])
    return None


def _scalars(summary: bytes) -> Iterator[tuple[str, float]]:
    for number, wire, value in fields(summary):
        if number != 1 or wire != 2 or not isinstance(value, bytes):
            continue
        tag, scalar = "", None
        for inner, kind, item in fields(value):
            if inner == 1 and isinstance(item, bytes):
                tag = item.decode("utf-8", "replace")
            elif inner == 2 and kind == 5 and isinstance(item, bytes):
                scalar = float(struct.unpack("<f", item)[0])
            elif inner == 8 and isinstance(item, bytes):
                scalar = _tensor(item)
        if tag and scalar is not None:
            yield tag, scalar


def read(source: Source, gather: Gather) -> int:
    """Scalars of one event file as series; the rank comes from the file or folder name."""
    table = RowMetrics(gather, source.rank, source.name)
    for record in _records(source, gather):
        step, values = 0, []
        try:
            for number, wire, value in fields(record):
                if number == 2 and wire == 0 and isinstance(value, int):
                    step = value
                elif number == 5 and isinstance(value, bytes):
                    values += list(_scalars(value))
        except ValueError:
            gather.dropped += 1
            continue
        for tag, scalar in values:
            table.row({tag: scalar}, step=step)
    if table.found:
        gather.sources.add("metrics")
    return max(table.found, 1)
