"""Schema of both stores, brought to a revision by Alembic: ``control`` by models, ``events`` by SQL for DuckDB.

``lanterne serve`` and ``lanterne migrate`` call :func:`upgrade`. A store newer than this release is refused.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import duckdb
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import inspect
from sqlalchemy.exc import DBAPIError

from lanterne.backend.store.control import control_url
from lanterne.backend.store.database import engine_of
from lanterne.backend.store.folders import make_folder
from lanterne.errors import StoreUnavailable
from lanterne.settings import ServerSettings

BRANCHES = ("control", "events")
_VERSION_TABLE = "schema_version"


def events_file(settings: ServerSettings) -> Path:
    """The DuckDB file in the data folder."""
    return Path(settings.data).absolute() / "events.duckdb"


def _config(branch: str, buffer: io.StringIO | None = None) -> Config:
    config = Config(output_buffer=buffer) if buffer is not None else Config()
    config.set_main_option("script_location", str(files("lanterne") / "migrations" / branch))
    config.set_main_option("path_separator", "os")
    return config


def _known(branch: str) -> set[str]:
    return {r.revision for r in ScriptDirectory.from_config(_config(branch)).walk_revisions()}


def _check(branch: str, found: str | None) -> None:
    if found is not None and found not in _known(branch):
        raise StoreUnavailable(
            f"{branch} store: its schema {found!r} is newer than this release; install the release that wrote it"
        )


# --- control -------------------------------------------------------------------------------------


def _control(url: str, act: Callable[[Config], None]) -> None:
    engine = engine_of(url)
    writer = engine.execution_options(lanterne_write=True)
    try:
        with writer.connect() as connection:
            _check("control", MigrationContext.configure(connection).get_current_revision())
            connection.rollback()
            if connection.dialect.name == "sqlite":  # batch mode rebuilds tables that others refer to
                connection.connection.driver_connection.execute("PRAGMA foreign_keys=OFF")  # type: ignore[union-attr]
            config = _config("control")
            config.attributes["connection"] = connection
            act(config)
            connection.commit()
    except DBAPIError as error:
        raise StoreUnavailable(f"control database: {error.orig}") from error
    finally:
        engine.dispose()


def control_revision(url: str) -> str | None:
    """Revision of the control database; None when it is empty."""
    engine = engine_of(url)
    try:
        with engine.connect() as connection:
            if not inspect(connection).has_table("alembic_version"):
                return None
            return MigrationContext.configure(connection).get_current_revision()
    finally:
        engine.dispose()


# --- events --------------------------------------------------------------------------------------


def events_revision(connection: Any) -> str | None:
    """Revision of an open DuckDB connection; None when it has no tables of ours."""
    there = connection.execute(
        "SELECT count(*) FROM information_schema.tables WHERE table_name = ?", [_VERSION_TABLE]
    ).fetchone()
    if not there[0]:
        return None
    row = connection.execute(f"SELECT version_num FROM {_VERSION_TABLE}").fetchone()
    return None if row is None else str(row[0])


def events_sql(direction: str, start: str | None, target: str) -> str:
    """The SQL between two revisions, version table included; empty when there is nothing to do."""
    script = ScriptDirectory.from_config(_config("events"))
    if direction == "upgrade" and start == (script.get_current_head() if target == "head" else target):
        return ""
    buffer = io.StringIO()
    if direction == "upgrade":
        command.upgrade(_config("events", buffer), f"{start or 'base'}:{target}", sql=True)
    else:
        command.downgrade(_config("events", buffer), f"{start}:{target}", sql=True)
    lines = [line for line in buffer.getvalue().splitlines() if not line.startswith("--")]
    return "\n".join(line for line in lines if line.strip() not in {"BEGIN;", "COMMIT;"}).strip()


def migrate_events(connection: Any, revision: str = "head", *, direction: str = "upgrade") -> None:
    """Bring an open DuckDB connection to ``revision`` in one transaction; a revision that fails leaves no trace."""
    start = events_revision(connection)
    _check("events", start)
    if direction == "downgrade" and start is None:
        return
    text = events_sql(direction, start, revision)
    if not text:
        return
    connection.execute("BEGIN")
    try:
        if start is None:  # a version table may be left from a downgrade to nothing
            connection.execute(f"DROP TABLE IF EXISTS {_VERSION_TABLE}")
        connection.execute(text)
        connection.execute("COMMIT")
    except Exception:
        connection.execute("ROLLBACK")
        raise


def _on_events(settings: ServerSettings, revision: str, direction: str) -> None:
    file = events_file(settings)
    make_folder(file.parent)
    try:
        with duckdb.connect(str(file)) as connection:
            migrate_events(connection, revision, direction=direction)
    except (duckdb.IOException, duckdb.FatalException) as error:
        raise StoreUnavailable(f"{file}: {error}") from error


def upgrade(settings: ServerSettings, revision: str = "head", *, branch: str | None = None) -> None:
    """Bring both stores (or one ``branch``) up to ``revision``. Raises :class:`StoreUnavailable`."""
    if branch in (None, "control"):
        _control(control_url(settings), lambda config: command.upgrade(config, revision))
    if branch in (None, "events"):
        _on_events(settings, revision, "upgrade")


def downgrade(settings: ServerSettings, revision: str = "base", *, branch: str | None = None) -> None:
    """Take both stores (or one ``branch``) down to ``revision``; rows of dropped tables are gone."""
    if branch in (None, "control"):
        _control(control_url(settings), lambda config: command.downgrade(config, revision))
    if branch in (None, "events"):
        _on_events(settings, revision, "downgrade")
