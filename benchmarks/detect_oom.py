"""Fit and compare the out-of-memory predictors: ``python -m benchmarks.detect_oom TRACES [--fit] [--json]``.

``TRACES`` is a folder of traces of real allocations (``benchmarks/_oom_traces.py``); missing ones are recorded first.
Each trace gets twelve limits between the peak of its first 20 samples and 1.15 times its own, so most of them run out
sooner or later; what follows the first sample at the limit is cut off. A window counts as positive when allocated
memory reaches the limit within the next ten samples (200 ms). Seeds 0 to 7 of each kind are fitted on, 8 and 9 choose
when to stop, 10 and 11 are kept apart: the figures are about those. ``--fit`` fits all three anew and writes their
numbers into the package; without it the shipped ones are judged. ``lstm_wins``: in how many of 200 resamples of the
traces kept apart (whole traces, with replacement) the network has the highest average precision.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from benchmarks._common import figure, report
from benchmarks._fit import least_on
from benchmarks._oom_traces import KINDS, Floats
from lanterne.backend.detect import oom

SEEDS = 12
SECONDS = 4.0
LIMITS = 12
QUIET = 20
EPOCHS = 30
RESAMPLES = 200
Set = tuple[Floats, Floats, Floats, Floats]  # windows [B, 10, 5], limits [B], reached [B], number of the trace [B]


class Network(torch.nn.Module):
    """LSTM(12, 16) and a linear layer: [B, 10, 12] -> logits [B]."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = torch.nn.LSTM(oom.FEATURES, oom.HIDDEN, batch_first=True)
        self.out = torch.nn.Linear(oom.HIDDEN, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, (last, _) = self.lstm(x)
        logits: torch.Tensor = self.out(last[-1])[:, 0]
        return logits


def record(folder: Path) -> None:
    """Record the kinds of which traces are missing; each takes about a minute."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        if not all((folder / f"{kind}-{seed}.npy").exists() for seed in range(SEEDS)):
            command = [sys.executable, "-m", "benchmarks._oom_traces", kind, str(SEEDS), str(SECONDS), str(folder)]
            subprocess.run(command, check=True)


def windows_of(trace: Floats, limit: float, number: int) -> Set:
    """All windows of a trace before its first sample at the limit."""
    allocated = trace[:, 0]
    over = np.flatnonzero(allocated >= limit)
    end = int(over[0]) if len(over) else len(trace) - oom.HORIZON
    starts = np.arange(0, max(0, end - oom.SAMPLES + 1))
    windows = np.array([trace[i : i + oom.SAMPLES] for i in starts]).reshape(-1, oom.SAMPLES, trace.shape[1])
    last = starts + oom.SAMPLES - 1
    reached = np.array([(allocated[i + 1 : i + 1 + oom.HORIZON] >= limit).any() for i in last], np.float64)
    return windows, np.full(len(windows), limit), reached, np.full(len(windows), float(number))


def load(folder: Path, seeds: range) -> Set:
    """All windows of the traces with these seeds, each under twelve limits."""
    parts: list[Set] = []
    for k, kind in enumerate(KINDS):
        for seed in seeds:
            trace = np.load(folder / f"{kind}-{seed}.npy", allow_pickle=False)
            rng = np.random.default_rng([k, seed, 7])
            low, high = trace[:QUIET, 0].max(), 1.15 * trace[:, 0].max()
            parts += [windows_of(trace, float(limit), SEEDS * k + seed) for limit in rng.uniform(low, high, LIMITS)]
    return tuple(np.concatenate([p[i] for p in parts]) for i in range(4))  # type: ignore[return-value]


def curve(level: Floats, reached: Floats) -> Floats:
    """Slope and offset of the logistic curve of ``reached`` over one number, by Newton's method."""
    x = np.stack([level, np.ones_like(level)], axis=1)
    weights = np.zeros(2)
    for _ in range(50):
        p = 1 / (1 + np.exp(-np.clip(x @ weights, -60, 60)))
        hessian = (x * (p * (1 - p))[:, None]).T @ x + 1e-6 * np.eye(2)
        weights = weights + np.linalg.solve(hessian, x.T @ (reached - p) - 1e-6 * weights)
    return weights


def train(fit: Set, stop: Set) -> dict[str, Floats]:
    """The network's weights at the epoch with the least loss on ``stop``."""
    torch.manual_seed(0)
    network = Network()
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3, weight_decay=0.05)
    x, y = torch.from_numpy(oom.features(fit[0], fit[1])).float(), torch.from_numpy(fit[2]).float()
    vx, vy = torch.from_numpy(oom.features(stop[0], stop[1])).float(), torch.from_numpy(stop[2]).float()
    loss_of = torch.nn.functional.binary_cross_entropy_with_logits
    return least_on((vx, vy), network, optimizer, (x, y), EPOCHS, loss_of)


def average_precision(chance: Floats, reached: Floats) -> float:
    """Area under precision over recall, each positive weighing alike."""
    hit = reached[np.argsort(-chance, kind="stable")]
    return float((np.cumsum(hit) / np.arange(1, len(hit) + 1))[hit > 0].mean())


def scores(chance: Floats, reached: Floats) -> dict[str, float]:
    """Average precision, Brier score, and F1 of the answer "act" (0.7)."""
    act = chance >= oom.ACT_AT
    true = float((act & (reached > 0)).sum())
    f1 = 2 * true / max(float(act.sum() + reached.sum()), 1.0)
    brier = float(((chance - reached) ** 2).mean())
    return {"average_precision": average_precision(chance, reached), "brier": brier, "f1_act": f1}


def wins(chances: dict[str, Floats], held: Set) -> float:
    """Share of resamples of whole traces in which the network ranks best."""
    rng = np.random.default_rng(0)
    numbers = np.unique(held[3])
    rows = {n: np.flatnonzero(held[3] == n) for n in numbers}
    count = 0
    for _ in range(RESAMPLES):
        chosen = np.concatenate([rows[n] for n in rng.choice(numbers, len(numbers))])
        found = {name: average_precision(chance[chosen], held[2][chosen]) for name, chance in chances.items()}
        count += max(found, key=lambda name: found[name]) == "lstm"
    return count / RESAMPLES


def fit_all(folder: Path) -> dict[str, Floats]:
    """The numbers of all three predictors from the traces that are not kept apart."""
    fit, stop = load(folder, range(8)), load(folder, range(8, 10))
    return {
        "last_value.curve": curve(oom.last_level(fit[0], fit[1]), fit[2]),
        "linear.curve": curve(oom.linear_level(fit[0], fit[1]), fit[2]),
        **train(fit, stop),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--fit", action="store_true", help="fit anew and write the numbers into the package")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    record(options.traces)
    if options.fit:
        np.savez_compressed(oom.WEIGHTS, **{k: np.asarray(v, np.float32) for k, v in fit_all(options.traces).items()})
    held = load(options.traces, range(10, SEEDS))
    chances = {name: oom.probability(held[0], held[1], predictor=name) for name in oom.PREDICTORS}
    found = {name: scores(chance, held[2]) for name, chance in chances.items()}
    figures = [
        figure(f"{name}_{what}", value, "1", better="lower" if what == "brier" else "higher")
        for name, row in found.items()
        for what, value in row.items()
    ]
    figures.append(figure("lstm_wins", wins(chances, held), "1", goal=0.95, better="higher"))
    said = report("detect_oom", figures, windows=len(held[2]), positive=int(held[2].sum()))
    if options.json:
        print(json.dumps(said))
        return
    print(f"{said['windows']} windows kept apart, {said['positive']} of them reach the limit")
    for row in figures:
        print(f"{row['name']}: {row['value']}")


if __name__ == "__main__":
    main()
