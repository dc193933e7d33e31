"""Any table of metrics as columns for the causal engine's generic mode: CSV, TSV or Parquet, one row a sample.

Columns are metrics, named ``entity|metric`` (or with another mark between them); one column may hold the time.
"""

from __future__ import annotations

import csv
import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
import pyarrow.compute as compute
import pyarrow.csv as arrow_csv
import pyarrow.parquet as parquet
from numpy.typing import NDArray

from lanterne.causal import Ranked, rank_metrics
from lanterne.causal.generic import entity_of, estimated_onset
from lanterne.errors import UsageError

Floats = NDArray[np.float64]
TIME_NAMES = frozenset({"time", "timestamp", "ts", "date", "datetime", "step", "unnamed: 0", "index", ""})
COLUMNS_MAX = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricTable:
    """``columns``: name -> values ``[rows]``, NaN where nothing was told; ``times`` [rows] numbers (ns for dates) or
    None; ``left_out``: columns without a number, or with one value only in all rows' place."""

    path: Path
    columns: dict[str, Floats]
    times: Floats | None
    time_name: str
    left_out: tuple[str, ...]

    @property
    def rows(self) -> int:
        return len(next(iter(self.columns.values())))


def read_table(path: Path, *, time: str = "", mark: str = "|") -> MetricTable:
    """Read a table. ``time``: its time column (default: one of the usual names); ``mark``: what stands between entity
    and metric in a column's name; its last occurrence counts.

    Raises UsageError with what is wrong and what to do: unreadable, no numbers, names that occur twice.
    """
    found = _arrow(path)
    names = [str(n) for n in found.column_names]
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise UsageError(f"{path}: column {twice[0]!r} occurs twice; give each metric one name")
    if len(names) > COLUMNS_MAX:
        raise UsageError(f"{path}: {len(names)} columns, at most {COLUMNS_MAX} are read; is it a table of metrics?")
    if time and time not in names:
        raise UsageError(f"{path}: no column {time!r} for --time{_near(time, names)}")
    time_name = time or next((n for n in names if n.strip().lower() in TIME_NAMES), "")
    has_time = bool(time) or any(n.strip().lower() in TIME_NAMES for n in names)
    columns: dict[str, Floats] = {}
    left_out = []
    for name in names:
        if has_time and name == time_name:
            continue
        values = _numbers(found[name])
        if values is None or not np.isfinite(values).any():
            left_out.append(name)
        else:
            columns[_named(name, mark)] = values
    if not columns:
        raise UsageError(
            f"{path}: no column of numbers among {', '.join(map(repr, names[:6]))}; is there a header row?"
        )
    times = _numbers(found[time_name]) if has_time else None
    if has_time and times is None:
        raise UsageError(
            f"{path}: the time column {time_name!r} holds neither numbers nor dates; name another by --time"
        )
    return MetricTable(
        path=path, columns=columns, times=times, time_name=time_name if has_time else "", left_out=tuple(left_out)
    )


def _arrow(path: Path) -> arrow.Table:
    kind = path.suffix.lower()
    try:
        if kind == ".parquet":
            return parquet.read_table(path)
        if kind in {".csv", ".tsv"}:
            separator = "\t" if kind == ".tsv" else ","
            return arrow_csv.read_csv(path, parse_options=arrow_csv.ParseOptions(delimiter=separator))
    except (arrow.ArrowException, OSError, UnicodeError) as error:
        raise UsageError(f"{path}: cannot be read as a {kind[1:]} table: {str(error).splitlines()[0]}") from error
    raise UsageError(f"{path}: a table of metrics ends in .csv, .tsv or .parquet")


def _numbers(column: arrow.ChunkedArray) -> Floats | None:
    """Values as floats, dates as nanoseconds; None where they are neither."""
    kind = column.type
    if arrow.types.is_timestamp(kind) or arrow.types.is_date(kind):
        stamps = compute.cast(compute.cast(column, arrow.timestamp("ns")), arrow.int64())
        return np.asarray(stamps.to_numpy(), np.float64)
    if not (arrow.types.is_integer(kind) or arrow.types.is_floating(kind) or arrow.types.is_boolean(kind)):
        return None
    return np.asarray(compute.cast(column, arrow.float64(), safe=False).to_numpy(), np.float64)


def _named(name: str, mark: str) -> str:
    if mark == "|" or mark not in name:
        return name
    entity, metric = name.rsplit(mark, 1)
    return f"{entity}|{metric}"


def _near(word: str, names: Sequence[str]) -> str:
    found = difflib.get_close_matches(word, names, 3, 0.4)
    return f"; did you mean {' or '.join(map(repr, found))}?" if found else ""


def onset_row(table: MetricTable, onset: str) -> int | None:
    """Row of the onset: the first at or after this time (number or RFC 3339), or the row's number where the table has
    no time; None for the empty text (it is estimated then). Raises UsageError where no row fits."""
    if not onset:
        return None
    try:
        value = float(onset)
    except ValueError:
        value = _moment(table, onset)
    if table.times is None:
        row = int(value)
    else:
        order = table.times[np.isfinite(table.times)]
        if len(order) > 1 and (np.diff(order) < 0).any():
            raise UsageError(f"{table.path}: the times in {table.time_name!r} do not rise; sort the rows first")
        row = int(np.argmax(table.times >= value)) if (table.times >= value).any() else table.rows
    if not 2 <= row < table.rows:
        reach = (
            f"{table.rows} rows" if table.times is None else f"times {table.times[0]:.10g} to {table.times[-1]:.10g}"
        )
        raise UsageError(
            f"{table.path}: --onset {onset} is row {row} of {reach}; two rows before it and one after are needed"
        )
    return row


def _moment(table: MetricTable, text: str) -> float:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(f"--onset {text!r}: neither a number nor a date such as 2026-03-01T12:00:00Z") from None
    if table.times is None:
        raise UsageError(
            f"--onset {text!r}: {table.path} has no time column; give a row's number, or name it by --time"
        )
    seconds = np.datetime64(moment.replace(tzinfo=None) - (moment.utcoffset() or moment.resolution * 0), "ns")
    ns = float(seconds.astype(np.int64))
    largest = float(np.nanmax(np.abs(table.times)))
    return ns if largest > 1e17 else ns / 1e6 if largest > 1e11 else ns / 1e9


def read_graph(path: Path, entities: Sequence[str]) -> list[tuple[str, str]]:
    """Edges (cause, effect) of a CSV file with two columns; a header row is one whose names are no entities.

    Raises UsageError on other shapes, and where no edge joins two entities of the table.
    """
    try:
        lines = [row for row in csv.reader(path.open(encoding="utf-8")) if any(cell.strip() for cell in row)]
    except (OSError, UnicodeError, csv.Error) as error:
        raise UsageError(f"{path}: cannot be read as a graph: {error}") from error
    for at, row in enumerate(lines, 1):
        if len(row) != 2:
            raise UsageError(f"{path}, line {at}: {len(row)} cells; a graph has two a line: cause,effect")
    edges = [(a.strip(), b.strip()) for a, b in lines]
    known = set(entities)
    if edges and not set(edges[0]) & known:
        edges = edges[1:]
    if not any(a in known and b in known for a, b in edges):
        raise UsageError(
            f"{path}: no edge joins two entities of the table; it knows {', '.join(map(repr, sorted(known)[:6]))}"
        )
    return edges


def rank_table(
    path: Path, *, onset: str = "", graph: Path | None = None, symptom: str = "", time: str = "", mark: str = "|",
    first: int = 10,
) -> dict[str, Any]:  # fmt: skip
    """Ranked causes of what a table shows, as plain data; see :func:`lanterne.causal.rank_metrics`."""
    table = read_table(path, time=time, mark=mark)
    entities = sorted({entity_of(name) for name in table.columns})
    if symptom and symptom not in table.columns and symptom not in entities:
        raise UsageError(
            f"{path}: no column or entity {symptom!r} for --symptom{_near(symptom, [*entities, *table.columns])}"
        )
    if table.rows < 4:
        raise UsageError(f"{path}: {table.rows} rows; at least four are needed, two of them before the onset")
    row = onset_row(table, onset)
    row = estimated_onset(table.columns) if row is None else row
    edges = None if graph is None else read_graph(graph, entities)
    try:
        found = rank_metrics(table.columns, row, edges, symptom=symptom or None)
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error
    return {
        "schema": "lanterne.ranked/1", "table": str(path), "rows": table.rows, "columns": len(table.columns),
        "onset_row": row, "left_out": list(table.left_out), "causes": [_plain(r) for r in found[:first]],
    }  # fmt: skip


def _plain(found: Ranked) -> dict[str, Any]:
    return {
        "entity": found.entity, "score": round(found.score, 3), "metric": found.metric,
        "sigmas": round(found.sigmas, 3), "says": found.says, "path": list(found.path),
        "patterns": list(found.patterns),
    }  # fmt: skip
