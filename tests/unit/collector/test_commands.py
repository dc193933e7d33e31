"""The command protocol between ranks: threads of one process, a real c10d store, real optimizers."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lanterne import orders
from lanterne.collector import commands, votelog
from lanterne.nouns import EventName, Identity
from lanterne.settings import CollectorSettings

PRIVATE, PUBLIC = orders.generate_key()
JOB = "job-a"


class Trainer:
    """A rank of a small job: a model, an optimizer and a loop, with everything a command needs."""

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        self.identity = Identity(job=JOB, attempt=1, rank=rank, world_size=world)
        self.settings = CollectorSettings(command_key=PUBLIC)
        self.folder, self.step, self.closed = folder, 0, False
        torch.manual_seed(3)
        self.model: Any = torch.nn.Linear(4, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler: Any = None
        self.scaler: Any = None
        self.said: list[dict[str, Any]] = []
        self.rates: list[float] = []
        self.calls: list[Any] = []

    @property
    def step_number(self) -> int:
        return self.step

    def phase(self, name: str) -> Any:
        return contextlib.nullcontext()

    def on_step_boundary(self, call: Any, /) -> None:
        self.calls.append(call)

    def put_event(self, name: EventName, /, body: str = "", attributes: Mapping[str, Any] | None = None) -> None:
        self.said.append({"name": str(name), "body": body, **(attributes or {})})

    def phases(self, order_id: str) -> list[str]:
        return [s["phase"] for s in self.said if s.get("id") == order_id]

    def train_step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(1, 4)).sum().backward()
        self.optimizer.step()
        self.rates.append(self.optimizer.param_groups[0]["lr"])
        self.step += 1
        for call in self.calls:
            call(self.step)


class Job:
    """``world`` trainers in threads of this process that share one c10d store, as ranks share the job's."""

    def __init__(self, folder: Path, world: int) -> None:
        self.folder = folder
        self.store = dist.HashStore()
        self.trainers = [Trainer(folder, rank, world) for rank in range(world)]
        self.agents = [commands.start(t, connect=lambda: self.store) for t in self.trainers]
        self.counter = 0
        self._stop = threading.Event()
        self._barrier = threading.Barrier(world)
        self._threads = [threading.Thread(target=self._train, args=(t,)) for t in self.trainers]
        self.exits: dict[int, Any] = {}

    def _train(self, trainer: Trainer) -> None:
        try:
            while not self._stop.is_set():
                self._barrier.wait(30)  # what a collective does to a step
                trainer.train_step()
                time.sleep(0.002 * (trainer.identity.rank + 1))
        except SystemExit as left:
            self.exits[trainer.identity.rank] = left.code
            self._barrier.abort()
        except threading.BrokenBarrierError:
            pass

    def run(self) -> Job:
        for thread in self._threads:
            thread.start()
        return self

    def order(self, action: str, parameters: dict[str, Any], **changes: Any) -> dict[str, Any]:
        self.counter += 1
        now = time.time_ns()
        plain = {
            "id": f"c{self.counter}",
            "job": JOB,
            "attempt": 1,
            "action": action,
            "parameters": parameters,
            "ranks": "all",
            "issued_ns": now,
            "expires_ns": now + 60_000_000_000,
            "counter": self.counter,
        }
        return orders.sign(plain | changes, changes.pop("private", PRIVATE))

    def submit(self, order: Mapping[str, Any]) -> None:
        path = self.folder / "commands" / "inbox.jsonl"
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(order) + "\n")

    def until(self, order_id: str, *phases: str, everywhere: bool = True, seconds: float = 60.0) -> None:
        watched = self.trainers if everywhere else self.trainers[:1]
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if all(set(phases) & set(t.phases(order_id)) for t in watched):
                return
            time.sleep(0.01)
        raise AssertionError(f"{order_id}: {phases} not seen: {[t.said for t in self.trainers]}")

    def close(self) -> None:
        self._stop.set()
        self._barrier.abort()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(30)
        for agent in self.agents:
            agent.close()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    found = Job(tmp_path, 3)
    yield found.run()
    found.close()


def applied_steps(job: Job, order_id: str) -> set[int]:
    return {s["step"] for t in job.trainers for s in t.said if s.get("id") == order_id and s["phase"] == "applied"}


def test_all_ranks_apply_at_the_same_step(job: Job) -> None:
    order = job.order("scale_lr", {"factor": 0.5})
    job.submit(order)
    job.until(order["id"], "applied")
    job.close()
    assert len(applied_steps(job, order["id"])) == 1
    shortest = min(len(t.rates) for t in job.trainers)
    assert len({tuple(t.rates[:shortest]) for t in job.trainers}) == 1
    assert {t.optimizer.param_groups[0]["lr"] for t in job.trainers} == {0.05}
    assert job.trainers[1].phases(order["id"])[-4:] == ["prepared", "voted", "committed", "applied"]


def test_the_vote_is_on_disk_with_the_decision_and_the_effect(job: Job) -> None:
    order = job.order("scale_lr", {"factor": 0.5})
    job.submit(order)
    job.until(order["id"], "applied")
    for rank in range(3):
        kinds = [e["kind"] for e in votelog.read(job.folder / "commands" / f"rank-{rank}.wal")]
        assert kinds[-3:] == ["vote", "decision", "applied"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"private": orders.generate_key()[0]}, "signature does not match"),
        ({"job": "job-b"}, "is for job 'job-b'"),
        ({"attempt": 0}, "for attempt 0, this is attempt 1"),
        ({"issued_ns": 10, "expires_ns": 20}, "expired"),
        ({"expires_ns": 1 << 62}, "the bound is"),
        ({"action": "format_disk"}, "is not one of"),
        ({"parameters": {"factor": 50.0}}, "is outside"),
        ({"parameters": {"factor": 0.5, "also": 1}}, "unknown parameters also"),
        ({"ranks": [1]}, "concerns all ranks or none"),
    ],
)
def test_bad_orders_are_refused_and_told(job: Job, changes: dict[str, Any], why: str) -> None:
    private = changes.pop("private", PRIVATE)
    now = time.time_ns()
    plain = {
        "id": "bad", "job": JOB, "attempt": 1, "action": "scale_lr", "parameters": {"factor": 0.5}, "ranks": "all",
        "issued_ns": now, "expires_ns": now + 60_000_000_000, "counter": 1,
    }  # fmt: skip
    job.submit(orders.sign(plain | changes, private))
    job.until("bad", "refused", everywhere=False)
    refusal = next(s for s in job.trainers[0].said if s.get("phase") == "refused")
    assert why in refusal["detail"]
    assert {t.optimizer.param_groups[0]["lr"] for t in job.trainers} == {0.1}


def test_a_replay_is_refused(job: Job) -> None:
    order = job.order("scale_lr", {"factor": 0.5})
    job.submit(order)
    job.until(order["id"], "applied")
    job.submit(order)
    job.until(order["id"], "refused", everywhere=False)
    assert {t.optimizer.param_groups[0]["lr"] for t in job.trainers} == {0.05}


def test_an_order_altered_on_its_way_is_refused(job: Job) -> None:
    order = job.order("scale_lr", {"factor": 0.5})
    job.submit(order | {"parameters": {"factor": 0.01}})
    job.until(order["id"], "refused", everywhere=False)
    assert {t.optimizer.param_groups[0]["lr"] for t in job.trainers} == {0.1}


def test_one_rank_that_cannot_do_it_stops_it_for_all(job: Job) -> None:
    job.trainers[2].scaler = None
    for trainer in job.trainers[:2]:
        trainer.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        trainer.scaler.scale(torch.ones(1))
    order = job.order("set_loss_scale", {"scale": 8.0})
    job.submit(order)
    job.until(order["id"], "aborted", everywhere=False)
    job.until(order["id"], "refused", everywhere=False)
    told = next(s for s in job.trainers[0].said if s.get("phase") == "refused")
    assert "rank 2" in told["detail"]
    assert [t.scaler.get_scale() for t in job.trainers[:2]] == [64.0, 64.0]


def test_undo_takes_back_exactly(job: Job) -> None:
    first = job.order("scale_lr", {"factor": 0.5})
    job.submit(first)
    job.until(first["id"], "applied")
    second = job.order("undo", {"of": first["id"]})
    job.submit(second)
    job.until(first["id"], "undone")
    assert {t.optimizer.param_groups[0]["lr"] for t in job.trainers} == {0.1}


def test_a_paused_job_still_takes_orders(job: Job) -> None:
    pause = job.order("pause", {"max_s": 60})
    job.submit(pause)
    job.until(pause["id"], "applied")
    held = {t.step for t in job.trainers}
    change = job.order("scale_lr", {"factor": 0.5})
    job.submit(change)
    job.until(change["id"], "applied")
    assert {t.step for t in job.trainers} == held
    resume = job.order("resume", {})
    job.submit(resume)
    job.until(resume["id"], "applied")
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and {t.step for t in job.trainers} == held:
        time.sleep(0.01)
    assert min(t.step for t in job.trainers) > min(held) - 1
    assert max(t.step for t in job.trainers) > max(held)


def test_stop_leaves_every_rank_with_the_code(job: Job) -> None:
    order = job.order("stop", {"exit_code": 7})
    job.submit(order)
    job.until(order["id"], "applied")
    job.close()
    assert job.exits == {0: 7, 1: 7, 2: 7}


def test_stacks_are_collected_from_a_rank_that_makes_no_step(tmp_path: Path) -> None:
    job = Job(tmp_path, 2)  # never run: no step is ever made
    try:
        order = job.order("collect_stacks", {}, ranks=[1])
        job.submit(order)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and "applied" not in job.trainers[1].phases(order["id"]):
            time.sleep(0.01)
        bodies = [s["body"] for s in job.trainers[1].said if s["name"] == "stacks"]
        assert "Thread MainThread" in bodies[0]
        assert not [s for s in job.trainers[0].said if s["name"] == "stacks"]
    finally:
        job.close()


def test_an_idle_channel_writes_nothing(job: Job, tmp_path: Path) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and min(t.step for t in job.trainers) < 100:
        time.sleep(0.01)
    job.close()
    assert job.store.num_keys() == 0
    assert not list(votelog.read(tmp_path / "commands" / "rank-0.wal"))


def test_a_rank_in_doubt_follows_a_decision_in_another_ranks_log(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, 1, 2)
    agent = commands.CommandAgent(trainer, clock=commands.SystemClock(), connect=lambda: None)
    store = dist.HashStore()
    participant = commands.Participant(store, 1, agent.log, agent.clock, agent._judge, agent.say, agent.position)
    agent.participant = participant
    order = Job.order(SimpleNamespace(counter=0), "scale_lr", {"factor": 0.5})  # type: ignore[arg-type]
    store.set("prepare/0", json.dumps({"order": order, "target": 5, "lasts_ns": 10**12}))
    participant.poll()
    votelog.VoteLog(tmp_path / "commands" / "rank-0.wal").write("decision", round=0, decision="commit")
    participant.lose("store gone")
    agent.boundary(5)
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    agent.close()


def test_a_rank_in_doubt_without_evidence_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "IN_DOUBT_S", 0.1)
    trainer = Trainer(tmp_path, 1, 2)
    agent = commands.CommandAgent(trainer, clock=commands.SystemClock(), connect=lambda: None)
    store = dist.HashStore()
    participant = commands.Participant(store, 1, agent.log, agent.clock, agent._judge, agent.say, agent.position)
    agent.participant = participant
    order = Job.order(SimpleNamespace(counter=0), "scale_lr", {"factor": 0.5})  # type: ignore[arg-type]
    store.set("prepare/0", json.dumps({"order": order, "target": 5, "lasts_ns": 10**12}))
    participant.poll()
    participant.lose("store gone")
    with pytest.raises(SystemExit) as left:
        agent.boundary(5)
    assert left.value.code == commands.IN_DOUBT_EXIT
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    agent.close()


def test_a_late_vote_is_a_no(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, 0, 2)
    agent = commands.CommandAgent(trainer, clock=commands.SystemClock(), connect=lambda: None)
    store = dist.HashStore()
    participant = commands.Participant(store, 0, agent.log, agent.clock, agent._judge, agent.say, agent.position)
    agent.position.step = 5
    order = Job.order(SimpleNamespace(counter=0), "scale_lr", {"factor": 0.5})  # type: ignore[arg-type]
    store.set("prepare/0", json.dumps({"order": order, "target": 5, "lasts_ns": 10**12}))
    participant.poll()
    assert json.loads(store.get("vote/0/0"))["vote"] == "no"
    assert not participant.armed
    agent.close()


def test_whoever_waits_too_long_aborts_for_all(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, 1, 2)
    agent = commands.CommandAgent(trainer, clock=commands.SystemClock(), connect=lambda: None)
    store = dist.HashStore()
    participant = commands.Participant(store, 1, agent.log, agent.clock, agent._judge, agent.say, agent.position)
    order = Job.order(SimpleNamespace(counter=0), "scale_lr", {"factor": 0.5})  # type: ignore[arg-type]
    store.set("prepare/0", json.dumps({"order": order, "target": 5, "lasts_ns": 0}))
    participant.poll()
    participant.poll()
    assert store.get("decision/0").startswith(b"abort: rank 1 waited")
    assert store.compare_set("decision/0", "", "commit").startswith(b"abort")
    assert not participant.armed
    agent.close()


def test_a_second_life_goes_on_after_the_last_round(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.wal"
    log = votelog.VoteLog(path)
    log.write("vote", round=4, counter=9, vote="yes")
    log.write("decision", round=4, decision="commit")
    log.close()
    with path.open("ab") as file:
        file.write(b'{"kind":"vote","round":5,"cou')
    again = votelog.VoteLog(path)
    assert (again.last_round, again.last_counter) == (4, 9)
    again.write("vote", round=5, counter=10, vote="no")
    assert [e["round"] for e in votelog.read(path)] == [4, 4, 5]
    again.close()
