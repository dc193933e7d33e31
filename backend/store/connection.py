"""Opening the DuckDB file: settings, the lock, and recovery of a damaged write-ahead log."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import duckdb

from lanterne.backend.store.folders import make_folder
from lanterne.errors import StoreUnavailable

_POSITION = re.compile(r"entry at byte position (\d+)")


@dataclass(frozen=True, slots=True)
class Opened:
    """An open database and, when its log was damaged, one sentence about what was kept."""

    connection: duckdb.DuckDBPyConnection
    recovered: str = ""


def connect(
    file: Path,
    *,
    memory_limit: str,
    threads: int = 2,
    folders: Sequence[Path] = (),
    attach: Callable[[duckdb.DuckDBPyConnection], None] | None = None,
) -> Opened:
    """Open ``file`` for writing, with no access to other files but those below ``folders``, which are made.

    ``attach`` is called before other files are shut out.

    A damaged log is moved aside under a dated name; its sound beginning is replayed.
    Raises :class:`StoreUnavailable` when the file is held by another process or cannot be used.
    """
    make_folder(file.parent)
    recovered = ""
    try:
        connection = _connect(file, memory_limit, threads)
    except duckdb.Error as error:
        if not _is_damaged_log(file, error):
            raise StoreUnavailable(_explain(file, error)) from error
        recovered = set_log_aside(file, str(error))
        try:
            connection = _connect(file, memory_limit, threads)
        except duckdb.Error as again:
            raise StoreUnavailable(_explain(file, again)) from again
    for folder in folders:
        make_folder(folder)
    if attach is not None:
        try:
            attach(connection)
        except BaseException:
            connection.close()
            raise
    quoted = ", ".join("'" + str(folder.absolute()).replace("'", "''") + "/'" for folder in folders)
    connection.execute(f"SET allowed_directories = [{quoted}]")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
    return Opened(connection, recovered)


def _connect(file: Path, memory_limit: str, threads: int) -> duckdb.DuckDBPyConnection:
    config: dict[str, str | bool | int | float | list[str]] = {
        "memory_limit": memory_limit,
        "threads": threads,
        "temp_directory": str(file.parent / "spill"),
        "preserve_insertion_order": False,
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
    }
    return duckdb.connect(str(file), config=config)


def _log_of(file: Path) -> Path:
    return file.with_name(file.name + ".wal")


def _is_damaged_log(file: Path, error: duckdb.Error) -> bool:
    return _log_of(file).exists() and "replaying WAL" in str(error)


def _explain(file: Path, error: duckdb.Error) -> str:
    if "lock" in str(error).lower():
        return f"{file}: another process holds the event store; stop it, or give this one its own --data folder"
    return f"{file}: {error}"


def set_log_aside(file: Path, error: str) -> str:
    """Move the log to a dated name and put its sound beginning in its place; says what was kept."""
    log = _log_of(file)
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    aside = log.with_name(f"{log.name}.damaged-{stamp}")
    n = 1
    while aside.exists():
        aside = log.with_name(f"{log.name}.damaged-{stamp}-{n}")
        n += 1
    shutil.move(log, aside)
    size = aside.stat().st_size
    found = _POSITION.search(error)
    sound = min(int(found.group(1)), size) if found else 0
    if sound:
        with aside.open("rb") as source, log.open("wb") as target:
            target.write(source.read(sound))
    return (
        f"the write-ahead log was damaged: kept the first {sound} of its {size} bytes and all rows checkpointed "
        f"before; the whole log lies at {aside.name}; senders with a spool will send again what was not acknowledged"
    )
