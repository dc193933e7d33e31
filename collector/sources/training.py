"""The hooks of the training loop: forward, backward, clipping, optimizer. No change to the user's code or results.

Only the root module and the optimizer class are hooked (a hook on every module costs milliseconds a step), and
``torch.autograd.backward``, through which ``Tensor.backward`` goes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from math import nan
from sys import modules
from time import monotonic_ns
from typing import Any

from lanterne.collector.core import RANGES, RATE, RATES
from lanterne.collector.sources.device import local, on_device
from lanterne.collector.sources.gradients import Gradients
from lanterne.collector.sources.patches import Patches
from lanterne.collector.sources.ranges import TOLD_EVERY, TOLD_FIRST, Ranges
from lanterne.collector.sources.scaler import ScalerSource
from lanterne.collector.sources.schedule import Plan, find_scheduler
from lanterne.collector.steps import Recorder

LOOK_FOR_SCHEDULER_AT = 2
"""Optimizer steps after which a scheduler that nobody passed is looked for on the heap, once."""

GROUPS_TOLD_MAX = 16
DYNAMO = "torch._dynamo"
"""Only where it is loaded can a frame be traced."""


class ForwardHook:
    """A hook on a module of the user's: copies of the module share it, and it is not in what is pickled of them."""

    __slots__ = ("_call", "_compiling")

    def __init__(self, call: Callable[[Any], None], compiling: Callable[[], bool]) -> None:
        self._call, self._compiling = call, compiling

    def __call__(self, module: Any, *_: Any) -> None:
        if DYNAMO in modules and self._compiling():  # a hook in a compiled frame is traced: there must be nothing in it
            return
        self._call(module)

    def __deepcopy__(self, _memo: Any) -> ForwardHook:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (
            nullcontext(),
            "__exit__",
        )  # a callable of the standard library that takes all and does nothing


class TrainingHooks:
    """``driven`` is set once the user marks the steps (``session.steps``, ``step``); else the optimizer ends them."""

    def __init__(
        self,
        recorder: Recorder,
        gradients: Gradients,
        *,
        optimizer: Any = None,
        scheduler: Any = None,
    ) -> None:
        self.recorder, self.core, self.gradients = recorder, recorder.core, gradients
        self.optimizer, self.scheduler = optimizer, scheduler
        self.plan: Plan | None = None
        self.driven = False
        self.stepped = False
        self.optimizer_steps = 0
        self.scaler = ScalerSource(recorder, self._scaler_stepped)
        self.ranges = Ranges(recorder, gradients.meter)
        self._first_rates: dict[int, float] = {}
        self._compiling: Callable[[], bool] = bool
        if scheduler is not None and optimizer is not None:
            self._make_plan()

    def install(self, patches: Patches, model: Any) -> None:
        """Put all hooks in place; ``patches.undo`` takes them away."""
        import torch
        from torch.nn.utils import clip_grad
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        self._compiling = torch.compiler.is_dynamo_compiling
        if model is not None:
            self.watch_model(model, patches)
        patches.wrap(torch.autograd, "backward", self._backward)
        for name in ("clip_grad_norm_", "get_total_norm"):
            for module in (torch.nn.utils, clip_grad):
                patches.wrap(module, name, self._clip)
        patches.add(register_optimizer_step_pre_hook(self._before_step).remove)
        patches.add(register_optimizer_step_post_hook(self._after_step).remove)
        self.scaler.install(patches)

    def watch_model(self, model: Any, patches: Patches) -> None:
        """Hook the root module of the model."""
        self.core.root = id(model)
        patches.add(model.register_forward_pre_hook(ForwardHook(self.core.begin_forward, self._compiling)).remove)
        patches.add(model.register_forward_hook(ForwardHook(self.core.end_forward, self._compiling)).remove)

    # --- backward and clipping --------------------------------------------------------------------

    def _backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        begin, end, scaler = self.core.begin_backward, self.core.end_backward, self.scaler

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if DYNAMO in modules and self._compiling():
                return original(tensors, *args, **kwargs)
            if not begin(None if scaler.scaling else tensors):
                return original(tensors, *args, **kwargs)
            if scaler.active:
                scaler.scaling = False
                scaler.called_backward()
            try:
                return original(tensors, *args, **kwargs)
            finally:
                end()

        return backward

    def _clip(self, original: Callable[..., Any]) -> Callable[..., Any]:
        core = self.core

        def clip(*args: Any, **kwargs: Any) -> Any:
            if DYNAMO in modules and self._compiling():
                return original(*args, **kwargs)
            if core.hit():
                self._look()
            if self.scaler.active:
                self.scaler.called("clip")
            norm = original(*args, **kwargs)
            try:
                self.took_norm(norm)
            except Exception as error:
                self.recorder.failed("clip_grad_norm_", error)
            return norm

        return clip

    def took_norm(self, norm: Any) -> None:
        """Someone computed the gradient norm (a 0-dim tensor or a float): it is reused, not computed again."""
        if isinstance(norm, (int, float)):
            self.core.grad_norm = float(norm)
        elif hasattr(norm, "to_local"):
            self.core.local_norm = local(norm).detach()
        else:
            self.core.grad_norm = norm.detach()

    def _look(self) -> None:
        try:
            self.gradients.suspect()
        except Exception as error:
            self.recorder.failed("gradients", error)

    # --- optimizer --------------------------------------------------------------------------------

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if DYNAMO in modules and self._compiling():
            return
        if optimizer is not self.optimizer:
            if self.optimizer is not None:
                return
            self.optimizer = optimizer
        core, scaler = self.core, self.scaler
        began = monotonic_ns() if core.on else 0
        try:
            left = core.begin_optimizer(optimizer)
            if self.plan is not None:
                core.lr_planned = self.plan.rate()
            if left:
                self._left(optimizer, left)
            steps = self.optimizer_steps
            if left & RANGES or steps == TOLD_FIRST or not steps % TOLD_EVERY:
                self.ranges.before_step(optimizer, steps)
        except Exception as error:
            self.recorder.failed("optimizer", error)
        scaler.optimizer_fired = True
        if scaler.active and not scaler.stepping:
            scaler.called("optimizer_step")
        if began:
            core.spent += monotonic_ns() - began

    def _left(self, optimizer: Any, left: int) -> None:
        """What the core does not do itself."""
        if left & RATE:
            lr = optimizer.param_groups[0].get("lr")
            if lr is not None and not on_device(lr):
                self.core.lr = float(lr)
        if left & RATES:
            self._group_rates(optimizer)
        self.gradients.before_step(optimizer, left)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if (DYNAMO in modules and self._compiling()) or optimizer is not self.optimizer:
            return
        core = self.core
        core.end_optimizer()
        began = monotonic_ns() if core.on else 0
        if self.gradients.kept:
            try:
                self.gradients.after_step()
            except Exception as error:
                self.recorder.failed("optimizer", error)
        self.stepped = True
        self.optimizer_steps += 1
        if self.optimizer_steps <= LOOK_FOR_SCHEDULER_AT and self.scheduler is None:
            self._look_for_scheduler()
        if began:
            core.spent += monotonic_ns() - began
        if not self.driven and not self.scaler.stepping:
            self.end_step()

    def _scaler_stepped(self) -> None:
        """``scaler.step`` returned, with or without an optimizer step: either way the step is over."""
        if not self.scaler.optimizer_fired:
            self.optimizer_steps += 1
            if self.core.hit():
                self._look()
        self.stepped = True
        if not self.driven:
            self.end_step()

    def end_step(self) -> None:
        """Close the step at which the optimizer stepped."""
        self.stepped = False
        if self.scaler.active:
            self.scaler.step_ends()
        self.recorder.close()

    # --- learning rate ----------------------------------------------------------------------------

    def _group_rates(self, optimizer: Any) -> None:
        """Rates of the groups behind the first, which :meth:`_rate` tells every step."""
        plan = self.plan.rates() if self.plan is not None else []
        for i, group in enumerate(optimizer.param_groups[1:GROUPS_TOLD_MAX], start=1):
            lr = group.get("lr")
            if lr is None or on_device(lr):
                continue
            first = nan if self.scheduler is not None else self._first_rates.setdefault(i, float(lr))
            self.recorder.group_rate(i, float(lr), plan[i] if i < len(plan) else nan, first)

    def _look_for_scheduler(self) -> None:
        """Nobody passed a scheduler: until one is found the first rate is the plan."""
        core = self.core
        if core.lr_zero != core.lr_zero:
            core.lr_zero = core.lr
        if self.optimizer_steps < LOOK_FOR_SCHEDULER_AT:
            return
        try:
            self.scheduler = find_scheduler(self.optimizer)
            if self.scheduler is not None:
                core.lr_zero = nan
                self._make_plan()
        except Exception as error:
            self.recorder.failed("scheduler", error)

    def _make_plan(self) -> None:
        plan = Plan(self.scheduler, self.optimizer)
        self.plan = plan if plan.known else None
