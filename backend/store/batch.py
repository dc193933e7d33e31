"""Arrow batches of the three signals: what ingest hands to the store.

A batch holds the rows of one request. ``runs`` name the stretches of rows that come from one rank, so
that the store can tell new rows from repeated ones without looking at every row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from lanterne import wire
from lanterne.nouns import Identity

TEXT = pa.dictionary(pa.int32(), pa.string())
ATTRIBUTES = pa.map_(pa.string(), pa.string())
_TYPES: Mapping[str, pa.DataType] = {
    "job": TEXT, "host": TEXT, "service": TEXT, "kind": TEXT, "name": TEXT, "group_name": TEXT, "dtype": TEXT,
    "unit": TEXT, "label": TEXT, "body": pa.string(), "attempt": pa.int32(), "rank": pa.int32(),
    "severity": pa.int32(), "value": pa.float64(), "trace_id": pa.binary(), "span_id": pa.binary(),
    "attributes": ATTRIBUTES,
}  # fmt: skip
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "spans": wire.SPAN_COLUMNS,
    "points": wire.POINT_COLUMNS,
    "logs": wire.LOG_COLUMNS,
}
SCHEMAS: Mapping[str, pa.Schema] = {
    signal: pa.schema([(name, _TYPES.get(name, pa.int64())) for name in names]) for signal, names in COLUMNS.items()
}
SIGNALS = tuple(COLUMNS)
DERIVED: Mapping[str, tuple[str, ...]] = {
    "waits": (
        "job", "attempt", "group_name", "group_sequence", "step", "rank", "op", "bytes", "lateness_ms", "wait_ms",
        "transfer_ms", "error_ms",
    ),
    "clocks": ("job", "attempt", "rank", "at_ns", "offset_ns", "error_ns", "drift_ppm"),
}  # fmt: skip
"""Columns of the tables that the pipeline fills."""
Derived: TypeAlias = Mapping[str, Sequence[Any]] | Any
"""An Arrow table, or columns by name."""
_NULLABLE = frozenset({"value", "attributes"})


@dataclass(frozen=True, slots=True)
class Run:
    """Rows ``start`` to ``stop`` (exclusive) of a batch come from one rank of one attempt of one job."""

    job: str
    attempt: int
    rank: int
    start: int
    stop: int

    @property
    def key(self) -> tuple[str, int, int]:
        return self.job, self.attempt, self.rank


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one signal; ``table`` has the columns of ``SCHEMAS[signal]``."""

    signal: str
    table: pa.Table
    runs: Sequence[Run]
    identities: Sequence[Identity] = ()

    @property
    def rows(self) -> int:
        return int(self.table.num_rows)

    @property
    def nbytes(self) -> int:
        """Bytes held in memory, at least 1 KiB: small batches have a cost of their own."""
        return max(1024, int(self.table.nbytes))


def fault(batch: Batch) -> str:
    """Why the event store would refuse these rows; empty when it takes them. ``value`` alone may be missing."""
    table = batch.table
    missing = [n for n in table.column_names if n not in _NULLABLE and table.column(n).null_count]
    return f"{', '.join(missing)}: a value is missing (NOT NULL)" if missing else ""


def derived(table: str, rows: Derived) -> pa.Table:
    """Rows for a table of ``DERIVED``, in its order of columns; ``op`` may be left out."""
    found = rows if isinstance(rows, pa.Table) else pa.table(dict(rows))
    names = DERIVED[table]
    if "op" in names and "op" not in found.column_names:
        found = found.append_column("op", pa.array([""] * found.num_rows, pa.string()))
    return found.select(list(names))


def map_array(rows: Sequence[Mapping[str, str]]) -> pa.MapArray:
    """A MAP(VARCHAR, VARCHAR) column of one mapping a row."""
    offsets = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum([len(r) for r in rows], out=offsets[1:])
    keys = [k for r in rows for k in r]
    values = [v for r in rows for v in r.values()]
    return pa.MapArray.from_arrays(pa.array(offsets), pa.array(keys, pa.string()), pa.array(values, pa.string()))


def runs_of(job: Sequence[str], attempt: Sequence[int], rank: Sequence[int]) -> list[Run]:
    """Split rows, in order, where (job, attempt, rank) changes."""
    runs: list[Run] = []
    start = 0
    for at in range(1, len(rank) + 1):
        if at == len(rank) or rank[at] != rank[start] or job[at] != job[start] or attempt[at] != attempt[start]:
            runs.append(Run(job[start], attempt[start], rank[start], start, at))
            start = at
    return runs


def from_columns(signal: str, columns: Mapping[str, list[Any]], identities: Sequence[Identity] = ()) -> Batch:
    """A batch from :mod:`lanterne.wire`'s decoded columns. Raises ArrowInvalid on values out of a column's range."""
    schema = SCHEMAS[signal]
    arrays = [
        map_array(columns[f.name]) if f.name == "attributes" else pa.array(columns[f.name], f.type) for f in schema
    ]
    runs = runs_of(columns["job"], columns["attempt"], columns["rank"])
    return Batch(signal, pa.Table.from_arrays(arrays, schema=schema), runs, identities)
