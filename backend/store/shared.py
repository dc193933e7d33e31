"""The lake at work in one backend: the thread that ships, and reads over the rows of all backends."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import duckdb
import pyarrow as pa

from lanterne.backend.store.events import QUERY_TIMEOUT_S, EventStore
from lanterne.backend.store.lake import MERGE_EVERY, SHIP_S, WIDE, Lake, said
from lanterne.backend.store.retention import DAY_NS
from lanterne.clock import Clock
from lanterne.errors import LanterneError, StoreUnavailable
from lanterne.settings import ServerSettings

log = logging.getLogger(__name__)


class SharedReads:
    """The event store, but that queries see the rows that other backends have shipped.

    While the lake cannot be reached they are answered from the own rows alone.
    """

    def __init__(self, store: EventStore, lake: Lake) -> None:
        self._store, self._lake = store, lake

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def query(
        self, sql: str, params: Sequence[Any] | Mapping[str, Any] = (), *, timeout_s: float = QUERY_TIMEOUT_S
    ) -> pa.Table:
        try:
            return self._store.query(sql, params, timeout_s=timeout_s, catalog=WIDE)
        except (StoreUnavailable, duckdb.Error) as error:
            return self._alone(error, lambda: self._store.query(sql, params, timeout_s=timeout_s))

    def rows(self, sql: str, params: Sequence[Any] | Mapping[str, Any] = ()) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.query(sql, params).to_pylist()
        return found

    def copy_out(self, select: str, params: Mapping[str, Any], target: Path) -> int:
        try:
            return self._store.copy_out(select, params, target, catalog=WIDE)
        except StoreUnavailable as error:
            return int(self._alone(error, lambda: self._store.copy_out(select, params, target)))

    def _alone(self, error: Exception, read: Any) -> Any:
        found = read()  # raises the same when the query itself is at fault
        self._lake.failure = f"the lake cannot be read: {said(error)}"
        log.warning("%s; only rows of this backend are shown", self._lake.failure)
        return found


def shared(store: EventStore) -> EventStore:
    """``store`` as the API should see it."""
    return store if store.lake is None else cast(EventStore, SharedReads(store, store.lake))


class Shipping:
    """Ships to the lake every ``SHIP_S`` seconds on a daemon thread, and once more at the end."""

    def __init__(self, store: EventStore, settings: ServerSettings, clock: Clock) -> None:
        self._store, self._settings, self._clock = store, settings, clock
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._rounds = self._others = 0

    def start(self) -> None:
        if self._store.lake is not None:
            self._thread = threading.Thread(target=self._run, name="lanterne-lake", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=60)

    def _run(self) -> None:
        while not self._stop.wait(SHIP_S):
            self.run_once()
        self.run_once()

    def run_once(self) -> int:
        """Ship what is new; how many rows. A failure is kept in ``lake.failure`` and tried again the next time."""
        lake = self._store.lake
        if lake is None:
            return 0
        now = self._clock.unix_ns()
        try:
            with self._store.cursor() as cursor:
                for statement in lake.repeated(cursor):
                    self._store.work(_deleting(statement))
                rows = lake.ship(cursor, now)
                self._rounds += 1
                if (others := lake.shippings(cursor)) != self._others:
                    self._others = others
                    self._store.changes.forget()  # answers that were kept may lack their rows
                if self._rounds % MERGE_EVERY == 0 and lake.leads(cursor, now):
                    days = self._settings.retention_days
                    lake.maintain(cursor, now - int(days * DAY_NS) if days > 0 else 0)
        except (LanterneError, duckdb.Error) as error:
            lake.failure = f"shipping to the lake failed: {said(error)}"
            log.error(lake.failure)
            return 0
        lake.failure = ""
        return rows


def _deleting(statement: str) -> Any:
    def delete(connection: duckdb.DuckDBPyConnection) -> None:
        connection.execute(statement)

    return delete
