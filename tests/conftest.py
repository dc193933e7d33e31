"""What all tests may use; beside it lie the servers that several folders start."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
from postgres_server import Postgres, binaries, postgres


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Postgres]:
    """A PostgreSQL server for the session; tests make databases of their own in it."""
    if binaries() is None:
        pytest.skip("a PostgreSQL server is needed: apt-get install postgresql")
    if importlib.util.find_spec("psycopg") is None:
        pytest.skip("psycopg is needed: pip install 'lanterne[postgres]'")
    with postgres() as found:
        yield found
