"""A real server with real simulated jobs, and Debian's Chromium in front of it."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.feed import send

ARGS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--no-first-run", "--disable-quic",
]  # fmt: skip
CULPRIT = 3
EVIL = '<img src=x onerror="window.pwned=1">'


@dataclass
class Site:
    """The server's address and the incident of the job ``slow``."""

    base: str
    incident: str


@dataclass
class Seen:
    """What a page did beside what it showed."""

    errors: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)


def chromium() -> str:
    """The browser's path; the test is skipped where there is none."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if not found:
        pytest.skip("no chromium here: apt-get install chromium")
    return found


def await_incident(base: str, job: str, patience_s: float = 90.0) -> str:
    """The id of the first diagnosed incident of a job."""
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        items = httpx.get(f"{base}/api/v1/jobs/{job}/incidents", timeout=30).json()["items"]
        if items and items[0]["causes"]:
            return str(items[0]["id"])
        time.sleep(0.5)
    raise AssertionError(f"no incident of {job} within {patience_s} s")


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    from lanterne.serving import EmbeddedServer
    from lanterne.settings import ServerSettings, load

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    data: Path = tmp_path_factory.mktemp("site")
    server = EmbeddedServer(load(ServerSettings, environ={}, port=port, grpc_port=0, data=str(data), policy="suggest"))
    base = server.start()
    try:
        send(base, "slow", [("slow_compute", CULPRIT, 60)], dp=8, steps=140)
        yield Site(base, await_incident(base, "slow"))
    finally:
        server.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, for one module: Playwright's event loop stands in this thread until it stops."""
    from playwright.sync_api import sync_playwright

    path = chromium()
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=ARGS)
        yield found
        found.close()


@pytest.fixture
def page(browser: Any, site: Site) -> Iterator[Any]:
    """A fresh tab; at its end no console error and no request to elsewhere may stand."""
    context = browser.new_context(viewport={"width": 1440, "height": 900}, accept_downloads=True)
    tab = context.new_page()
    tab.set_default_timeout(60_000)
    seen = Seen()
    tab.on("console", lambda m: seen.errors.append(m.text) if m.type == "error" else None)
    tab.on("pageerror", lambda e: seen.errors.append(str(e)))
    tab.on("request", lambda r: None if r.url.startswith((site.base, "data:", "blob:")) else seen.outside.append(r.url))
    yield tab
    context.close()
    assert seen.errors == []
    assert seen.outside == []
