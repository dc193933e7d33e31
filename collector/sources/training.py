"""The hooks of the training loop: forward, backward, clipping, optimizer. No change to the user's code or results.

Only the root module and the optimizer class are hooked (a hook on every module costs milliseconds a step), and
``torch.autograd.backward``, through which ``Tensor.backward`` goes.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns
from typing import Any

from lanterne.collector.overhead import OverheadMeter
from lanterne.collector.sources.collectives import TapFile
from lanterne.collector.sources.device import local, on_device
from lanterne.collector.sources.gradients import Gradients
from lanterne.collector.sources.patches import Patches
from lanterne.collector.sources.ranges import Ranges
from lanterne.collector.sources.scaler import ScalerSource
from lanterne.collector.sources.schedule import Plan, find_scheduler
from lanterne.collector.steps import BACKWARD, EVAL, FORWARD, NAN, OPTIMIZER, Recorder

LOOK_FOR_SCHEDULER_AT = 2
"""Optimizer steps after which a scheduler that nobody passed is looked for on the heap, once."""

GROUP_RATES_EVERY, GROUPS_TOLD_MAX = 10, 16
"""Steps between readings of the rates of the parameter groups behind the first, and how many of them are told."""


class TrainingHooks:
    """``driven`` is set once the user marks the steps (``session.steps``, ``step``); else the optimizer ends them."""

    def __init__(
        self,
        recorder: Recorder,
        meter: OverheadMeter,
        gradients: Gradients,
        tap: TapFile | None,
        *,
        optimizer: Any = None,
        scheduler: Any = None,
    ) -> None:
        self.recorder, self.meter, self.gradients, self.tap = recorder, meter, gradients, tap
        self.optimizer, self.scheduler = optimizer, scheduler
        self.plan: Plan | None = None
        self.driven = False
        self.stepped = False
        self.optimizer_steps = 0
        self.scaler = ScalerSource(recorder, self._scaler_stepped)
        self.ranges = Ranges(recorder, meter)
        self._forward_began = self._optimizer_began = 0
        self._forward_phase = FORWARD
        self._in_backward = False
        self._first_rates: dict[int, float] = {}
        self._compiling: Callable[[], bool] = bool
        if scheduler is not None and optimizer is not None:
            self._make_plan()

    def install(self, patches: Patches, model: Any) -> None:
        """Put all hooks in place; ``patches.undo`` takes them away."""
        import torch
        from torch.nn.utils import clip_grad
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        self._compiling = torch.compiler.is_compiling
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
        patches.add(model.register_forward_pre_hook(self._before_forward).remove)
        patches.add(model.register_forward_hook(self._after_forward).remove)

    # --- forward and backward ---------------------------------------------------------------------

    def _before_forward(self, module: Any, args: Any) -> None:
        if self._compiling():  # a hook in a compiled frame is traced: there must be nothing in it
            return
        recorder = self.recorder
        if recorder.user_phase >= 0 or self._in_backward:
            return
        self._forward_phase = FORWARD if module.training else EVAL
        began = self._forward_began = recorder.enter(self._forward_phase)
        if self.meter.on:
            self.meter.spent += monotonic_ns() - began

    def _after_forward(self, module: Any, args: Any, output: Any) -> None:
        if self._compiling():
            return
        began, self._forward_began = self._forward_began, 0
        if began:
            at = monotonic_ns()
            self.recorder.leave(self._forward_phase, began)
            if self.meter.on:
                self.meter.spent += monotonic_ns() - at

    def _backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        recorder, meter = self.recorder, self.meter
        tell = self.tap.tell_backward if self.tap is not None else _nothing

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if self._compiling() or self._in_backward or recorder.user_phase >= 0:
                return original(tensors, *args, **kwargs)
            began = recorder.enter(BACKWARD)
            if self.scaler.scaling:
                self.scaler.scaling = False
            elif getattr(tensors, "ndim", None) == 0:
                recorder.loss(tensors)
            self._in_backward = True
            if self.scaler.active:
                self.scaler.called_backward()
            tell(1)
            if meter.on:
                meter.spent += monotonic_ns() - began
            try:
                return original(tensors, *args, **kwargs)
            finally:
                at = monotonic_ns()
                tell(0)
                self._in_backward = False
                recorder.leave(BACKWARD, began)
                if meter.on:
                    meter.spent += monotonic_ns() - at

        return backward

    # --- clipping ---------------------------------------------------------------------------------

    def _clip(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def clip(*args: Any, **kwargs: Any) -> Any:
            if self._compiling():
                return original(*args, **kwargs)
            self._look()
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
        values = self.recorder.values
        part = local(norm)
        if part is not norm:
            values.local_norm = part.detach()
        elif isinstance(norm, (int, float)):
            values.grad_norm = float(norm)
        else:
            values.grad_norm = norm.detach()

    def _look(self) -> None:
        try:
            self.gradients.suspect()
        except Exception as error:
            self.recorder.failed("gradients", error)

    # --- optimizer --------------------------------------------------------------------------------

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._compiling():
            return
        if self.optimizer is None:
            self.optimizer = optimizer
        if optimizer is not self.optimizer:
            return
        recorder = self.recorder
        began = self._optimizer_began = recorder.enter(OPTIMIZER) if recorder.user_phase < 0 else 0
        self.scaler.optimizer_fired = True
        if not self.scaler.stepping:
            self.scaler.called("optimizer_step")
        try:
            self._rate(optimizer)
            if len(optimizer.param_groups) > 1 and recorder.step % GROUP_RATES_EVERY == 0:
                self._group_rates(optimizer)
            self.gradients.before_step(optimizer)
            self.ranges.before_step(optimizer, self.optimizer_steps)
        except Exception as error:
            recorder.failed("optimizer", error)
        if self.meter.on and began:
            self.meter.spent += monotonic_ns() - began

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._compiling():
            return
        if optimizer is not self.optimizer:
            return
        at = monotonic_ns()
        recorder = self.recorder
        if self._optimizer_began:
            recorder.leave(OPTIMIZER, self._optimizer_began)
            self._optimizer_began = 0
        try:
            self.gradients.after_step()
        except Exception as error:
            recorder.failed("optimizer", error)
        self.optimizer_steps += 1
        if self.optimizer_steps == LOOK_FOR_SCHEDULER_AT and self.scheduler is None:
            self._find_scheduler()
        self.stepped = True
        if self.meter.on:
            self.meter.spent += monotonic_ns() - at
        if not self.driven and not self.scaler.stepping:
            self.end_step()

    def _scaler_stepped(self) -> None:
        """``scaler.step`` returned, with or without an optimizer step: either way the step is over."""
        if not self.scaler.optimizer_fired:
            self.optimizer_steps += 1
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

    def _rate(self, optimizer: Any) -> None:
        recorder = self.recorder
        lr = optimizer.param_groups[0].get("lr")
        if not isinstance(lr, float):
            if lr is None or (getattr(lr, "device", None) is not None and lr.device.type != "cpu"):
                return
            lr = float(lr)
        recorder.lr = lr
        if self.plan is not None:
            recorder.lr_planned = self.plan.rate()
        elif self.scheduler is None and recorder.lr_zero != recorder.lr_zero:
            recorder.lr_zero = lr

    def _group_rates(self, optimizer: Any) -> None:
        """Rates of the groups behind the first, which :meth:`_rate` tells every step."""
        plan = self.plan.rates() if self.plan is not None else []
        for i, group in enumerate(optimizer.param_groups[1:GROUPS_TOLD_MAX], start=1):
            lr = group.get("lr")
            if lr is None or on_device(lr):
                continue
            first = NAN if self.scheduler is not None else self._first_rates.setdefault(i, float(lr))
            self.recorder.group_rate(i, float(lr), plan[i] if i < len(plan) else NAN, first)

    def _find_scheduler(self) -> None:
        try:
            self.scheduler = find_scheduler(self.optimizer)
            if self.scheduler is not None:
                self.recorder.lr_zero = NAN
                self._make_plan()
        except Exception as error:
            self.recorder.failed("scheduler", error)

    def _make_plan(self) -> None:
        plan = Plan(self.scheduler, self.optimizer)
        self.plan = plan if plan.known else None


def _nothing(_: int) -> None:
    return None
