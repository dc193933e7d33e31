"""A real `lanterne serve` is killed under load, or told to end: what it acknowledged is there, exactly once."""

from __future__ import annotations

import random
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest
from backend_server import PROTOBUF, RANKS, body, check, serve

ROWS = 40


class Sender(threading.Thread):
    """One rank that sends span batches until the server is gone; repeats what was not acknowledged before."""

    def __init__(self, base: str, rank: int, first: int, acknowledged: set[int]) -> None:
        super().__init__(daemon=True)
        self.base, self.rank, self.next, self.acknowledged = base, rank, first, acknowledged
        self.gone = False

    def run(self) -> None:
        with httpx.Client(base_url=self.base, timeout=20) as client:
            while not self.gone:
                numbers = range(self.next, self.next + ROWS)
                try:
                    answer = client.post("/v1/traces", content=body(self.rank, numbers), headers=PROTOBUF)
                except httpx.HTTPError:
                    return
                if answer.status_code != 200:
                    self.gone = answer.status_code != 503
                    continue
                assert answer.content == b""
                self.acknowledged.update(numbers)
                self.next += ROWS


def load_and_end(data: Path, sent: dict[int, set[int]], after_s: float, how: signal.Signals) -> int:
    """Serve, send from all ranks, end the server in the middle; its exit code."""
    with serve(data) as (process, base):
        senders = [Sender(base, r, len(sent[r]), sent[r]) for r in range(RANKS)]
        for sender in senders:
            sender.start()
        goal = sum(map(len, sent.values())) + RANKS * ROWS  # under load: something was acknowledged in this life
        until = time.monotonic() + 60
        while sum(map(len, sent.values())) < goal and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(after_s)
        process.send_signal(how)
        code = process.wait(60)
        for sender in senders:
            sender.gone = True
            sender.join(60)
    assert sum(map(len, sent.values())) >= goal
    return code


def crashes(data: Path, times: int) -> None:
    sent: dict[int, set[int]] = {rank: set() for rank in range(RANKS)}
    chance = random.Random(20)
    for _ in range(times):
        assert load_and_end(data, sent, chance.uniform(0, 0.5), signal.SIGKILL) == -signal.SIGKILL
        check(data, sent)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_20_every_acknowledged_event_is_there_once(tmp_path: Path) -> None:
    crashes(tmp_path, 3)


@pytest.mark.heavy
@pytest.mark.timeout(3600)
def test_20_a_hundred_times(tmp_path: Path) -> None:
    crashes(tmp_path, 100)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_24_sigterm_in_mid_batch_loses_nothing_acknowledged(tmp_path: Path) -> None:
    sent: dict[int, set[int]] = {rank: set() for rank in range(RANKS)}
    assert load_and_end(tmp_path, sent, 0.2, signal.SIGTERM) in (0, -signal.SIGTERM)
    assert not list(tmp_path.glob("*.wal")), "the log was not folded into the file"
    check(tmp_path, sent)
