"""What can be told of the lake without one: its settings, its errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from lanterne.backend.store.lake import Lake, backend_id, said
from lanterne.errors import UsageError
from lanterne.settings import ServerSettings, load

CATALOG = "postgres:dbname=x host=db password=geheim|/mnt/lake"


def test_a_lake_needs_a_control_database_that_is_shared() -> None:
    with pytest.raises(UsageError, match="control_url"):
        load(ServerSettings, environ={"LANTERNE_LAKE": CATALOG})
    found = load(ServerSettings, environ={"LANTERNE_LAKE": CATALOG, "LANTERNE_CONTROL_URL": "postgresql://db/x"})
    assert found.lake == CATALOG


@pytest.mark.parametrize(
    "spec", ["/mnt/lake", "postgres:dbname=x", "postgres:dbname=x|", "sqlite:x password=geheim|/a"]
)
def test_other_forms_are_told_without_their_secrets(tmp_path: Path, spec: str) -> None:
    with pytest.raises(UsageError, match="example: postgres:") as told:
        Lake(spec, tmp_path / "events.duckdb")
    assert "geheim" not in str(told.value)


def test_a_backend_keeps_its_name(tmp_path: Path) -> None:
    first = backend_id(tmp_path)
    assert len(first) == 12
    assert backend_id(tmp_path) == first
    (tmp_path / "other").mkdir()
    assert backend_id(tmp_path / "other") != first


@pytest.mark.parametrize("text", ["host=db password=geheim port=1: refused", "password = 'geheim' x\nmore", "plain"])
def test_errors_name_no_password(text: str) -> None:
    assert "geheim" not in said(ValueError(text))
    assert "\n" not in said(ValueError(text))
