"""Convergence under spikes: a small transformer, static clipping against each adaptive guard, five seeds.

``python -m benchmarks.guards --json`` trains ``STEPS`` steps on a synthetic task (the class of a noisy sequence of
tokens) by SGD with momentum, where the length of a gradient matters. At seeded steps the gradient is
spiked: by 30, 300 or 3000 times, as a bad batch or a flipped bit does. What counts is the loss on held-out data after
the last step and the worst loss on the way. ``--docs`` writes the table and the plot of docs/guards.md.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks._common import figure, report
from lanterne.collector.guards.clipping import CurvatureClip, EmaClip, LayerClip, QuantileClip

STEPS, SEEDS, EVERY = 300, (0, 1, 2, 3, 4), 10
WIDTH, TOKENS, CLASSES, BATCH, RATE = 32, 8, 8, 32, 0.05
SPIKES, FACTORS = 12, (30.0, 300.0, 3000.0)
DOCS = Path(__file__).parents[1] / "docs"
Guard = Callable[[nn.Module, torch.optim.Optimizer, Callable[[], torch.Tensor]], Callable[[int], Any]]


class Static:
    """``clip_grad_norm_`` with one bound for the whole run."""

    def __init__(self, parameters: Sequence[nn.Parameter], bound: float) -> None:
        self.parameters, self.bound = parameters, bound

    def clip(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters, self.bound)


def _curvature(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> Any:
    guard = CurvatureClip(list(model.parameters()), lambda: float(optimizer.param_groups[0]["lr"]))

    def clip(step: int) -> Any:
        if step % 25 == 0:
            with sdpa_kernel(SDPBackend.MATH):  # the fused attention has no second derivative
                guard.measure(loss)
        return guard.clip()

    return clip


def _of(make: Callable[[list[nn.Parameter]], Any]) -> Guard:
    def start(model: nn.Module, _optimizer: Any, _loss: Any) -> Callable[[int], Any]:
        guard = make(list(model.parameters()))
        return lambda _step: guard.clip()

    return start


GUARDS: dict[str, Guard] = {
    "none": lambda *_: lambda _step: None,
    "static, bound 1": _of(lambda p: Static(p, 1.0)),
    "static, bound 5": _of(lambda p: Static(p, 5.0)),
    "LayerClip": _of(LayerClip),
    "EmaClip": _of(EmaClip),
    "QuantileClip": _of(QuantileClip),
    "CurvatureClip": _curvature,
}


class Model(nn.Module):
    """One transformer encoder layer and a classifier over the mean token."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.encoder(x).mean(1))
        return found


def data(generator: torch.Generator, task: torch.Tensor, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences ``[samples, TOKENS, WIDTH]`` whose class is the largest of CLASSES projections of their mean."""
    x = torch.randn(samples, 1, WIDTH, generator=generator)
    noise = 0.3 * torch.randn(samples, TOKENS, WIDTH, generator=generator)
    return x + noise, (x[:, 0] @ task).argmax(1)


def train(start: Guard, seed: int, steps: int) -> list[float]:
    """Held-out loss each ``EVERY`` steps; inf once a parameter is not finite."""
    torch.manual_seed(seed)
    generator, draw = torch.Generator().manual_seed(seed), random.Random(seed)
    task = torch.randn(WIDTH, CLASSES, generator=generator)
    test_x, test_y = data(generator, task, 512)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    held = data(generator, task, BATCH)
    guard = start(model, optimizer, lambda: nn.functional.cross_entropy(model(held[0]), held[1]))
    spiked = {step: draw.choice(FACTORS) for step in draw.sample(range(steps // 6, steps - steps // 6), SPIKES)}
    curve = []
    for step in range(steps):
        x, y = data(generator, task, BATCH)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        if step in spiked:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(spiked[step])
        guard(step)
        optimizer.step()
        if step % EVERY == EVERY - 1:
            with torch.no_grad():
                loss = float(nn.functional.cross_entropy(model(test_x), test_y))
            curve.append(loss if loss == loss else float("inf"))
    return curve


def run(steps: int, seeds: Sequence[int]) -> dict[str, list[list[float]]]:
    torch.set_num_threads(1)
    return {name: [train(start, seed, steps) for seed in seeds] for name, start in GUARDS.items()}


def rows(curves: dict[str, list[list[float]]]) -> list[tuple[str, float, float, float, float]]:
    """Guard, median, best and worst final loss over the seeds, and the median of the worst loss on the way."""
    found = []
    for name, runs in curves.items():
        last = [curve[-1] for curve in runs]
        way = statistics.median(max(curve[len(curve) // 6 :]) for curve in runs)
        found.append((name, statistics.median(last), min(last), max(last), way))
    return found


def write_docs(curves: dict[str, list[list[float]]], steps: int) -> None:
    """The table between the marks of docs/guards.md, and its plot."""
    import plotly.graph_objects as go

    lines = ["| guard | final loss, median | best | worst | worst on the way, median |", "|" + " --- |" * 5]
    lines += [f"| {name} | " + " | ".join(f"{v:.3g}" for v in values) + " |" for name, *values in rows(curves)]
    page = DOCS / "guards.md"
    text = page.read_text(encoding="utf-8")
    head, _, rest = text.partition("<!-- table -->\n")
    tail = rest.partition("<!-- end -->")[2]
    page.write_text(head + "<!-- table -->\n" + "\n".join(lines) + "\n<!-- end -->" + tail, encoding="utf-8")
    figure_ = go.Figure()
    at = list(range(EVERY, steps + 1, EVERY))
    for name, runs in curves.items():
        median_ = [statistics.median(values) for values in zip(*runs, strict=True)]
        figure_.add_scatter(x=at, y=[min(v, 1e3) for v in median_], name=name, mode="lines")
    figure_.update_layout(
        template="plotly_white", width=900, height=420, margin={"l": 60, "r": 20, "t": 20, "b": 50},
        xaxis_title="step", yaxis_title="held-out loss, median of seeds", yaxis_type="log",
    )  # fmt: skip
    _picture(figure_, DOCS / "images" / "guards.png")


def _picture(figure_: Any, path: Path) -> None:
    """Drawn by the browser that the page's tests use."""
    import tempfile

    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as play:
        page_file = Path(folder) / "figure.html"
        figure_.write_html(page_file, include_plotlyjs=True, config={"displayModeBar": False})
        browser = play.chromium.launch(executable_path=_chromium())
        page = browser.new_page(viewport={"width": 900, "height": 420})
        page.goto(page_file.as_uri())
        page.wait_for_selector(".main-svg")
        page.screenshot(path=str(path))
        browser.close()


def _chromium() -> str | None:
    import shutil

    return shutil.which("chromium") or shutil.which("google-chrome")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="two seeds")
    parser.add_argument("--docs", action="store_true", help="write docs/guards.md and its plot")
    arguments = parser.parse_args()
    seeds = SEEDS[:2] if arguments.quick else SEEDS
    curves = run(STEPS, seeds)
    figures = [figure(f"final_loss_median[{name}]", mid, "nats") for name, mid, *_ in rows(curves)]
    json.dump(report("guards", figures, steps=STEPS, seeds=list(seeds), spikes=SPIKES), sys.stdout, indent=1)
    sys.stdout.write("\n")
    sys.stdout.flush()
    if arguments.docs:
        write_docs(curves, STEPS)


if __name__ == "__main__":
    main()
