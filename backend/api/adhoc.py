"""Read-only SQL for admins: the named tables are copied out and queried in a child process with limits."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import shutil
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import duckdb

from lanterne.backend.api.problems import Problem
from lanterne.backend.store.events import EventStore
from lanterne.backend.store.views import views

ROWS_MAX = 10_000
MEMORY_BYTES = 1 << 30
SECONDS = 10
COPY_ROWS_MAX = 5_000_000
SQL_CHARS_MAX = 20_000
TABLES = ("spans", "points", "logs", "waits", "rank_steps", "clocks")
_NAME = re.compile(r"^[a-z_]+$")


def tables_of(sql: str) -> list[str]:
    """Names of ours that a SELECT reads. Raises :class:`Problem` (400) when it is not one SELECT on known names."""
    if len(sql) > SQL_CHARS_MAX:
        raise Problem(400, f"the SQL is longer than {SQL_CHARS_MAX} characters")
    try:
        with duckdb.connect(":memory:") as parser:
            statements = parser.extract_statements(sql)
            if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
                raise Problem(400, "exactly one SELECT is taken")
            named = parser.get_table_names(sql)
    except duckdb.Error as error:
        raise Problem(400, f"the SQL cannot be read: {str(error)[:500]}") from None
    known = {*TABLES, *(view.name for view in views())}
    unknown = sorted(named - known)
    if unknown:
        raise Problem(400, f"no table {unknown[0][:80]!r}; there are {', '.join(sorted(known))}")
    return sorted(named)


def _copy(store: EventStore, names: list[str], job: str | None, folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True)
    for name in names:
        if not _NAME.match(name):
            raise Problem(400, f"no table {name!r}")
        select = f"SELECT * FROM {name} WHERE $job IS NULL OR job = $job LIMIT {COPY_ROWS_MAX + 1}"
        if store.copy_out(select, {"job": job}, folder / f"{name}.parquet") > COPY_ROWS_MAX:
            raise Problem(400, f"{name} has more than {COPY_ROWS_MAX} rows; give `job`")


async def run(store: EventStore, sql: str, job: str | None) -> dict[str, Any]:
    """``{columns, rows, truncated}``. Raises :class:`Problem`: 400 with DuckDB's words, 503 when too slow."""
    names = tables_of(sql)
    folder = store.adhoc / secrets.token_hex(8)
    try:
        await asyncio.to_thread(_copy, store, names, job, folder)
        return await _child(sql, folder)
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, True)


async def _child(sql: str, folder: Path) -> dict[str, Any]:
    script = str(files("lanterne.backend.api") / "sandbox.py")
    asked = {"sql": sql, "folder": str(folder), "rows": ROWS_MAX, "memory_bytes": MEMORY_BYTES, "seconds": SECONDS}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", script, env={},
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        out, _ = await asyncio.wait_for(process.communicate(json.dumps(asked).encode()), SECONDS + 5)
    except TimeoutError:
        process.kill()
        await process.wait()
        raise Problem(400, f"the query ran longer than {SECONDS} s") from None
    if process.returncode != 0:
        raise Problem(400, f"the query used more than {SECONDS} s or {MEMORY_BYTES >> 20} MiB and was ended")
    answer: dict[str, Any] = json.loads(out)
    if "error" in answer:
        raise Problem(400, answer["error"])
    return answer
