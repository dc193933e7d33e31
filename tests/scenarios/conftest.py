"""The house of the scenarios: a whole backend in one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from whole_backend import House


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    opened = House(tmp_path)
    yield opened
    opened.close()
