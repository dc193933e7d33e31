"""Crash trials of the command protocol: real processes, a real TCPStore, gloo all-reduces, SIGKILL at seeded points.

One trial forks a store process (the launcher's part) and ``WORLD`` ranks that train a tiny model with an
all-reduce a step. Orders arrive in the inbox; the victim kills itself with SIGKILL when it comes to the drawn
point of the protocol: before or after one store call or one line of the vote log. Each rank writes the rate
that it really used at each step; no two ranks may ever have used different rates at the same step, and every
process must be gone within a bound. Prints one JSON object a trial.

``--who launcher`` and ``--who backend`` kill what stands around the trainers (``remedy_outer_trials.py``); ``--who all
--trials 200 --summary --out FILE`` is the whole, and goes on where it was when it is called again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lanterne import orders
from lanterne.collector import commands, votelog
from lanterne.nouns import EventName, Identity
from lanterne.settings import CollectorSettings

WORLD, STEPS, STEP_S = 4, 120, 0.004
ENDS_WITHIN_S = 60.0
POINTS = (
    "none", "set:prepare:before", "set:prepare:after", "set:vote:before", "set:vote:after",
    "compare_set:decision:before", "compare_set:decision:after", "get:decision:before", "get:decision:after",
    "log:vote:before", "log:vote:after", "log:decision:before", "log:decision:after", "log:applied:before",
    "log:applied:after", "step",
)  # fmt: skip
VICTIMS = ("coordinator", "rank", "store")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class FatalStore:
    """A store client that ends this process at one point (``call:key:before|after``), the n-th time it is there."""

    def __init__(self, store: Any, point: str, nth: int) -> None:
        self.store, self.left = store, nth
        self.call, self.key, self.when = (*point.split(":"), "", "")[:3]

    def _do(self, call: str, key: str, run: Callable[[], Any]) -> Any:
        mine = call == self.call and key.split("/")[-2 if key.count("/") == 1 else 0] == self.key
        mine = mine or (call == self.call and key.split("/")[0] == self.key)
        if mine:
            self.left -= 1
        if mine and self.left == 0 and self.when == "before":
            die()
        found = run()
        if mine and self.left == 0 and self.when == "after":
            die()
        return found

    def set(self, key: str, value: str) -> None:
        self._do("set", key, lambda: self.store.set(key, value))

    def get(self, key: str) -> bytes:
        found: bytes = self._do("get", key, lambda: self.store.get(key))
        return found

    def check(self, keys: list[str]) -> bool:
        return bool(self.store.check(keys))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        found: bytes = self._do("compare_set", key, lambda: self.store.compare_set(key, expected, desired))
        return found


class Rank:
    """What a command agent needs of a session, around a loop with an all-reduce a step."""

    def __init__(self, folder: Path, rank: int, public: str) -> None:
        self.identity = Identity(job="trial", rank=rank, world_size=WORLD)
        self.settings = CollectorSettings(command_key=public)
        self.folder, self.step, self.closed = folder, 0, False
        torch.manual_seed(5)
        self.model: Any = torch.nn.Linear(8, 8)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.calls: list[Callable[[int], None]] = []

    @property
    def step_number(self) -> int:
        return self.step

    def phase(self, name: str) -> Any:
        return contextlib.nullcontext()

    def on_step_boundary(self, call: Callable[[int], None], /) -> None:
        self.calls.append(call)

    def put_event(self, name: EventName, /, body: str = "", attributes: Mapping[str, Any] | None = None) -> None:
        with (self.folder / f"events-{self.identity.rank}.jsonl").open("a") as file:
            file.write(json.dumps({"name": str(name), **(attributes or {})}) + "\n")

    def train(self, pace: random.Random, dies_at: int) -> None:
        rates = (self.folder / f"rates-{self.identity.rank}").open("a", buffering=1)
        for step in range(STEPS):
            time.sleep(pace.random() * 2 * STEP_S)
            self.optimizer.zero_grad()
            self.model(torch.ones(2, 8)).pow(2).mean().backward()
            for parameter in self.model.parameters():
                dist.all_reduce(parameter.grad)
            rates.write(f"{step} {self.optimizer.param_groups[0]['lr']!r}\n")
            self.optimizer.step()
            self.step = step + 1
            if self.step == dies_at:
                die()
            for call in self.calls:
                call(self.step)


def fatal_log(point: str, nth: int) -> None:
    """Let the vote log of this process be the place of its death."""
    _, kind, when = point.split(":")
    write, left = votelog.VoteLog.write, [nth]

    def fatal(self: votelog.VoteLog, found: str, **fields: Any) -> None:
        left[0] -= found == kind
        if found == kind and left[0] == 0 and when == "before":
            die()
        write(self, found, **fields)
        if found == kind and left[0] == 0 and when == "after":
            die()

    votelog.VoteLog.write = fatal  # type: ignore[method-assign]


def worker(folder: Path, rank: int, port: int, public: str, seed: int, point: str, nth: int) -> None:
    torch.set_num_threads(1)
    commands.IN_DOUBT_S = 1.5
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=20))
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("pg", store), rank=rank, world_size=WORLD, timeout=timedelta(seconds=20)
    )
    if point.startswith("log:"):
        fatal_log(point, nth)
    found = Rank(folder, rank, public)
    agent = commands.CommandAgent(found, clock=commands.SystemClock(), connect=lambda: None)
    own = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5))
    agent.join(FatalStore(dist.PrefixStore("lanterne", own), point, nth))
    found.on_step_boundary(agent.boundary)
    agent.thread.start()
    dies_at = 20 + nth * 40 if point == "step" else -1
    found.train(random.Random(seed * 10 + rank), dies_at)
    agent.close()


def spawn(run: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        os.dup2(sys.stderr.fileno(), 2)
        run()
        code = 0
    except SystemExit as left:
        code = int(left.code or 0)
    except BaseException:
        code = 1
    finally:
        os._exit(code)


def serve_store(pipe: int, dies: Callable[[], bool]) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(pipe, f"{store.port}\n".encode())
    while not dies():
        time.sleep(0.001)
    die()


def inbox(folder: Path, private: str) -> None:
    now = time.time_ns()
    path = folder / "commands"
    path.mkdir()
    lines = []
    for counter, factor in enumerate((0.5, 1.5, 0.25), start=1):
        plain = {
            "id": f"c{counter}", "job": "trial", "attempt": 0, "action": "scale_lr",
            "parameters": {"factor": factor}, "ranks": "all", "issued_ns": now,
            "expires_ns": now + 60_000_000_000, "counter": counter,
        }  # fmt: skip
        lines.append(json.dumps(orders.sign(plain, private)) + "\n")
    (path / "inbox.jsonl").write_text("".join(lines))


def phases(folder: Path) -> int:
    """How far the protocol came: lines of all vote logs, the clock by which the store is killed."""
    return sum(1 for path in (folder / "commands").glob("*.wal") for _ in votelog.read(path))


def trial(seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    victim, nth = draw.choice(VICTIMS), draw.randint(1, 3)
    point = draw.choice([p for p in POINTS if victim != "rank" or not p.startswith(("set:prepare", "compare_set"))])
    dead = {"coordinator": 0, "rank": draw.randint(1, WORLD - 1), "store": -1}[victim]
    lines = draw.randint(1, WORLD * 3)
    private, public = orders.generate_key()
    with tempfile.TemporaryDirectory(prefix="lanterne-trial-") as name:
        folder = Path(name)
        inbox(folder, private)
        read, write = os.pipe()
        reached = (lambda: phases(folder) >= lines) if victim == "store" else (lambda: False)
        pids = {-1: spawn(lambda: serve_store(write, reached))}
        port = int(os.read(read, 16))
        for rank in range(WORLD):
            mine = point if rank == dead else "none"
            pids[rank] = spawn(lambda r=rank, p=mine: worker(folder, r, port, public, seed, p, nth))  # type: ignore[misc]
        exits = gone(pids)
        os.close(read), os.close(write)
        return verdict(folder, exits) | {"seed": seed, "victim": victim, "point": point, "nth": nth}


def gone(pids: dict[int, int]) -> dict[int, int | None]:
    """Exit codes of the ranks (None: still there at the bound); the store process is ended last."""
    deadline, exits = time.monotonic() + ENDS_WITHIN_S, dict[int, int | None]()
    while len(exits) < WORLD and time.monotonic() < deadline:
        for rank in set(range(WORLD)) - set(exits):
            pid, status = os.waitpid(pids[rank], os.WNOHANG)
            if pid:
                exits[rank] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    for rank, pid in pids.items():
        if rank not in exits:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            exits.setdefault(rank, None)
    del exits[-1]
    return exits


def verdict(folder: Path, exits: Mapping[int, int | None]) -> dict[str, Any]:
    used: dict[int, set[str]] = {}
    for rank in range(WORLD):
        path = folder / f"rates-{rank}"
        for line in path.read_text().splitlines() if path.exists() else ():
            step, _, rate = line.partition(" ")
            used.setdefault(int(step), set()).add(rate)
    applied: dict[str, set[str]] = {}
    counts: dict[str, int] = {}
    for path in (folder / "commands").glob("*.wal"):
        for entry in votelog.read(path):
            if entry["kind"] == "applied":
                effect = json.dumps([entry["step"], entry.get("after"), entry.get("failed")])
                applied.setdefault(entry["id"], set()).add(effect)
                counts[entry["id"]] = counts.get(entry["id"], 0) + 1
    different = sorted(step for step, rates in used.items() if len(rates) > 1)
    different += [-1] if any(len(effects) > 1 for effects in applied.values()) else []
    return {
        "different": different,
        "hung": sorted(rank for rank, code in exits.items() if code is None),
        "applied": counts,
        "exits": dict(sorted(exits.items())),
        "steps": max(used, default=-1) + 1,
    }


def kind_of(seed: int, who: str) -> str:
    """``inner`` (a rank, the coordinator or the store), ``launcher`` or ``backend``; ``all`` is 3, 1 and 1 in five."""
    return who if who != "all" else ("inner", "inner", "inner", "launcher", "backend")[seed % 5]


def trials(seeds: list[int], who: str) -> Iterator[dict[str, Any]]:
    """The rows of these seeds, one kind after the other, so that a server and a job serve many trials."""
    yield from (trial(seed) for seed in seeds if kind_of(seed, who) == "inner")
    for kind in ("launcher", "backend"):
        mine = [seed for seed in seeds if kind_of(seed, who) == kind]
        if not mine:
            continue
        from remedy_outer_trials import stage

        with tempfile.TemporaryDirectory(prefix="lanterne-trials-") as name, stage(kind, Path(name) / kind) as run:
            yield from map(run, mine)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    victims = sorted({row["victim"] for row in rows})
    return {
        "trials": len(rows),
        "different": sum(bool(row["different"]) for row in rows),
        "hung": sum(bool(row["hung"]) for row in rows),
        "by_victim": {v: sum(row["victim"] == v for row in rows) for v in victims},
        "seeds": [min(row["seed"] for row in rows), max(row["seed"] for row in rows)] if rows else [],
        "bad": [row for row in rows if row["different"] or row["hung"]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="the first seed; the others follow it")
    parser.add_argument("--who", choices=("inner", "launcher", "backend", "all"), default="inner")
    parser.add_argument("--out", type=Path, help="keep a line a trial here, and go on behind what stands there")
    parser.add_argument("--summary", action="store_true", help="print one object at the end: trials, different, hung")
    arguments = parser.parse_args()
    known: list[dict[str, Any]] = []
    if arguments.out is not None and arguments.out.exists():
        known = [json.loads(line) for line in arguments.out.read_text().splitlines() if line]
    wanted = set(range(arguments.seed, arguments.seed + arguments.trials))
    rows = [row for row in known if row["seed"] in wanted]
    for row in trials(sorted(wanted - {row["seed"] for row in rows}), arguments.who):
        rows.append(row)
        if arguments.out is not None:
            with arguments.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
        if not arguments.summary:
            print(json.dumps(row), flush=True)
    if arguments.summary:
        print(json.dumps(summary(rows), indent=1))


if __name__ == "__main__":
    main()
