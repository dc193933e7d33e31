"""Draw the pictures of README and docs from a real server with simulated jobs: ``python docs/images/make.py``.

A server is started in a folder of its own and fed through OTLP/HTTP: 64 ranks of which one turns slow, and three
smaller jobs. Chromium then visits the pages as a reader would, dark and light. Needs the dev extra and a
Chromium on the PATH.
"""

from __future__ import annotations

import argparse
import shutil
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from lanterne.serving import EmbeddedServer  # noqa: E402
from lanterne.settings import ServerSettings, load  # noqa: E402
from tests.e2e.feed import send  # noqa: E402

JOB, CULPRIT, SINCE = "llama-7b-pretrain", 21, 60
BYTES_MAX = 300_000
PATIENCE_MS = 240_000


def feed(base: str, dp: int, tp: int) -> None:
    """The fleet: one big job with a slow rank and three smaller ones."""
    send(base, "vit-finetune", [], dp=8, steps=90, seed=11)
    send(base, "moe-ablation-3", [("slow_data", 2, 40)], dp=4, steps=100, seed=12)
    send(base, "tokenizer-eval", [], dp=2, steps=40, seed=13)
    send(base, JOB, [("slow_compute", CULPRIT, SINCE)], dp=dp, tp=tp, steps=120, seed=14)


def diagnosed(base: str, patience_s: float = 240.0) -> str:
    """The id of the big job's first diagnosed incident. Raises :class:`SystemExit` where none comes."""
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        items = httpx.get(f"{base}/api/v1/jobs/{JOB}/incidents", timeout=60).json()["items"]
        if items and items[0]["causes"]:
            return str(items[0]["id"])
        time.sleep(1.0)
    raise SystemExit(f"{JOB} has no diagnosed incident after {patience_s:.0f} s")


def draw(base: str, incident: str, out: Path) -> None:
    """Visit the pages and write a picture of each."""
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        raise SystemExit("no chromium here: apt-get install chromium")
    pages = {
        "fleet": ("/", "main table", 620),
        "incident": (f"/incidents/{incident}", "#culprit", 1000),
        "job": (f"/jobs/{JOB}", "#heat .hm image", 1000),
        "step": (f"/jobs/{JOB}/steps/{SINCE + 20}", "#lanes .barlayer .point", 900),
    }
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        for scheme, suffix in (("dark", ""), ("light", "-light")):
            tab = browser.new_context(color_scheme=scheme).new_page()
            tab.set_default_timeout(PATIENCE_MS)
            for name, (where, sign, height) in pages.items():
                tab.set_viewport_size({"width": 1360, "height": height})
                tab.goto(base + where, wait_until="commit")
                tab.wait_for_selector("#first", state="detached")
                tab.wait_for_selector(sign)
                tab.wait_for_timeout(3_000)
                shoot(tab, out / f"{name}{suffix}.png")
        browser.close()


def shoot(tab: Any, target: Path) -> None:
    """One picture; raises :class:`SystemExit` where it is too big for the tree."""
    tab.screenshot(path=str(target), timeout=PATIENCE_MS)
    size = target.stat().st_size
    sys.stdout.write(f"{target.name}: {size:,} bytes\n")
    if size > BYTES_MAX:
        raise SystemExit(f"{target.name} has {size:,} bytes, more than {BYTES_MAX:,}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--dp", type=int, default=32)
    parser.add_argument("--tp", type=int, default=2)
    given = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = tempfile.mkdtemp(prefix="lanterne-pictures-")
    server = EmbeddedServer(load(ServerSettings, environ={}, port=port, grpc_port=0, data=folder, policy="suggest"))
    try:
        base = server.start()
        feed(base, given.dp, given.tp)
        draw(base, diagnosed(base), given.out)
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
