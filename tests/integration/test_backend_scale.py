"""Two backends over one PostgreSQL and one lake: each answers for all jobs; one is killed, and nothing is lost."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import duckdb
import httpx
import pytest
from backend_server import PROTOBUF, RANKS, body, serve
from postgres_server import Postgres

from lanterne.backend.store.lake import load_extensions

ROWS = 200


pytestmark = [pytest.mark.heavy, pytest.mark.postgres, pytest.mark.timeout(600)]


@pytest.fixture
def server(postgres_server: Postgres) -> Postgres:
    try:
        with duckdb.connect() as connection:
            load_extensions(connection)
    except duckdb.Error:
        pytest.skip("DuckDB's extensions ducklake and postgres_scanner are needed: pip install 'lanterne[scale]'")
    return postgres_server


class Fleet:
    """Settings that both backends share."""

    def __init__(self, server: Postgres, folder: Path, name: str) -> None:
        server.make(name)
        self.folder = folder
        catalog = server.catalog(name)
        self.env = {"LANTERNE_CONTROL_URL": server.url(name), "LANTERNE_LAKE": f"{catalog}|{folder / 'lake'}"}

    def serve(self, name: str) -> Any:
        return serve(self.folder / name, **self.env)


def sequences(base: str, job: str, rank: int) -> list[int]:
    sql = f"SELECT sequence FROM spans WHERE rank = {rank} ORDER BY ALL"
    answer = httpx.post(f"{base}/api/v1/query", json={"sql": sql, "job": job}, timeout=60)
    assert answer.status_code == 200, answer.text
    return [row[0] for row in answer.json()["rows"]]


def send(base: str, job: str, rank: int, first: int) -> bool:
    """One batch; was it acknowledged?"""
    try:
        numbers = range(first, first + ROWS)
        answer = httpx.post(f"{base}/v1/traces", content=body(rank, numbers, job), headers=PROTOBUF, timeout=20)
    except httpx.HTTPError:
        return False
    return answer.status_code == 200


def wait_for(base: str, job: str, rank: int, expected: list[int], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while (found := sequences(base, job, rank)) != expected and time.monotonic() < until:
        time.sleep(0.5)
    assert found == expected, f"{len(found)} rows, {len(set(found))} of them distinct, of {len(expected)}"


def test_each_backend_answers_for_all_jobs(server: Postgres, tmp_path: Path) -> None:
    fleet = Fleet(server, tmp_path, "both")
    with fleet.serve("a") as (_, a), fleet.serve("b") as (_, b):
        assert send(a, "one", 0, 0)
        assert send(b, "two", 1, 0)
        for base in (a, b):
            wait_for(base, "one", 0, list(range(ROWS)))
            wait_for(base, "two", 1, list(range(ROWS)))
            jobs = {job["id"] for job in httpx.get(f"{base}/api/v1/jobs", timeout=20).json()["items"]}
            assert {"one", "two"} <= jobs
            steps = httpx.get(f"{base}/api/v1/jobs/one/metrics?name=forward_ms&rank=0", timeout=20)
            assert steps.status_code == 200, steps.text


def test_a_backend_is_killed_and_senders_go_to_the_other(server: Postgres, tmp_path: Path) -> None:
    """Every row is there once for both, also the batches that the dead one had stored and not acknowledged."""
    fleet = Fleet(server, tmp_path, "killed")
    sent = dict.fromkeys(range(RANKS), 0)
    with fleet.serve("b") as (_, b):
        with fleet.serve("a") as (process, a):
            for _ in range(20):
                for rank in sent:
                    if send(a, "crash", rank, sent[rank]):
                        sent[rank] += ROWS
            shipped = list(range(sent[0]))
            wait_for(b, "crash", 0, shipped)
            for rank in sent:  # stored by the first, but the answer is lost on its way
                assert send(a, "crash", rank, sent[rank])
            process.kill()
            process.wait()
        wait_for(b, "crash", 0, shipped, 5)
        for _ in range(20):  # the others go to the second, beginning with what was not acknowledged
            for rank in sent:
                assert send(b, "crash", rank, sent[rank])
                sent[rank] += ROWS
        with fleet.serve("a") as (_, a):
            for base in (a, b):
                for rank, count in sent.items():
                    wait_for(base, "crash", rank, list(range(count)))
            assert send(a, "crash", 0, sent[0])
            wait_for(b, "crash", 0, list(range(sent[0] + ROWS)))


def test_while_postgresql_is_away_a_backend_takes_and_shows_its_own(server: Postgres, tmp_path: Path) -> None:
    fleet = Fleet(server, tmp_path, "away")
    with fleet.serve("a") as (_, a), fleet.serve("b") as (_, b):
        assert send(a, "one", 0, 0)
        wait_for(b, "one", 0, list(range(ROWS)))
        server.stop()
        try:
            assert send(a, "one", 0, ROWS)
            with httpx.Client(base_url=a, timeout=60) as client:
                told = client.get("/readyz")
                assert told.status_code == 503
                assert "control database" in told.json()["reason"]
        finally:
            server.start()
        expected = list(range(2 * ROWS))
        wait_for(a, "one", 0, expected)
        wait_for(b, "one", 0, expected)
