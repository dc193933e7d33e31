"""OTLP bodies made at random from the message descriptors: common ones, odd ones, and damaged ones."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from lanterne import wire

REQUESTS: dict[str, Any] = {
    "traces": ExportTraceServiceRequest,
    "metrics": ExportMetricsServiceRequest,
    "logs": ExportLogsServiceRequest,
}
_F = FieldDescriptor
_WHOLE = (wire.STEP, wire.SEQUENCE, wire.LAMPORT, wire.MONOTONIC, wire.GROUP_SEQUENCE, wire.BYTES)
_TEXT = (wire.NAME, wire.GROUP, wire.DTYPE, wire.LABEL, wire.EVENT_NAME)
_PLACE = (wire.ATTEMPT, wire.RANK, wire.WORLD_SIZE)
_WORDS = ("", "a", "training.step", "all_reduce", "naïve ✓", "\x00", "é" * 300, "x" * 600, "y" * 5_000, "𝄞")
_REALS = (0.0, -0.0, 1.5, 1e16, 9_999_999_999_999_998.0, 1e-4, 9e-5, 5e-324, 1.7e308, 0.1, float("nan"), float("inf"))


def body(signal: str, rng: random.Random) -> bytes:
    """A valid request of ``traces``, ``metrics`` or ``logs``; half of them with nothing odd in them."""
    request = REQUESTS[signal]()
    _fill(request, rng, 0, odd=rng.choice((0.0, 0.0, 0.02, 0.2)))
    raw: bytes = request.SerializeToString()
    if rng.random() < 0.1:
        raw += _unknown(rng)
    if rng.random() < 0.05:
        raw += raw[: rng.randrange(len(raw) + 1)]
    return raw


def damaged(raw: bytes, rng: random.Random) -> bytes:
    """The body with some bytes changed, put in, or cut off."""
    data = bytearray(raw)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        change: Callable[[], None] = rng.choice(
            (
                lambda at=at: data.__setitem__(slice(at, at + 1), bytes([rng.randrange(256)])),
                lambda at=at: data.__setitem__(slice(at, at), bytes([rng.randrange(256)])),
                lambda at=at: data.__delitem__(slice(at, at + rng.randint(1, 9))),
                lambda at=at: data.__delitem__(slice(at, None)),
                lambda at=at: data.__setitem__(slice(at, at), b"\xff" * rng.randint(1, 11)),
            )
        )
        change()
    return bytes(data)


def _unknown(rng: random.Random) -> bytes:
    number = rng.choice((15, 60, 63, 64, 200, 2**28))
    tag, out = number << 3, bytearray()
    wire_type = rng.choice((0, 1, 2, 3, 5))
    tag |= wire_type
    while tag > 0x7F:
        out.append(tag & 0x7F | 0x80)
        tag >>= 7
    out.append(tag)
    return bytes(out) + {0: b"\x05", 1: b"12345678", 2: b"\x03abc", 3: b"", 5: b"1234"}[wire_type]


def _fill(message: Any, rng: random.Random, depth: int, odd: float) -> None:
    kind = message.DESCRIPTOR.name
    if kind == "KeyValue":
        _pair(message, rng, odd)
        return
    for field in message.DESCRIPTOR.fields:
        if field.containing_oneof is not None:
            continue
        usual = field.name in {"attributes", "resource"} or field.name.startswith(("resource_", "scope_"))
        if rng.random() < (0.2 if odd == 0 and not usual else 0.7):
            _set(message, field, rng, depth, odd)
    if kind == "Resource" and odd == 0 and rng.random() < 0.7:
        del message.attributes[:]
        for key, value in (("lanterne.job", f"job{rng.randrange(3)}"), ("host.name", "n"), ("service.name", "s")):
            message.attributes.add(key=key).value.string_value = value
        for key, number in ((wire.RANK, rng.randrange(4)), (wire.WORLD_SIZE, 4)):
            message.attributes.add(key=key).value.int_value = number
    for choice in message.DESCRIPTOR.oneofs:
        members = [f for f in choice.fields if odd or f.name not in {"histogram", "exponential_histogram", "summary"}]
        if rng.random() < 0.8:
            _set(message, rng.choice(members), rng, depth, odd)


def _set(message: Any, field: Any, rng: random.Random, depth: int, odd: float) -> None:
    repeated = field.is_repeated
    for _ in range(rng.choice((1, 1, 2, 5)) if repeated else 1):
        if field.message_type is not None:
            if depth > 7:
                return
            inner = getattr(message, field.name)
            inner = inner.add() if repeated else inner
            if not repeated:
                inner.SetInParent()
            _fill(inner, rng, depth + 1, odd)
        elif repeated:
            getattr(message, field.name).append(_scalar(field, rng, odd))
        else:
            setattr(message, field.name, _scalar(field, rng, odd))


def _scalar(field: Any, rng: random.Random, odd: float) -> Any:
    if field.type == _F.TYPE_STRING:
        return rng.choice(_WORDS) if rng.random() < odd else rng.choice(_WORDS[:6])
    if field.type == _F.TYPE_BYTES:
        return rng.randbytes(rng.choice((0, 8, 16, 16, 3)))
    if field.type in (_F.TYPE_DOUBLE, _F.TYPE_FLOAT):
        return _real(rng)
    if field.type == _F.TYPE_BOOL:
        return rng.random() < 0.5
    if field.type == _F.TYPE_ENUM:
        return rng.choice(field.enum_type.values).number
    if "end" in field.name:
        return 2**62
    if rng.random() < odd:
        return rng.choice((0, 2**31 - 1))
    return rng.randrange(2**20)


def _real(rng: random.Random) -> float:
    if rng.random() < 0.4:
        return rng.choice(_REALS)
    found: float = struct.unpack("<d", rng.randbytes(8))[0]
    return found if rng.random() < 0.5 else rng.uniform(-1e6, 1e6)


def _pair(pair: Any, rng: random.Random, odd: float) -> None:
    value = pair.value
    if rng.random() < odd:
        pair.key = rng.choice((*_WHOLE, *_TEXT, *_PLACE, wire.JOB, *_WORDS))
        _fill(value, rng, 6, odd)
        return
    pair.key = rng.choice((*_WHOLE, *_TEXT, *(f"user.{rng.randrange(1000)}" for _ in range(11))))
    if pair.key in _WHOLE:
        value.int_value = rng.choice((0, 1, 7, 2**40, 2**53))
    elif pair.key in _TEXT:
        value.string_value = rng.choice(_WORDS[:6])
    else:
        pick = rng.randrange(5)
        if pick == 0:
            value.int_value = rng.choice((-(2**63), 2**63 - 1, 0, -5))
        elif pick == 1:
            value.double_value = _real(rng)
        elif pick == 2:
            value.bool_value = rng.random() < 0.5
        elif pick == 3:
            value.bytes_value = rng.randbytes(rng.randrange(9))
        else:
            value.string_value = rng.choice(_WORDS[:6])
