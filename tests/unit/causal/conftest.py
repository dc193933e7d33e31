"""Small synthetic jobs as Facts: a data-parallel step in which everybody waits for the last rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from lanterne.causal import FactEvent, Facts, Place


@dataclass
class Small:
    """A job of ``ranks`` x ``steps``; set ``work`` (own ms by phase) and ``series``, then ``facts()``."""

    ranks: int = 4
    steps: int = 100
    seed: int = 0
    noise: float = 0.03
    hosts: int = 1
    work: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    transfer: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    series: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    events: list[FactEvent] = field(default_factory=list)
    mesh: Callable[[int], dict[str, int]] = lambda rank: {"dp_replicate": rank}

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)

        def around(ms: float) -> NDArray[np.float64]:
            return ms * np.exp(rng.normal(0, self.noise, (self.steps, self.ranks)))

        self.work = {"data": around(3), "forward": around(20), "backward": around(35), "optimizer": around(4)}
        self.transfer = np.abs(rng.normal(6, 0.3, self.steps))
        self.series = {
            "loss": 3 - 0.01 * np.arange(self.steps)[:, None] + rng.normal(0, 0.03, (self.steps, self.ranks)),
            "grad_norm": np.repeat(1 + rng.normal(0, 0.05, (self.steps, 1)), self.ranks, 1),
            "grad_norm_local": np.exp(rng.normal(0, 0.08, (self.steps, self.ranks))),
            "lr": np.full((self.steps, self.ranks), 1e-3),
            "lr_planned": np.full((self.steps, self.ranks), 1e-3),
            "rss_bytes": 8e8 + rng.normal(0, 2e6, (self.steps, self.ranks)),
        }

    def places(self) -> dict[int, Place]:
        per_host = -(-self.ranks // self.hosts)
        return {r: Place(host=f"node{r // per_host}", mesh=self.mesh(r)) for r in range(self.ranks)}

    def facts(self, **changes: object) -> Facts:
        """Backward times hold the wait for the last rank, as a host clock sees them."""
        w = self.work
        own = w["data"] + w["forward"] + w["backward"]
        wait = own.max(1, keepdims=True) - own
        series = {
            "step_ms": np.repeat(own.max(1, keepdims=True) + self.transfer[:, None] + 4, self.ranks, 1),
            "data_wait_ms": w["data"],
            "forward_ms": w["forward"],
            "backward_ms": w["backward"] + wait + self.transfer[:, None],
            "optimizer_ms": w["optimizer"],
            "lateness_ms": own - np.median(own, 1)[:, None],
            "busy_ms": own + w["optimizer"],
            "wait_ms": wait,
            "transfer_ms": np.repeat(self.transfer[:, None], self.ranks, 1),
            **self.series,
        }
        plain: dict[str, object] = {
            "job": "small", "ranks_expected": self.ranks, "ranks": tuple(range(self.ranks)),
            "steps": np.arange(self.steps), "series": series, "places": self.places(), "events": tuple(self.events),
        }  # fmt: skip
        return Facts(**{**plain, **changes})  # type: ignore[arg-type]

    def event(self, name: str, rank: int, step: int, body: str = "", **attributes: str | int | float | bool) -> None:
        self.events.append(
            FactEvent(name=name, rank=rank, step=step, body=body, attributes=attributes, job_ns=1 + len(self.events))
        )


@pytest.fixture
def small() -> Callable[..., Small]:
    return Small


def names(causes: Sequence[object]) -> list[tuple[str, int | None]]:
    """(category, rank) of causes, for readable failures."""
    return [(c.category.value, c.subject.rank) for c in causes]  # type: ignore[attr-defined]


@pytest.fixture
def named() -> Callable[[Sequence[object]], list[tuple[str, int | None]]]:
    return names
