"""Field cases C01 to C17 and P1, P12, P13: the collective stream is broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.evidence import (
    Logs,
    categories,
    dump,
    entry,
    first,
    hedged,
    judge,
    metrics_file,
    named_ranks,
    store_timeout,
    watchdog,
    write_dump,
)

LAYOUTS = ("per_rank", "combined", "torchrun")


def _victims(logs: Logs, silent: int, **kw: object) -> Logs:
    for rank in range(logs.ranks):
        if rank != silent:
            logs.say(rank, watchdog(rank, **kw))  # type: ignore[arg-type]
    return logs


@pytest.mark.parametrize(("ranks", "silent"), [(4, 2), (8, 0), (16, 11)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("style", ["new", "pg", "plain"])
def test_c01_uneven_iterable(tmp_path: Path, ranks: int, silent: int, layout: str, style: str) -> None:
    logs = Logs(ranks)
    for rank in range(ranks):
        logs.say(
            rank,
            f"rank {rank}: epoch 3: 100%|##########| 1249/1249 [10:00<00:00, 2.08it/s]",
            f"rank {rank}: epoch 3 finished",
        )
    _victims(logs, silent, sequence=5021, style=style)
    report = judge(logs.write(tmp_path, layout)[0])
    assert (first(report).category, first(report).subject.rank) == ("uneven_inputs", silent)
    assert named_ranks(report) == {silent}


@pytest.mark.parametrize(("ranks", "shards"), [(8, 10), (16, 20), (6, 9)])
def test_c03_uneven_shards(tmp_path: Path, ranks: int, shards: int) -> None:
    silent = ranks - 1
    logs = Logs(ranks)
    for rank in range(ranks):
        logs.say(rank, f"dataset.num_shards={shards} world_size={ranks}", "step 1248/1250 loss 2.1")
    _victims(logs, silent, numel=25_557_032, op="ALLREDUCE")
    report = judge(logs.write(tmp_path)[0])
    assert (first(report).category, first(report).subject.rank) == ("uneven_inputs", silent)


@pytest.mark.parametrize(
    "work",
    [
        "Running tokenizer on dataset (num_proc=8):  67%|######7   | 670000/1000000 [29:58<14:52, 370.00 examples/s]",
        "Map:  45%|####5     | 450321/1000000 [29:55<36:30, 250.9 examples/s]",
        "Downloading shards:  33%|###3      | 5/15 [09:58<20:00, 120s/it]",
        "INFO preprocessing dataset shard 412 of 1000",
    ],
)
@pytest.mark.parametrize("timeout_ms", [600_000, 1_800_000])
def test_c05_main_process_first(tmp_path: Path, work: str, timeout_ms: int) -> None:
    logs = Logs(8).say(0, "loading data", work)
    for rank in range(1, 8):
        logs.say(rank, store_timeout(timeout_ms) if rank % 2 else watchdog(rank, 1, "ALLREDUCE", 1, timeout_ms))
    report = judge(logs.write(tmp_path)[0])
    cause = first(report)
    assert (cause.category, cause.subject.rank) == ("exclusive_work", 0)
    assert "network_failure" not in categories(report)
    assert any("measures the time-out" in e.says for e in cause.evidence)


@pytest.mark.parametrize("masters", [(0,), (0, 8)])
def test_c07_checkpoint_download(tmp_path: Path, masters: tuple[int, ...]) -> None:
    ranks = 8 * len(masters)
    logs = Logs(ranks)
    for rank in range(ranks):
        if rank in masters:
            logs.say(rank, "Downloading checkpoint s3://b/ep0-ba900.pt to /tmp/ckpt")
        else:
            logs.say(rank, watchdog(rank, 2, "BARRIER", 1, 600_000, "plain"))
    report = judge(logs.write(tmp_path)[0])
    assert {c.category for c in report.incidents[0].causes} == {"exclusive_work"}
    assert named_ranks(report) == set(masters)


@pytest.mark.parametrize(
    "line",
    [
        "waiting for ready marker /shared/weights/step_40/STABLE",
        "INFO Waiting for inference server at http://10.0.0.7:8000/health",
        "polling for the orchestrator's signal",
    ],
)
@pytest.mark.parametrize("master", [0, 3])
def test_c09_master_waits_for_a_service(tmp_path: Path, line: str, master: int) -> None:
    logs = Logs(4).say(master, "step 40 done", line)
    report = judge(
        _victims(logs, master, sequence=961, op="_ALLGATHER_BASE", numel=8_388_608, timeout_ms=600_000).write(tmp_path)[
            0
        ]
    )
    assert (first(report).category, first(report).subject.rank) == ("exclusive_work", master)


@pytest.mark.parametrize("odd", [1, 3])
def test_c11_metric_keys_differ(tmp_path: Path, odd: int) -> None:
    for rank in range(4):
        key = "val/acc_b" if rank == odd else "val/acc_a"
        metrics_file(
            tmp_path / f"rank{rank}.jsonl",
            [{"step": 10 * i, "rank": rank, "val/loss": 1.0 + 0.01 * rank / (i + 1), key: 0.5} for i in range(5)],
        )
    report = judge(tmp_path)
    assert (first(report).category, first(report).subject.rank) == ("collective_divergence", odd)


@pytest.mark.parametrize("odd", [0, 2])
def test_c13_skipped_object_gather(tmp_path: Path, odd: int) -> None:
    logs = Logs(4).say(odd, "local metrics dict is empty, returning early from log_metrics")
    report = judge(_victims(logs, odd, op="ALLGATHER", numel=1, timeout_ms=600_000).write(tmp_path)[0])
    assert (first(report).category, first(report).subject.rank) == ("collective_divergence", odd)


def test_c13_in_the_dumps(tmp_path: Path) -> None:
    for rank in range(4):
        calls = [entry(s) for s in range(1, 6)]
        tail = [("all_gather", (1,)), ("all_gather", (128,)), ("all_reduce", (4096,)), ("all_reduce", (2048,))]
        tail = tail[2:] if rank == 3 else tail
        calls += [entry(6 + i, op, shape, done=False) for i, (op, shape) in enumerate(tail)]
        write_dump(tmp_path, rank, dump(calls, range(4)))
    report = judge(tmp_path)
    assert (first(report).category, first(report).subject.rank) == ("collective_divergence", 3)


@pytest.mark.parametrize(
    "oom",
    [
        "WARNING: ran out of memory, skipping batch. if this happens frequently, decrease batchsize",
        "CUDA out of memory. Tried to allocate 1.2 GiB. Skipping batch.",
        "| WARNING: OOM in all workers, skipping update",
        "caught OutOfMemoryError (OOM), skipping this batch and continuing",
    ],
)
@pytest.mark.parametrize(("culprit", "layout"), [(1, "per_rank"), (5, "combined"), (7, "torchrun")])
def test_c15_caught_out_of_memory(tmp_path: Path, oom: str, culprit: int, layout: str) -> None:
    logs = Logs(8).say(culprit, oom)
    report = judge(_victims(logs, culprit, sequence=9188, numel=7_340_032).write(tmp_path, layout)[0])
    assert (first(report).category, first(report).subject.rank) == ("collective_divergence", culprit)
    assert "out_of_memory" not in categories(report)[:1]


def test_c15_everybody_times_out_one_call_apart(tmp_path: Path) -> None:
    logs = Logs(4).say(2, "OOM: skipping batch 8812")
    for rank in range(4):
        logs.say(rank, watchdog(rank, 9188, "ALLREDUCE", 7_340_032))
    report = judge(logs.write(tmp_path)[0])
    assert (first(report).category, first(report).subject.rank) == ("collective_divergence", 2)


@pytest.mark.parametrize("tokens", [(18, 24, 30, 12), (7, 7, 9, 7, 7, 5, 7, 8)])
def test_c17_unequal_chunks(tmp_path: Path, tokens: tuple[int, ...]) -> None:
    for rank, n in enumerate(tokens):
        calls = [entry(s) for s in range(1, 4)] + [entry(4, "all_gather", (n, 64), done=False)]
        write_dump(tmp_path, rank, dump(calls, range(len(tokens))))
    assert first(judge(tmp_path)).category == "collective_mismatch"


def test_c17_in_words(tmp_path: Path) -> None:
    logs = Logs(4)
    for rank, n in enumerate((18, 24, 30, 12)):
        logs.say(rank, f"rank {rank} holds {n} tokens before the expert gather")
    logs.say(0, "RuntimeError: all_gather: tensors must have the same size on all ranks")
    assert first(judge(logs.write(tmp_path)[0])).category == "collective_mismatch"


@pytest.mark.parametrize("missing", [0, 5])
def test_p1_missing_dump_is_a_suspect(tmp_path: Path, missing: int) -> None:
    for rank in range(8):
        if rank != missing:
            write_dump(tmp_path, rank, dump([entry(s) for s in range(1, 9)] + [entry(9, done=False)], range(8)))
    report = judge(tmp_path)
    assert (first(report).category, first(report).subject.rank) == ("rank_missing", missing)
    assert hedged(report)


@pytest.mark.parametrize(("world", "workers"), [(8, 16), (4, 6)])
def test_p12_reused_store(tmp_path: Path, world: int, workers: int) -> None:
    logs = Logs(world)
    for rank in range(world):
        logs.say(
            rank,
            f"RuntimeError: Timed out initializing process group in store based barrier on rank: "
            f"{rank}, for key: "
            f"store_based_barrier_key:1 (world_size={world}, worker_count={workers}, "
            f"timeout=0:30:00)",
        )
    report = judge(logs.write(tmp_path)[0])
    assert first(report).category == "unknown"
    assert hedged(report)
    assert named_ranks(report) == set()


@pytest.mark.parametrize(
    "done",
    [
        "Training finished.",
        "`Trainer.fit` stopped: `max_epochs=3` reached.",
        "Training completed. Do not forget to share your model",
    ],
)
def test_p13_hang_after_the_end(tmp_path: Path, done: str) -> None:
    logs = Logs(4)
    for rank in range(4):
        logs.say(rank, "Saved checkpoint to /out/final", done)
    report = judge(_victims(logs, 1).write(tmp_path)[0])
    assert first(report).category == "unknown"
    assert hedged(report)
    assert "safe" in first(report).remedy.says
