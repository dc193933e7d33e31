"""The host agent's findings: alone a cause with the host, under a slow rank its explanation."""

from __future__ import annotations

import pytest

from lanterne.causal import FactEvent, diagnose

QUOTA = ("host_contention", "cgroup", "the CPU quota of cgroup /pods/train stopped it")
DISK = ("storage_slow", "disk_space", "/data is full")


def told(job, *findings, host="node1", state="begun", at=5):
    for category, source, body in findings:
        said = {"state": state, "category": category, "host": host, "source": source, "what": "x", "value": 1.0}
        job.events.append(FactEvent(name="host_finding", job_ns=at, host=host, body=body, attributes=said))


def causes(job):
    return {(c.category.value, c.subject.rank, c.subject.host) for c in diagnose(job.facts()).causes}


def test_both_findings_are_causes_with_the_host(small):
    job = small(ranks=4, hosts=2)
    told(job, QUOTA, DISK)
    assert causes(job) == {("host_contention", None, "node1"), ("storage_slow", None, "node1")}


def test_a_slow_rank_on_that_host_is_explained(small):
    job = small(ranks=4, hosts=2)
    job.work["forward"][40:, 2] += 60
    assert causes(job) == {("slow_compute", 2, "node1")}
    told(job, QUOTA)
    assert causes(job) == {("host_contention", 2, "node1")}
    assert "cgroup /pods/train" in diagnose(job.facts()).causes[0].evidence[0].says


@pytest.mark.parametrize(("host", "state"), [("node9", "begun"), ("node1", "ended")])
def test_other_hosts_and_what_ended_are_left_out(small, host, state):
    job = small(ranks=4, hosts=2)
    told(job, QUOTA, DISK)
    told(job, QUOTA, DISK, host=host, state=state, at=6)
    expected = set() if state == "ended" else {("host_contention", None, "node1"), ("storage_slow", None, "node1")}
    assert causes(job) == expected
