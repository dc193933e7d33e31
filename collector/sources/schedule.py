"""The planned learning rate of every step, from a shadow of the user's scheduler.

The shadow is a copy of the scheduler's own numbers made at attach, over a stand-in optimizer. Where it has a closed
form that is asked for the position, else the shadow is stepped ahead in batches. A rate (or base rate) that is tampered
with later moves the user's scheduler and not the shadow: the drift shows. Only schedulers whose steps depend on nothing
but their own numbers are shadowed: torch's own, with functions that are pure as far as their closures tell. For the
others no plan is claimed.
"""

from __future__ import annotations

import functools
import types
from collections import Counter
from collections.abc import Callable
from math import isclose
from typing import Any

CHUNK = 64
"""Steps that are planned at a time, when the plan runs out: a bounded pause of about a millisecond."""
PROOF_STEPS = 8
"""Steps in which a closed form must agree with the stepped shadow before it is believed."""
_UNKNOWN = [float("nan")]
REACH_MAX = 100_000
_PLAIN = (int, float, complex, str, bytes, bool, type(None))
_UNPLANNABLE = frozenset({"ReduceLROnPlateau"})


class _StandIn:
    """What a scheduler needs of an optimizer: param_groups, and a ``step`` that counts as called."""

    def __init__(self, optimizer: Any) -> None:
        self.param_groups = [
            {k: v for k, v in group.items() if k != "params"} | {"params": []} for group in optimizer.param_groups
        ]
        self.state: dict[Any, Any] = {}
        self.defaults = dict(optimizer.defaults)
        self._opt_called = True

        def step() -> None:
            return None

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        self.step = step


def _is_pure(value: Any, depth: int = 0) -> bool:
    """Is this a function whose result depends on its arguments and on constants only, as far as can be seen?"""
    if isinstance(value, _PLAIN):
        return True
    if depth > 4:
        return False
    if isinstance(value, (tuple, list)):
        return all(_is_pure(v, depth + 1) for v in value)
    if isinstance(value, functools.partial):
        parts = (value.func, *value.args, *value.keywords.values())
        return all(_is_pure(v, depth + 1) for v in parts)
    if isinstance(value, types.FunctionType):
        if {"STORE_GLOBAL", "STORE_DEREF"} & _instructions(value):
            return False
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return all(_is_pure(v, depth + 1) for v in cells)
    return isinstance(value, types.BuiltinFunctionType)


def _instructions(function: types.FunctionType) -> set[str]:
    import dis

    return {instruction.opname for instruction in dis.get_instructions(function)}


def _shadow(value: Any, optimizer: Any, stand_in: _StandIn) -> Any:
    """A copy of a scheduler's numbers: containers and inner schedulers are copied, functions are shared if pure."""
    from torch.optim.lr_scheduler import LRScheduler

    if value is optimizer:
        return stand_in
    if isinstance(value, LRScheduler):
        if type(value).__module__ != "torch.optim.lr_scheduler" or type(value).__name__ in _UNPLANNABLE:
            raise TypeError(f"{type(value).__name__} is not one of torch's own schedulers")
        copy = object.__new__(type(value))
        copy.__dict__.update({k: _shadow(v, optimizer, stand_in) for k, v in value.__dict__.items()})
        return copy
    if isinstance(value, Counter):  # MultiStepLR's milestones
        return Counter(value)
    if isinstance(value, dict):
        return {k: _shadow(v, optimizer, stand_in) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_shadow(v, optimizer, stand_in) for v in value)
    if isinstance(value, _PLAIN) or _is_pure(value):
        return value
    if isinstance(value, types.MethodType) and isinstance(value.__self__, LRScheduler):
        raise TypeError("a bound method of the scheduler cannot be shadowed")
    raise TypeError(f"cannot tell whether {type(value).__name__} is free of side effects")


def _closed_form(scheduler: Any) -> Callable[[int], list[float]] | None:
    """The rates of all groups as a function of the position, where this scheduler has such a form."""
    if type(scheduler).__name__ == "LambdaLR":
        pairs = list(zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True))
        return lambda at: [base * factor(at) for base, factor in pairs]
    compute = getattr(scheduler, "_get_closed_form_lr", None)
    if compute is None:
        return None

    def rates(at: int) -> list[float]:
        scheduler.last_epoch = at
        return list(map(float, compute()))

    return rates


class Plan:
    """``rates()`` is what the scheduler's plan says for now, by parameter group; NaN where none can be made.

    A scheduler with a closed form is asked for the position alone; of the others a shadow is stepped along.
    """

    def __init__(self, scheduler: Any, optimizer: Any) -> None:
        self.scheduler, self.optimizer = scheduler, optimizer
        self.reason = ""
        self._rates: list[list[float]] = []
        self._begin()

    def _begin(self) -> None:
        """Make the shadow from the scheduler as it is now."""
        self._base = int(getattr(self.scheduler, "last_epoch", 0))
        self._seen = self._base
        self._rates = []
        self._copy: Any = None
        self._formula: Callable[[int], list[float]] | None = None
        try:
            self._shadow_now()
            self._formula = self._proven_formula()
        except Exception as error:  # an unknown scheduler is a plan less, never an error of the user's
            self.reason = str(error)
            self._copy = None

    def _shadow_now(self) -> None:
        self._stand_in = _StandIn(self.optimizer)
        self._copy = _shadow(self.scheduler, self.optimizer, self._stand_in)
        self._rates = [self._present()]

    def _present(self) -> list[float]:
        return [float(group["lr"]) for group in self._stand_in.param_groups]

    def _proven_formula(self) -> Callable[[int], list[float]] | None:
        """The closed form, where it gives what the shadow gives for the next steps; else None."""
        formula = _closed_form(_shadow(self.scheduler, self.optimizer, _StandIn(self.optimizer)))
        if formula is None:
            return None
        self._extend(PROOF_STEPS - CHUNK)
        for ahead, known in enumerate(self._rates[:PROOF_STEPS]):
            if not all(isclose(a, b, rel_tol=1e-6) for a, b in zip(formula(self._base + ahead), known, strict=True)):
                return None
        return formula

    @property
    def known(self) -> bool:
        return self._copy is not None

    def rate(self, ahead: int = 0) -> float:
        """The planned rate of the first group at the scheduler's present position, or ``ahead`` steps later."""
        return self.rates(ahead)[0]

    def rates(self, ahead: int = 0) -> list[float]:
        """The planned rates of all groups; a NaN where the plan does not reach."""
        if self._copy is None:
            return _UNKNOWN
        at = int(self.scheduler.last_epoch)
        if at < self._seen or at - self._seen > REACH_MAX:  # a checkpoint was loaded: its plan begins here
            self._begin()
            at = self._base
        self._seen = at
        index = at - self._base + ahead
        if index < 0:
            return _UNKNOWN
        if self._formula is not None:
            return self._formula(self._base + index)
        if index >= len(self._rates):
            self._extend(index)
        return self._rates[index] if index < len(self._rates) else _UNKNOWN

    def _extend(self, index: int) -> None:
        try:
            while len(self._rates) <= index + CHUNK:
                self._copy.step()
                self._rates.append(self._present())
        except Exception as error:  # a finite schedule has ended (OneCycleLR): the plan ends with it
            self.reason = str(error)
            if len(self._rates) <= index:
                self._copy = None


def find_scheduler(optimizer: Any) -> Any:
    """The scheduler that drives ``optimizer``, None where there is none or more than one. Looks at the heap once."""
    import gc

    from torch.optim.lr_scheduler import LRScheduler

    holders = [h for h in gc.get_referrers(optimizer) if isinstance(h, dict) and h.get("optimizer") is optimizer]
    found = [s for h in holders for s in gc.get_referrers(h) if isinstance(s, LRScheduler) and s.__dict__ is h]
    if not found:  # Python 3.11 keeps an object's attributes in the object itself
        found = [s for s in gc.get_referrers(optimizer) if isinstance(s, LRScheduler) and s.optimizer is optimizer]
    inner = {id(i) for s in found for i in getattr(s, "_schedulers", ())}
    outer = [s for s in found if id(s) not in inner]
    return outer[0] if len(outer) == 1 else None
