"""One commit: tell new rows from repeated ones, insert, roll up; used by the writer thread alone."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lanterne.backend.store.batch import SIGNALS, Batch
from lanterne.backend.store.marks import Key, Marks
from lanterne.quality import Quality

_ROLL_UP_SPANS = """
INSERT INTO rank_steps (job, attempt, metric, rank, step, start_ns, value, received_ns)
SELECT job, attempt, CASE WHEN kind = 'training.step' THEN 'step_ms' ELSE name || '_ms' END,
       rank, step, start_ns, (end_ns - start_ns) / 1e6, received_ns
FROM incoming WHERE kind IN ('training.step', 'training.phase') AND rank >= 0 AND step >= 0
"""
_ROLL_UP_WAITS = """
INSERT INTO rank_steps (job, attempt, metric, rank, step, start_ns, value, received_ns)
SELECT job, attempt, unnest(['lateness_ms', 'wait_ms', 'transfer_ms']), rank, step, 0,
       unnest([max(lateness_ms), sum(wait_ms), sum(transfer_ms)]), max(received_ns)
FROM incoming WHERE step >= 0 GROUP BY job, attempt, rank, step
"""
_DERIVED = ("waits", "rank_steps", "clocks")
_IN_DOUBT = """
SELECT DISTINCT t.job, t.attempt, t.rank, t.sequence FROM {signal}_history t
JOIN incoming d ON t.job = d.job AND t.attempt = d.attempt AND t.rank = d.rank
WHERE t.sequence BETWEEN d.low AND d.high
"""


def _stamped(rows: pa.Table, received_ns: int) -> pa.Table:
    return rows.append_column("received_ns", pa.array(np.full(rows.num_rows, received_ns, np.int64)))


@dataclass(frozen=True, slots=True)
class Receipt:
    """What became of a batch: rows stored now, and rows that had been stored before."""

    stored: int
    duplicates: int = 0


@dataclass(slots=True)
class Counters:
    """What the writer did since the start; read by ``/metrics``."""

    rows: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SIGNALS, 0))
    commits: int = 0
    commit_seconds: float = 0.0
    failures: int = 0


@dataclass(slots=True)
class _Stretch:
    """Rows of one rank in one batch, with the range of their sequences."""

    batch: int
    key: Key
    rows: pa.Table
    first: int
    last: int


class Writing:
    """The writer's cursor with its marks. ``commit`` is one transaction; it raises what DuckDB raises."""

    def __init__(self, cursor: duckdb.DuckDBPyConnection, quality: Quality) -> None:
        self.cursor = cursor
        self._quality = quality
        self._marks = Marks()

    def commit(
        self, found: Sequence[Batch], derived: Sequence[tuple[str, pa.Table]], received_ns: int, journaled: int = 0
    ) -> list[Receipt]:
        """Store batches and derived rows; one receipt a batch, in order.

        ``journaled`` is the number of the last record of the journal among them; 0 = none.
        """
        duplicates = [0] * len(found)
        self.cursor.execute("BEGIN")
        try:
            for signal in SIGNALS:
                chosen = [(i, b) for i, b in enumerate(found) if b.signal == signal and b.rows]
                if chosen:
                    self._store(signal, chosen, duplicates, received_ns)
            for table, rows in derived:
                rows = _stamped(rows, received_ns)
                self._insert(table, rows)
                if table == "waits":
                    self._run(_ROLL_UP_WAITS, rows)
            if journaled:
                self.cursor.execute("UPDATE journal_stored SET number = ?", [journaled])
            self.cursor.execute("COMMIT")
        except BaseException:
            self._marks.forget()
            self._rollback()
            raise
        self._marks.trim()
        if sum(duplicates):
            self._quality.add("duplicate", sum(duplicates))
        return [Receipt(b.rows - d, d) for b, d in zip(found, duplicates, strict=True)]

    def newest_ns(self) -> int:
        """The largest ``received_ns`` of all tables; 0 = no row."""
        newest = " UNION ALL ".join(f"SELECT max(received_ns) AS t FROM {t}" for t in (*SIGNALS, *_DERIVED))
        return int(self.cursor.execute(f"SELECT coalesce(max(t), 0) FROM ({newest})").fetchall()[0][0])

    def journaled(self) -> int:
        """Number of the last record of the journal that is stored."""
        row = self.cursor.execute("SELECT max(number) FROM journal_stored").fetchone()
        return int(row[0]) if row and row[0] is not None else 0

    def _rollback(self) -> None:
        try:
            self.cursor.execute("ROLLBACK")
        except duckdb.Error:
            pass  # no transaction is open any more; the error that led here is the one to tell

    def _store(self, signal: str, chosen: Sequence[tuple[int, Batch]], duplicates: list[int], received_ns: int) -> None:
        fresh: list[pa.Table] = []
        doubtful: list[_Stretch] = []
        for index, batch in chosen:
            stretches = self._stretches(signal, index, batch)
            if all(self._is_new(s) for s in stretches):
                fresh.append(batch.table)
            else:
                fresh.extend(s.rows for s in stretches if self._is_new(s))
                doubtful.extend(s for s in stretches if not self._is_new(s))
            for s in stretches:
                if s.last >= 0:
                    self._marks.add(s.key, max(s.first, 0), s.last)
        self._add(signal, fresh, received_ns)
        if doubtful:
            self._add(signal, self._sift(signal, doubtful, duplicates), received_ns)

    def _is_new(self, s: _Stretch) -> bool:
        return s.last < 0 or self._marks.is_new(s.key, max(s.first, 0), s.last)

    def _stretches(self, signal: str, index: int, batch: Batch) -> list[_Stretch]:
        """The batch's rows by rank; runs of the same rank are joined, as a relay may cut them in two."""
        by_key: dict[Key, list[pa.Table]] = {}
        for run in batch.runs:
            if not self._marks.knows(signal, run.job):
                self._load(signal, run.job)
            rows = batch.table.slice(run.start, run.stop - run.start)
            by_key.setdefault((signal, *run.key), []).append(rows)
        stretches: list[_Stretch] = []
        for key, parts in by_key.items():
            rows = parts[0] if len(parts) == 1 else pa.concat_tables(parts)
            span = pc.min_max(rows.column("sequence"))
            stretches.append(_Stretch(index, key, rows, span["min"].as_py(), span["max"].as_py()))
        return stretches

    def _load(self, signal: str, job: str) -> None:
        table = f"{signal}_history"  # days that have moved to Parquet count too
        query = f"SELECT attempt, rank, max(sequence) FROM {table} WHERE job = ? AND sequence >= 0 GROUP BY ALL"
        self._marks.load(signal, job, self.cursor.execute(query, [job]).fetchall())

    def _sift(self, signal: str, doubtful: Sequence[_Stretch], duplicates: list[int]) -> list[pa.Table]:
        """Of rows in doubt, those that the table does not hold."""
        asked = pa.table(
            {
                "job": [s.key[1] for s in doubtful],
                "attempt": pa.array([s.key[2] for s in doubtful], pa.int32()),
                "rank": pa.array([s.key[3] for s in doubtful], pa.int32()),
                "low": pa.array([max(s.first, 0) for s in doubtful], pa.int64()),
                "high": pa.array([s.last for s in doubtful], pa.int64()),
            }
        )
        seen: dict[Key, set[int]] = {}
        for job, attempt, rank, sequence in self._run(_IN_DOUBT.format(signal=signal), asked):
            seen.setdefault((signal, job, attempt, rank), set()).add(sequence)
        kept: list[pa.Table] = []
        for s in doubtful:
            there = seen.setdefault(s.key, set())
            sequences = s.rows.column("sequence").to_numpy()
            new = ~np.isin(sequences, np.fromiter(there, np.int64, len(there)))
            duplicates[s.batch] += int(len(new) - new.sum())
            there.update(sequences[new & (sequences >= 0)].tolist())
            kept.append(s.rows.filter(pa.array(new)))
        return kept

    def _add(self, signal: str, tables: Sequence[pa.Table], received_ns: int) -> None:
        tables = [t for t in tables if t.num_rows]
        if not tables:
            return
        rows = tables[0] if len(tables) == 1 else pa.concat_tables(tables)
        rows = _stamped(rows, received_ns)
        self._insert(signal, rows)
        if signal == "spans":
            self._run(_ROLL_UP_SPANS, rows)

    def _insert(self, table: str, rows: pa.Table) -> None:
        columns = ", ".join(rows.column_names)
        self._run(f"INSERT INTO {table} ({columns}) SELECT {columns} FROM incoming", rows)

    def _run(self, sql: str, incoming: pa.Table) -> list[Any]:
        self.cursor.register("incoming", incoming)
        try:
            found: list[Any] = self.cursor.execute(sql).fetchall()
        except duckdb.Error:
            with contextlib.suppress(duckdb.Error):  # refused in a failed transaction; the next register replaces it
                self.cursor.unregister("incoming")
            raise
        self.cursor.unregister("incoming")
        return found
