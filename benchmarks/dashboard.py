"""The page in a real browser over a real server: paint, heat map, zoom, live tick, and each page's requests.

A store of ``--events`` (50 million by default) is written by SQL (``_large_store``) into ``--store``, or into a folder
that goes afterwards; a folder that holds a store already is used as it is, so that it is built once. Then a server
process of its own answers. Figures are medians over ``--rounds``: ``paint_ms`` from navigation to the jobs table,
``heatmap_ms`` from the click that asks for another metric of the job of ``--ranks`` x ``--steps`` to the drawn figure,
``zoom_ms`` from a zoom to the finer figure, ``tick_ms`` the server's answer to one live tick of the fleet.
``query_ms`` is the slowest page's slowest request to the API once its arrays are in memory; ``requests`` lists all of
them with the first answer, which reads the store, as ``cold_ms``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import httpx

from benchmarks import _large_store
from benchmarks._common import figure, report
from benchmarks._large_store import JOB
from lanterne.settings import ServerSettings, load

START_S = 60.0

GOALS = {"paint_ms": 1_000.0, "heatmap_ms": 500.0, "zoom_ms": 300.0, "tick_ms": 100.0, "query_ms": 200.0}
ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--no-first-run",
    "--disable-component-update",
]
CLICK = """async (value) => {
  const heat = document.querySelector('#heat .js-plotly-plot'), old = heat.data[0].z;
  const drawn = new Promise(done => heat.on('plotly_afterplot', () => { if (heat.data[0].z !== old) done(); }));
  const start = performance.now();
  document.querySelector(`button[data-value="${value}"]`).click();
  await drawn;
  return performance.now() - start;
}"""
ZOOM = """async ([from, to]) => {
  const heat = document.querySelector('#heat .js-plotly-plot'), old = heat.data[0].z;
  const drawn = new Promise(done => heat.on('plotly_afterplot', () => { if (heat.data[0].z !== old) done(); }));
  const start = performance.now();
  await Plotly.relayout(heat, {'xaxis.range[0]': from, 'xaxis.range[1]': to});
  await drawn;
  return performance.now() - start;
}"""


def browse(base: str, rounds: int, steps: int) -> dict[str, float]:
    """Median times in Chromium."""
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        raise SystemExit("no chromium here: apt-get install chromium")
    paints: list[float] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGS)
        tab = browser.new_context(viewport={"width": 1440, "height": 900}).new_page()
        for _ in range(rounds + 1):
            tab.goto(base, wait_until="commit")
            tab.wait_for_selector("main table")
            paints.append(tab.evaluate("performance.now()"))
        tab.goto(f"{base}/jobs/{JOB}?heat=step_ms", wait_until="commit")
        tab.wait_for_selector("#heat .hm image", timeout=60_000)
        heats = [tab.evaluate(CLICK, ("busy_ms", "step_ms")[turn % 2]) for turn in range(rounds)]
        starts = [steps // 4 + turn * 10 for turn in range(rounds)]
        zooms = [tab.evaluate(ZOOM, [first, first + steps // 8]) for first in starts]
        browser.close()
    found = {"paint_ms": paints[1:], "heatmap_ms": heats, "zoom_ms": zooms}
    return {name: statistics.median(values) for name, values in found.items()}


def tick(base: str, rounds: int) -> float:
    """Median time of the fleet's live callback, in ms."""
    body = {
        "output": "..fleet-live.children...fleet-told.data..",
        "outputs": [{"id": "fleet-live", "property": "children"}, {"id": "fleet-told", "property": "data"}],
        "inputs": [{"id": "tick", "property": "data", "value": 1}, {"id": "url", "property": "search", "value": ""}],
        "state": [
            {"id": "url", "property": "pathname", "value": "/"},
            {"id": "url", "property": "href", "value": base + "/"},
            {"id": "fleet-told", "property": "data", "value": None},
        ],
        "changedPropIds": ["tick.data"],
    }
    times = []
    with httpx.Client(base_url=base, timeout=60.0) as client:
        for _ in range(rounds):
            start = time.perf_counter()
            client.post("/_dash-update-component", json=body).raise_for_status()
            times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


PAGES = {
    "fleet": ["jobs"],
    "job": ["jobs/{job}", "jobs/{job}/incidents", "jobs/{job}/metrics"],
    "job: time": ["jobs/{job}/steps?from_step={last}", "jobs/{job}/sla"],
    "job: heat map": ["jobs/{job}/heatmap?metric={metric}&encoding=f4"],
    "job: zoom": ["jobs/{job}/heatmap?metric={metric}&encoding=f4&from_step=50&to_step=150"],
    "job: curves": [
        "jobs/{job}/metrics?name=training.loss&aggregate=median",
        "jobs/{job}/metrics?name=training.grad_norm&aggregate=median",
        "jobs/{job}/metrics?name=step_ms&aggregate=max",
        "jobs/{job}/metrics?name=training.loss&most=32",
    ],
    "ranks": ["jobs/{job}/ranks?limit=1000"],
    "rank": ["jobs/{job}/metrics?name=forward_ms&rank=7", "jobs/{job}/metrics?name=hw.gpu.memory.usage&rank=7"],
    "step": ["jobs/{job}/steps/{last}"],
    "communication": ["jobs/{job}/communication", "jobs/{job}/waits", "jobs/{job}/collectives"],
    "events": ["jobs/{job}/events"],
}  # fmt: skip
"""What each page asks of the API."""
METRICS = ("lateness_ms", "busy_ms", "wait_ms", "step_ms", "forward_ms")


def requests(base: str, rounds: int, steps: int) -> list[dict[str, Any]]:
    """Each page's requests one by one: the first answer and the median of those after it, in ms."""
    found = []
    with httpx.Client(base_url=f"{base}/api/v1/", timeout=120.0) as client:
        for page, templates in PAGES.items():
            for template in templates:
                for metric in METRICS if "{metric}" in template else ("",):
                    where = template.format(job=JOB, metric=metric, last=steps - 100)
                    times = []
                    for _ in range(rounds + 1):
                        start = time.perf_counter()
                        client.get(where).raise_for_status()
                        times.append((time.perf_counter() - start) * 1e3)
                    cold, warm = round(times[0], 1), round(statistics.median(times[1:]), 1)
                    found.append({"page": page, "request": where, "cold_ms": cold, "ms": warm})
    return found


@contextlib.contextmanager
def served(settings: ServerSettings) -> Iterator[str]:
    """A server process on the store; its base URL. Raises :class:`SystemExit` when it does not come up."""
    base = f"http://127.0.0.1:{settings.port}"
    command = [sys.executable, "-m", "lanterne", "serve", "--port", str(settings.port), "--data", settings.data]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            end = time.monotonic() + START_S
            while time.monotonic() < end and server.poll() is None:
                with contextlib.suppress(httpx.HTTPError):
                    if httpx.get(f"{base}/readyz", timeout=5).is_success:
                        break
                time.sleep(0.2)
            else:
                raise SystemExit(f"the server did not start within {START_S:.0f} s")
            yield base
        finally:
            server.terminate()


def measure(store: str, ranks: int, steps: int, rounds: int, events: int) -> tuple[dict[str, float], dict[str, Any]]:
    """All figures, and what they stand on: events, seconds to write the store, requests."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = load(ServerSettings, environ={}, port=port, grpc_port=0, data=store)
    start = time.perf_counter()
    about: dict[str, Any] = {"events": _large_store.fill(settings, ranks, steps, events)}
    about["fill_s"] = round(time.perf_counter() - start, 1)
    with served(settings) as base:
        about["requests"] = requests(base, rounds, steps)
        found = browse(base, rounds, steps)
        found["tick_ms"] = tick(base, rounds * 4)
    found["query_ms"] = max(one["ms"] for one in about["requests"])
    return found, about


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1_024)
    parser.add_argument("--steps", type=int, default=2_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--events", type=int, default=50_000_000, help="events in the store")
    parser.add_argument("--store", help="folder of the store, which stays; used as it is where it holds one")
    parser.add_argument("--quick", action="store_true", help="64 ranks, 300 steps, 3 rounds, 1.3 million events")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    full = (given.ranks, given.steps, given.rounds, given.events)
    folder = given.store or tempfile.mkdtemp(prefix="lanterne-bench-")
    try:
        found, about = measure(folder, *((64, 300, 3, 1_300_000) if given.quick else full))
    finally:
        if not given.store:
            shutil.rmtree(folder, ignore_errors=True)
    figures = [figure(n, v, "ms", goal=GOALS[n]) for n, v in found.items()]
    whole = report("dashboard", figures, **about)
    if given.json:
        print(json.dumps(whole))
        return
    for one in figures:
        print(f"{one['name']:12s} {one['value']:8.1f} ms   goal {one['goal']:.0f} ms", file=sys.stdout)


if __name__ == "__main__":
    main()
