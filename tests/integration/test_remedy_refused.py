"""Orders that a real trainer refuses, from its inbox to the audit trail of a real server."""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from lanterne import orders
from lanterne.serving import EmbeddedServer
from lanterne.settings import ServerSettings

TRAINER = textwrap.dedent("""
    import time, torch, lanterne
    torch.set_num_threads(1)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = lanterne.attach(model, optimizer)
    for _ in range(100_000):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        session.step()
        print(optimizer.param_groups[0]["lr"], flush=True)
        time.sleep(0.02)
""")
JOB = "target"


def until(look: Any, seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(0.1)
    raise AssertionError("it did not come to pass in time")


def plain(**changes: Any) -> dict[str, Any]:
    now = time.time_ns()
    return {
        "id": "o", "job": JOB, "attempt": 0, "action": "scale_lr", "parameters": {"factor": 0.5}, "ranks": "all",
        "issued_ns": now, "expires_ns": now + 60_000_000_000, "counter": 50,
    } | changes  # fmt: skip


def private_key(data: Path, job: str) -> str:
    with sqlite3.connect(data / "control.sqlite", timeout=30) as control:
        (found,) = control.execute("SELECT private FROM job_keys WHERE job = ?", [job]).fetchone()
    return bytes(found).hex()


@pytest.mark.slow
def test_forged_replayed_expired_and_cross_job_orders_change_nothing_and_are_audited(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    server = EmbeddedServer(ServerSettings(port=port, grpc_port=0, data=str(tmp_path / "data"), dashboard=False))
    api = server.start() + "/api/v1"
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "LANTERNE_"))}
    clean |= {
        "LANTERNE_ENDPOINT": api.removesuffix("/api/v1"),
        "LANTERNE_JOB": JOB,
        "LANTERNE_DIR": str(tmp_path / "s"),
    }
    with (tmp_path / "rates").open("w") as rates:
        trainer = subprocess.Popen([sys.executable, "-c", TRAINER], env=clean, stdout=rates)
    try:
        folder = tmp_path / "s" / JOB / "0" / "commands"
        until((folder / "key.json").exists)
        answer = httpx.post(f"{api}/jobs/{JOB}/commands", json={"action": "scale_lr", "parameters": {"factor": 0.5}})
        good = answer.raise_for_status().json()
        until(lambda: httpx.get(f"{api}/commands/{good['id']}").json()["state"] == "applied")

        httpx.get(f"{api}/jobs/other/key").raise_for_status()  # makes the other job's key
        own, other, stranger = private_key(tmp_path / "data", JOB), private_key(tmp_path / "data", "other"), None
        stranger, _ = orders.generate_key()
        past = time.time_ns() - 900_000_000_000
        sent = next(json.loads(line) for line in (folder / "inbox.jsonl").read_text().splitlines())
        bad = {
            "forged": (orders.sign(plain(id="forged"), stranger), "signature does not match"),
            "others-key": (orders.sign(plain(id="others-key"), other), "signature does not match"),
            "cross-job": (orders.sign(plain(id="cross-job", job="other"), own), "order is for job 'other'"),
            "stale": (orders.sign(plain(id="stale", attempt=3), own), "order is for attempt 3"),
            "expired": (
                orders.sign(plain(id="expired", issued_ns=past, expires_ns=past + 10**9), own), "order expired",
            ),
            "replayed": (orders.sign(plain(id="replayed", counter=sent["counter"]), own), "is a replay"),
            "altered": ({**sent, "id": "altered"}, "signature does not match"),
        }  # fmt: skip
        with (folder / "inbox.jsonl").open("a") as inbox:
            inbox.writelines(json.dumps(order) + "\n" for order, _ in bad.values())

        def refusals() -> dict[str, str]:
            rows = httpx.get(f"{api}/audit?limit=200").json()["items"]
            return {r["subject"]: r["detail"]["detail"] for r in rows if r["action"] == "command.refused"}

        until(lambda: set(bad) <= set(refusals()))
        for name, (_, why) in bad.items():
            assert why in refusals()[name], name
        used = {line for line in (tmp_path / "rates").read_text().split("\n")[:-1] if line}
        assert used == {"0.1", "0.05"}  # the one good order, and nothing else
    finally:
        trainer.kill()
        trainer.wait()
        server.stop()
