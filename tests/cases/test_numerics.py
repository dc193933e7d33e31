"""Field cases C38 to C52 and P5: loss, gradients, schedule and data, from trainer files with many key names."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from tests.cases.evidence import Logs, first, hedged, judge, metrics_file, named_ranks

KEYS = [
    ("step", "loss", "grad_norm", "lr"),
    ("global_step", "train/loss", "train/grad_norm", "train/learning_rate"),
    ("iteration", "lm loss", "grad norm", "learning rate"),
    ("_step", "train_loss", "gnorm", "learning_rate"),
]


def curve(n: int, *, start: float = 10.0, end: float = 3.0, seed: int = 1, noise: float = 0.02) -> list[float]:
    random_ = random.Random(seed)
    return [end + (start - end) * math.exp(-4 * i / n) + random_.gauss(0, noise) for i in range(n)]


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("clip", [1.0, 0.5])
def test_c38_clip_before_unscale(tmp_path: Path, keys: tuple[str, ...], clip: float) -> None:
    noise = random.Random(4)
    rows = [{"fp16": True, "max_grad_norm": clip}]
    rows += [
        {
            keys[0]: i,
            keys[1]: 10.4 + noise.gauss(0, 0.01),
            keys[2]: clip / 65536 * (1 + 0.01 * noise.random()),
            "loss_scale": 65536.0,
        }
        for i in range(60)
    ]  # type: ignore[misc]
    assert first(judge(metrics_file(tmp_path / "log.jsonl", rows))).category == "scaler_misuse"


def test_c38_healthy_fp16_is_quiet(tmp_path: Path) -> None:
    loss, noise = curve(100), random.Random(4)
    rows = [{"fp16": True, "max_grad_norm": 1.0}] + [
        {"step": i, "loss": x, "grad_norm": 0.8 + 0.1 * noise.random(), "loss_scale": 65536.0}
        for i, x in enumerate(loss)
    ]  # type: ignore[list-item]
    assert judge(metrics_file(tmp_path / "log.jsonl", rows)).healthy


@pytest.mark.parametrize(("ranks", "culprit"), [(4, 3), (8, 5)])
def test_c40_nan_before_the_reduction(tmp_path: Path, ranks: int, culprit: int) -> None:
    for rank in range(ranks):
        rows = []
        for i in range(40):
            bad = i == 30
            local = float("nan") if bad and rank == culprit else 1.0 + 0.01 * rank
            rows.append(
                {
                    "step": i,
                    "rank": rank,
                    "loss": float("nan") if i >= 30 else 3.0 - 0.01 * i,
                    "grad_norm_local": local,
                    "num_valid_labels": 0 if bad and rank == culprit else 512,
                }
            )
        metrics_file(tmp_path / f"rank_{rank}.jsonl", rows)
    cause = first(judge(tmp_path))
    assert (cause.category, cause.subject.rank) == ("nonfinite_values", culprit)


def test_c40_in_words(tmp_path: Path) -> None:
    logs = Logs(8).say(5, "step 812 valid_label_count=0", "rank 5: loss is NaN at step 812 before all-reduce")
    for rank in (0, 1, 2, 3, 4, 6, 7):
        logs.say(rank, "step 812 valid_label_count=480", f"rank {rank}: grad norm is NaN at step 812")
    cause = first(judge(logs.write(tmp_path)[0]))
    assert (cause.category, cause.subject.rank) == ("nonfinite_values", 5)


def test_c42_overlap_and_mxfp8(tmp_path: Path) -> None:
    lines = [
        "  fp8_recipe ............................ mxfp8",
        "fp8_recipe: mxfp8",
        "  overlap_param_gather ............................ True",
        "iteration 120 grad norm: nan",
    ]
    (tmp_path / "train.log").write_text("\n".join(lines) + "\n")
    cause = first(judge(tmp_path))
    assert cause.category == "nonfinite_values"
    assert cause.subject.rank is None
    assert "overlap_param_gather" in cause.remedy.says


@pytest.mark.parametrize("factor", [2.2, 1.8])
def test_c44_step_counter_lost(tmp_path: Path, factor: float) -> None:
    noise, rows = random.Random(2), []
    for i in range(200):
        extra = 1 + (factor - 1) * math.exp(-(i - 120) / 12) if i >= 120 else 1
        row = {
            "step": i,
            "loss": 3.0 + noise.gauss(0, 0.01),
            "lr": 3e-4,
            "update_ratio": 1e-3 * extra * (1 + noise.gauss(0, 0.01)),
        }
        if i == 120:
            row["event"] = "resumed from checkpoint-120"  # type: ignore[assignment]
        rows.append(row)
    cause = first(judge(metrics_file(tmp_path / "log.jsonl", rows)))
    assert (cause.category, cause.since_step) == ("resume_state_lost", 120)


@pytest.mark.parametrize("keys", KEYS)
def test_c46_learning_rate_restarts(tmp_path: Path, keys: tuple[str, ...]) -> None:
    loss, rows = curve(300), []
    for i, x in enumerate(loss):
        lr = 3e-4 * min(1.0, (i + 1) / 20) if i < 200 else 3e-4 * min(1.0, (i - 199) / 20)
        row = {keys[0]: i, keys[1]: x + (0.6 * math.exp(-(i - 200) / 20) if i >= 200 else 0), keys[3]: lr}
        if i == 200:
            row["event"] = "resume from checkpoint"  # type: ignore[assignment]
        rows.append(row)
    cause = first(judge(metrics_file(tmp_path / "log.jsonl", rows)))
    assert cause.category == "resume_state_lost"
    assert cause.since_step is not None
    assert abs(cause.since_step - 200) <= 2


def test_c46_in_a_trainer_state(tmp_path: Path) -> None:
    history = []
    for i, x in enumerate(curve(120)):
        lr = 5e-5 * min(1.0, (i + 1) / 10) if i < 80 else 5e-5 * min(1.0, (i - 79) / 10)
        history.append(
            {"epoch": i / 60, "learning_rate": lr, "loss": x + (0.9 if 80 <= i < 100 else 0), "step": 10 * (i + 1)}
        )
    (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": 1200, "log_history": history}))
    assert first(judge(tmp_path)).category == "resume_state_lost"


@pytest.mark.parametrize("steps", [4, 8])
def test_c48_accumulation(tmp_path: Path, steps: int) -> None:
    noise, rows = random.Random(5), []
    for i in range(80):
        k = steps if i >= 40 else 1
        rows.append(
            {
                "step": i,
                "loss": 2.5 * k * (1 + noise.gauss(0, 0.01)),
                "grad_norm": 0.7 * k * (1 + noise.gauss(0, 0.05)),
                "gradient_accumulation_steps": k,
            }
        )
    cause = first(judge(metrics_file(tmp_path / "log.jsonl", rows)))
    assert (cause.category, cause.since_step) == ("accumulation_error", 40)


@pytest.mark.parametrize("odd", [1, 3])
def test_c50_checksums_drift(tmp_path: Path, odd: int) -> None:
    for rank in range(4):
        rows = [
            {
                "step": 50 * i,
                "rank": rank,
                "loss": 3 - 0.01 * i,
                "param_checksum": 1234.5 + 0.25 * i + (0.003 * (i - 9) if rank == odd and i > 9 else 0),
            }
            for i in range(30)
        ]
        metrics_file(tmp_path / f"rank_{rank}.jsonl", rows)
    cause = first(judge(tmp_path))
    assert (cause.category, cause.subject.rank) == ("replica_divergence", odd)


def test_c50_in_words(tmp_path: Path) -> None:
    logs = Logs(4)
    for rank in range(4):
        logs.say(rank, f"rank {rank} step 400 parameter checksum=0x{'8f3a11' if rank != 2 else '8f3b70'}")
    cause = first(judge(logs.write(tmp_path)[0]))
    assert (cause.category, cause.subject.rank) == ("replica_divergence", 2)


@pytest.mark.parametrize("ranks", [2, 8])
def test_c52_equal_losses(tmp_path: Path, ranks: int) -> None:
    loss = curve(50)
    for rank in range(ranks):
        metrics_file(
            tmp_path / f"rank_{rank}.jsonl", [{"step": i, "rank": rank, "loss": x} for i, x in enumerate(loss)]
        )
    assert first(judge(tmp_path)).category == "data_order"


def test_c52_fingerprints(tmp_path: Path) -> None:
    logs = Logs(4)
    for rank in range(4):
        logs.say(rank, *(f"rank {rank} step {s} batch_hash=ab12{s}" for s in range(10, 14)))
    assert first(judge(logs.write(tmp_path)[0])).category == "data_order"


def test_c52_different_losses_are_healthy(tmp_path: Path) -> None:
    for rank in range(4):
        metrics_file(
            tmp_path / f"rank_{rank}.jsonl",
            [{"step": i, "rank": rank, "loss": x} for i, x in enumerate(curve(80, seed=rank, start=4))],
        )
    assert judge(tmp_path).healthy


def test_p5_a_spike_without_a_cause(tmp_path: Path) -> None:
    noise, rows = random.Random(9), []
    rise, norms = [2.2, 2.3, 2.9, 4.1, 5.1, 4.0], [0.95, 2.4, 15.9, 145.0, 960.0, 40.0]
    for i in range(300):
        loss, norm = 2.2 + noise.gauss(0, 0.01), 0.24 + noise.gauss(0, 0.01)
        if 200 <= i < 206:
            loss, norm = rise[i - 200], norms[i - 200]
        elif 206 <= i < 230:
            loss = 2.2 + 1.5 * math.exp(-(i - 206) / 6)
        rows.append({"step": i, "loss": loss, "grad_norm": norm, "lr": 6e-5})
    report = judge(metrics_file(tmp_path / "log.jsonl", rows))
    assert not report.healthy
    assert first(report).category == "unknown"
    assert named_ranks(report) <= {0}
    assert hedged(report)
