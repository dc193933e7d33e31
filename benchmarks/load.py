"""Many ranks from one load generator: ``python -m benchmarks.load [--minutes 10] [--ranks 2048] [--quick] [--json]``.

A real ``lanterne serve`` with a small queue, and senders that stand for the shippers of nodes of eight ranks: each
sends two steps of its ranks every two seconds. Three phases: steady for ``--minutes``; pushed, with bodies as fast as
the senders can, until the server answers 503 with ``Retry-After``; steady again, while what was refused is sent anew.
At the end each acknowledged span is in the store, once.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb
import httpx

from benchmarks import ingest
from benchmarks._common import figure, report
from lanterne import wire
from lanterne.nouns import Identity

RANKS_A_NODE, STEPS_A_BODY, PERIOD_S = 8, 2, 2.0
SPANS_A_STEP = len(ingest.SHAPE)
SENDERS = 32
PUSH_S = 20.0
QUEUE_BYTES = 96 << 20


@dataclass
class Seen:
    """What the senders met; guarded by ``lock``."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    waits: list[float] = field(default_factory=list)
    spans: int = 0
    refused: int = 0
    errors: list[str] = field(default_factory=list)

    def p99_s(self) -> float:
        found = sorted(self.waits)
        return found[min(len(found) - 1, int(len(found) * 0.99))] if found else 0.0


def node_body(job: str, node: int, tick: int, ranks: int) -> bytes:
    """Spans of two steps of the eight ranks of a node."""
    request: Any = None
    first = tick * STEPS_A_BODY * SPANS_A_STEP
    for rank in range(node * RANKS_A_NODE, (node + 1) * RANKS_A_NODE):
        who = Identity(job=job, rank=rank, local_rank=rank % 8, world_size=ranks, host=f"node{node}", pid=100 + rank)
        made = wire.encode(who, [ingest._span(first + n, rank) for n in range(STEPS_A_BODY * SPANS_A_STEP)]).traces
        assert made is not None
        if request is None:
            request = made
        else:
            request.resource_spans.extend(made.resource_spans)
    raw: bytes = request.SerializeToString()
    return raw


class Senders:
    """Threads that send bodies when they are due, and again after ``Retry-After`` when they are told to wait."""

    def __init__(self, base: str) -> None:
        self.seen = Seen()
        self._work: queue.Queue[tuple[float, bytes, int] | None] = queue.Queue(maxsize=4_096)
        self._threads = [threading.Thread(target=self._run, args=(base,), daemon=True) for _ in range(SENDERS)]
        for thread in self._threads:
            thread.start()

    def put(self, due: float, body: bytes, spans: int) -> None:
        self._work.put((due, body, spans))

    def close(self) -> Seen:
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()
        return self.seen

    def _run(self, base: str) -> None:
        with httpx.Client(base_url=base, timeout=120) as client:
            while (item := self._work.get()) is not None:
                due, body, spans = item
                time.sleep(max(0.0, due - time.perf_counter()))
                while not self._send(client, due, body, spans):
                    pass

    def _send(self, client: httpx.Client, due: float, body: bytes, spans: int) -> bool:
        """True when nothing is left to do."""
        try:
            answer = client.post("/v1/traces", content=body, headers=ingest.PROTOBUF)
        except httpx.HTTPError as error:
            with self.seen.lock:
                self.seen.errors.append(repr(error))
            return True
        if answer.status_code == 503 and answer.headers.get("retry-after", "").isdigit():
            with self.seen.lock:
                self.seen.refused += 1
            time.sleep(int(answer.headers["retry-after"]))
            return False
        with self.seen.lock:
            if answer.status_code == 200 and not answer.content:
                self.seen.spans += spans
                self.seen.waits.append(time.perf_counter() - due)
            else:
                self.seen.errors.append(f"{answer.status_code} {answer.content[:200]!r}")
        return True


def steady(base: str, ranks: int, first_tick: int, seconds: float) -> tuple[Seen, int]:
    """(what was met, the next tick): every node sends once a period, spread over it."""
    nodes = ranks // RANKS_A_NODE
    spans = RANKS_A_NODE * STEPS_A_BODY * SPANS_A_STEP
    senders = Senders(base)
    began = time.perf_counter()
    ticks = max(1, int(seconds / PERIOD_S))
    for tick in range(ticks):
        for node in range(nodes):
            due = began + (tick + node / nodes) * PERIOD_S
            senders.put(due, node_body("load", node, first_tick + tick, ranks), spans)
    return senders.close(), first_tick + ticks


def pushed(base: str) -> Seen:
    """As much as the senders can for ``PUSH_S``: the bodies of the ingest benchmark under one job after another."""
    made = ingest.make_bodies(40)
    senders = Senders(base)
    for body in _endless(made, time.perf_counter() + PUSH_S):
        senders.put(0.0, body, ingest.SPANS_A_BODY)
    return senders.close()


def _endless(made: list[bytes], until: float) -> Iterator[bytes]:
    n = 0
    while time.perf_counter() < until:
        yield made[n % len(made)].replace(b"bench", b"x%04d" % (n // len(made)))
        n += 1


def _stored(file: Path) -> tuple[int, int]:
    """(spans in the file of a server that has ended, how many of them are distinct)."""
    with duckdb.connect(str(file)) as store:
        rows = store.execute("SELECT count(*), count(DISTINCT (job, rank, sequence)) FROM spans").fetchall()
    return int(rows[0][0]), int(rows[0][1])


def _step(base: str) -> int:
    return int(httpx.get(f"{base}/api/v1/jobs/load", timeout=60).json().get("step") or 0)


def _memory_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def run(minutes: float, ranks: int) -> dict[str, Any]:
    os.environ["LANTERNE_QUEUE_BYTES"] = str(QUEUE_BYTES)
    with tempfile.TemporaryDirectory(prefix="lanterne-load-") as name:
        data = Path(name) / "data"
        with ingest.serving(data) as (pid, base):
            before, tick = steady(base, ranks, 0, 20)  # everybody is known, what is compiled is compiled
            early = _memory_mib(pid)
            calm, tick = steady(base, ranks, tick, minutes * 60)
            lag = tick * STEPS_A_BODY - 1 - _step(base)
            late = _memory_mib(pid)
            push = pushed(base)
            after, tick = steady(base, ranks, tick, 20)
        total, distinct = _stored(data / "events.duckdb")
    sent = sum(phase.spans for phase in (before, calm, push, after))
    errors = [*before.errors, *calm.errors, *push.errors, *after.errors]
    figures = [
        figure("errors", len(errors), "1", goal=0),
        figure("steady_spans_per_s", calm.spans / (minutes * 60), "{span}/s", better="higher"),
        figure("steady_ack_p99_ms", calm.p99_s() * 1e3, "ms"),
        figure("steady_refused", calm.refused, "1", goal=0),
        figure("lag_steps", lag, "{step}", goal=5),
        figure("memory_start_mib", early, "MiB"),
        figure("memory_end_mib", late, "MiB"),
        figure("pushed_spans_per_s", push.spans / PUSH_S, "{span}/s", better="higher"),
        figure("pushed_refused", push.refused, "1", better="higher"),
        figure("recovered_refused", after.refused, "1", goal=0),
        figure("recovered_ack_p99_ms", after.p99_s() * 1e3, "ms"),
        figure("missing_spans", sent - distinct, "1", goal=0),
        figure("repeated_spans", total - distinct, "1", goal=0),
    ]
    return report("load", figures, ranks=ranks, minutes=minutes, first_errors=errors[:3])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--ranks", type=int, default=2048)
    parser.add_argument("--quick", action="store_true", help="half a minute")
    parser.add_argument("--json", action="store_true", help="print the JSON object only")
    arguments = parser.parse_args()
    found = run(0.5 if arguments.quick else arguments.minutes, arguments.ranks)
    if arguments.json:
        print(json.dumps(found))
        return
    for line in found["figures"]:
        print(f"{line['name']:28} {line['value']!s:>12} {line['unit']:9} goal {line['goal']}")
    print(found["first_errors"])


if __name__ == "__main__":
    main()
