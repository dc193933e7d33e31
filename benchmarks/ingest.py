"""How fast telemetry comes in: ``python -m benchmarks.ingest [--quick] [--json] [--rivals-python PATH]``.

A real ``lanterne serve`` in a process of its own, senders that wait for each acknowledgement (which comes when the
batch is in the journal on the disk), the same bodies for everybody; the rate counts until the tables hold all. The
ceiling: the same rows, decoded beforehand, straight into DuckDB on the same disk, one transaction a commit of the
server's size. Rivals are measured where ``--rivals-python`` (or
``LANTERNE_BENCH_RIVALS``) names an interpreter that has them; each takes about a minute.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import duckdb
import httpx
import pyarrow as pa

from benchmarks import _rivals
from benchmarks._common import figure, report
from lanterne import limits, wire
from lanterne.backend.ingest import walker
from lanterne.backend.ingest.decode import decode
from lanterne.nouns import AttributeValue, Event, Identity, Kind

SPANS_A_BODY = 2_000  # limits.EXPORT_BATCH_EVENTS, rounded
SENDERS = 16
SHAPE = (
    (Kind.PHASE, "forward"), (Kind.PHASE, "backward"), (Kind.COLLECTIVE, "all_reduce"), (Kind.STEP, "step"),
)  # fmt: skip
PROTOBUF = {"content-type": "application/x-protobuf"}


def make_bodies(number: int, job: str = "bench") -> list[bytes]:
    """OTLP protobuf bodies of ``SPANS_A_BODY`` spans, of ranks in turn: one collective to two phases and a step."""
    made, ranks = [], 8
    for n in range(number):
        rank, first = n % ranks, n // ranks * SPANS_A_BODY
        who = Identity(job=job, rank=rank, local_rank=rank, world_size=ranks, host=f"node{rank // 4}", pid=100 + rank)
        request = wire.encode(who, [_span(first + i, rank) for i in range(SPANS_A_BODY)]).traces
        if request is not None:
            made.append(request.SerializeToString())
    return made


def _span(n: int, rank: int) -> Event:
    step, part = divmod(n, 4)
    kind, name = SHAPE[part]
    call: dict[str, AttributeValue] = {
        wire.GROUP: "0-7",
        wire.GROUP_SEQUENCE: step,
        wire.BYTES: 4 << 20,
        wire.DTYPE: "float32",
    }
    at = 1_790_000_000_000_000_000 + step * 100_000_000 + part * 20_000_000 + rank * 1_000
    return Event(
        kind=kind, name=name, unix_ns=at, duration_ns=19_000_000, monotonic_ns=at - 10**18, lamport=n, sequence=n,
        step=step, attributes=call if kind is Kind.COLLECTIVE else {},
    )  # fmt: skip


@contextlib.contextmanager
def server(data: Path) -> Iterator[str]:
    """``lanterne serve`` without the page; its base URL."""
    with serving(data) as (_, base):
        yield base


@contextlib.contextmanager
def serving(data: Path) -> Iterator[tuple[int, str]]:
    """:func:`server` with its process id."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [sys.executable, "-m", "lanterne", "serve", "--port", str(port), "--grpc-port", "0", "--data", str(data)]
    process = subprocess.Popen(command, env={**os.environ, "LANTERNE_DASHBOARD": "0"})
    base = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{base}/readyz", timeout=1).status_code == 200:
                    break
            time.sleep(0.1)
        yield process.pid, base
    finally:
        process.terminate()
        process.wait(60)


def send(base: str, made: Sequence[bytes], *, bodies_per_s: float = 0.0) -> tuple[float, list[float]]:
    """(seconds until all were acknowledged, seconds each waited for its acknowledgement).

    ``bodies_per_s`` paces the senders; a wait then counts from the moment at which the body was due.
    """
    work: queue.SimpleQueue[tuple[float, bytes] | None] = queue.SimpleQueue()
    began = time.perf_counter() + 0.05
    for n, body in enumerate(made):
        work.put((began + n / bodies_per_s if bodies_per_s else 0.0, body))
    for _ in range(SENDERS):
        work.put(None)
    waits: list[float] = []
    failures: list[str] = []

    def run() -> None:
        with httpx.Client(base_url=base, timeout=60) as client:
            while (item := work.get()) is not None and not failures:
                due, body = item
                time.sleep(max(0.0, due - time.perf_counter()))
                asked = due or time.perf_counter()
                answer = client.post("/v1/traces", content=body, headers=PROTOBUF)
                if answer.status_code != 200 or answer.content:
                    failures.append(f"{answer.status_code} {answer.content[:200]!r}")
                waits.append(time.perf_counter() - asked)

    threads = [threading.Thread(target=run) for _ in range(SENDERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise SystemExit(f"the server refused a body: {failures[0]}")
    return time.perf_counter() - began, waits


def in_tables(base: str) -> int:
    """Spans that the server has committed to its tables since it began."""
    for line in httpx.get(f"{base}/metrics", timeout=60).text.splitlines():
        if line.startswith('lanterne_rows_stored_total{signal="spans"}'):
            return int(float(line.split()[-1]))
    raise SystemExit("the server tells no lanterne_rows_stored_total")


def stored(base: str, job: str) -> int:
    answer = httpx.post(f"{base}/api/v1/query", json={"sql": "SELECT count(*) FROM spans", "job": job}, timeout=60)
    return int(answer.json()["rows"][0][0])


def ceiling(tables: Sequence[pa.Table], folder: Path) -> float:
    """Spans a second of decoded rows straight into a DuckDB table, durable: a commit of the server's size each."""
    at_once = max(1, limits.COMMIT_ROWS_MAX // SPANS_A_BODY)
    with duckdb.connect(str(folder / "ceiling.duckdb")) as file:
        file.register("incoming", tables[0])
        file.execute("CREATE TABLE spans AS SELECT *, 0::BIGINT AS received_ns FROM incoming LIMIT 0")
        began = time.perf_counter()
        for at in range(0, len(tables), at_once):
            file.register("incoming", pa.concat_tables(tables[at : at + at_once]).unify_dictionaries())
            file.execute("BEGIN")
            file.execute("INSERT INTO spans SELECT *, 1::BIGINT FROM incoming")
            file.execute("COMMIT")
        took = time.perf_counter() - began
        rows = file.execute("SELECT count(*) FROM spans").fetchone()
    assert rows is not None
    assert rows[0] == sum(t.num_rows for t in tables)
    return float(rows[0] / took)


def against(python: str, made: Sequence[bytes], folder: Path) -> tuple[dict[str, float], dict[str, str]]:
    """(spans a second by rival, why the others were left out)."""
    rates: dict[str, float] = {}
    skipped: dict[str, str] = {}
    for rival in _rivals.RIVALS:
        if not python:
            skipped[rival.name] = "no interpreter was named that has it (--rivals-python)"
        elif not _rivals.installed(python, rival):
            skipped[rival.name] = f"not installed for {python}"
        else:
            rates[rival.name] = _rivals.rate(python, rival, made, SENDERS, folder / rival.name)
    return rates, skipped


def run(quick: bool, rivals_python: str = "") -> dict[str, Any]:
    """Everything in one run: decode alone, ceiling, sustained rate, acknowledgement at half of it, rivals."""
    if walker.load() is None:
        print("no compiled decoder here: the figures are of the protobuf library's", file=sys.stderr)
    number = 24 if quick else 300
    made = make_bodies(number)
    began = time.process_time()
    tables = [decode("traces", body).batch.table for body in made]
    decoding = number * SPANS_A_BODY / (time.process_time() - began)
    with tempfile.TemporaryDirectory(prefix="lanterne-bench-") as name:
        folder = Path(name)
        top = ceiling(tables, folder)
        with server(folder / "data") as base:
            send(base, make_bodies(8, job="warm"))
            spans = number * SPANS_A_BODY
            before = in_tables(base)
            began = time.perf_counter()
            send(base, made)
            while in_tables(base) - before < spans and time.perf_counter() - began < 60:
                time.sleep(0.02)
            rate = spans / (time.perf_counter() - began)  # until the tables hold all of them, not only the journal
            if (found := stored(base, "bench")) != spans:
                raise SystemExit(f"{found} of {spans} acknowledged spans are stored")
            half = rate / 2 / SPANS_A_BODY
            paced = [  # the same bodies under other jobs
                made[n % number].replace(b"bench", b"p%04d" % (n // number))
                for n in range(int(half * (4 if quick else 60)))
            ]
            _, waits = send(base, paced, bodies_per_s=half)
        rates, skipped = against(rivals_python, made, folder)
    p99 = sorted(waits)[min(len(waits) - 1, int(len(waits) * 0.99))] * 1e3
    best = max(rates.values(), default=0.0)
    ratio = round(rate / best, 4) if best else None
    figures = [
        figure("spans_per_s", rate, "{span}/s", better="higher"),
        {"name": "best_rival_ratio", "value": ratio, "unit": "1", "goal": 100, "better": "higher"},
        figure("ceiling_ratio", rate / top, "1", goal=0.5, better="higher"),
        figure("ack_p99_ms", p99, "ms", goal=250),
        figure("ceiling_spans_per_s", top, "{span}/s", better="higher"),
        figure("decode_spans_per_cpu_s", decoding, "{span}/s", better="higher"),
        *(figure(f"{name}_spans_per_s", value, "{span}/s", better="higher") for name, value in rates.items()),
    ]
    return report("ingest", figures, skipped=skipped, spans=spans, spans_a_body=SPANS_A_BODY, senders=SENDERS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="under a minute, noisier")
    parser.add_argument("--json", action="store_true", help="print the JSON object only")
    parser.add_argument("--rivals-python", default=os.environ.get("LANTERNE_BENCH_RIVALS", ""), metavar="PATH")
    arguments = parser.parse_args()
    found = run(arguments.quick, arguments.rivals_python)
    if arguments.json:
        print(json.dumps(found))
        return
    for line in found["figures"]:
        print(f"{line['name']:26} {line['value']!s:>12} {line['unit']:9} goal {line['goal']}")
    print("skipped:", found["skipped"])


if __name__ == "__main__":
    main()
