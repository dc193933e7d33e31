"""Service levels: every second goes to one cause, budgets burn as they should, nothing is invented."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from backend_rows import events, identity, send, serving

from lanterne.backend.sla import Targets, report_of
from lanterne.backend.sla.account import Life, Steps, Trouble, account
from lanterne.backend.sla.objectives import (
    availability,
    burn_alerts,
    ettr,
    failures,
    job_success,
    objective,
    recoveries,
)
from lanterne.backend.sla.read import Record
from lanterne.nouns import Event, Kind

S = 1_000_000_000


def steps(*runs: tuple[int, int, int, int], ms: float = 1000.0, **phases: dict[int, float]) -> Steps:
    """Runs of (attempt, first step, count, start in s), steps back to back; phases by row."""
    attempt, number, start = [], [], []
    for a, first, count, at in runs:
        attempt += [a] * count
        number += list(range(first, first + count))
        start += [at * S + int(i * ms * 1e6) for i in range(count)]
    rows = len(number)
    table = {n: np.array([v.get(i, 0.0) for i in range(rows)]) for n, v in phases.items()}
    return Steps(
        attempt=np.array(attempt), step=np.array(number), start_ns=np.array(start), duration_ms=np.full(rows, ms),
        phases=table,
    )  # fmt: skip


def test_a_healthy_job_is_all_productive() -> None:
    spent = account(steps((0, 0, 100, 10)), [Life(attempt=0, first_ns=10 * S, last_ns=110 * S, succeeded=True)])
    assert (spent.productive_s, spent.badput, spent.wall_s) == (100.0, {}, 100.0)
    assert (ettr(spent), availability(spent)) == (1.0, 1.0)


def test_a_restart_costs_the_gap_the_start_up_and_the_steps_done_again() -> None:
    lives = [
        Life(attempt=0, first_ns=0, last_ns=60 * S, succeeded=False),
        Life(attempt=1, first_ns=80 * S, last_ns=150 * S, succeeded=True),
    ]
    seen = steps((0, 0, 50, 10), (1, 40, 60, 90))
    spent = account(seen, lives)
    assert spent.badput == {"start_up": 20.0, "restart": 20.0, "recomputed": 10.0}
    assert spent.productive_s == 100.0
    assert spent.wall_s == 150.0
    assert availability(spent) == pytest.approx(1 - 30 / 140)  # the first start-up is not down time
    assert recoveries(seen, lives, ()) == [31.0]  # 60 s to the end of the first step, at 91 s
    assert (failures(lives, ()), job_success(lives)) == (1, 0.5)


def test_time_is_named_by_phase_and_by_incident() -> None:
    seen = steps((0, 0, 30, 0), checkpoint={10: 400.0}, data_wait={20: 100.0})
    seen.duration_ms[25:] = 2000.0
    seen.start_ns[25:] = 25 * S + 2 * S * np.arange(5)
    life = Life(attempt=0, first_ns=0, last_ns=35 * S)
    slow = Trouble(cause="slow_compute", start_ns=25 * S)
    assert account(seen, [life], [slow]).badput == {"slow_compute": 5.0, "checkpoint": 0.4, "data_wait": 0.1}
    assert "slow_steps" in account(seen, [life]).badput


def test_a_pause_is_the_hang_that_covers_it() -> None:
    seen = steps((0, 0, 10, 0), (0, 10, 10, 40))
    life = Life(attempt=0, first_ns=0, last_ns=50 * S)
    hang = Trouble(cause="rank_hung", start_ns=11 * S, end_ns=40 * S, fatal=True)
    assert account(seen, [life], [hang]).badput == {"rank_hung": 30.0}
    assert account(seen, [life]).badput == {"idle": 30.0}
    assert recoveries(seen, [life], [hang]) == [29.0]
    assert failures([life], [hang]) == 1


@pytest.mark.parametrize("heard", [40_000_000, -40_000_000])
def test_a_job_told_long_after_or_on_another_clock_is_as_long_as_its_steps(heard: int) -> None:
    late = Life(attempt=0, first_ns=heard * S, last_ns=(heard + 5) * S, succeeded=True)
    stuck = Trouble(cause="slow_compute", start_ns=50 * S)  # still open
    spent = account(steps((0, 0, 100, 10)), [late], [stuck])
    assert (spent.productive_s, spent.badput, spent.wall_s) == (100.0, {}, 100.0)


def test_a_hang_right_after_the_start_counts_although_its_first_sign_came_after_its_steps() -> None:
    spent = account(steps((0, 0, 3, 10)), [Life(attempt=0, first_ns=14 * S, last_ns=43 * S)],
                    [Trouble(cause="rank_hung", start_ns=13 * S)])  # fmt: skip
    assert spent.badput == {"rank_hung": 30.0}


def test_budget_and_burn_rate() -> None:
    found = objective("ettr", 0.95, 0.70)
    assert found.burn_rate == pytest.approx(6.0)
    assert (found.error_budget, found.met) == (0.0, False)
    half = objective("ettr", 0.90, 0.95)
    assert half.burn_rate == pytest.approx(0.5)
    assert half.error_budget == pytest.approx(0.5)
    assert objective("ettr", 0.9, None).met is None
    with pytest.raises(ValueError, match="leaves no error budget"):
        objective("ettr", 1.0, 0.5)


def test_a_recovery_is_met_only_with_its_checks() -> None:
    lives = (
        Life(attempt=0, first_ns=0, last_ns=50 * S, succeeded=False),
        Life(attempt=1, first_ns=70 * S, last_ns=200 * S, succeeded=True),
    )
    record = Record(
        steps=steps((0, 0, 50, 0), (1, 50, 100, 94)), lives=lives, troubles=(), liveness=None, checkpoint_success=None,
        checks={"ranks_report": True, "loss_finite": True, "replicas_agree": True, "checkpoint_verified": None},
    )  # fmt: skip
    rows = {o.level: o for o in report_of(record, Targets()).objectives if o.level}
    assert (rows["L1"].value, rows["L1"].met) == (0.0, False)  # it took 45 s
    assert (rows["L2"].value, rows["L2"].met) == (1.0, True)
    assert (rows["L3"].value, rows["L3"].met) == (1.0, None)  # nobody verified a checkpoint
    assert set(rows["L1"].checks) < set(rows["L2"].checks) < set(rows["L3"].checks)


def test_nothing_measured_is_nothing_said() -> None:
    empty = Record(steps=steps(), lives=(), troubles=(), liveness=None, checkpoint_success=None)
    found = report_of(empty, Targets())
    assert {o.value for o in found.objectives} == {None}
    assert (found.mtbf_s, found.mttr_s, found.ettr) == (None, None, None)
    assert len(found.notes) == 4


def test_burn_alerts_need_both_windows() -> None:
    now = 7200 * S
    life = [Life(attempt=0, first_ns=0, last_ns=now)]
    stopped = account(steps((0, 0, 2000, 0)), life, [Trouble(cause="rank_hung", start_ns=2000 * S)])
    assert burn_alerts("ettr", 0.9, stopped, now) == []  # 72% of the hour lost is a rate of 7 at most
    loss = [Trouble(cause="rank_hung", start_ns=0, end_ns=now)]
    dead = account(steps((0, 0, 60, 0), (0, 60, 60, 7100)), life, loss)
    assert burn_alerts("ettr", 0.9, dead, now) == []  # it runs again: the short window is clean
    steady = steps((0, 0, 600, 0), ms=1000.0)
    slow = Steps(
        attempt=steady.attempt, step=steady.step, start_ns=np.arange(600) * 12 * S, duration_ms=steady.duration_ms
    )
    alerts = burn_alerts("ettr", 0.95, account(slow, life), now)
    assert [(a.action, a.window_s) for a in alerts] == [("page", 3600.0), ("page", 21600.0)]
    assert alerts[0].burn_rate == pytest.approx(11 / 12 / 0.05, rel=0.01)


def test_the_route_accounts_for_a_job_that_was_restarted(tmp_path: Path) -> None:
    now = time.time_ns()
    with serving(tmp_path) as client:
        for rank in range(2):
            first = identity(rank, world_size=2)
            lost = Event(
                kind=Kind.EVENT, name="exited", sequence=900, lamport=900, unix_ns=now - 3 * S, monotonic_ns=1,
                attributes={"exit_code": 1},
            )  # fmt: skip
            send(client, first, [*events(20, rank=rank, now_ns=now - 4 * S), lost])
            again = identity(rank, attempt=1, world_size=2)
            send(client, again, events(30, first_step=10, rank=rank, now_ns=now))
        body = client.get("/api/v1/jobs/demo/sla").json()
        by_name = {o["name"]: o for o in body["objectives"]}
        assert body["goodput"]["badput"]["recomputed"] == pytest.approx(1.0, abs=0.01)
        assert body["goodput"]["productive_s"] == pytest.approx(4.0, abs=0.05)
        assert body["failures"] == 1
        assert by_name["job_success"]["value"] == 0.0
        assert by_name["liveness"]["value"] is None
        assert by_name["recovery_30s"]["level"] == "L1"
        assert body["mttr_s"] == pytest.approx(1.1, abs=0.3)
        assert 0 < body["ettr"] < 1
        job = client.get("/api/v1/jobs/demo").json()
        assert job["ettr"] == pytest.approx(body["ettr"], abs=0.05)
        past = client.get("/api/v1/jobs/demo/sla", params={"to": "1000"}).json()
        assert past["ettr"] is None
