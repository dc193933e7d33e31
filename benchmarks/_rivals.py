"""Other servers that take OTLP spans, on the same bodies: how many spans a second they bring to their own disk.

They are run by an interpreter of their own, where they are installed (``--rivals-python``). What counts is rows in
their SQLite file, as one of them answers before it stores.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import sqlite3
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

START_S, SEND_S, SETTLE_S = 180.0, 30.0, 20.0
PROTOBUF = {"content-type": "application/x-protobuf"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """``command`` follows the interpreter; ``{port}``, ``{other}`` and ``{folder}`` are filled in it and in ``env``."""

    name: str
    module: str
    command: Sequence[str]
    database: str
    env: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


RIVALS = (
    Rival(
        name="arize-phoenix",
        module="phoenix",
        command=("-m", "phoenix.server.main", "serve"),
        database="phoenix.db",
        env={
            "PHOENIX_WORKING_DIR": "{folder}", "PHOENIX_PORT": "{port}", "PHOENIX_GRPC_PORT": "{other}",
            "PHOENIX_HOST": "127.0.0.1", "PHOENIX_TELEMETRY_ENABLED": "false",
        },
    ),
    Rival(
        name="mlflow",
        module="mlflow",
        command=(
            "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", "{port}", "--workers", "1",
            "--backend-store-uri", "sqlite:///{folder}/mlflow.db", "--artifacts-destination", "{folder}/artifacts",
        ),
        database="mlflow.db",
        env={"MLFLOW_DISABLE_TELEMETRY": "true"},
        headers={"x-mlflow-experiment-id": "0"},
    ),
)  # fmt: skip


def installed(python: str, rival: Rival) -> bool:
    """Can this interpreter import the rival?"""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({rival.module!r}) is None)"
    return subprocess.run([python, "-c", code], check=False).returncode == 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _serving(python: str, rival: Rival, folder: Path) -> Iterator[str]:
    port = free_port()
    places = {"port": str(port), "other": str(free_port()), "folder": str(folder)}
    command = [python, *(part.format(**places) for part in rival.command)]
    env = {**os.environ, **{name: value.format(**places) for name, value in rival.env.items()}}
    env.pop("PYTHONPATH", None)  # the rival's own packages, not ours
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, env=env, cwd=folder, stdout=log, stderr=log, start_new_session=True)
        try:
            base = f"http://127.0.0.1:{port}"
            _wait(process, base, folder / "log")
            yield base
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait(30)


def _wait(process: subprocess.Popen[bytes], base: str, log: Path) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(base, timeout=2).status_code < 500:
                return
        time.sleep(0.5)
    raise SystemExit(f"{base} did not come up: {log.read_text(errors='replace')[-800:]}")


def _rows(database: Path) -> int:
    try:
        with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=5)) as file:
            return int(file.execute("SELECT count(*) FROM spans").fetchone()[0])
    except sqlite3.Error:
        return 0


def rate(python: str, rival: Rival, made: Sequence[bytes], senders: int, folder: Path) -> float:
    """Spans a second on the rival's disk: bodies are sent for ``SEND_S`` seconds, then rows are waited for until none
    has come for ``SETTLE_S``; the time counts from the first request to the last row seen."""
    folder.mkdir()
    with _serving(python, rival, folder) as base:
        database = folder / rival.database
        work: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        for body in made:
            work.put(body)
        before, began = _rows(database), time.perf_counter()
        threads = [threading.Thread(target=_send, args=(base, rival, work, began + SEND_S)) for _ in range(senders)]
        for thread in threads:
            thread.start()
        seen, at, sending = before, began, True
        while sending or time.perf_counter() - at < SETTLE_S:
            sending = any(thread.is_alive() for thread in threads)
            now = _rows(database)
            if now != seen:
                seen, at = now, time.perf_counter()
            time.sleep(0.25)
    return (seen - before) / (at - began) if seen > before else 0.0


def _send(base: str, rival: Rival, work: queue.SimpleQueue[bytes], until: float) -> None:
    with httpx.Client(base_url=base, timeout=120, headers={**PROTOBUF, **rival.headers}) as client:
        while time.perf_counter() < until:
            try:
                body = work.get_nowait()
            except queue.Empty:
                return
            with contextlib.suppress(httpx.HTTPError):
                if client.post("/v1/traces", content=body).status_code >= 400:
                    time.sleep(0.2)
