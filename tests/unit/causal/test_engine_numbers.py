"""Numerics, memory, checkpoints, exits, seeds and replicas: the first to move is named, its effects are not."""

from __future__ import annotations

import numpy as np
import pytest

from lanterne.causal import diagnose
from lanterne.nouns import CauseCategory


def test_the_rank_whose_batch_moved_the_global_norm(small):
    job = small(seed=1)
    job.series["loss"][50, 3] += 5
    job.series["grad_norm_local"][50, 3] *= 40
    job.series["grad_norm"][50] *= 12
    job.series["loss"][51:58] += 1
    job.event("batch", 3, 50, fingerprint="b-50-3")
    cause = diagnose(job.facts()).causes[0]
    assert (cause.category, cause.subject.rank, cause.since_step) == (CauseCategory.BAD_BATCH, 3, 50)
    assert cause.subject.batch == "b-50-3"
    assert cause.remedy.action == "skip_batch"


def test_a_learning_rate_off_its_plan_explains_what_follows(small, named):
    job = small(seed=2)
    job.series["lr"][40:] *= 12
    job.series["loss"][42:] += 3
    job.series["grad_norm"][42:] *= 4
    diagnosis = diagnose(job.facts())
    assert named(diagnosis.causes) == [("lr_misconfigured", None)]
    assert diagnosis.causes[0].since_step == 40


@pytest.mark.parametrize("planned", [True, False])
def test_a_jump_is_found_without_a_plan_only_when_the_loss_suffers(small, named, planned):
    found = {}
    for hurt in (True, False):
        job = small(seed=3)
        job.series["lr"][40:] *= 12
        if not planned:
            del job.series["lr_planned"]
        if hurt:
            job.series["loss"][42:] += 3
        found[hurt] = named(diagnose(job.facts()).causes)
    assert found[True] == [("lr_misconfigured", None)]
    assert found[False] == ([("lr_misconfigured", None)] if planned else [])


def test_a_scheduled_warm_up_is_no_jump(small, named):
    job = small(seed=4)
    warm = np.minimum(1.0, (np.arange(100) + 1) / 20)[:, None]
    job.series["lr"] *= warm
    del job.series["lr_planned"]
    assert named(diagnose(job.facts()).causes) == []


def test_our_own_command_is_no_misconfiguration(small, named):
    job = small(seed=5)
    job.series["lr"][40:] *= 0.1
    job.event("command", 0, 40, phase="applied", action="scale_lr")
    assert named(diagnose(job.facts()).causes) == []


def test_the_first_nonfinite_gradient_is_named_with_its_parameter(small):
    job = small(seed=6)
    count = np.zeros((100, 4))
    count[60, 2] = 17
    job.series["grad_nonfinite"] = count
    job.series["loss"][61:] = np.inf  # the store writes a lost value as infinite
    job.event("nonfinite", 2, 60, parameter="head.weight", count=17, where="gradient")
    (cause,) = diagnose(job.facts()).causes
    assert (cause.category, cause.subject.rank, cause.since_step) == (CauseCategory.NONFINITE_VALUES, 2, 60)
    assert cause.subject.parameter == "head.weight"


def test_one_skipped_step_is_how_a_loss_scale_works_many_are_an_overflow(small, named):
    for times, expected in ((1, []), (8, [("fp16_overflow", 1)])):
        job = small(seed=7)
        scale, count = np.full((100, 4), 4096.0), np.zeros((100, 4))
        for i in range(times):
            scale[50 + i :] /= 2
            count[50 + i, 1] = 320
            job.event("overflow", 0, 50 + i)
        job.series |= {"loss_scale": scale, "grad_nonfinite": count if times > 1 else np.zeros((100, 4))}
        assert named(diagnose(job.facts()).causes) == expected


def test_a_leak_is_a_trend_not_a_jump(small, named):
    leak, jump = small(seed=8), small(seed=8)
    leak.series["rss_bytes"][30:, 1] += np.arange(70) * 25e6
    jump.series["rss_bytes"][30:, 1] += 6e8
    (cause,) = diagnose(leak.facts()).causes
    assert (cause.category, cause.subject.rank) == (CauseCategory.MEMORY_LEAK, 1)
    assert cause.since_step == pytest.approx(30, abs=2)
    assert named(diagnose(jump.facts()).causes) == []


def test_a_leak_explains_the_slowness_and_the_failed_allocation(small, named):
    job = small(seed=9)
    job.series["rss_bytes"][30:, 1] += np.arange(70) * 25e6
    job.work["forward"][60:, 1] += 15
    job.event("out_of_memory", 1, 99, body="out of memory")
    diagnosis = diagnose(job.facts())
    assert named(diagnosis.causes) == [("memory_leak", 1)]
    assert {"out_of_memory", "slow_compute"} <= {s.kind for s in diagnosis.symptoms}


def test_an_out_of_memory_is_not_a_crash(small, named):
    job = small(seed=10)
    job.event("exception", 3, 70, body="RuntimeError: DefaultCPUAllocator: can't allocate memory", type="RuntimeError")
    job.event("exited", 3, 70, exit_code=1)
    job.event("exception", 0, 70, body="RuntimeError: Connection closed by peer [127.0.0.1]")
    job.event("exited", 0, 70, exit_code=1)
    assert named(diagnose(job.facts()).causes)[0] == ("out_of_memory", 3)


def test_the_rank_that_died_is_the_crash_and_the_survivors_are_victims(small):
    job = small(seed=11)
    job.event("exception", 0, 60, body="RuntimeError: Connection closed by peer")
    job.event("exited", 0, 60, exit_code=1)
    job.event("exited", 1, 60, signal=15)
    job.event("exited", 2, 60, signal=11)
    job.event("exited", 3, 60, signal=15)
    diagnosis = diagnose(job.facts(ended=True))
    cause = diagnosis.causes[0]
    assert (cause.category, cause.subject.rank) == (CauseCategory.RANK_CRASHED, 2)
    assert "SIGSEGV" in cause.evidence[0].says
    assert diagnosis.kind == "crash"


def test_clean_exits_are_no_crash(small, named):
    job = small(seed=12)
    for rank in range(4):
        job.event("exited", rank, 99, exit_code=0)
    assert named(diagnose(job.facts(ended=True)).causes) == []


def _checkpointing(job, late_ms=0.0, all_ms=0.0):
    saving = np.zeros((100, 4))
    saving[9::20] = 300.0
    saving[49] += late_ms + all_ms
    job.series["checkpoint_ms"] = saving
    facts = job.facts()
    facts.series["lateness_ms"][49, 2] += late_ms
    facts.series["step_ms"][:] += saving.max(1)[:, None]
    return facts


def test_a_barrier_makes_all_checkpoints_long_and_the_last_to_enter_is_the_culprit(small):
    cause = diagnose(_checkpointing(small(seed=13), late_ms=8000)).causes[0]
    assert (cause.category, cause.subject.rank, cause.since_step) == (CauseCategory.CHECKPOINT_STALL, 2, 49)


def test_storage_that_is_slow_for_all_blames_no_rank(small, named):
    assert named(diagnose(_checkpointing(small(seed=13), all_ms=8000)).causes) == [("storage_slow", None)]


def test_a_checkpoint_that_does_not_read_back(small, named):
    job = small(seed=14)
    job.event("checkpoint_verified", 1, 39, ok=True, path="a")
    job.event("checkpoint_verified", 2, 39, ok=False, path="b", detail="checksum of 3 blocks differs")
    assert named(diagnose(job.facts()).causes) == [("checkpoint_corrupt", 2)]


def test_the_odd_seed_and_seeds_that_differ_by_design(small, named):
    odd, design = small(seed=15), small(seed=15)
    for rank in range(4):
        odd.event("seed", rank, 0, torch=1234 if rank != 3 else 9153)
        design.event("seed", rank, 0, torch=1234 + rank)
    assert named(diagnose(odd.facts()).causes) == [("seed_mismatch", 3)]
    assert named(diagnose(design.facts()).causes) == []


def test_a_replica_that_drifted(small):
    job = small(seed=16)
    checksum = np.full((100, 4), np.nan)
    checksum[::10] = np.random.default_rng(0).random((10, 1))
    checksum[50::10, 2] += 1e-3
    job.series["parameter_checksum"] = checksum
    (cause,) = diagnose(job.facts()).causes
    assert (cause.category, cause.subject.rank, cause.since_step) == (CauseCategory.REPLICA_DIVERGENCE, 2, 50)


def test_pipeline_stages_hold_different_parameters(small, named):
    job = small(seed=17, mesh=lambda r: {"dp_replicate": r // 2, "pp": r % 2})
    job.series["parameter_checksum"] = np.tile([0.25, 0.75], (100, 2))
    assert named(diagnose(job.facts()).causes) == []
