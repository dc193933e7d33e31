"""Which cause is given to which incident."""

from __future__ import annotations

from detect_runs import facts, series

from lanterne import causal
from lanterne.backend import detect, judgement


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
