"""OTLP/JSON to the protobuf messages. It departs from plain protobuf JSON: ids are hex, enums are numbers."""

from __future__ import annotations

import base64
import json
from typing import Any, TypeVar

from google.protobuf.json_format import ParseDict, ParseError
from google.protobuf.message import Message

from lanterne import limits
from lanterne.backend.ingest.body import BodyRefused

M = TypeVar("M", bound=Message)
_IDS = frozenset({"traceId", "spanId", "parentSpanId", "trace_id", "span_id", "parent_span_id"})
_DEPTH_MAX = 3 * limits.NESTING_MAX + 16  # each AnyValue level is up to three JSON levels


def parse(body: bytes, message: M) -> M:
    """Fill ``message`` from OTLP/JSON; unknown fields are ignored. Raises :class:`BodyRefused` (400)."""
    try:
        plain = json.loads(body, parse_constant=_constant)
        if not isinstance(plain, dict):
            raise BodyRefused(400, "the JSON body is not an object")
        filled: M = ParseDict(_with_ids(plain, 0), message, ignore_unknown_fields=True, max_recursion_depth=_DEPTH_MAX)
    except (ValueError, RecursionError, ParseError, TypeError, AttributeError, OverflowError) as error:
        raise BodyRefused(400, f"the body is not OTLP/JSON: {str(error)[:200]}") from None
    return filled


def _constant(text: str) -> str:
    """``NaN`` and its like are not JSON, but protobuf JSON takes them as strings."""
    return {"-Infinity": "-Infinity", "Infinity": "Infinity"}.get(text, "NaN")


def _with_ids(value: Any, depth: int) -> Any:
    if depth > _DEPTH_MAX:
        raise ValueError(f"nested deeper than {_DEPTH_MAX}")
    if isinstance(value, dict):
        return {
            k: base64.b64encode(bytes.fromhex(v)).decode()
            if k in _IDS and isinstance(v, str)
            else _with_ids(v, depth + 1)
            for k, v in value.items()
        }
    if isinstance(value, list):
        return [_with_ids(v, depth + 1) for v in value]
    return value
