"""The page in a real browser over a real server: paint, heat map, zoom, live tick.

The store first gets ``--events`` rows of other jobs by SQL (48 million points and spans by default, with the roll-up
that ingest keeps), then a job of step spans goes in through OTLP/HTTP (``--ranks`` x ``--steps``; 1,024 x 2,000 by
default), so that the pages are drawn at 50 million events. Figures are medians over ``--rounds``: ``paint_ms`` from
navigation to the jobs table, ``heatmap_ms`` from the click that asks for another metric to the drawn figure,
``zoom_ms`` from a zoom to the finer figure, ``tick_ms`` the server's answer to one live tick of the fleet.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import httpx
import zstandard

from lanterne import wire
from lanterne.nouns import Event, Identity, Kind
from lanterne.serving import EmbeddedServer
from lanterne.settings import ServerSettings, load

STEP_NS = 100_000_000
STEPS_A_REQUEST = 40
GOALS = {"paint_ms": 1_000.0, "heatmap_ms": 500.0, "zoom_ms": 300.0, "tick_ms": 100.0}
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


_POINTS = """
INSERT INTO points
SELECT 'filler-' || (i // 1000000), 0, (i % 256)::INTEGER, i // 256, i, 'training.metric' || ((i // 256) % 16),
       (i // 4096) % 2000, $start + i * 1000, i, random(), '1', '', 'n' || (i % 32), 'filler', NULL, $start
FROM range($first, $last) t(i)
"""
_SPANS = """
INSERT INTO spans
SELECT 'filler-' || (i // 1000000), 0, (i % 256)::INTEGER, i // 256, i, 'training.step', 'step', i // 256,
       $start + i * 1000, $start + i * 1000 + 100000000, i, '', 0, 0, '', 'n' || (i % 32), 'filler', ''::BLOB, ''::BLOB,
       NULL, $start
FROM range($first, $last) t(i)
"""
_STEPS = """
INSERT INTO rank_steps
SELECT 'filler-' || (i // 1000000), 0, 'step_ms', (i % 256)::INTEGER, i // 256, $start + i * 1000, 100 + random()
FROM range($first, $last) t(i)
"""
BLOCK = 2_000_000


def fill(settings: ServerSettings, events: int) -> None:
    """Rows of other jobs, three points to a span; written straight into the store's tables."""
    from lanterne.backend.store import migrate
    from lanterne.backend.store.events import EventStore

    migrate.upgrade(settings)
    store = EventStore.open(settings)
    try:
        for first in range(0, events, BLOCK):
            last = min(first + BLOCK, events)
            cut = first + (last - first) * 3 // 4
            start = time.time_ns() - 86_400 * 10**9
            store.work(lambda c, a=first, b=cut, s=start: c.execute(_POINTS, {"first": a, "last": b, "start": s}))
            for sql in (_SPANS, _STEPS):
                store.work(lambda c, q=sql, a=cut, b=last, s=start: c.execute(q, {"first": a, "last": b, "start": s}))
    finally:
        store.close()


def _events(rank: int, first: int, last: int, start_ns: int) -> list[Event]:
    late = 30_000_000 if rank == 17 and first >= 200 else 0
    return [
        Event(
            kind=Kind.STEP, name="step", sequence=step, lamport=step, unix_ns=start_ns + step * STEP_NS,
            monotonic_ns=step * STEP_NS, step=step,
            duration_ns=STEP_NS - 5_000_000 + late + (rank * 7919 + step * 104729) % 2_000_000,
        )
        for step in range(first, last)
    ]  # fmt: skip


def feed(base: str, ranks: int, steps: int) -> int:
    """Send the job; returns the number of events that were acknowledged."""
    squeeze = zstandard.ZstdCompressor(level=1)
    headers = {"content-type": "application/x-protobuf", "content-encoding": "zstd"}
    start_ns = time.time_ns() - steps * STEP_NS
    sent = 0
    with httpx.Client(base_url=base, timeout=120.0) as client:
        for first in range(0, steps, STEPS_A_REQUEST):
            last = min(first + STEPS_A_REQUEST, steps)
            for low in range(0, ranks, 256):
                body = None
                for rank in range(low, min(low + 256, ranks)):
                    who = Identity(job="bench", rank=rank, local_rank=rank % 8, world_size=ranks, host=f"n{rank // 8}")
                    found = wire.encode(who, _events(rank, first, last, start_ns)).traces
                    if found is None:
                        continue
                    if body is None:
                        body = found
                    else:
                        body.MergeFrom(found)
                    sent += last - first
                if body is not None:
                    packed = squeeze.compress(body.SerializeToString())
                    client.post("/v1/traces", content=packed, headers=headers).raise_for_status()
    return sent


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
        tab.goto(f"{base}/jobs/bench?heat=step_ms", wait_until="commit")
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


def measure(ranks: int, steps: int, rounds: int, others: int) -> tuple[dict[str, float], int]:
    """All figures and the number of events in the store."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = tempfile.mkdtemp(prefix="lanterne-bench-")
    settings = load(ServerSettings, environ={}, port=port, grpc_port=0, data=folder)
    server = EmbeddedServer(settings)
    try:
        fill(settings, others)
        base = server.start()
        events = others + feed(base, ranks, steps)
        found = browse(base, rounds, steps)
        found["tick_ms"] = tick(base, rounds * 4)
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)
    return found, events


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1_024)
    parser.add_argument("--steps", type=int, default=2_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--events", type=int, default=48_000_000, help="rows of other jobs in the store")
    parser.add_argument("--quick", action="store_true", help="64 ranks, 300 steps, 3 rounds, a million other events")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    full = (given.ranks, given.steps, given.rounds, given.events)
    found, events = measure(*((64, 300, 3, 1_000_000) if given.quick else full))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    report: dict[str, Any] = {
        "benchmark": "dashboard",
        "commit": commit.stdout.strip(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "events": events,
        "figures": [
            {"name": n, "value": round(v, 1), "unit": "ms", "goal": GOALS[n], "better": "lower"}
            for n, v in found.items()
        ],
    }
    if given.json:
        print(json.dumps(report))
        return
    for one in report["figures"]:
        print(f"{one['name']:12s} {one['value']:8.1f} ms   goal {one['goal']:.0f} ms", file=sys.stdout)


if __name__ == "__main__":
    main()
