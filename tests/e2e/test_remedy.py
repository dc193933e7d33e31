"""A person approves a remedy on the page of a real run and sees it verified."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]


def proposed(base: str, patience_s: float = 240.0) -> tuple[str, str]:
    """The ids of the first incident with a proposed order, and of that order."""
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        time.sleep(1.0)
        try:
            for one in httpx.get(f"{base}/api/v1/incidents", timeout=30).json()["items"]:
                whole = httpx.get(f"{base}/api/v1/incidents/{one['id']}", timeout=30).json()
                orders = [c["id"] for c in whole["commands"] if c["state"] == "proposed"]
                if orders:
                    return str(one["id"]), str(orders[0])
        except httpx.HTTPError:
            continue
    raise AssertionError(f"nothing was proposed within {patience_s} s")


def test_a_remedy_is_approved_and_seen_verified(browser: Any, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    base = f"http://127.0.0.1:{port}"
    command = [
        sys.executable, "-m", "lanterne", "demo", "--fault", "lr-jump", "--rank", "1", "--ranks", "2",
        "--steps", "3000", "--policy", "approve", "--port", str(port), "--data", str(tmp_path / "data"),
        "--exit", "--json",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (tmp_path / "log").open("wb") as log:
        run = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            incident, order = proposed(base)
            page = browser.new_context(viewport={"width": 1440, "height": 900}).new_page()
            page.set_default_timeout(120_000)
            errors: list[str] = []
            page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
            page.goto(f"{base}/incidents/{incident}")
            page.click("summary:has-text('Approve')")
            page.click("button:text-is('Approve now')")
            page.wait_for_selector("article.order .chip:has-text('applied')")
            page.wait_for_selector(".ledger li.done:has-text('verified')")
            page.wait_for_selector("h1 ~ .chip:has-text('resolved')")
            told = httpx.get(f"{base}/api/v1/commands/{order}", timeout=30).json()
            assert {r["rank"] for r in told["results"] if r["phase"] == "applied"} == {0, 1}
            assert errors == []
        finally:
            run.terminate()
            run.wait(60)
