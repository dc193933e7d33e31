"""The compiled way from an OTLP protobuf body to an admitted batch (``walker.cpp``); it releases the GIL.

It takes a body only when all of it is common: known keys of their own type, texts and counts within their bounds,
plain values. :func:`admitted` answers None for every other body, broken ones included, and before the library is
built; :mod:`lanterne.backend.ingest.decode` then goes the long way. Both give the same rows.
"""

from __future__ import annotations

import ctypes
import logging
import secrets
import struct
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from lanterne import limits, native, wire
from lanterne.backend.ingest.admit import NAME_CHARS_MAX, Admitted, place_fault
from lanterne.backend.store.batch import SCHEMAS, TEXT, Batch, Run
from lanterne.nouns import Identity

log = logging.getLogger(__name__)

SOURCES = (Path(__file__).with_name("walker.cpp"), Path(__file__).with_name("walker.h"))
FLAGS = (*native.FLAGS, "-std=c++17")
_ROOTS: Mapping[str, Descriptor] = {
    "spans": ExportTraceServiceRequest.DESCRIPTOR,
    "points": ExportMetricsServiceRequest.DESCRIPTOR,
    "logs": ExportLogsServiceRequest.DESCRIPTOR,
}  # in the order of the C++ Signal
_NUMBERS = ("step", "sequence", "lamport", "monotonic_ns", "group_sequence", "bytes")
NAMES = (
    wire.STEP, wire.SEQUENCE, wire.LAMPORT, wire.MONOTONIC, wire.GROUP_SEQUENCE, wire.BYTES, wire.NAME, wire.GROUP,
    wire.DTYPE, wire.LABEL, wire.EVENT_NAME,
)  # fmt: skip
"""Attributes with a column of their own, in the order of the C++ ``Slot``."""
_LIMITS = (
    NAME_CHARS_MAX, limits.BODY_TEXT_BYTES_MAX, limits.ATTRIBUTE_KEY_BYTES_MAX, limits.ATTRIBUTE_VALUE_BYTES_MAX,
    limits.ATTRIBUTES_MAX, limits.RECORDS_PER_BODY_MAX, limits.STEP_MAX, limits.MAP_BYTES_PER_BODY_MAX,
)  # fmt: skip
_WORDS = ("kind", "name", "group_name", "dtype", "label", "unit")
_TEXTS = ("trace_id", "span_id", "body", "keys", "values")
_BUFFERS: Mapping[str, int] = {
    **{name: n for n, name in enumerate(_NUMBERS)},
    **{name: len(_NUMBERS) + 3 * n for n, name in enumerate(_WORDS)},
    **{name: 24 + 2 * n for n, name in enumerate(_TEXTS)},
    "map_ends": 34, "start_ns": 35, "time_ns": 35, "end_ns": 36, "value": 37, "severity": 38, "block_rows": 39,
}  # fmt: skip
_FIELDS = 64
_BLOCKS_MAX = 4_096
_CACHED_RESOURCE_BYTES = 8_192
_F = FieldDescriptor
_KINDS = {
    **dict.fromkeys((_F.TYPE_INT32, _F.TYPE_INT64, _F.TYPE_UINT32, _F.TYPE_UINT64, _F.TYPE_SINT32, _F.TYPE_SINT64), 1),
    **dict.fromkeys((_F.TYPE_BOOL, _F.TYPE_ENUM), 1),
    **dict.fromkeys((_F.TYPE_FIXED64, _F.TYPE_SFIXED64, _F.TYPE_DOUBLE), 2),
    **dict.fromkeys((_F.TYPE_FIXED32, _F.TYPE_SFIXED32, _F.TYPE_FLOAT), 3),
    _F.TYPE_STRING: 4,
    _F.TYPE_BYTES: 5,
}
_PACKED, _MESSAGE = 8, 16


def tables(root: Descriptor) -> bytes:
    """The kind of each field of each message below ``root``, ``_FIELDS`` bytes a message; ``root`` is the first."""
    order: list[Descriptor] = [root]
    rows: list[bytearray] = []
    for message in order:  # grows while it is read
        row = bytearray(_FIELDS)
        for field in message.fields:
            if field.message_type is not None:
                if field.message_type not in order:
                    order.append(field.message_type)
                row[field.number] = _MESSAGE + order.index(field.message_type)
            else:
                kind = _KINDS[field.type]
                row[field.number] = kind | (_PACKED if field.is_repeated and kind <= 3 else 0)
        rows.append(row)
    return b"".join(rows)


class Rows:
    """Rows made by the library; Arrow's buffers keep it alive, its end frees them."""

    def __init__(self, library: ctypes.CDLL, handle: int) -> None:
        self._library, self._handle = library, handle

    def __del__(self) -> None:
        self._library.lanterne_rows_free(self._handle)

    def buffer(self, which: int) -> pa.Buffer:
        size = ctypes.c_int64()
        at = self._library.lanterne_rows_buffer(self._handle, which, ctypes.byref(size))
        return pa.foreign_buffer(at, size.value, self) if size.value else pa.py_buffer(b"")


class Walker:
    """The loaded library with its three tables. Thread-safe."""

    def __init__(self, library: Path) -> None:
        """Raises OSError when the dynamic loader refuses the file."""
        self._library = lib = ctypes.CDLL(str(library))
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        lib.lanterne_walker_seed.argtypes, lib.lanterne_walker_seed.restype = [ctypes.c_uint64], None
        lib.lanterne_walker_new.restype = pointer
        lib.lanterne_walker_scan.argtypes = [ctypes.c_char_p, number, pointer, number]
        lib.lanterne_walker_scan.restype = number
        lib.lanterne_walker_walk.argtypes = [pointer, ctypes.c_char_p, number, pointer, pointer, number]
        lib.lanterne_walker_walk.restype = pointer
        lib.lanterne_rows_free.argtypes, lib.lanterne_rows_free.restype = [pointer], None
        lib.lanterne_rows_buffer.argtypes = [pointer, ctypes.c_int, ctypes.POINTER(number)]
        lib.lanterne_rows_buffer.restype = pointer
        lib.lanterne_walker_seed(secrets.randbits(64))
        self._handles: dict[str, int] = {}
        names = (ctypes.c_char_p * len(NAMES))(*(name.encode() for name in NAMES))
        bounds = (number * len(_LIMITS))(*_LIMITS)
        for which, (signal, root) in enumerate(_ROOTS.items()):
            kinds = tables(root)
            self._handles[signal] = lib.lanterne_walker_new(
                kinds, number(len(kinds) // _FIELDS), 0, which, names, bounds
            )

    def admitted(self, signal: str, body: bytes) -> Admitted | None:
        """The batch of a body of ``spans``, ``points`` or ``logs``; None when it is not common enough."""
        places = np.empty((_BLOCKS_MAX, 2), dtype=np.int64)
        blocks = self._library.lanterne_walker_scan(body, len(body), places.ctypes.data, _BLOCKS_MAX)
        if blocks < 0:
            return None
        sources = []
        for at, size in places[:blocks].tolist():
            source = _source(body[at : at + size])
            if source is None:
                return None
            sources.append(source)
        extras = (ctypes.c_char_p * blocks)(*(packed for _, packed in sources))
        sizes = np.array([len(packed) for _, packed in sources], dtype=np.int64)
        handle = self._library.lanterne_walker_walk(
            self._handles[signal], body, len(body), ctypes.addressof(extras), sizes.ctypes.data, blocks
        )
        if not handle:
            return None
        return _admitted(signal, Rows(self._library, handle), [identity for identity, _ in sources])


def _source(resource: bytes) -> tuple[Identity, bytes] | None:
    """Who speaks, and what each of its rows is told of the resource; None when it cannot be admitted as it is."""
    return _known_source(resource) if len(resource) <= _CACHED_RESOURCE_BYTES else _read_source(resource)


def _read_source(resource: bytes) -> tuple[Identity, bytes] | None:
    try:
        identity, rest = wire.source_of(Resource.FromString(resource))
    except DecodeError:
        return None
    if place_fault(identity) or max(len(identity.host), len(identity.service_name)) > NAME_CHARS_MAX:
        return None
    packed = bytearray()
    for key, value in rest.items():
        if len(key) > limits.ATTRIBUTE_KEY_BYTES_MAX or len(value) > limits.ATTRIBUTE_VALUE_BYTES_MAX:
            return None
        for part in (key.encode(), value.encode()):
            packed += struct.pack("<I", len(part)) + part
    return identity, bytes(packed)


_known_source = lru_cache(maxsize=4_096)(_read_source)


def _admitted(signal: str, rows: Rows, sources: Sequence[Identity]) -> Admitted:
    counts = np.frombuffer(rows.buffer(_BUFFERS["block_rows"]), dtype=np.int64)
    speaking = [(who, int(n)) for who, n in zip(sources, counts, strict=True) if n]
    total = sum(n for _, n in speaking)
    columns = []
    for field in SCHEMAS[signal]:
        if field.name in ("job", "attempt", "rank", "host", "service"):
            columns.append(_told(field, speaking))
        else:
            columns.append(_column(field, rows, total))
    runs: list[Run] = []
    at = 0
    for who, n in speaking:
        if runs and runs[-1].key == (who.job, who.attempt, who.rank):
            runs[-1] = Run(*runs[-1].key, runs[-1].start, at + n)
        else:
            runs.append(Run(who.job, who.attempt, who.rank, at, at + n))
        at += n
    last = {(i.job, i.attempt, i.rank): i for i in sources}  # the last word of a rank on itself, as decode has it
    told = {run.key for run in runs}
    identities = [identity for key, identity in last.items() if key in told]
    return Admitted(Batch(signal, pa.Table.from_arrays(columns, schema=SCHEMAS[signal]), runs, identities))


def _told(field: pa.Field, speaking: Sequence[tuple[Identity, int]]) -> pa.Array:
    """A column that the resource decides: one value for all rows of a block."""
    name = "service_name" if field.name == "service" else field.name
    values = [getattr(who, name) for who, _ in speaking]
    repeats = [n for _, n in speaking]
    if field.type != TEXT:
        return pa.array(np.repeat(np.array(values, dtype=np.int32), repeats), field.type)
    places: dict[str, int] = {}
    index = np.array([places.setdefault(v, len(places)) for v in values], dtype=np.int32)
    return pa.DictionaryArray.from_arrays(np.repeat(index, repeats), pa.array(list(places), pa.string()))


def _column(field: pa.Field, rows: Rows, total: int) -> pa.Array:
    if field.name == "attributes":
        ends = rows.buffer(_BUFFERS["map_ends"])
        held = np.frombuffer(ends, dtype=np.int32)[-1]
        keys = _text(pa.string(), rows, _BUFFERS["keys"], held)
        values = _text(pa.string(), rows, _BUFFERS["values"], held)
        return pa.MapArray.from_arrays(pa.Array.from_buffers(pa.int32(), total + 1, [None, ends]), keys, values)
    which = _BUFFERS[field.name]
    if field.type == TEXT:
        ends = rows.buffer(which + 1)
        words = pa.Array.from_buffers(pa.string(), ends.size // 4 - 1, [None, ends, rows.buffer(which + 2)])
        index = pa.Array.from_buffers(pa.int32(), total, [None, rows.buffer(which)])
        return pa.DictionaryArray.from_arrays(index, words, safe=False)
    if field.name in _TEXTS:
        return _text(field.type, rows, which, total)
    return pa.Array.from_buffers(field.type, total, [None, rows.buffer(which)])


def _text(kind: pa.DataType, rows: Rows, which: int, length: int) -> pa.Array:
    return pa.Array.from_buffers(kind, int(length), [None, rows.buffer(which), rows.buffer(which + 1)])


# --- building it ---

_lock = threading.Lock()
_walker: Walker | None = None
_tried = False


def library_path() -> Path:
    """Where the library of these sources is, or would be. Raises :class:`native.BuildFailed`."""
    return native.target("walker", [*(s.read_text(encoding="utf-8") for s in SOURCES), *FLAGS])


def load(wait_s: float = native.COMPILE_TIMEOUT_S) -> Walker | None:
    """Build (some seconds, once a machine) and load the library; None, and one warning, where that cannot be."""
    global _walker, _tried
    with _lock:
        if not _tried:
            _tried = True
            try:
                _walker = Walker(native.build(library_path(), [*FLAGS, str(SOURCES[0])], wait_s))
            except (native.BuildFailed, OSError) as error:
                log.warning("OTLP is decoded by the protobuf library, much slower: %s", error)
        return _walker


def load_soon() -> None:
    """:func:`load` on a daemon thread, where it has not been tried."""
    if not _tried:
        threading.Thread(target=load, name="lanterne-build", daemon=True).start()


def admitted(signal: str, body: bytes) -> Admitted | None:
    """:meth:`Walker.admitted`, or None while there is no walker."""
    walker = _walker
    return None if walker is None else walker.admitted(signal, body)


if __name__ == "__main__":  # python -m lanterne.backend.ingest.walker: ahead of time, as in the container's image
    print(native.build(library_path(), [*FLAGS, str(SOURCES[0])]))  # noqa: T201
