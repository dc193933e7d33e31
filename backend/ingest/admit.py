"""Decoded columns to Arrow batches, within the limits: a record outside of them is refused and counted.

Refused: a job id that is no id, a rank outside the job, a number outside 64 bits, a span that ends before
it starts. Cut short, not refused: long texts and surplus attributes, as foreign programs send them in
good faith; ``lanterne.cut`` then says so on the record.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lanterne import limits
from lanterne.backend.store.batch import SCHEMAS, Batch, from_columns
from lanterne.nouns import NO_RANK, Identity

_ID = re.compile(limits.ID_PATTERN)
_INT64 = 1 << 63
_INT32 = 1 << 31
_TEXT_BOUNDS = {"body": limits.BODY_TEXT_BYTES_MAX}
NAME_CHARS_MAX = 512
CUT = "lanterne.cut"
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Admitted:
    """A batch of what may be stored, with what was refused and why."""

    batch: Batch
    refused: int = 0
    reasons: str = ""


def admit(signal: str, columns: Mapping[str, list[Any]], identities: Sequence[Identity]) -> Admitted:
    """Check all rows, cut long texts, build the Arrow batch."""
    rows = len(columns["job"])
    keep: Mask = np.ones(rows, dtype=bool)
    reasons: Counter[str] = Counter()
    cleaned = dict(columns)
    for field in SCHEMAS[signal]:
        if pa.types.is_integer(field.type):
            bound = _INT32 if field.type == pa.int32() else _INT64
            cleaned[field.name] = _integers(columns[field.name], field.name, bound, keep, reasons)
        elif field.name == "attributes":
            cleaned[field.name] = _attributes(columns[field.name])
        elif pa.types.is_dictionary(field.type) or pa.types.is_string(field.type):
            cleaned[field.name] = _texts(columns[field.name], _TEXT_BOUNDS.get(field.name, NAME_CHARS_MAX))
    sizes = {(i.job, i.attempt, i.rank): i.world_size for i in identities}
    _check_places(cleaned, sizes, keep, reasons)
    _check_numbers(signal, cleaned, keep, reasons)
    if not keep.all():
        chosen = np.flatnonzero(keep).tolist()
        cleaned = {name: [column[i] for i in chosen] for name, column in cleaned.items()}
    told = {(j, a, r) for j, a, r in zip(cleaned["job"], cleaned["attempt"], cleaned["rank"], strict=True)}
    known = [i for i in identities if (i.job, i.attempt, i.rank) in told]
    says = "; ".join(f"{n} x {why}" for why, n in reasons.most_common(5))
    return Admitted(from_columns(signal, cleaned, known), rows - int(keep.sum()), says)


def _integers(column: list[Any], name: str, bound: int, keep: Mask, reasons: Counter[str]) -> list[Any]:
    try:
        array = np.array(column)
    except (ValueError, OverflowError):
        array = np.array(column, dtype=object)
    if array.dtype.kind == "i" and (not len(array) or (array.min() >= -bound and array.max() < bound)):
        return column
    fixed: list[Any] = list(column)
    for at, value in enumerate(column):
        if type(value) is int and -bound <= value < bound:
            continue
        fixed[at] = 0
        if keep[at]:
            keep[at] = False
            reasons[f"{name} is not a whole number within {bound.bit_length()} bits"] += 1
    return fixed


def _texts(column: list[str], bound: int) -> list[str]:
    if not column or max(map(len, column)) <= bound:
        return column
    return [text if len(text) <= bound else text[: bound - 1] + "…" for text in column]


def _attributes(column: list[dict[str, str]]) -> list[dict[str, str]]:
    if all(
        len(row) <= limits.ATTRIBUTES_MAX
        and (not row or max(map(len, row)) <= limits.ATTRIBUTE_KEY_BYTES_MAX)
        and (not row or max(map(len, row.values())) <= limits.ATTRIBUTE_VALUE_BYTES_MAX)
        for row in column
    ):
        return column
    return [_cut(row) for row in column]


def _cut(row: dict[str, str]) -> dict[str, str]:
    bound = limits.ATTRIBUTE_VALUE_BYTES_MAX
    kept: dict[str, str] = {}
    cut = 0
    for key, value in row.items():
        if len(kept) >= limits.ATTRIBUTES_MAX - 1 or len(key) > limits.ATTRIBUTE_KEY_BYTES_MAX:
            cut += 1
            continue
        if len(value) > bound:
            cut += 1
            value = value[: bound - 1] + "…"
        kept[key] = value
    return {**kept, CUT: str(cut)} if cut else kept


def _check_places(
    columns: Mapping[str, Sequence[Any]],
    sizes: Mapping[tuple[str, int, int], int],
    keep: Mask,
    reasons: Counter[str],
) -> None:
    verdicts: dict[tuple[str, int, int], str] = {}
    for at, place in enumerate(zip(columns["job"], columns["attempt"], columns["rank"], strict=True)):
        why = verdicts.get(place)
        if why is None:
            why = verdicts[place] = _place(*place, sizes.get(place, 0))
        if why and keep[at]:
            keep[at] = False
            reasons[why] += 1


def place_fault(identity: Identity) -> str:
    """Why no row of this speaker may be stored; empty when it may."""
    return _place(identity.job, identity.attempt, identity.rank, identity.world_size)


def _place(job: str, attempt: int, rank: int, world_size: int) -> str:
    if not _ID.match(job):
        return f"lanterne.job is not an id ({limits.ID_PATTERN})"
    if attempt < 0:
        return "lanterne.attempt is negative"
    bound = world_size if world_size > 0 else limits.RANKS_MAX
    if rank != NO_RANK and not 0 <= rank < bound:
        return f"lanterne.rank {rank} is outside 0 to {bound - 1}"
    return ""


def _check_numbers(signal: str, columns: Mapping[str, Sequence[Any]], keep: Mask, reasons: Counter[str]) -> None:
    step = np.array(columns["step"], dtype=np.int64)
    bad = (step < -1) | (step > limits.STEP_MAX)
    _refuse(bad, "lanterne.step is outside -1 to 2^53", keep, reasons)
    sequence = np.array(columns["sequence"], dtype=np.int64)
    _refuse(sequence < -1, "lanterne.sequence is negative", keep, reasons)
    if signal == "spans":
        start = np.array(columns["start_ns"], dtype=np.int64)
        end = np.array(columns["end_ns"], dtype=np.int64)
        _refuse((end < start) & (end != 0), "the span ends before it starts", keep, reasons)


def _refuse(bad: Mask, why: str, keep: Mask, reasons: Counter[str]) -> None:
    bad = bad & keep
    if bad.any():
        reasons[why] += int(bad.sum())
        keep &= ~bad
