"""``lanterne inject``: a fault for real in somebody's own training run, to see if it would be found (a game day).

The launcher sets ``LANTERNE_INJECT=KIND:RANK:STEP``; ``attach`` calls :func:`from_environment`, which hangs the
hooks of :class:`~lanterne.collector.sim.inject.Injector` on the user's model, optimizer and loader in the
culprit's process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol

from lanterne.collector.sim.inject import Injector
from lanterne.errors import UsageError

VARIABLE = "LANTERNE_INJECT"
IN_ANY_RUN = (
    "slow-rank", "slow-data", "slow-backward", "hang", "crash", "lr-jump", "nan", "leak", "oom", "gc", "slow-link",
    "replica-divergence",
)  # fmt: skip
"""Faults that need nothing from the training script; the others need the demo's own loop."""


class Attached(Protocol):
    """What is needed of a session."""

    model: Any
    optimizer: Any
    scheduler: Any

    def on_step_boundary(self, call: Callable[[int], None], /) -> None: ...


def parse(text: str) -> tuple[str, int, int]:
    """``KIND:RANK:STEP`` -> its parts; raises :class:`UsageError` with what is allowed."""
    try:
        kind, rank, step = text.split(":")
        found = kind, int(rank), int(step)
    except ValueError:
        raise UsageError(f"{VARIABLE}: {text!r} is not KIND:RANK:STEP, for example slow-rank:3:100") from None
    if kind not in IN_ANY_RUN:
        raise UsageError(f"{VARIABLE}: {kind!r} cannot be injected into any run; choose one of {', '.join(IN_ANY_RUN)}")
    return found


def from_environment(session: Attached, rank: int) -> Injector | None:
    """Hang the fault of ``LANTERNE_INJECT`` on the session if it is this rank's; returns the injector or None."""
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    kind, culprit, onset = parse(text)
    fault = Injector(kind, culprit, onset, me=rank)
    state = {"step": 0}
    model = session.model
    if model is None:
        raise UsageError(f"{VARIABLE}: no model is attached to hang the fault on")
    fault.gradients(0, model)

    def boundary(step: int) -> None:
        fault.after_step(state["step"], model, session.scheduler or _Schedulerless(session.optimizer))
        state["step"] = step

    session.on_step_boundary(boundary)
    model.register_forward_pre_hook(lambda *_: fault.forward(state["step"], model))
    if kind == "slow-backward":
        model.register_full_backward_pre_hook(lambda *_: fault.backward(state["step"]))
    if kind == "slow-data":
        _slow_loader(fault, state)
    return fault


class _Schedulerless:
    """A run without a scheduler, in the shape that the learning-rate fault wants."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.base_lrs: list[float] = []


def _slow_loader(fault: Injector, state: dict[str, int]) -> None:
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    original = _BaseDataLoaderIter.__next__

    def slow_next(self: Any) -> Any:
        fault.loading(state["step"])
        return original(self)

    _BaseDataLoaderIter.__next__ = slow_next  # type: ignore[method-assign]
