"""Other tools that watch a training loop, each by its documented way for a plain loop, against no tool at all.

``python -m benchmarks._collector_rivals NAME STEPS`` (by an interpreter that has torch and the tool) runs the loop
bare, then with the tool, and prints ``{"us": ...}``: what the tool adds to the training thread's CPU time a step. One
process a measurement, because their patches stay. Loss, gradient norm and rate are given to those that record what they
are given.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks._training import Training, decile_us, group, plain

CONNECT_S = 60.0
Loop = Callable[[Training, int, Path], Iterator[None]]


def _traceml(training: Training, steps: int, folder: Path) -> Iterator[None]:
    import traceml_ai

    aggregator = subprocess.Popen(
        [str(Path(sys.executable).with_name("traceml")), "serve"],
        cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        traceml_ai.init(
            mode="auto", logs_dir=str(folder), connect_timeout_sec=CONNECT_S, on_missing_aggregator="raise"
        )  # fmt: skip
        for _ in range(steps):
            with traceml_ai.trace_step(training.model):
                training.step()
            yield
    finally:
        aggregator.kill()
        aggregator.wait()


def _trainscope(training: Training, steps: int, folder: Path) -> Iterator[None]:
    from trainscope import TrainScope
    from trainscope.core.config import TrainScopeConfig

    scope = TrainScope(training.model, training.optimizer, config=TrainScopeConfig(run_dir=str(folder))).attach()
    for step in range(steps):
        training.step(lambda loss, at=step: scope.step(loss.item(), batch_index=at))  # type: ignore[misc]
        yield
    scope.detach()


def _wandb(training: Training, steps: int, folder: Path) -> Iterator[None]:
    import wandb

    with wandb.init(project="bench", mode="offline", dir=str(folder)) as run:
        for _ in range(steps):
            run.log(_given(training))
            yield


def _mlflow(training: Training, steps: int, folder: Path) -> Iterator[None]:
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
    mlflow.set_experiment("bench")
    with mlflow.start_run():
        for step in range(steps):
            mlflow.log_metrics(_given(training), step=step, synchronous=False)
            yield


def _given(training: Training) -> dict[str, float]:
    loss = training.step()
    rate = training.optimizer.param_groups[0]["lr"]
    return {"loss": loss.item(), "grad_norm": training.norm.item(), "lr": rate}


LOOPS: dict[str, Loop] = {"traceml": _traceml, "trainscope": _trainscope, "wandb": _wandb, "mlflow": _mlflow}


def measure(name: str, steps: int) -> float:
    """us a step that the tool ``name`` adds, each loop's lower decile."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ |= {"MLFLOW_DISABLE_TELEMETRY": "true", "WANDB_SILENT": "true"}
    with tempfile.TemporaryDirectory() as folder, group():
        training = Training()
        decile_us(plain(training, steps))
        bare = decile_us(plain(training, steps))
        return decile_us(LOOPS[name](training, steps, Path(folder))) - bare


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps({"us": measure(sys.argv[1], int(sys.argv[2]))}) + "\n")
