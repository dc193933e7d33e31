"""Fit the learned score and compare it: ``python -m benchmarks.detect_learned [--fit] [--json]``.

Healthy simulated jobs of four shapes give series (medians over ranks): seeds 0 to 4 are fitted on, 5 chooses when to
stop, 6 to 8 are kept apart. Into copies of those one disturbance each is put: a spike, a shift of ten steps, a drift,
or a doubled scatter, of 3 to 6 sigmas. The figure of each score is the area under the ROC curve of its highest value
within the ten disturbed steps against its highest value within ten steps of the same series undisturbed. ``--fit``
fits anew and writes the numbers into the package.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks._common import figure, report
from benchmarks._fit import least_on
from lanterne.backend.detect import anomaly, learned
from lanterne.collector.sim.faults import simulate
from lanterne.collector.sim.model import Shape

Floats = NDArray[np.float64]
SHAPES = (
    Shape(dp=4, steps=240, checkpoint_every=0), Shape(dp=4, steps=240, checkpoint_every=0, jitter=0.04),
    Shape(dp=2, steps=240, checkpoint_every=0, forward_ms=8, backward_ms=16),
    Shape(dp=4, steps=240, checkpoint_every=0, data_ms=20.0),
)  # fmt: skip
NAMES = (
    "step_ms", "data_wait_ms", "forward_ms", "backward_ms", "transfer_ms", "wait_ms", "loss", "grad_norm", "rss_bytes",
    "gpu_power_w", "gpu_temperature_c", "host_cpu_percent", "loader_ms",
)  # fmt: skip
HIDDEN = 12
EPOCHS = 25
TRIALS = 6
LENGTH = 10
FIRST = 80


class Network(torch.nn.Module):
    """LSTM(2, 12) and a linear layer: [B, 16, 2] -> (mean, log spread) [B, 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = torch.nn.LSTM(2, HIDDEN, batch_first=True)
        self.out = torch.nn.Linear(HIDDEN, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, (last, _) = self.lstm(x)
        found: torch.Tensor = self.out(last[-1])
        return found


def series(seeds: range) -> list[Floats]:
    """Medians over ranks of the healthy jobs with these seeds."""
    found = []
    for seed in seeds:
        for shape in SHAPES:
            job = simulate(shape, (), seed=seed)
            found += [np.median(job.series[name], axis=1) for name in NAMES]
    return found


def _tensors(found: list[Floats]) -> tuple[torch.Tensor, torch.Tensor]:
    parts = [learned.standardised(x) for x in found]
    windows, following = (np.concatenate([p[i] for p in parts]) for i in range(2))
    return torch.from_numpy(windows).float(), torch.from_numpy(following).float()


def fit(train: list[Floats], stop: list[Floats]) -> dict[str, Floats]:
    """Weights with the least Gaussian negative log-likelihood on ``stop``."""
    torch.manual_seed(0)
    network = Network()
    optimizer = torch.optim.Adam(network.parameters(), lr=4e-3)
    x, y = _tensors(train)
    vx, vy = _tensors(stop)

    def loss_of(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        spread = out[:, 1].clamp(-3, 3)
        return (spread + 0.5 * ((target - out[:, 0]) / spread.exp()) ** 2).mean()

    return least_on((vx, vy), network, optimizer, (x, y), EPOCHS, loss_of)


def disturbed(x: Floats, at: int, kind: int, rng: np.random.Generator) -> Floats:
    """A copy of ``x`` with a disturbance of 3 to 6 of its own sigmas in ``at .. at + LENGTH``."""
    y, rest = x.copy(), np.diff(x)
    sigma = float(np.median(np.abs(rest - np.median(rest)))) * 1.4826 / np.sqrt(2)
    size = float(rng.uniform(3, 6)) * sigma
    match kind:
        case 0:
            y[at + int(rng.integers(LENGTH))] += size
        case 1:
            y[at : at + LENGTH] += size
        case 2:
            y[at : at + LENGTH] += size * np.linspace(0.2, 1, LENGTH)
        case _:
            y[at : at + LENGTH] += rng.normal(0, size / 2, LENGTH)
    return y


def area(faulty: list[float], clean: list[float]) -> float:
    """Area under the ROC curve: how often a faulty value exceeds a clean one."""
    a, b = np.array(faulty)[:, None], np.array(clean)[None, :]
    return float((a > b).mean() + 0.5 * (a == b).mean())


def compare(held: list[Floats], scores: dict[str, Callable[[Floats], Floats]]) -> dict[str, float]:
    rng = np.random.default_rng(0)
    faulty: dict[str, list[float]] = {name: [] for name in scores}
    clean: dict[str, list[float]] = {name: [] for name in scores}
    for i, x in enumerate(held):
        for trial in range(TRIALS):
            at = int(rng.integers(FIRST, len(x) - LENGTH))
            y = disturbed(x, at, (i + trial) % 4, rng)
            for name, score in scores.items():
                faulty[name].append(float(np.nanmax(np.abs(score(y)[at : at + LENGTH]))))
                clean[name].append(float(np.nanmax(np.abs(score(x)[at : at + LENGTH]))))
    return {name: area(faulty[name], clean[name]) for name in scores}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fit", action="store_true", help="fit anew and write the numbers into the package")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.fit:
        fitted = fit(series(range(5)), series(range(5, 6)))
        np.savez_compressed(learned.WEIGHTS, **{k: np.asarray(v, np.float32) for k, v in fitted.items()})
    scores = {"robust_z": anomaly.robust_z, "detrended_z": anomaly.detrended_z, "learned": learned.score}
    found = compare(series(range(6, 9)), scores)
    said = report("detect_learned", [figure(f"{name}_auc", v, "1", better="higher") for name, v in found.items()])
    print(json.dumps(said) if options.json else "\n".join(f"{name}: {v:.4f}" for name, v in found.items()))


if __name__ == "__main__":
    main()
