"""The documented SQL views of ``store/sql``: one purpose a file, every column commented.

A file is a comment (what and how), one ``-- column: says`` line a column, and one SELECT. The view has
the file's name. ``{tier:spans}`` stands for the Parquet files of a signal, or nothing where there are none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

_COLUMN = re.compile(r"^-- ([a-z_0-9]+): (.+)$")
_TIER = re.compile(r"\{tier:([a-z]+)\}")


@dataclass(frozen=True, slots=True)
class View:
    name: str
    says: str
    columns: Mapping[str, str]
    sql: str


def views() -> list[View]:
    """All views, by name."""
    folder = files("lanterne.backend.store") / "sql"
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".sql"))
    return [_parse(name.removesuffix(".sql"), (folder / name).read_text(encoding="utf-8")) for name in names]


def _parse(name: str, text: str) -> View:
    says: list[str] = []
    columns: dict[str, str] = {}
    sql: list[str] = []
    for line in text.splitlines():
        match = _COLUMN.match(line)
        if match:
            columns[match.group(1)] = match.group(2)
        elif line.startswith("--"):
            says.append(line.removeprefix("--").strip())
        else:
            sql.append(line)
    return View(name, " ".join(filter(None, says)), columns, "\n".join(sql).strip().rstrip(";"))


def tiered_files(tier: Path, signal: str) -> list[Path]:
    """Parquet files of a signal, oldest first."""
    return sorted(tier.glob(f"{signal}-*.parquet"))


def create_views(connection: Any, tier: Path) -> None:
    """Create or replace all views; call again after files come to or leave the tier."""

    def old_rows(match: re.Match[str]) -> str:
        found = tiered_files(tier, match.group(1))
        if not found:
            return ""
        quoted = ", ".join("'" + str(f.absolute()).replace("'", "''") + "'" for f in found)
        return f"UNION ALL BY NAME SELECT * FROM read_parquet([{quoted}])"

    for view in views():
        connection.execute(f"CREATE OR REPLACE VIEW {view.name} AS {_TIER.sub(old_rows, view.sql)}")
