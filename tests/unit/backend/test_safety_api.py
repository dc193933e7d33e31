"""Breakers, rules, alerts, silences and the fleet's levels of a running server, over real HTTP."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from backend_rows import events, identity, send, serving
from receiver import Receiver

from lanterne.nouns import Event, Kind

API = "/api/v1"


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    found = Receiver()
    yield found
    found.server.shutdown()
    found.server.server_close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, receiver: Receiver) -> Iterator[httpx.Client]:
    """Four ranks of sixty steps whose transfers grow from 10 to 80 ms at step 40; then rank 2 is killed."""
    folder: Path = tmp_path_factory.mktemp("safety")
    with serving(folder, alerts=f"alertmanager={receiver.url}", alert_private=True, alert_link="http://page") as client:
        now = time.time_ns()
        for rank in range(4):
            found = [_slow(e) for e in events(60, rank=rank, now_ns=now)]
            if rank == 2:
                last = found[-1]
                found.append(
                    replace(
                        last, kind=Kind.EVENT, name="exited", sequence=last.sequence + 1, unix_ns=now, step=59,
                        attributes={"signal": 11},
                    )
                )  # fmt: skip
            send(client, identity(rank), found)
        yield client


def _slow(event: Event) -> Event:
    slow = event.kind is Kind.COLLECTIVE and event.step >= 40
    return replace(event, duration_ns=event.duration_ns + 80_000_000) if slow else event


def get(client: httpx.Client, path: str, **query: Any) -> Any:
    answer = client.get(API + path, params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def incidents(client: httpx.Client) -> list[dict[str, Any]]:
    deadline = time.monotonic() + 30
    while not (found := get(client, "/jobs/demo/incidents")["items"]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return list(found)


def test_the_breaker_of_a_slow_group_is_open_in_the_api_and_on_the_report(server: httpx.Client) -> None:
    incidents(server)
    found = get(server, "/jobs/demo/breakers")
    assert [(b["group"], b["state"], b["opened_times"]) for b in found["items"]] == [("0-3", "open", 1)]
    assert (found["changes"][0]["step"], found["changes"][0]["position"]) == (42, "open")
    assert found["changes"][0]["at"].endswith("Z")
    (stated,) = get(server, "/jobs/demo/report")["breakers"]
    assert (stated["group"], stated["state"]) == ("0-3", "open")
    assert "3 collectives in a row" in stated["why"]


def test_an_incident_reaches_the_receiver(server: httpx.Client, receiver: Receiver) -> None:
    (found,) = incidents(server)
    body = receiver.bodies(1)[0]
    assert body["version"] == "4"
    assert body["alerts"][0]["labels"]["incident"] == found["id"]
    assert body["alerts"][0]["labels"]["rank"] == "2"
    assert body["alerts"][0]["generatorURL"] == f"http://page/incidents/{found['id']}"
    deadline = time.monotonic() + 20
    while not get(server, "/alerts")["sent"] and time.monotonic() < deadline:
        time.sleep(0.05)
    told = get(server, "/alerts")
    assert told["sent"] >= 1
    assert [t["format"] for t in told["targets"]] == ["alertmanager"]


def test_a_silence_is_kept_by_fingerprint(server: httpx.Client) -> None:
    (found,) = incidents(server)
    made = server.post(f"{API}/incidents/{found['id']}/silence", json={"hours": 2, "says": "known"})
    assert made.status_code == 201, made.text
    (kept,) = get(server, "/silences")["items"]
    assert (kept["fingerprint"], kept["says"]) == (found["fingerprint"], "known")
    assert server.post(f"{API}/incidents/{found['id']}/silence", json={"hours": 0}).status_code == 422
    assert server.post(f"{API}/incidents/inc-none/silence", json={}).status_code == 404


def test_the_fleet_s_levels_and_efficiency(server: httpx.Client) -> None:
    fleet = get(server, "/sla")
    assert fleet["jobs"] == 1
    assert {o["name"] for o in fleet["objectives"]} >= {"availability", "job_success", "ettr"}
    assert get(server, "/sla", to="100")["jobs"] == 0
    found = get(server, "/efficiency", rate=["1:125", "8:876"])
    assert found["points"][-1]["efficiency"] == pytest.approx(0.876)
    assert server.get(f"{API}/efficiency", params={"rate": "eight"}).status_code == 400
    assert server.get(f"{API}/efficiency", params={"job": "nobody"}).status_code == 404
    assert server.get(f"{API}/efficiency", params={"job": "demo"}).status_code == 400  # no throughput was told


def test_a_scheduler_s_answer_becomes_unified_records(server: httpx.Client) -> None:
    app = {"id": "a", "name": "t", "state": "FINISHED", "finalStatus": "SUCCEEDED", "startedTime": 1000,
           "launchTime": 3000, "finishedTime": 13000, "allocatedMB": 2048, "allocatedVCores": 4}  # fmt: skip
    answer = server.post(f"{API}/schedulers/yarn", json={"apps": {"app": [app]}})
    assert answer.status_code == 200, answer.text
    (row,) = answer.json()["items"]
    assert (row["state"], row["queued_s"], row["ran_s"], row["memory_bytes"]) == ("succeeded", 2.0, 10.0, 2 << 30)
    assert answer.json()["success_rate"] == 1.0
    assert server.post(f"{API}/schedulers/yarn", json={"apps": 3}).status_code == 400
    assert server.post(f"{API}/schedulers/pbs", json={}).status_code == 422


@pytest.mark.parametrize("score", ["robust_z", "detrended_z", "learned"])
def test_what_moved_is_ranked(server: httpx.Client, score: str) -> None:
    rows = get(server, "/jobs/demo/anomalies", step=40)["items"]
    assert rows[0]["series"] == "transfer_ms"
    assert (rows[0]["step"], rows[0]["rank"]) == (40, None)
    assert all(abs(r["score"]) >= 6 for r in get(server, "/jobs/demo/anomalies", score=score)["items"])
    assert server.get(f"{API}/jobs/demo/anomalies", params={"score": "oracle"}).status_code == 422


def test_a_webhook_is_set_told_and_ended(server: httpx.Client, receiver: Receiver) -> None:
    fixed = get(server, "/alerts")["targets"]
    assert [t["id"] for t in fixed] == [None]
    body = {"format": "generic", "url": receiver.url, "secret": "s", "severities": ["P2"]}
    made = server.post(f"{API}/alerts/targets", json=body)
    assert made.status_code == 201, made.text
    assert made.json()["severities"] == ["P2"]
    text = server.get(f"{API}/alerts").text
    assert get(server, "/alerts")["targets"] == [*fixed, made.json()]
    assert '"s"' not in text
    assert server.delete(f"{API}/alerts/targets/{made.json()['id']}").status_code == 204
    assert server.delete(f"{API}/alerts/targets/{made.json()['id']}").status_code == 404
    assert get(server, "/alerts")["targets"] == fixed
    actions = [a["action"] for a in get(server, "/audit")["items"]]
    assert actions.index("webhook.end") < actions.index("webhook.add")


@pytest.mark.parametrize("url", ["file:///etc/passwd", "http://", "http://u:p@h/", "http://0.0.0.0/x", "http://[::1"])
def test_an_address_that_is_none_is_refused(server: httpx.Client, url: str) -> None:
    answer = server.post(f"{API}/alerts/targets", json={"format": "generic", "url": url})
    assert answer.status_code == 400, answer.text
