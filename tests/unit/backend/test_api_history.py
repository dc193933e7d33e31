"""Silences, decisions, replay and who waits for whom, over real HTTP."""

from __future__ import annotations

import base64
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from backend_rows import PROTOBUF, events, identity, serving

from lanterne import wire
from lanterne.backend.store import migrate
from lanterne.backend.store.control import ControlStore
from lanterne.settings import ServerSettings

API = "/api/v1"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Four ranks of twelve steps; rank 3 enters every call 3 ms after rank 0."""
    with serving(tmp_path_factory.mktemp("history")) as client:
        now = time.time_ns()
        whole = wire.encode(identity(0), events(12, rank=0, now_ns=now)).traces
        assert whole is not None
        for rank in range(1, 4):
            whole.MergeFrom(wire.encode(identity(rank), events(12, rank=rank, now_ns=now)).traces)
        client.post("/v1/traces", content=whole.SerializeToString(), headers=PROTOBUF).raise_for_status()
        yield client


def get(client: httpx.Client, path: str, **query: Any) -> Any:
    answer = client.get(API + path, params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_silence_is_listed_over_all_jobs_and_ended(tmp_path: Path) -> None:
    settings = ServerSettings(data=str(tmp_path))
    migrate.upgrade(settings, branch="control")
    control = ControlStore.open(settings)
    try:
        for job, hours in (("a", 2), ("b", 1), ("a", -1)):
            control.add_silence(job, f"f-{job}", control.clock.unix_ns() + hours * 3_600 * 10**9, says="known")
        assert [s.job for s in control.all_silences()] == ["b", "a"]
        assert [s.job for s in control.silences("a")] == ["a"]
        control.end_silence(control.all_silences()[0].id)
        assert [s.job for s in control.all_silences()] == ["a"]
    finally:
        control.close()


def test_an_unknown_silence_cannot_be_ended(server: httpx.Client) -> None:
    assert get(server, "/silences")["items"] == []
    assert server.delete(f"{API}/silences/7").status_code == 404


def test_decisions_and_replay_of_a_store_without_incidents_are_empty(server: httpx.Client) -> None:
    assert get(server, "/decisions") == {"items": [], "next": None}
    name = get(server, "/policies")["items"][0]["name"]
    assert get(server, f"/policies/{name}/replay") == {"items": []}
    assert server.get(f"{API}/policies/nobody/replay").status_code == 404


def test_the_last_to_enter_is_the_one_waited_for(server: httpx.Client) -> None:
    end = time.monotonic() + 20.0  # calls are matched some time after they came in
    while len((found := get(server, "/jobs/demo/waits"))["ranks"]) < 4 and time.monotonic() < end:
        time.sleep(0.1)
    assert (found["ranks"], found["values"]["shape"]) == ([0, 1, 2, 3], "4,4")
    cells = struct.unpack("<16f", base64.b64decode(found["values"]["bdata"]))
    waited = {(at // 4, at % 4) for at, value in enumerate(cells) if value > 0}
    assert waited == {(pair["rank"], pair["for"]) for pair in found["pairs"]}
    assert waited
    pooled = get(server, "/jobs/demo/waits", size=2)
    assert (pooled["ranks"], pooled["values"]["shape"]) == ([0, 2], "2,2")
    assert get(server, "/jobs/demo/waits", from_step=90, to_step=99)["pairs"] == []
