"""Orders that ``lanterne run`` carries out: a real server, real signatures, a real command that is started again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from shipper_backend import Backend

from lanterne import orders, wire
from lanterne.collector.integrations.launch_orders import GIVE_UP_EXIT, elastic
from lanterne.nouns import Event, EventName, Identity, Kind
from lanterne.serving import EmbeddedServer
from lanterne.settings import ServerSettings

LAUNCH = "import sys; from lanterne.collector.integrations.launch import main; sys.exit(main(sys.argv[1:]))"
COMMAND = textwrap.dedent("""
    # plays the trainer: leaves word of its session folder as a shipper does, tells its attempt, and ends as it is told
    import json, os, pathlib, sys, time, urllib.request
    endings = json.loads(sys.argv[2])
    job, base = os.environ["LANTERNE_JOB"], int(os.environ.get("LANTERNE_ATTEMPT_BASE", 0))
    folder = pathlib.Path(sys.argv[1], job, str(base))
    (folder / "commands").mkdir(parents=True, exist_ok=True)
    key = urllib.request.urlopen(f"{os.environ['LANTERNE_ENDPOINT']}/api/v1/jobs/{job}/key").read()
    (folder / "commands" / "key.json").write_bytes(key)
    pathlib.Path(os.environ["LANTERNE_EXITS"], f"shipper-{os.getpid()}").write_text(str(folder))
    print("attempt", base, os.environ.get("NCCL_ALGO", "-"), os.environ.get("LANTERNE_MICRO_BATCH", "-"), flush=True)
    if endings[base] == "stay":
        time.sleep(120)
    sys.exit(endings[base])
""")


class Server:
    """An embedded server and the launches that are made against it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        settings = ServerSettings(port=port, grpc_port=0, data=str(folder / "data"), dashboard=False, policy="auto")
        self.server = EmbeddedServer(settings)
        self.url = self.server.start()

    def appear(self, job: str, attempt: int = 0) -> None:
        """Let the job be seen, as its first event does."""
        event = Event(
            kind=Kind.EVENT, name=EventName.HEARTBEAT, sequence=0, lamport=0, unix_ns=time.time_ns(),
            monotonic_ns=time.monotonic_ns(),
        )  # fmt: skip
        body = wire.encode(Identity(job=job, attempt=attempt, rank=0, world_size=1), [event]).logs
        headers = {"content-type": "application/x-protobuf"}
        httpx.post(f"{self.url}/v1/logs", content=body.SerializeToString(), headers=headers).raise_for_status()

    def order(self, job: str, action: str, **parameters: Any) -> dict[str, Any]:
        answer = httpx.post(
            f"{self.url}/api/v1/jobs/{job}/commands", json={"action": action, "parameters": parameters}
        ).raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def command(self, identifier: str) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.url}/api/v1/commands/{identifier}").raise_for_status().json()
        return found

    def wait(self, identifier: str, *states: str) -> dict[str, Any]:
        return until(lambda: found if (found := self.command(identifier))["state"] in states else None)

    def audit(self, subject: str) -> list[dict[str, Any]]:
        rows = httpx.get(f"{self.url}/api/v1/audit?limit=200").raise_for_status().json()["items"]
        return [row for row in rows if row["subject"] == subject]

    @contextlib.contextmanager
    def launched(
        self,
        job: str,
        endings: list[Any],
        *more: str,
        sessions: str = "sessions",
        through: Sequence[str] = (),
        **environ: str,
    ) -> Iterator[subprocess.Popen[str]]:
        script = self.folder / "command.py"
        script.write_text(COMMAND)
        command = [sys.executable, *through, str(script), str(self.folder / sessions), json.dumps(endings), *more]
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "LANTERNE_"))}
        clean |= {"LANTERNE_ENDPOINT": self.url, "LANTERNE_JOB": job, "NO_PROXY": "*", **environ}
        process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, "--", *command], env=clean, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def until(look: Callable[[], Any], seconds: float = 40.0) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = look()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError("it did not come to pass in time")


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    found = Server(tmp_path_factory.mktemp("launch"))
    yield found
    found.server.stop()


pytestmark = pytest.mark.slow


def test_a_restart_starts_the_next_attempt_twice_and_no_more(server: Server) -> None:
    server.appear("again")
    with server.launched("again", ["stay", "stay", "stay"]) as process:
        assert line(process) == "attempt 0 - -"
        first = server.order("again", "restart", nccl_algo="Tree", micro_batch=2)
        assert line(process) == "attempt 1 Tree 2"
        assert server.wait(first["id"], "applied")["results"][-1]["after"] == '{"attempt": 1}'
        server.appear("again", attempt=1)
        server.order("again", "restart")
        assert line(process) == "attempt 2 Tree 2"
        server.appear("again", attempt=2)
        third = server.order("again", "restart")
        assert "LANTERNE_RESTARTS allows no more" in server.wait(third["id"], "refused")["reason"]
        assert process.poll() is None
        last = server.order("again", "give_up")
        assert process.wait(timeout=60) == GIVE_UP_EXIT
        server.wait(last["id"], "applied")
        trail = [a["action"] for a in server.audit(first["id"])]
        assert (trail[-1], trail[0]) == ("command.issued", "command.applied")


def children(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return [p for p in psutil.Process(process.pid).children() if p.status() != psutil.STATUS_ZOMBIE]


def test_a_standby_waits_for_the_order_and_starts_with_its_environment(server: Server) -> None:
    server.appear("ready")
    with server.launched("ready", ["stay", 0], LANTERNE_STANDBY="1") as process:
        assert line(process) == "attempt 0 - -"
        _, ahead = until(lambda: found if len(found := children(process)) == 2 else None)
        server.order("ready", "restart", nccl_algo="Ring", micro_batch=2)
        assert line(process) == "attempt 1 Ring 2"
        assert process.wait(timeout=60) == 0
        assert process.stderr is not None
        assert "attempt 1 starts from standby" in process.stderr.read()
        assert not ahead.is_running()


@pytest.mark.heavy
def test_a_standby_of_torchrun_lets_every_rank_go(server: Server) -> None:
    server.appear("ranks")
    through = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    with server.launched("ranks", ["stay", 0], through=through, LANTERNE_STANDBY="1") as process:
        assert [line(process), line(process)] == ["attempt 0 - -"] * 2
        _, ahead = until(lambda: found if len(found := children(process)) == 2 else None)
        until(lambda: len(ahead.children()) == 2, 120)
        held = ahead.children()
        server.order("ranks", "restart", micro_batch=4)
        assert [line(process), line(process)] == ["attempt 1 - 4"] * 2
        assert process.wait(timeout=60) == 0
        assert process.stderr is not None
        assert "attempt 1 starts from standby" in process.stderr.read()
        assert not [p for p in (ahead, *held) if p.is_running()]


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM])
def test_a_standby_whose_launcher_ends_never_runs_the_script(server: Server, sign: signal.Signals) -> None:
    job = f"alone-{sign.name}"
    server.appear(job)
    with server.launched(job, ["stay", 0], LANTERNE_STANDBY="1") as process:
        assert line(process) == "attempt 0 - -"
        first, ahead = until(lambda: found if len(found := children(process)) == 2 else None)
        process.send_signal(sign)
        process.wait(timeout=60)
        until(lambda: not ahead.is_running() or ahead.status() == psutil.STATUS_ZOMBIE)
        with contextlib.suppress(psutil.Error):
            first.kill()
        assert process.stdout is not None
        assert process.stdout.read() == ""


def test_every_nodes_launcher_takes_the_order(server: Server) -> None:
    server.appear("nodes")
    with (
        server.launched("nodes", ["stay", 0], sessions="one") as first,
        server.launched("nodes", ["stay", 0], sessions="two") as second,
    ):
        assert line(first) == line(second) == "attempt 0 - -"
        made = server.order("nodes", "restart")
        assert line(first) == line(second) == "attempt 1 - -"
        assert first.wait(timeout=60) == second.wait(timeout=60) == 0
        server.wait(made["id"], "applied")


def test_a_command_that_failed_is_waited_for_with_an_order(server: Server) -> None:
    server.appear("failed")
    with server.launched("failed", [3, 0]) as process:
        assert line(process) == "attempt 0 - -"
        server.order("failed", "restart")
        assert line(process) == "attempt 1 - -"
        assert process.wait(timeout=60) == 0


def test_a_person_who_stops_the_job_is_obeyed(server: Server) -> None:
    server.appear("stopped")
    with server.launched("stopped", ["stay", 0]) as process:
        assert line(process) == "attempt 0 - -"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == -signal.SIGTERM


def test_without_restarts_nothing_is_waited_for_or_started(server: Server) -> None:
    server.appear("never")
    with server.launched("never", [3, 0], LANTERNE_RESTARTS="0") as process:
        assert line(process) == "attempt 0 - -"
        began = time.monotonic()
        server.order("never", "restart")
        assert process.wait(timeout=60) == 3
        assert time.monotonic() - began < 15


def test_a_node_is_left_out_only_where_the_job_can_do_without(server: Server) -> None:
    server.appear("fixed")
    with server.launched("fixed", ["stay", 0]) as process:
        assert line(process) == "attempt 0 - -"
        made = server.order("fixed", "restart_without_node", host="elsewhere")
        assert "--nnodes MIN:MAX" in server.wait(made["id"], "refused")["reason"]
    server.appear("elastic")
    with server.launched("elastic", ["stay", 0], "--nnodes", "1:4", LANTERNE_NODE="node-7") as process:
        assert line(process) == "attempt 0 - -"
        server.order("elastic", "restart_without_node", host="node-7")
        assert process.wait(timeout=60) == GIVE_UP_EXIT


@pytest.mark.parametrize(
    ("command", "can"),
    [
        (["torchrun", "--nnodes=2:4", "t.py"], True),
        (["torchrun", "--nnodes", "1:2", "t.py"], True),
        (["torchrun", "--nnodes=2", "t.py"], False),
        (["torchrun", "--nnodes=2:2", "t.py"], False),
        (["python", "t.py"], False),
    ],
)
def test_elastic_launches_are_told_from_fixed_ones(command: list[str], can: bool) -> None:
    assert elastic(command) is can


def test_an_altered_order_in_the_database_is_refused_and_audited(server: Server) -> None:
    server.appear("forged")
    server.appear("elsewhere")
    with server.launched("forged", ["stay", 0]) as process:
        assert line(process) == "attempt 0 - -"
        with sqlite3.connect(server.folder / "data" / "control.sqlite", timeout=30) as control:
            made = server.order("elsewhere", "restart", nccl_algo="Ring")  # another job's order, moved over and altered
            control.execute("UPDATE commands SET job = 'forged', attempt = 0 WHERE id = ?", [made["id"]])
        refused = server.wait(made["id"], "refused")
        assert "signature does not match" in refused["reason"]
        assert "command.refused" in [a["action"] for a in server.audit(made["id"])]
        assert process.poll() is None


def signed(private: str, **changes: Any) -> dict[str, Any]:
    now = time.time_ns()
    plain = {
        "id": "o1", "job": "alone", "attempt": 0, "action": "restart", "parameters": {}, "ranks": "all",
        "issued_ns": now, "expires_ns": now + 60_000_000_000, "counter": 1,
    }  # fmt: skip
    return orders.sign(plain | changes, private)


def test_a_hostile_backend_restarts_nothing(tmp_path: Path) -> None:
    """What a server without the job's key may send: refused with the reason, each told back as an event."""
    private, public = orders.generate_key()
    stranger, _ = orders.generate_key()
    past = {"issued_ns": time.time_ns() - 120_000_000_000, "expires_ns": time.time_ns() - 60_000_000_000}
    bad = {
        "forged": signed(stranger, id="forged", counter=2),
        "altered": {**signed(private, id="altered", counter=3), "parameters": {"micro_batch": 64}},
        "cross-job": signed(private, id="cross-job", job="another", counter=4),
        "stale": signed(private, id="stale", attempt=7, counter=5),
        "expired": signed(private, id="expired", counter=6, **past),
    }
    why = {
        "forged": "signature does not match", "altered": "signature does not match", "cross-job": "order is for job",
        "stale": "order is for attempt 7", "expired": "order expired", "replayed": "is a replay",
    }  # fmt: skip
    good = signed(private, id="good", counter=9)
    with Backend() as backend:
        backend.commands = list(bad.values())
        there = Server.__new__(Server)
        there.folder, there.url = tmp_path, backend.url
        with there.launched("alone", ["stay", "stay"], LANTERNE_COMMAND_KEY=public) as process:
            assert line(process) == "attempt 0 - -"
            for name in bad:
                assert backend.wait(lambda n=name: refusal(backend, n)), name  # type: ignore[misc]
                assert why[name] in refusal(backend, name)
            assert process.poll() is None
            backend.commands = [good]
            assert line(process) == "attempt 1 - -"
            backend.commands = [{**good, "id": "replayed"}, signed(private, id="replayed-2", counter=9)]
            assert backend.wait(lambda: refusal(backend, "replayed-2"))
            assert "order is for attempt 0, this is attempt 1" in refusal(backend, "replayed-2")
            assert process.poll() is None


def refusal(backend: Backend, identifier: str) -> str:
    rows = [row["attributes"] for kind, row in backend.rows if kind == "logs" and row["name"] == "command"]
    return next((str(r["detail"]) for r in rows if r["id"] == identifier and r["phase"] == "refused"), "")
