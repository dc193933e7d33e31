"""Back-up that any tool can read: events as Parquet, control tables as JSON lines; and the way back.

Tokens and the jobs' private keys are secrets and stay out: after a restore new tokens are made, and a job
that is still running keeps trusting the key that it pinned, so its commands need a new attempt.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import duckdb
from sqlalchemy import LargeBinary, insert, select

from lanterne.backend.store import migrate
from lanterne.backend.store.control import control_url
from lanterne.backend.store.database import Database
from lanterne.backend.store.events import EventStore
from lanterne.backend.store.models import Base
from lanterne.backend.store.views import tiered_files
from lanterne.errors import StoreUnavailable, UnreadableInput, UsageError
from lanterne.settings import ServerSettings

EVENT_TABLES = ("spans", "points", "logs", "waits", "rank_steps", "clocks")
SECRET_TABLES = frozenset({"tokens", "job_keys"})
_MANIFEST = "lanterne-backup.json"


def export(settings: ServerSettings, target: Path, *, job: str = "") -> int:
    """Write all rows (or one job's events) of a stopped server to the empty folder ``target``; how many.

    Raises :class:`UsageError` when ``target`` holds something and :class:`StoreUnavailable` when the store is in use.
    """
    if target.exists() and any(target.iterdir()):
        raise UsageError(f"{target}: the folder is not empty; name a new one")
    migrate.upgrade(settings)
    target.mkdir(parents=True, exist_ok=True)
    counts = _export_events(settings, target, job) | _export_control(settings, target)
    manifest = {"schema": "lanterne.backup/1", "job": job, "rows": counts}
    (target / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    return sum(counts.values())


def _quoted(path: Path) -> str:
    return "'" + str(path.absolute()).replace("'", "''") + "'"


def _export_events(settings: ServerSettings, target: Path, job: str) -> dict[str, int]:
    file = migrate.events_file(settings)
    if any((file.parent / "journal").glob("*.log")):
        EventStore.open(settings).close()  # a server that was killed left answered rows there
    counts: dict[str, int] = {}
    try:
        with duckdb.connect(str(file)) as connection:
            for table in EVENT_TABLES:
                old = tiered_files(file.parent / "tier", table)
                tier = "".join(f" UNION ALL BY NAME SELECT * FROM read_parquet({_quoted(f)})" for f in old)
                rows = f"SELECT * FROM (SELECT * FROM {table}{tier}) WHERE $job = '' OR job = $job"
                done = connection.execute(
                    f"COPY ({rows}) TO {_quoted(target / f'{table}.parquet')} (FORMAT parquet, COMPRESSION zstd)",
                    {"job": job},
                ).fetchone()
                counts[table] = int(done[0]) if done else 0
    except duckdb.Error as error:
        raise StoreUnavailable(f"{file}: {error}") from error
    return counts


def _export_control(settings: ServerSettings, target: Path) -> dict[str, int]:
    database = Database(control_url(settings))
    counts: dict[str, int] = {}
    try:
        with database.reading() as session:
            for table in Base.metadata.sorted_tables:
                if table.name in SECRET_TABLES:
                    continue
                rows = [dict(row._mapping) for row in session.execute(select(table))]
                text = "".join(json.dumps(row, default=_encoded) + "\n" for row in rows)
                (target / f"{table.name}.jsonl").write_text(text, encoding="utf-8")
                counts[table.name] = len(rows)
    finally:
        database.close()
    return counts


def _encoded(value: Any) -> str:
    return base64.b64encode(value).decode()


def restore(settings: ServerSettings, source: Path) -> int:
    """Read a back-up of :func:`export` into the empty store of ``settings``; how many rows.

    Raises :class:`UnreadableInput` when ``source`` is no back-up and :class:`UsageError` when the store holds rows.
    """
    try:
        manifest = json.loads((source / _MANIFEST).read_text(encoding="utf-8"))
        counts: Mapping[str, int] = manifest["rows"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnreadableInput(str(source), f"is not a back-up of lanterne export: {error}") from error
    migrate.upgrade(settings)
    _restore_events(settings, source)
    _restore_control(settings, source)
    return sum(counts.values())


def _restore_events(settings: ServerSettings, source: Path) -> None:
    file = migrate.events_file(settings)
    try:
        with duckdb.connect(str(file)) as connection:
            for table in EVENT_TABLES:
                there = connection.execute(f"SELECT count(*) FROM {table}").fetchone()
                if there and there[0]:
                    raise UsageError(f"{file}: {table} holds {there[0]} rows; restore into a new data folder")
            connection.execute("BEGIN")
            for table in EVENT_TABLES:
                path = source / f"{table}.parquet"
                connection.execute(f"INSERT INTO {table} BY NAME SELECT * FROM read_parquet({_quoted(path)})")
            connection.execute("COMMIT")
    except duckdb.Error as error:
        raise StoreUnavailable(f"{file}: {error}") from error


def _restore_control(settings: ServerSettings, source: Path) -> None:
    database = Database(control_url(settings))
    try:
        with database.writing() as session:
            for table in Base.metadata.sorted_tables:
                path = source / f"{table.name}.jsonl"
                if table.name in SECRET_TABLES or not path.exists():
                    continue
                binary = {c.name for c in table.columns if isinstance(c.type, LargeBinary)}
                lines = path.read_text(encoding="utf-8").splitlines()
                rows = [
                    {k: base64.b64decode(v) if k in binary else v for k, v in json.loads(line).items()}
                    for line in lines
                ]
                if rows:
                    session.execute(insert(table), rows)
    finally:
        database.close()
