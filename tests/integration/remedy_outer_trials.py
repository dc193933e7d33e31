"""Crash trials of what stands around the trainers: SIGKILL of the launcher and of the backend at seeded points.

Launcher: a real server orders a restart of a real command under ``lanterne run``, which kills itself at the drawn
point (a line of its log, a word to the backend, the end of the command, the start of the next one). Two trainers of
one job must never run at once, each must go on or be gone, and a second launch must not carry the order out again.

Backend: four real ranks with ``lanterne.attach`` and a real shipper train on and on; an order is given, the server is
killed when it has come to the drawn point, started again over the same folder, and must find its way: every rank used
the same rate at every step, none applied an order twice, and the order ends the same for all.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from lanterne import wire
from lanterne.collector import votelog
from lanterne.nouns import Event, EventName, Identity, Kind
from lanterne.serving import EmbeddedServer
from lanterne.settings import ServerSettings

WORLD = 4
ENDS_WITHIN_S = 30.0
SETTLES_WITHIN_S = 60.0
FINAL = ("applied", "refused", "expired", "cancelled", "undone")
LAUNCHER_POINTS = tuple(
    f"{place}:{when}"
    for place in (
        "say:received", "log:vote", "log:decision", "say:committed", "end:1", "start:2", "say:applied",
    )
    for when in ("before", "after")
)  # fmt: skip
BACKEND_POINTS = ("posting", "answered", "fetched", *(f"log:{n}" for n in range(1, 13)), "told:1", "told:4")


def clean_environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "LANTERNE_"))}
    return kept | {"OMP_NUM_THREADS": "1", "NO_PROXY": "*", **more}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(look: Callable[[], Any], seconds: float, pause_s: float = 0.02) -> Any:
    """What ``look`` finds, as soon as it finds something; its last answer when the time is over."""
    deadline = time.monotonic() + seconds
    while not (found := look()) and time.monotonic() < deadline:
        time.sleep(pause_s)
    return found


def order(url: str, job: str, action: str, **parameters: Any) -> dict[str, Any]:
    body = {"action": action, "parameters": parameters}
    found: dict[str, Any] = httpx.post(f"{url}/api/v1/jobs/{job}/commands", json=body).raise_for_status().json()
    return found


def state(url: str, identifier: str) -> str:
    try:
        answer = httpx.get(f"{url}/api/v1/commands/{identifier}", timeout=5.0)
        return str(answer.json()["state"]) if answer.status_code == 200 else ""
    except httpx.HTTPError:
        return ""


# --- the launcher ----------------------------------------------------------------------------------------------------

LAUNCH = textwrap.dedent("""
    import collections, os, signal, sys
    from lanterne.collector import votelog
    from lanterne.collector.integrations import launch, launch_orders
    point, counts = os.environ.pop("TRIAL_POINT", ""), collections.Counter()
    def fatal(owner, name, label):
        original = getattr(owner, name)
        def call(*args, **fields):
            counts[name] += 1
            place = label(args, counts[name])
            if point == place + ":before":
                os.kill(os.getpid(), signal.SIGKILL)
            found = original(*args, **fields)
            if point == place + ":after":
                os.kill(os.getpid(), signal.SIGKILL)
            return found
        setattr(owner, name, call)
    fatal(votelog.VoteLog, "write", lambda args, n: "log:" + args[1])
    fatal(launch_orders.Orders, "_say", lambda args, n: "say:" + args[2])
    fatal(launch_orders, "end_tree", lambda args, n: f"end:{n}")
    fatal(launch, "_start", lambda args, n: f"start:{n}")
    sys.exit(launch.main(sys.argv[1:]))
""")
TRAINER = textwrap.dedent("""
    # one process that trains for ever, notes who else does, and takes a moment to end
    import fcntl, os, pathlib, signal, sys, time, urllib.request
    folder, job = pathlib.Path(sys.argv[1]), os.environ["LANTERNE_JOB"]
    attempt = os.environ.get("LANTERNE_ATTEMPT_BASE", "0")
    lock = open(folder / "lock", "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        (folder / "overlap").touch()
    session = folder / "sessions" / job / attempt
    (session / "commands").mkdir(parents=True, exist_ok=True)
    key = urllib.request.urlopen(f"{os.environ['LANTERNE_ENDPOINT']}/api/v1/jobs/{job}/key").read()
    (session / "commands" / "key.json").write_bytes(key)
    def end(*_):
        time.sleep(float(sys.argv[2]))
        sys.exit(1)
    signal.signal(signal.SIGTERM, end)
    with open(folder / "starts", "a") as starts:
        print(attempt, os.getpid(), file=starts)
    pathlib.Path(os.environ["LANTERNE_EXITS"], f"shipper-{os.getpid()}").write_text(str(session))
    while True:
        (folder / f"beat-{os.getpid()}").write_text(str(time.monotonic_ns()))
        time.sleep(0.01)
""")


class Launches:
    """A real server for all launcher trials."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        settings = ServerSettings(
            port=free_port(), grpc_port=0, data=str(folder / "data"), dashboard=False, policy="auto"
        )
        self.server = EmbeddedServer(settings)
        self.url = self.server.start()

    def close(self) -> None:
        self.server.stop()

    def _appear(self, job: str) -> None:
        event = Event(
            kind=Kind.EVENT, name=EventName.HEARTBEAT, sequence=0, lamport=0, unix_ns=time.time_ns(),
            monotonic_ns=time.monotonic_ns(),
        )  # fmt: skip
        body = wire.encode(Identity(job=job, attempt=0, rank=0, world_size=1), [event]).logs
        headers = {"content-type": "application/x-protobuf"}
        httpx.post(f"{self.url}/v1/logs", content=body.SerializeToString(), headers=headers).raise_for_status()

    def trial(self, seed: int) -> dict[str, Any]:
        draw = random.Random(seed)
        point, slow, job = draw.choice(LAUNCHER_POINTS), draw.choice((0.0, 0.3)), f"launch-{seed}"
        folder = self.folder / job
        folder.mkdir()
        (folder / "train.py").write_text(TRAINER)
        self._appear(job)
        hung: list[str] = []
        first = self._launch(folder, job, slow, point)
        until(lambda: starts(folder), ENDS_WITHIN_S)
        made = order(self.url, job, "restart")
        if until(lambda: first.poll() is not None, ENDS_WITHIN_S):
            hung += self._left_behind(folder)
        else:
            hung.append("the point was not reached")
        kill(first)
        for _, pid in starts(folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        until(lambda: not any(alive(pid) for _, pid in starts(folder)), ENDS_WITHIN_S)
        committed = decided(folder / "sessions" / job / "0" / "commands" / "launcher.wal", made["id"])
        before = len(starts(folder))
        second = self._launch(folder, job, slow, "")
        until(lambda: len(starts(folder)) > before, ENDS_WITHIN_S)
        settled = until(lambda: state(self.url, made["id"]) in FINAL, SETTLES_WITHIN_S, 0.1)
        if state(self.url, made["id"]) == "applied" and not until(lambda: restarted(folder), ENDS_WITHIN_S):
            hung.append("applied, and no attempt came of it")
        second.terminate()
        try:
            second.wait(ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            hung.append("the second launch does not end")
        kill(second)
        restarts, again = restarted(folder), restarted(folder, before)
        different = ["two at once"] if (folder / "overlap").exists() else []
        different += [f"restarted {restarts} times"] if restarts > 1 else []
        different += ["carried out again"] if committed and again else []
        hung += [] if settled else ["the order is never settled"]
        return {
            "seed": seed, "victim": "launcher", "point": point, "different": different, "hung": hung,
            "committed": committed, "restarts": restarts, "state": state(self.url, made["id"]),
        }  # fmt: skip

    def _launch(self, folder: Path, job: str, slow: float, point: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(folder / "train.py"), str(folder), str(slow)]
        with (folder / "log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-c", LAUNCH, "--", *command], stdout=log, stderr=log,
                env=clean_environment(LANTERNE_ENDPOINT=self.url, LANTERNE_JOB=job, TRIAL_POINT=point),
            )  # fmt: skip

    def _left_behind(self, folder: Path) -> list[str]:
        """Trainers that neither go on nor end after their launcher was killed."""
        stuck = []
        for _, pid in starts(folder):
            began, beat = time.monotonic_ns(), folder / f"beat-{pid}"

            def settled(pid: int = pid, beat: Path = beat, began: int = began) -> bool:
                return not alive(pid) or (beat.exists() and int(beat.read_text() or 0) > began)

            if not until(settled, ENDS_WITHIN_S):
                stuck.append(f"trainer {pid}")
        return stuck


def starts(folder: Path) -> list[tuple[str, int]]:
    """(attempt, pid) of every trainer so far."""
    try:
        words = [line.split() for line in (folder / "starts").read_text().splitlines()]
    except OSError:
        return []
    return [(attempt, int(pid)) for attempt, pid in words]


def restarted(folder: Path, since: int = 0) -> int:
    """How many of the trainers from the ``since``-th on belong to attempt 1."""
    return sum(attempt == "1" for attempt, _ in starts(folder)[since:])


def decided(path: Path, identifier: str) -> bool:
    entries = list(votelog.read(path))
    rounds = {e["round"] for e in entries if e.get("kind") == "vote" and e.get("id") == identifier}
    return any(e.get("kind") == "decision" and e["decision"] == "commit" and e["round"] in rounds for e in entries)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    process.wait()


# --- the backend -----------------------------------------------------------------------------------------------------

RANK = textwrap.dedent("""
    import datetime, os, sys, time
    import torch, torch.distributed as dist, lanterne
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    torch.manual_seed(5)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = lanterne.attach(model, optimizer)
    rates = open(os.path.join(sys.argv[1], f"rates-{dist.get_rank()}"), "a", buffering=1)
    step = 0
    while True:
        time.sleep(0.01)
        optimizer.zero_grad()
        model(torch.ones(2, 8)).pow(2).mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        rates.write(f"{step} {optimizer.param_groups[0]['lr']!r}\\n")
        optimizer.step()
        session.step()
        step += 1
""")
JOB = "outlives"


class Backends:
    """One job of four ranks whose backend is killed again and again."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = self._serve()
        port = free_port()
        self.ranks = [self._rank(rank, port) for rank in range(WORLD)]
        self.commands = folder / "s" / JOB / "0" / "commands"
        if not until(lambda: (self.commands / "key.json").exists() and self.steps() > 20, 120.0, 0.1):
            self.close()
            raise RuntimeError(f"the job did not start: {(folder / 'ranks.log').read_text()[-2000:]}")

    def close(self) -> None:
        for process in (*self.ranks, self.server):
            kill(process)

    def _serve(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "lanterne", "serve", "--port", str(self.port), "--grpc-port", "0"]
        environ = clean_environment(LANTERNE_DATA=str(self.folder / "data"), LANTERNE_DASHBOARD="0")
        with (self.folder / "serve.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env=environ | {"LANTERNE_POLICY": "auto"})

    def _rank(self, rank: int, port: int) -> subprocess.Popen[bytes]:
        environ = clean_environment(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD), MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo", LANTERNE_ENDPOINT=self.url, LANTERNE_JOB=JOB,
            LANTERNE_DIR=str(self.folder / "s"),
        )  # fmt: skip
        with (self.folder / "ranks.log").open("ab") as log:
            return subprocess.Popen([sys.executable, "-c", RANK, str(self.folder)], stdout=log, stderr=log, env=environ)

    def ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz", timeout=2.0).status_code == 200
        except httpx.HTTPError:
            return False

    def used(self) -> dict[int, set[str]]:
        """Step -> the rates that ranks used at it; whole lines only."""
        found: dict[int, set[str]] = {}
        for rank in range(WORLD):
            path = self.folder / f"rates-{rank}"
            text = path.read_text() if path.exists() else ""
            for line in text[: text.rfind("\n") + 1].splitlines():
                step, _, rate = line.partition(" ")
                found.setdefault(int(step), set()).add(rate)
        return found

    def steps(self) -> int:
        return max(self.used(), default=0)

    def applied(self) -> dict[str, list[tuple[int, str]]]:
        """Order -> (step, effect) of each rank that carried it out."""
        found: dict[str, list[tuple[int, str]]] = {}
        for path in self.commands.glob("rank-*.wal"):
            for entry in votelog.read(path):
                if entry["kind"] == "applied":
                    effect = json.dumps([entry.get("after"), entry.get("failed")])
                    found.setdefault(entry["id"], []).append((entry["step"], effect))
        return found

    def lines(self) -> int:
        return sum(1 for path in self.commands.glob("rank-*.wal") for _ in votelog.read(path))

    def _reached(self, point: str, lines: int, made: dict[str, Any], posted: threading.Event) -> bool:
        what, _, count = point.partition(":")
        if what == "posting":
            return posted.is_set()
        if what == "answered":
            return bool(made)
        if what == "fetched":
            inbox = self.commands / "inbox.jsonl"
            return bool(made) and inbox.exists() and made["id"] in inbox.read_text()
        if what == "log":
            return self.lines() >= lines + int(count)
        if not made:
            return False
        answer = httpx.get(f"{self.url}/api/v1/commands/{made['id']}").json()
        return sum(r.get("phase") == "applied" for r in answer.get("results", ())) >= int(count)

    def trial(self, seed: int) -> dict[str, Any]:
        draw = random.Random(seed)
        point, factor = draw.choice(BACKEND_POINTS), draw.choice((0.5, 0.8, 1.25, 2.0))
        delay_s, away_s = draw.random() * 0.008, draw.random()
        until(self.ready, SETTLES_WITHIN_S, 0.1)
        lines, made, posted = self.lines(), dict[str, Any](), threading.Event()

        def post() -> None:
            posted.set()
            with contextlib.suppress(httpx.HTTPError):
                made.update(order(self.url, JOB, "scale_lr", factor=factor))

        poster = threading.Thread(target=post, daemon=True)
        poster.start()
        reached = until(lambda: self._reached(point, lines, made, posted), ENDS_WITHIN_S, 0.001)
        time.sleep(delay_s if point == "posting" else 0.0)
        kill(self.server)
        poster.join(10.0)
        time.sleep(away_s)
        self.server = self._serve()
        hung = [] if reached else ["the point was not reached"]
        if not until(self.ready, SETTLES_WITHIN_S, 0.05):
            hung.append("the backend does not come back")
        return self._verdict(made, hung) | {"seed": seed, "victim": "backend", "point": point}

    def _verdict(self, made: dict[str, Any], hung: list[str]) -> dict[str, Any]:
        identifier = made.get("id") or self._newest()
        settled = until(lambda: state(self.url, identifier) in FINAL, SETTLES_WITHIN_S, 0.1) if identifier else True
        step = self.steps()
        if not until(lambda: self.steps() > step + 5, ENDS_WITHIN_S, 0.1):
            hung.append("the ranks stand still")
        applied = self.applied()
        different = sorted(step for step, rates in self.used().items() if len(rates) > 1)
        effects = applied.get(identifier, [])
        told = state(self.url, identifier) if identifier else ""
        uneven = [i for i, found in applied.items() if len(set(found)) > 1 or len(found) not in (0, WORLD)]
        uneven += [identifier] if (told == "applied") != (len(effects) == WORLD) else []
        hung += [] if settled else [f"the order stays {told}"]
        return {"different": different + sorted(set(uneven)), "hung": hung, "applied": len(effects), "state": told}

    def _newest(self) -> str:
        """The order that was stored although nobody heard the answer; empty where it was not."""
        answer = httpx.get(f"{self.url}/api/v1/jobs/{JOB}/commands?limit=1")
        items = answer.json()["items"] if answer.status_code == 200 else []
        return str(items[0]["id"]) if items else ""


@contextlib.contextmanager
def stage(kind: str, folder: Path) -> Iterator[Callable[[int], dict[str, Any]]]:
    """The trials of ``launcher`` or ``backend``, over one server or one job."""
    folder.mkdir(parents=True)
    found = Launches(folder) if kind == "launcher" else Backends(folder)
    try:
        yield found.trial
    finally:
        found.close()
