"""Reading and writing the learning rate of an optimizer together with its schedule.

Schedulers come in two kinds: those that compute each rate from ``base_lrs`` (LambdaLR and everything with a
closed form) and those that go on from the rate in the parameter group. A rate that is only written into the
groups is overwritten by the first kind at the next step, so its ``base_lrs`` are scaled by the same factor,
but only when the schedule itself produced the rate that is being corrected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

TOLERANCE = 1e-3
_GROUP_KEYS = ("lr", "initial_lr", "max_lr", "min_lr")


def current(optimizer: Any) -> float:
    """Rate of the first parameter group."""
    return float(optimizer.param_groups[0]["lr"])


def _all(scheduler: Any) -> Iterator[Any]:
    if scheduler is None:
        return
    yield scheduler
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _all(inner)


def _own_rate(scheduler: Any) -> float | None:
    """The rate of the first group that the schedule computes from ``base_lrs`` now; None where it does not."""
    bases = getattr(scheduler, "base_lrs", None)
    if not bases:
        return None
    multipliers = getattr(scheduler, "lr_lambdas", None)
    if multipliers is not None and type(scheduler).__name__ == "LambdaLR":
        return float(bases[0]) * float(multipliers[0](scheduler.last_epoch))
    closed = getattr(scheduler, "_get_closed_form_lr", None)
    return float(closed()[0]) if closed is not None else None


class _Memory:
    """Rates before a change; ``undo`` puts them back, keeping what the schedule did to them since."""

    def __init__(self, optimizer: Any, scheduler: Any) -> None:
        self.optimizer = optimizer
        self.groups = [{k: float(g[k]) for k in _GROUP_KEYS if k in g} for g in optimizer.param_groups]
        self.bases = [(s, list(s.base_lrs)) for s in _all(scheduler) if hasattr(s, "base_lrs")]
        self.after = 0.0

    def changed(self) -> Callable[[], None]:
        self.after = current(self.optimizer)
        return self.undo

    def undo(self) -> None:
        since = current(self.optimizer) / self.after if self.after else 1.0
        for group, old in zip(self.optimizer.param_groups, self.groups, strict=False):
            for key, value in old.items():
                group[key] = _like(group[key], value * since if key == "lr" else value)
        for found, bases in self.bases:
            found.base_lrs = bases


def _like(old: Any, value: float) -> Any:
    """Keep a rate that lives in a tensor (capturable optimizers) in its tensor."""
    if hasattr(old, "fill_"):
        old.fill_(float(value))
        return old
    return float(value)


def _multiply(optimizer: Any, scheduler: Any, factor: float, *, keys: tuple[str, ...], schedule: bool) -> None:
    for group in optimizer.param_groups:
        for key in keys:
            if key in group:
                group[key] = _like(group[key], float(group[key]) * factor)
    for found in _all(scheduler) if schedule else ():
        if hasattr(found, "base_lrs"):
            found.base_lrs = [base * factor for base in found.base_lrs]


def scale(optimizer: Any, scheduler: Any, factor: float) -> Callable[[], None]:
    """Multiply the rate of every group and of the schedule by ``factor``; returns the undo."""
    memory = _Memory(optimizer, scheduler)
    _multiply(optimizer, scheduler, factor, keys=_GROUP_KEYS, schedule=True)
    return memory.changed()


def put(optimizer: Any, scheduler: Any, rate: float) -> Callable[[], None]:
    """Set the rate of the first group to ``rate``, the others in proportion; returns the undo.

    The schedule is scaled along only where it is itself the source of the present rate; a schedule that
    already says ``rate`` is left alone.
    """
    memory = _Memory(optimizer, scheduler)
    now = current(optimizer)
    own = _own_rate(scheduler)
    factor = rate / now if now else 1.0
    follows = (
        own is not None and math.isclose(own, now, rel_tol=TOLERANCE) and not math.isclose(own, rate, rel_tol=1e-9)
    )
    _multiply(optimizer, scheduler, factor, keys=("lr",), schedule=follows)
    if not now:
        for group in optimizer.param_groups:
            group["lr"] = _like(group["lr"], rate)
    return memory.changed()
