"""Metric files of jobs whose fault shows in numbers alone: schedules, replicas, data, memory, pace."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from tests.cases.evidence import dump, entry, watchdog, write_dump
from tests.cases.evidence_series import builder

RANKS = 4


def _loss(step: int, noise: random.Random, pace: float = 60.0) -> float:
    return 2.2 + 8.3 * math.exp(-step / pace) + noise.gauss(0, 0.03)


def _jsonl(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _ranks(folder: Path, steps: int, row: Callable[[int, int, random.Random], Mapping[str, object]]) -> None:
    """One file a rank; ``row(step, rank, noise)``."""
    for rank in range(RANKS):
        noise = random.Random(rank)
        _jsonl(folder / f"rank_{rank}.jsonl", ({"step": s, "rank": rank, **row(s, rank, noise)} for s in range(steps)))


@builder
def lr_ends_too_soon(folder: Path) -> None:
    noise = random.Random(1)
    rows = []
    for s in range(1, 801):
        lr = max(0.0, 3e-4 * (1 - s * 8 / 800))  # a scheduler that steps once a process
        rows.append({"step": s, "max_steps": 800, "loss": _loss(min(s, 100), noise), "lr": lr, "grad_norm": 1.0})
    _jsonl(folder / "trainer_log.jsonl", rows)


@builder
def checksums_drift(folder: Path) -> None:
    def row(s: int, r: int, noise: random.Random) -> dict[str, object]:
        return {"loss": _loss(s, noise), "param_checksum": 1000.0 + s + (0.01 * (s - 40) if r == 2 and s > 40 else 0)}

    _ranks(folder, 100, row)


@builder
def reduced_norms_differ(folder: Path) -> None:
    def row(s: int, r: int, noise: random.Random) -> dict[str, object]:
        norm = 1.0 + 0.1 * math.sin(s)
        return {"loss": _loss(s, random.Random(s)), "grad_norm": norm * (1.7 if r == 3 and s > 30 else 1.0)}

    _ranks(folder, 100, row)


@builder
def same_fingerprints(folder: Path) -> None:
    def row(s: int, r: int, noise: random.Random) -> dict[str, object]:
        return {"loss": _loss(s, noise), "batch_hash": f"{(s * 7919) % 65536:04x}"}

    _ranks(folder, 60, row)


@builder
def own_fingerprints(folder: Path) -> None:
    def row(s: int, r: int, noise: random.Random) -> dict[str, object]:
        return {"loss": _loss(s, noise), "batch_hash": f"{(s * 7919 + r * 104729) % 1048576:05x}"}

    _ranks(folder, 60, row)


@builder
def host_memory_grows_everywhere(folder: Path) -> None:
    def row(s: int, r: int, noise: random.Random) -> dict[str, object]:
        return {"loss": _loss(s, noise), "rss_gb": 31.0 + 0.05 * s + noise.gauss(0, 0.05)}

    _ranks(folder, 400, row)


@builder
def memory_is_flat(folder: Path) -> None:
    def row(s: int, r: int, noise: random.Random) -> dict[str, object]:
        rss = 31.0 + 6 * (1 - math.exp(-s / 20)) + noise.gauss(0, 0.2)
        return {"loss": _loss(s, noise), "rss_gb": rss, "step_time_ms": noise.gauss(300, 4)}

    _ranks(folder, 300, row)


@builder
def device_memory_grows_on_one(folder: Path) -> None:
    def row(s: int, r: int, noise: random.Random) -> dict[str, object]:
        return {
            "loss": _loss(s, noise),
            "memory_allocated_gb": 50.0 + (0.06 * s if r == 1 else 0) + noise.gauss(0, 0.1),
        }

    _ranks(folder, 300, row)


@builder
def pauses_wander(folder: Path) -> None:
    def row(s: int, r: int, noise: random.Random) -> dict[str, object]:
        pause = 1450.0 if s % 130 == (17 + 31 * r) % 130 else 0.0
        return {"loss": _loss(s, noise), "step_time_ms": noise.gauss(900, 8) + pause}

    _ranks(folder, 600, row)


@builder
def scale_collapses(folder: Path) -> None:
    noise = random.Random(2)
    rows = [
        {"step": s, "loss": _loss(s, noise), "loss_scale": 65536.0 if s < 100 else max(1.0, 65536.0 / 2 ** (s - 99))}
        for s in range(160)
    ]
    _jsonl(folder / "metrics.jsonl", rows)


@builder
def clip_before_unscale(folder: Path) -> None:
    noise = random.Random(3)
    rows: list[dict[str, object]] = [{"fp16": True, "max_grad_norm": 1.0}]
    rows += [
        {
            "step": s,
            "loss": 10.4 + noise.gauss(0, 0.02),
            "grad_norm": abs(noise.gauss(1.6e-5, 1e-6)),
            "loss_scale": 65536.0,
        }
        for s in range(120)
    ]
    _jsonl(folder / "metrics.jsonl", rows)


@builder
def update_jumps_at_resume(folder: Path) -> None:
    noise = random.Random(4)
    rows: list[dict[str, object]] = []
    for s in range(240):
        big = 1 + 1.2 * math.exp(-(s - 120) / 12) if s >= 120 else 1.0
        rows.append({"step": s, "loss": _loss(s, noise), "lr": 1e-4, "update_ratio": 1e-3 * big * noise.gauss(1, 0.01)})
        if s == 119:
            rows.append({"event": "resume", "step": 120, "message": "resumed from checkpoint at step 120"})
    _jsonl(folder / "metrics.jsonl", rows)


@builder
def labels_run_out_on_one(folder: Path) -> None:
    def row(s: int, r: int, noise: random.Random) -> dict[str, object]:
        bad = s >= 73
        labels = 0 if r == 2 and s == 73 else 500 + noise.randrange(50)
        return {"loss": math.nan if bad else _loss(s, noise), "valid_labels": labels}

    _ranks(folder, 80, row)


@builder
def spike_without_reason(folder: Path) -> None:
    noise = random.Random(5)
    rows = []
    for s in range(500):
        up = 1.9 * math.exp(-(s - 400) / 8) if s >= 400 else 0.0
        norm = 1.0 * (1 + 200 * math.exp(-((s - 398) ** 2) / 8))
        rows.append({"step": s, "loss": _loss(s, noise) + up, "grad_norm": norm, "lr": 2e-4})
    _jsonl(folder / "metrics.jsonl", rows)


@builder
def load_is_uneven_by_tokens(folder: Path) -> None:
    def row(s: int, r: int, noise: random.Random) -> dict[str, object]:
        tokens = noise.randrange(2000, 16000)
        return {"num_tokens": tokens, "forward_ms": tokens * 0.02 + noise.gauss(0, 2), "loss": _loss(s, noise)}

    _ranks(folder, 120, row)


@builder
def noisy_but_healthy(folder: Path) -> None:
    def row(s: int, r: int, noise: random.Random) -> dict[str, object]:
        return {
            "loss": _loss(s, noise) + noise.gauss(0, 0.15),
            "step_time_ms": noise.gauss(420, 30),
            "grad_norm": 1.1,
            "lr": 3e-4 * (0.5 + 0.5 * math.cos(math.pi * s / 400)),
        }

    _ranks(folder, 400, row)


def _dumps(folder: Path, ranks: int, lag: Mapping[int, int]) -> None:
    for rank in range(ranks):
        last = 60 - lag.get(rank, 0)
        write_dump(folder, rank, dump([entry(s, done=s < 60) for s in range(20, last + 1)], range(ranks)))


@builder
def dumps_logs_and_metrics(folder: Path) -> None:
    """A whole folder of one hang: dumps, logs, trainer metrics; one verdict is wanted."""
    _dumps(folder, 8, {6: 1})
    for rank in range(8):
        noise = random.Random(rank)
        lines = [f"step {s} loss {_loss(s, noise):.3f}" for s in range(40)]
        lines += (
            [watchdog(rank, 60, "ALLREDUCE", 1024, 600_000)]
            if rank != 6
            else ["Evaluating:  41%|████      | 410/1000 [09:58<14:21]"]
        )
        (folder / f"rank_{rank}.log").write_text("\n".join(lines))
        _jsonl(
            folder / f"metrics_rank{rank}.jsonl", [{"step": s, "rank": rank, "step_time_ms": 300} for s in range(40)]
        )


@builder
def one_dump_is_not_there(folder: Path) -> None:
    for rank in (0, 1, 2, 4, 5, 6, 7):
        write_dump(folder, rank, dump([entry(s, done=s < 60) for s in range(20, 61)], range(8)))


@builder
def dumps_of_a_job_that_ended_well(folder: Path) -> None:
    for rank in range(8):
        write_dump(folder, rank, dump([entry(s) for s in range(20, 61)], range(8)))


@builder
def one_rank_gathers_instead(folder: Path) -> None:
    for rank in range(8):
        rows = [entry(s, done=s < 60) for s in range(20, 60)]
        rows.append(entry(60, "all_gather_into_tensor" if rank == 4 else "all_reduce", done=False))
        write_dump(folder, rank, dump(rows, range(8)))


@builder
def one_rank_skipped_a_call(folder: Path) -> None:
    sizes = {s: (100 + (s * 37) % 91,) for s in range(20, 70)}
    for rank in range(8):
        rows = [entry(s, shape=sizes[s + (1 if rank == 3 and s >= 50 else 0)], done=s < 50) for s in range(20, 56)]
        write_dump(folder, rank, dump(rows, range(8)))


@builder
def compressed_node_logs(folder: Path) -> None:
    import gzip

    for node in range(2):
        lines = []
        for local in range(4):
            r = 4 * node + local
            if r != 5:
                lines.append(f"[default{local}]:{watchdog(r, 812, 'ALLREDUCE', 4096, 600_000)}")
            else:
                lines.append(f"[default{local}]:[rank{r}]: step 90 loss 2.1")
        with gzip.open(folder / f"node-{node}.log.gz", "wt") as file:
            file.write("\n".join(["WORLD_SIZE=8", *lines]))
