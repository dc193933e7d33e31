"""Age and size: old rows move to Parquet files of the tier, and the oldest files go.

A file holds the rows of one signal of one UTC day by the server's own clock (``received_ns``), which no sender
can set. Rows of the last ``HOT_DAYS`` stay in the database. Deleted rows give their blocks back to later
inserts; the database file itself does not shrink.
"""

from __future__ import annotations

import logging
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb

from lanterne.backend.store.batch import SIGNALS
from lanterne.backend.store.events import EventStore
from lanterne.backend.store.views import create_views, tiered_files
from lanterne.clock import Clock
from lanterne.errors import LanterneError
from lanterne.settings import ServerSettings

log = logging.getLogger(__name__)

DAY_NS = 86_400_000_000_000
HOT_DAYS = 2
PERIOD_S = 600.0


def _day(at_ns: int) -> str:
    return datetime.fromtimestamp(at_ns // 1_000_000_000, UTC).strftime("%Y%m%d")


def tier_day(store: EventStore, signal: str, first_ns: int) -> int:
    """Move the rows received in the day from ``first_ns`` to one Parquet file; how many.

    The file is complete under another name before the rows are deleted, and is named in the same
    transaction's end: a crash between leaves both, and the next run replaces the file.
    """
    target = store.tier / f"{signal}-{_day(first_ns)}.parquet"
    partial = store.tier / f"{signal}-{_day(first_ns)}.partial"
    bounds = {"low": first_ns, "high": first_ns + DAY_NS}
    where = "received_ns >= $low AND received_ns < $high"

    def move(connection: Any) -> int:
        there = f" UNION ALL BY NAME SELECT * FROM read_parquet('{_quoted(target)}')" if target.exists() else ""
        select = f"SELECT * FROM {signal} WHERE {where}{there} ORDER BY job, attempt, rank, sequence"
        connection.execute(f"COPY ({select}) TO '{_quoted(partial)}' (FORMAT parquet, COMPRESSION zstd)", bounds)
        connection.execute("BEGIN")
        try:
            gone = connection.execute(f"DELETE FROM {signal} WHERE {where}", bounds).fetchone()
            partial.replace(target)
            create_views(connection, store.tier)
            connection.execute("COMMIT")
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        return int(gone[0])

    moved: int = store.work(move)
    return moved


def _quoted(path: Path) -> str:
    return str(path.absolute()).replace("'", "''")


def drop_before(store: EventStore, at_ns: int) -> int:
    """Delete Parquet files of days that ended before ``at_ns``, and derived rows of jobs with no event left."""
    last = _day(at_ns)
    gone = [f for s in SIGNALS for f in tiered_files(store.tier, s) if f.stem.rsplit("-", 1)[1] < last]

    def drop(connection: Any) -> None:
        for file in gone:
            file.unlink(missing_ok=True)
        create_views(connection, store.tier)
        kept = "SELECT job, attempt FROM spans_history UNION SELECT job, attempt FROM logs_history"
        for table in ("waits", "rank_steps", "clocks"):
            connection.execute(f"DELETE FROM {table} WHERE (job, attempt) NOT IN ({kept})")

    if gone:
        store.work(drop)
    return len(gone)


def bytes_used(store: EventStore) -> int:
    """Database, its log, and the tier, in bytes on disk."""
    parts = [store.file, store.file.with_name(store.file.name + ".wal"), *store.tier.glob("*.parquet")]
    return sum(p.stat().st_size for p in parts if p.exists())


class Keeper:
    """Applies age and size now and then on a daemon thread."""

    def __init__(self, store: EventStore, settings: ServerSettings, clock: Clock) -> None:
        self._store, self._settings, self._clock = store, settings, clock
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="lanterne-keeper", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=30)

    def _run(self) -> None:
        while not self._stop.wait(PERIOD_S):
            try:
                self.run_once()
            except (LanterneError, duckdb.Error, OSError) as error:
                log.error("retention: %s", error)

    def run_once(self) -> None:
        """Move days older than ``HOT_DAYS`` to Parquet; drop what is too old; drop the oldest while it is too large."""
        now = self._clock.unix_ns()
        today = now - now % DAY_NS
        for signal in SIGNALS:
            oldest = self._store.rows(f"SELECT min(received_ns) AS t FROM {signal}")[0]["t"]
            day = None if oldest is None else oldest - oldest % DAY_NS
            while day is not None and day < today - HOT_DAYS * DAY_NS:
                tier_day(self._store, signal, day)
                day += DAY_NS
        if self._settings.retention_days > 0:
            drop_before(self._store, now - int(self._settings.retention_days * DAY_NS))
        self._shrink()

    def _shrink(self) -> None:
        """Drop the oldest days that together are as large as what is too much; the database itself does not shrink."""
        bound = self._settings.retention_bytes
        excess = bytes_used(self._store) - bound if bound else 0
        while excess > 0:
            files = [f for s in SIGNALS for f in tiered_files(self._store.tier, s)]
            if not files:
                return
            first = min(f.stem.rsplit("-", 1)[1] for f in files)
            excess -= sum(f.stat().st_size for f in files if f.stem.endswith(first))
            after = datetime.strptime(first, "%Y%m%d").replace(tzinfo=UTC).timestamp() * 1e9 + DAY_NS
            drop_before(self._store, int(after))
