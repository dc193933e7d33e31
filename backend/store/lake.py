"""Past one machine: several backends over one DuckLake (a PostgreSQL catalog, Parquet files in a shared folder).

Each backend writes to its own event store, as alone, and its detection reads only that. Every ``SHIP_S`` seconds what
was stored since goes to the lake in one transaction, together with how far it goes: a backend that is killed goes on
from there after its restart, and ships each row once. The API reads through the database ``wide``: views that join the
own tables with the rows that the *other* backends have shipped, so that each backend answers for each job, for rows of
others as of their last shipping. A batch that a sender gave to two backends, because the first died before it
answered, is taken out of the one that ships later.

Needs the extensions ``ducklake`` and ``postgres_scanner`` of the DuckDB in use (docs/scale-out.md).
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import re
import secrets
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import duckdb

from lanterne.backend.store.folders import make_folder, make_private_file
from lanterne.backend.store.views import create_views
from lanterne.errors import StoreUnavailable, UsageError

log = logging.getLogger(__name__)

SHIP_S = 5.0
ATTEMPTS = 5
MERGE_EVERY = 120
"""Shippings between two merges of small files, by the first of the backends that shipped lately."""
ALIVE_NS = 60_000_000_000
WIDE = "wide"
_ROW = ("job", "attempt", "rank", "sequence")
KEYS: Mapping[str, Sequence[str]] = {
    "spans": _ROW,
    "points": _ROW,
    "logs": _ROW,
    "rank_steps": ("job", "attempt", "metric", "rank", "step"),
    "waits": ("job", "attempt", "group_name", "group_sequence", "rank"),
    "clocks": ("job", "attempt", "rank", "at_ns"),
}
"""What is shipped, and what names a row of it on all backends (rows of strangers, sequence -1, have no such name)."""


def backend_id(folder: Path) -> str:
    """The name of the backend with this data folder: made once, kept there."""
    file = folder / "backend-id"
    make_private_file(file)
    found = file.read_text(encoding="utf-8").strip()
    if not found:
        found = secrets.token_hex(6)
        file.write_text(found, encoding="utf-8")
    return found


def said(error: Exception) -> str:
    """The first line of an error, without the catalog's password."""
    return re.sub(r"password\s*=\s*('[^']*'|\S+)", "password=***", str(error).partition("\n")[0])


def load_extensions(connection: duckdb.DuckDBPyConnection) -> None:
    """Load what the lake needs: as installed for this DuckDB, else from its wheels. Raises ``duckdb.Error``."""
    for name in ("ducklake", "postgres_scanner"):
        try:
            connection.execute(f"LOAD {name}")
        except duckdb.Error:
            wheel = importlib.util.find_spec(f"duckdb_extension_{name}")
            if wheel is None or wheel.origin is None:
                raise
            folder = Path(wheel.origin).parent / "extensions" / f"v{duckdb.__version__}"
            quoted = str(folder / f"{name}.duckdb_extension").replace("'", "''")
            connection.execute(f"LOAD '{quoted}'")


class Lake:
    """One backend's side of the lake; ``spec`` is the setting ``lake``: catalog and folder joined by ``|``."""

    def __init__(self, spec: str, file: Path) -> None:
        """Raises :class:`UsageError` when ``spec`` names no catalog or no folder."""
        catalog, _, folder = (part.strip() for part in spec.partition("|"))
        if not catalog.startswith("postgres:") or not folder:
            raise UsageError(
                f"lake: {spec.split('=')[0][:40]!r} is not postgres:CONNECTION|FOLDER; "
                "example: postgres:dbname=lanterne host=db user=lanterne|/mnt/lake"
            )
        self._catalog = catalog
        self.folder = Path(folder).absolute()
        self._local, self._tier = file.stem, file.parent / "tier"
        make_folder(file.parent)
        self.backend = backend_id(file.parent)
        self.failure = ""

    def attach(self, connection: duckdb.DuckDBPyConnection) -> None:
        """Join the lake and ``wide`` to a connection, before its doors are closed. Raises :class:`StoreUnavailable`."""
        make_folder(self.folder)
        try:
            load_extensions(connection)
            connection.execute("SET ducklake_max_retry_count = 100")
            quoted, data = (text.replace("'", "''") for text in (self._catalog, f"{self.folder}/"))
            for left in reversed(range(ATTEMPTS)):  # two backends that come first at the same time
                try:
                    connection.execute(f"ATTACH 'ducklake:{quoted}' AS lake (DATA_PATH '{data}')")
                    break
                except duckdb.Error:
                    if not left:
                        raise
                    threading.Event().wait(0.5)
        except duckdb.Error as error:
            raise StoreUnavailable(f"lake: {said(error)}; see docs/scale-out.md") from None
        connection.execute(f"ATTACH ':memory:' AS {WIDE}")

    def widen(self, connection: duckdb.DuckDBPyConnection) -> None:
        """Make the lake's tables as the local ones are, and the views of ``wide``."""
        for left in reversed(range(ATTEMPTS)):
            try:
                self._make_tables(connection)
                break
            except duckdb.Error:
                if not left:
                    raise
                threading.Event().wait(0.5)
        for table in KEYS:
            columns = ", ".join(self._columns(connection, self._local, table))
            connection.execute(
                f"CREATE OR REPLACE VIEW {WIDE}.main.{table} AS SELECT {columns} FROM {self._local}.main.{table} "
                f"UNION ALL SELECT {columns} FROM lake.main.{table} WHERE backend <> '{self.backend}'"
            )
        with connection.cursor() as cursor:
            cursor.execute(f"USE {WIDE}")
            create_views(cursor, self._tier)

    def _make_tables(self, connection: duckdb.DuckDBPyConnection) -> None:
        connection.execute("BEGIN")
        try:
            connection.execute(
                "CREATE TABLE IF NOT EXISTS lake.main.shipped (backend VARCHAR, upto_ns BIGINT, at_ns BIGINT)"
            )
            for table in KEYS:
                source = f"SELECT ''::VARCHAR AS backend, * FROM {self._local}.main.{table} LIMIT 0"
                connection.execute(f"CREATE TABLE IF NOT EXISTS lake.main.{table} AS {source}")
                there = self._columns(connection, "lake", table)
                for name, kind in self._columns(connection, self._local, table).items():
                    if name not in there:  # of a later release
                        connection.execute(f"ALTER TABLE lake.main.{table} ADD COLUMN {name} {kind}")
            connection.execute("COMMIT")
        except duckdb.Error:
            with contextlib.suppress(duckdb.Error):
                connection.execute("ROLLBACK")
            raise

    def _columns(self, connection: duckdb.DuckDBPyConnection, catalog: str, table: str) -> dict[str, str]:
        rows = connection.execute(f"DESCRIBE {catalog}.main.{table}").fetchall()
        return {row[0]: row[1] for row in rows}

    def shipped_ns(self, cursor: duckdb.DuckDBPyConnection) -> int:
        """``received_ns`` up to which this backend has shipped; -1 = nothing yet."""
        query = "SELECT coalesce(max(upto_ns), -1) FROM lake.main.shipped WHERE backend = ?"
        return int(cursor.execute(query, [self.backend]).fetchall()[0][0])

    def ship(self, cursor: duckdb.DuckDBPyConnection, now_ns: int) -> int:
        """Send the rows stored since the last time, in one transaction; how many. Raises what DuckDB raises."""
        cursor.execute("BEGIN")
        try:
            low = self.shipped_ns(cursor)
            newest = " UNION ALL ".join(f"SELECT max(received_ns) AS t FROM {self._local}.main.{t}" for t in KEYS)
            high = cursor.execute(f"SELECT coalesce(max(t), -1) FROM ({newest})").fetchall()[0][0]
            rows = 0
            if high > low:
                for table in KEYS:
                    names = ", ".join(self._columns(cursor, self._local, table))
                    source = f"SELECT '{self.backend}', {names} FROM {self._local}.main.{table}"
                    done = cursor.execute(
                        f"INSERT INTO lake.main.{table} (backend, {names}) {source} "
                        "WHERE received_ns > ? AND received_ns <= ?",
                        [low, high],
                    ).fetchall()
                    rows += int(done[0][0])
                cursor.execute("INSERT INTO lake.main.shipped VALUES (?, ?, ?)", [self.backend, high, now_ns])
            cursor.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(duckdb.Error):
                cursor.execute("ROLLBACK")
            raise
        return rows

    def repeated(self, cursor: duckdb.DuckDBPyConnection) -> list[str]:
        """Statements that take out of the own tables what others have shipped already; none as a rule."""
        low = self.shipped_ns(cursor)
        found = []
        for table, key in KEYS.items():
            mine = f"received_ns > {low}" + (" AND sequence >= 0" if "sequence" in key else "")
            same = " AND ".join(f"o.{name} = m.{name}" for name in key)
            others = f"SELECT 1 FROM lake.main.{table} o WHERE o.backend <> '{self.backend}' AND {same}"
            which = f"{mine} AND EXISTS ({others})"
            jobs = cursor.execute(f"SELECT DISTINCT job FROM {self._local}.main.{table} WHERE {mine}").fetchall()
            told = cursor.execute(
                f"SELECT 1 FROM lake.main.{table} WHERE backend <> ? AND list_contains(?, job) LIMIT 1",
                [self.backend, [row[0] for row in jobs]],
            )
            if jobs and told.fetchall():
                query = f"SELECT count(*) FROM {self._local}.main.{table} m WHERE {which}"
                if cursor.execute(query).fetchall()[0][0]:
                    found.append(f"DELETE FROM {self._local}.main.{table} m WHERE {which}")
        return found

    def shippings(self, cursor: duckdb.DuckDBPyConnection) -> int:
        """How often other backends have shipped rows so far."""
        query = "SELECT count(*) FROM lake.main.shipped WHERE backend <> ?"
        return int(cursor.execute(query, [self.backend]).fetchall()[0][0])

    def leads(self, cursor: duckdb.DuckDBPyConnection, now_ns: int) -> bool:
        """Is this the first, by name, of the backends that shipped in the last minute?"""
        query = "SELECT min(backend) FROM lake.main.shipped WHERE at_ns > ?"
        return bool(cursor.execute(query, [now_ns - ALIVE_NS]).fetchall()[0][0] == self.backend)

    def maintain(self, cursor: duckdb.DuckDBPyConnection, oldest_ns: int) -> None:
        """Merge small files; forget rows received before ``oldest_ns`` (0 = none) and files nobody needs any more."""
        if oldest_ns:
            for table in KEYS:
                cursor.execute(f"DELETE FROM lake.main.{table} WHERE received_ns < ?", [oldest_ns])
        cursor.execute("CALL ducklake_merge_adjacent_files('lake')")
        cursor.execute("CALL ducklake_expire_snapshots('lake', older_than => now() - INTERVAL 1 DAY)")
        cursor.execute("CALL ducklake_cleanup_old_files('lake', older_than => now() - INTERVAL 1 DAY)")
