"""Efficiency over world sizes, and what schedulers say, in one form."""

from __future__ import annotations

from typing import Any

import pytest

from lanterne.backend.sla import READERS, efficiency, success_rate
from lanterne.backend.sla.scaling import compare
from lanterne.backend.sla.schedulers import quantity
from lanterne.errors import UsageError


@pytest.mark.parametrize(("rates", "share"), [({1: 125.0, 8: 876.0}, 0.876), ({1: 250.0, 8: 1684.0}, 0.842)])
def test_throughputs_of_eight_ranks_give_the_contract_s_efficiencies(rates: dict[int, float], share: float) -> None:
    """87.6% and 84.2% are the contract's figures; the throughputs here are chosen to have these ratios."""
    found = efficiency(rates)
    assert found.points[-1].efficiency == pytest.approx(share, abs=5e-4)
    assert found.serial_share == pytest.approx((1 / share - 1) / 7, rel=1e-3)  # Amdahl: 1/e = 1 + (n - 1) s
    assert found.residual == pytest.approx(0.0, abs=1e-9)


TENSORFLOW_2017 = {
    "ResNet-50, DGX-1, synthetic data": ({1: 219.0, 2: 422.0, 4: 852.0, 8: 1734.0}, 7.92),
    "ResNet-50, DGX-1, real data": ({1: 218.0, 2: 425.0, 4: 853.0, 8: 1630.0}, 7.48),
    "InceptionV3, K80 on GCE, real data": ({1: 30.6, 2: 58.4, 4: 115.0, 8: 225.0}, 7.35),
    "ResNet-50, K80 on GCE, real data, batch 32": ({1: 49.3, 2: 95.3, 4: 186.0, 8: 359.0}, 7.28),
}
"""Images a second as published at tensorflow.org/performance/benchmarks (2017), and the speed-up they come to."""


@pytest.mark.parametrize("name", TENSORFLOW_2017)
def test_a_published_scaling_table_is_reproduced(name: str) -> None:
    rates, speed_up = TENSORFLOW_2017[name]
    found = efficiency(rates)
    assert found.points[-1].speed_up == pytest.approx(speed_up, abs=5e-3)
    assert found.points[-1].efficiency == pytest.approx(speed_up / 8, abs=1e-3)
    assert found.serial_share is not None
    assert 0 < found.serial_share < 0.03
    assert found.residual is not None
    assert found.residual < 0.06


def test_amdahl_is_fitted_and_its_misfit_told() -> None:
    law = {n: 100.0 / (0.05 + 0.95 / n) for n in (1, 2, 4, 8, 16)}
    found = efficiency(law)
    assert found.serial_share == pytest.approx(0.05)
    assert found.speed_up_limit == pytest.approx(20.0)
    falling = efficiency({1: 100.0, 2: 190.0, 4: 300.0, 8: 280.0})
    assert falling.residual is not None
    assert falling.residual > 0.2
    assert compare(found, falling)[8] == pytest.approx(280 / 800 - found.points[3].efficiency)


def test_from_a_base_above_one_and_with_mfu() -> None:
    found = efficiency({8: 800.0, 64: 5600.0}, flops_per_unit=1e12, peak_flops=1e15)
    assert found.points[1].efficiency == pytest.approx(0.875)
    assert found.points[0].mfu == pytest.approx(0.1)
    alone = efficiency({4: 10.0})
    assert (alone.serial_share, alone.speed_up_limit, alone.residual) == (None, None, None)


@pytest.mark.parametrize("rates", [{}, {0: 1.0}, {1: 0.0}, {1: float("nan")}])
def test_nonsense_is_refused(rates: dict[int, float]) -> None:
    with pytest.raises(UsageError):
        efficiency(rates)


def test_slurm_old_and_new_numbers() -> None:
    row: dict[str, Any] = {
        "job_id": 17, "name": "llama", "state": {"current": ["NODE_FAIL"], "reason": "None"}, "restart_cnt": 1,
        "time": {"submission": 100, "start": 160, "end": 760},
        "exit_code": {"return_code": {"set": True, "infinite": False, "number": 1}},
        "tres": {"allocated": [
            {"type": "cpu", "name": "", "count": 64}, {"type": "mem", "name": "", "count": 1024},
            {"type": "gres", "name": "gpu", "count": 8},
        ]},
    }  # fmt: skip
    new = row | {"job_id": 18, "state": {"current": ["COMPLETED"]}, "time": {"start": {"set": True, "number": 160}}}
    first, second = READERS["slurm"]({"jobs": [row, new]})
    assert (first.state, first.queued_s, first.ran_s, first.restarts, first.exit_code) == ("failed", 60.0, 600.0, 1, 1)
    assert (first.cpus, first.gpus, first.memory_bytes) == (64.0, 8.0, 2**30)
    assert (second.state, second.started_ns, second.queued_s) == ("succeeded", 160 * 10**9, None)
    assert success_rate([first, second]) == 0.5


def test_yarn_units_and_final_status() -> None:
    app = {
        "id": "application_1_0001", "name": "t", "state": "FINISHED", "finalStatus": "FAILED", "startedTime": 1000,
        "launchTime": 3000, "finishedTime": 13000, "allocatedMB": 2048, "allocatedVCores": 4,
    }  # fmt: skip
    good = app | {"finalStatus": "SUCCEEDED", "allocatedMB": -1, "allocatedVCores": -1}
    failed, done = READERS["yarn"]({"apps": {"app": [app, good]}})
    assert (failed.state, failed.queued_s, failed.ran_s) == ("failed", 2.0, 10.0)
    assert (failed.memory_bytes, failed.cpus) == (2 * 2**30, 4.0)
    assert (done.state, done.memory_bytes, done.cpus) == ("succeeded", None, None)


def test_kubernetes_pods_and_jobs() -> None:
    container = {"resources": {"limits": {"nvidia.com/gpu": "8", "memory": "16Gi"}, "requests": {"cpu": "500m"}}}
    ended = {"exitCode": 137, "reason": "OOMKilled", "finishedAt": "2026-01-01T00:10:30Z"}
    pod: dict[str, Any] = {
        "kind": "Pod",
        "metadata": {"uid": "u", "name": "w-0", "namespace": "ml", "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"containers": [container]},
        "status": {
            "phase": "Failed", "startTime": "2026-01-01T00:00:30Z",
            "containerStatuses": [
                {"restartCount": 2, "state": {"terminated": ended}}
            ],
        },
    }  # fmt: skip
    job = {
        "kind": "Job", "metadata": {"name": "j"},
        "spec": {"parallelism": 4, "template": {"spec": {"containers": [container]}}},
        "status": {"conditions": [{"type": "Complete", "status": "True"}], "startTime": "2026-01-01T00:00:00Z",
                   "completionTime": "2026-01-01T01:00:00Z"},
    }  # fmt: skip
    moved = pod | {"status": pod["status"] | {"conditions": [{"type": "DisruptionTarget", "status": "True"}]}}
    dead, evicted, whole = READERS["kubernetes"]({"items": [pod, moved, job]})
    assert (dead.state, dead.reason, dead.exit_code, dead.restarts) == ("failed", "OOMKilled", 137, 2)
    assert (dead.queued_s, dead.ran_s, dead.cpus, dead.gpus, dead.memory_bytes) == (30.0, 600.0, 0.5, 8.0, 16 * 2**30)
    assert evicted.state == "preempted"
    assert (whole.state, whole.gpus, whole.ran_s) == ("succeeded", 32.0, 3600.0)
    assert success_rate([]) is None


@pytest.mark.parametrize("name", sorted(READERS))
@pytest.mark.parametrize("body", [{}, [], {"jobs": 3, "items": 3, "apps": None}, {"jobs": [1], "items": [1]}])
def test_other_json_is_refused(name: str, body: Any) -> None:
    with pytest.raises(UsageError):
        READERS[name](body)


@pytest.mark.parametrize("text", ["", "12Zi", "abc", "1 Gi"])
def test_other_quantities_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        quantity(text)
