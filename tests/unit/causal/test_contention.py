"""Ranks without a core: the host is named, and neither a link nor a rank is blamed for it."""

from __future__ import annotations

import numpy as np
import pytest

from lanterne.causal import diagnose
from lanterne.nouns import CauseCategory


def starved(small, percent: float, *, link: float = 40.0):
    """From step 50 transfers take ``link`` ms more, while the scheduler tells of ``percent`` without a core."""
    job = small(ranks=4, seed=2)
    job.transfer[50:] += link
    told = np.full((100, 4), np.nan)  # asked twice a second: every seventh step
    told[::7] = 4 + np.arange(4)
    told[50:] = np.nan
    told[52::7] = percent
    job.series["cpu_delay_percent"] = told
    return job


def test_transfers_that_wait_for_cores_are_the_hosts_matter(small):
    cause = diagnose(starved(small, 40.0).facts()).causes[0]
    assert (cause.category, cause.subject.host, cause.subject.rank) == (CauseCategory.HOST_CONTENTION, "node0", None)
    assert cause.since_step == pytest.approx(50, abs=2)
    assert cause.evidence[0].ref == "cpu_delay_percent"
    assert "40 % of the time" in cause.evidence[0].says


def test_cores_that_were_free_leave_the_link_to_blame(small):
    cause = diagnose(starved(small, 7.0).facts()).causes[0]
    assert cause.category is CauseCategory.SLOW_LINK


def test_a_wait_for_cores_that_explains_little_is_not_the_cause(small):
    cause = diagnose(starved(small, 20.0, link=400.0).facts()).causes[0]
    assert cause.category is CauseCategory.SLOW_LINK


def test_one_rank_without_a_core_is_contention_and_not_slow_compute(small):
    job = small(ranks=4, seed=3)
    job.work["forward"][50:, 1] += 60
    told = np.full((100, 4), np.nan)
    told[::7] = 3.0
    told[56::7, 1] = 48.0
    job.series["cpu_delay_percent"] = told
    cause = diagnose(job.facts()).causes[0]
    assert (cause.category, cause.subject.rank) == (CauseCategory.HOST_CONTENTION, 1)
