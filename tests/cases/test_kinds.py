"""Kinds beyond the rows: dumps that are permuted, sub-grouped and mismatched, stacks, plain crashes, healthy logs."""

from __future__ import annotations

from pathlib import Path

import pytest

from lanterne.backend.readers import read
from tests.cases.evidence import Logs, categories, dump, entry, first, judge, named_ranks, watchdog, write_dump


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 1, 0)])
@pytest.mark.parametrize("style", ["pickle", "json"])
def test_the_silent_member_of_a_sub_group(tmp_path: Path, order: tuple[int, ...], style: str) -> None:
    culprit = order[2]
    pairs = {r: sorted((order[i - i % 2], order[i - i % 2 + 1])) for i, r in enumerate(order)}
    for rank in order:
        groups = {"0": [0, 1, 2, 3], "7": pairs[rank]}
        calls = [entry(s) for s in range(1, 4)] + [entry(s, group=("7", "tp")) for s in range(1, 6)]
        if rank in pairs[culprit] and rank != culprit:
            calls.append(entry(6, "_allgather_base", done=False, group=("7", "tp")))
        elif rank != culprit:
            calls.append(entry(4, done=False))
        write_dump(tmp_path, rank, dump(calls, order, groups=groups), style)
    report = judge(tmp_path)
    assert first(report).subject.rank == culprit
    assert named_ranks(report) == {culprit}


@pytest.mark.parametrize("culprit", [0, 3])
def test_another_dtype_in_one_slot(tmp_path: Path, culprit: int) -> None:
    for rank in range(4):
        calls = [entry(s) for s in range(1, 4)] + [entry(4, done=False, dtype="Half" if rank == culprit else "Float")]
        write_dump(tmp_path, rank, dump(calls, range(4)))
    cause = first(judge(tmp_path))
    assert (cause.category, cause.subject.rank) == ("collective_mismatch", culprit)


def test_two_against_two_names_nobody(tmp_path: Path) -> None:
    for rank in range(4):
        calls = [entry(s) for s in range(1, 4)] + [entry(4, done=False, shape=(64,) if rank < 2 else (32,))]
        write_dump(tmp_path, rank, dump(calls, range(4)))
    report = judge(tmp_path)
    assert first(report).category == "collective_mismatch"
    assert named_ranks(report) == set()
    assert first(report).needs


def test_dumps_of_a_healthy_job(tmp_path: Path) -> None:
    for rank in range(4):
        write_dump(tmp_path, rank, dump([entry(s) for s in range(1, 30)], range(4)))
    assert judge(tmp_path).healthy


@pytest.mark.parametrize("rank", [0, 3])
def test_a_stack_tells_a_stuck_loader(tmp_path: Path, rank: int) -> None:
    for r in range(4):
        calls = [entry(s) for s in range(1, 9)] + ([] if r == rank else [entry(9, done=False)])
        write_dump(tmp_path, r, dump(calls, range(4)))
    (tmp_path / f"rank_{rank}.txt").write_text(
        'Process 4242: python train.py\nPython v3.11.2\n\nThread 4242 (idle): "MainThread"\n'
        "    wait (threading.py:331)\n    get (queue.py:180)\n"
        "    _try_get_data (torch/utils/data/dataloader.py:1243)\n    _next_data (torch/utils/data/dataloader.py:14)\n"
    )
    cause = first(judge(tmp_path))
    assert (cause.category, cause.subject.rank) == ("data_stall", rank)


@pytest.mark.parametrize("rank", [1, 5])
def test_out_of_memory_ends_the_job(tmp_path: Path, rank: int) -> None:
    logs = Logs(8)
    for r in range(8):
        logs.say(r, "step 10 loss 3.2")
    logs.say(rank, "Traceback (most recent call last):", '  File "t.py", line 1, in <module>')
    logs.say(rank, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has 79 GiB")
    cause = first(judge(logs.write(tmp_path)[0]))
    assert (cause.category, cause.subject.rank) == ("out_of_memory", rank)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_crash_makes_victims(tmp_path: Path, rank: int) -> None:
    logs = Logs(4).say(rank, "Traceback (most recent call last):", '  File "t.py", line 1, in <module>')
    logs.say(rank, "KeyError: 'labels'")
    for r in range(4):
        if r != rank:
            logs.say(r, watchdog(r, 77, "ALLREDUCE", 4096))
    report = judge(logs.write(tmp_path)[0])
    assert (first(report).category, first(report).subject.rank) == ("rank_crashed", rank)
    assert named_ranks(report) == {rank}


@pytest.mark.parametrize("layout", ["per_rank", "combined", "torchrun"])
def test_logs_of_a_healthy_job(tmp_path: Path, layout: str) -> None:
    logs = Logs(4)
    for r in range(4):
        logs.say(r, "NCCL version 2.21.5+cuda12.4", "Loading checkpoint shards: 100%|##########| 4/4 [00:10<00:00]")
        logs.say(r, *(f"step {s} loss {3 - 0.01 * s + 0.001 * r:.3f} lr 3e-4" for s in range(40)))
        logs.say(r, "saving checkpoint at iteration 40 to /ckpt", "epoch 1 finished", "Training finished.")
    report = judge(logs.write(tmp_path, layout)[0])
    assert report.healthy, categories(report)


def test_our_own_session_folder(tmp_path: Path) -> None:
    import json

    from lanterne.blackbox_files import STEP_RECORD
    from lanterne.collector.ring import Ring

    folder = tmp_path / "job" / "0"
    folder.mkdir(parents=True)
    for rank in range(2):
        ring = Ring(folder, rank)
        for step in range(30):
            ring.span(STEP_RECORD, 0, 0, step, ring.clock_pair[0] + step * 10**8, 10**8)
        about = {"identity": {"job": "job", "rank": rank, "world_size": 2, "host": "n1"}}
        (folder / f"rank-{rank}.json").write_text(json.dumps(about))
    facts = read([tmp_path])
    assert facts.ranks == (0, 1)
    assert facts.series["step_ms"].shape == (30, 2)
    assert facts.job == "job"
