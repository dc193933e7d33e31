"""The page's client against a small stand-in for the API (double.py)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import httpx
import pytest

from lanterne.dashboard.client import Api


def _load() -> ModuleType:
    name = "dashboard_double"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("double.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(scope="session")
def double() -> ModuleType:
    return _load()


@pytest.fixture
def api(double: ModuleType) -> Api:
    return Api("http://api", httpx.ASGITransport(double.create()))
