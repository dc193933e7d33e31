"""The control database's engine: SQLite (WAL, FULL, foreign keys on) by default, PostgreSQL by URL.

SQLite transactions are opened by us: ``BEGIN`` for reads, ``BEGIN IMMEDIATE`` for writes, so that two
writers queue at the start of their transaction instead of failing at its end. PostgreSQL's take a lock that
does the same, over all backends: what a transaction has read before it writes (a state, a counter) then still holds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from lanterne.backend.store.folders import make_private_file
from lanterne.clock import Clock, SystemClock
from lanterne.errors import StoreUnavailable

BUSY_TIMEOUT_MS = 10_000
_LOCK = text("SELECT pg_advisory_xact_lock(7215940338123)")


def engine_of(url: str) -> Engine:
    """An engine for ``url``; SQLite files are made with mode 0600 as they hold keys and token hashes."""
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite":
        if parsed.database:
            make_private_file(Path(parsed.database))
        engine = create_engine(parsed)
        event.listen(engine, "connect", _sqlite_connect)
        event.listen(engine, "begin", _sqlite_begin)
        return engine
    if parsed.drivername == "postgresql":
        parsed = parsed.set(drivername="postgresql+psycopg")
    return create_engine(parsed, pool_pre_ping=True)


def _sqlite_connect(connection: Any, _record: Any) -> None:
    connection.isolation_level = None
    for pragma in (
        "journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", f"busy_timeout={BUSY_TIMEOUT_MS}",
    ):  # fmt: skip
        connection.execute(f"PRAGMA {pragma}").close()


def _sqlite_begin(connection: Connection) -> None:
    write = connection.get_execution_options().get("lanterne_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")


def dumps(value: Any) -> str:
    """Compact JSON with sorted keys; NaN is refused (nouns.to_json has already made it null)."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


class Database:
    """Sessions on the control database; the base of the parts of :class:`ControlStore`."""

    def __init__(self, url: str, *, clock: Clock | None = None) -> None:
        self.url = url
        self.clock: Clock = clock or SystemClock()
        self._engine = engine_of(url)
        self._writer = self._engine.execution_options(lanterne_write=True)
        upserts: dict[str, Callable[..., Any]] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}
        self._insert = upserts[self._engine.dialect.name]

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """A session whose changes are thrown away. Raises :class:`StoreUnavailable` when the database is away."""
        try:
            with Session(self._engine, expire_on_commit=False) as session:
                yield session
        except DBAPIError as error:
            raise StoreUnavailable(f"control database: {error.orig}") from error

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """A session committed at the end. Raises :class:`StoreUnavailable` when the database is away or full."""
        try:
            with Session(self._writer, expire_on_commit=False) as session, session.begin():
                if self._engine.dialect.name == "postgresql":
                    session.execute(_LOCK)
                yield session
        except DBAPIError as error:
            raise StoreUnavailable(f"control database: {error.orig}") from error

    def close(self) -> None:
        self._engine.dispose()
