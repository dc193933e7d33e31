"""Which cause is given to which incident."""

from __future__ import annotations

from dataclasses import replace

import pytest
from detect_runs import event, facts, series

from lanterne import causal
from lanterne.backend import detect, judgement
from lanterne.nouns import EventName


def test_a_bad_batch_does_not_explain_slow_transfers() -> None:
    found = series(step_ms=200.0)
    more = found["transfer_ms"][100:] * 3
    found["transfer_ms"][100:] += more
    found["step_ms"][100:] += more
    found["loss"][60, 1] += 0.3
    found["grad_norm"][60] *= 2.3
    run = facts(found)
    anomalies = detect.run(run)
    assert {c.category.value for c in causal.diagnose(run, anomalies).causes} == {"bad_batch", "slow_link"}
    (case,) = judgement.evaluate(run).cases
    assert (case.incident.kind, [c.category.value for c in case.incident.causes]) == ("slow_transfer", ["slow_link"])


@pytest.mark.parametrize(("ended", "hours"), [(True, 4 * 10 / 3600), (False, 4 * 1.0)])
def test_a_job_that_is_over_costs_nothing_more(ended: bool, hours: float) -> None:
    found = facts(series())
    last = found.now_ns + 10_000_000_000
    gone = [replace(event(EventName.EXITED, r, 199, exit_code=5 if r == 1 else 1), job_ns=last) for r in range(4)]
    later = replace(found, events=tuple(gone), ended=ended, now_ns=found.now_ns + 3_600_000_000_000)
    (incident,) = judgement.judge(later).incidents
    assert incident.causes[0].category.value == "rank_crashed"
    assert incident.causes[0].cost.gpu_hours == pytest.approx(hours, rel=0.1)
