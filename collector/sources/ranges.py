"""Where gradients lie in narrow formats, and what the optimizer steps with: sampled, never waited for.

A sample of the gradient elements is held against FP16 (times the loss scale) and FP8 E4M3 (each tensor scaled to it):
which share the cast would flush to zero or push beyond the largest number. The optimizer's settings and its step count
must be the same on all replicas; they are told now and then.
"""

from __future__ import annotations

from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from lanterne.collector.overhead import OverheadMeter
from lanterne.collector.sources.device import local
from lanterne.collector.sources.gradients import Interval
from lanterne.collector.steps import Recorder
from lanterne.nouns import AttributeValue

if TYPE_CHECKING:
    import torch

RANGES_EVERY, ELEMENTS, TENSORS = 32, 1 << 15, 4
NARROW = {"fp16": (65504.0, 2.0**-24), "e4m3": (448.0, 2.0**-9)}
"""Format -> (largest finite, smallest subnormal): IEEE 754 binary16, OCP 8-bit Floating Point Specification."""
NAMES = (*(f"training.{name}_{side}" for name in NARROW for side in ("underflow", "overflow")), "training.grad_std")
OPTIMIZER_STATE = "optimizer_state"
SETTINGS = ("betas", "eps", "weight_decay", "momentum")
TOLD_FIRST, TOLD_EVERY = 4, 256
"""Optimizer steps at which its settings are told."""


def shares(x: torch.Tensor, format: str) -> torch.Tensor:  # noqa: A002
    """[2]: underflow and overflow share of float32 elements [N] if they were cast to ``fp16`` or ``e4m3``.

    Underflow: not zero, and at most half of the smallest subnormal, which rounds to zero. Overflow: beyond the largest
    finite number, or not finite.
    """
    import torch

    (top, least), a = NARROW[format], x.abs()
    under, over = (a > 0) & (a <= least / 2), (a > top) | ~torch.isfinite(x)
    return torch.stack([under.float().mean(), over.float().mean()])


def scaled_to(top: float, x: torch.Tensor) -> torch.Tensor:
    """A tensor with its largest magnitude brought to ``top``, as FP8 recipes scale each tensor."""
    return x * (top * (1 - 1e-6) / x.abs().max().clamp_min(1e-30))  # rounding must not carry it beyond


def settings_of(optimizer: Any) -> dict[str, AttributeValue]:
    """Settings of the first group, and how often its first parameter was stepped, where that is known on the host."""
    group = optimizer.param_groups[0]
    said: dict[str, AttributeValue] = {}
    for key in SETTINGS:
        value = group.get(key)
        parts = value if isinstance(value, tuple) else (value,)
        if value is not None and all(getattr(part, "is_cpu", True) for part in parts):
            said[key] = ",".join(str(float(part)) for part in parts)
    state = optimizer.state.get(group["params"][0]) if group["params"] else None
    count = state.get("step") if state else None
    if count is not None and getattr(count, "is_cpu", True):
        said["step_count"] = int(count)
    return said


class Ranges:
    """Called before each optimizer step, gradients reduced and unscaled."""

    def __init__(self, recorder: Recorder, meter: OverheadMeter) -> None:
        self.recorder, self.meter = recorder, meter
        self.interval = Interval(RANGES_EVERY)
        recorder.core.ranges_every = RANGES_EVERY

    def before_step(self, optimizer: Any, optimizer_steps: int) -> None:
        recorder = self.recorder
        if optimizer_steps == TOLD_FIRST or (optimizer_steps and optimizer_steps % TOLD_EVERY == 0):
            recorder.ring.note(OPTIMIZER_STATE, recorder.step, monotonic_ns(), settings_of(optimizer))
        if recorder.step and self.interval.due(recorder.step) and self.meter.allows("ranges"):
            began = monotonic_ns()
            self._sample(optimizer, recorder.step // self.interval.every)
            self.interval.cost(monotonic_ns() - began, recorder.core.step_ns)
            recorder.core.ranges_every = self.interval.every

    def _sample(self, optimizer: Any, turn: int) -> None:
        import torch

        grads = [local(p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not grads or any(g.is_sparse for g in grads) or len({g.device for g in grads}) > 1:
            return
        chosen = [grads[(turn + i) % len(grads)] for i in range(min(TENSORS, len(grads)))]
        with torch.no_grad():
            each = ELEMENTS // len(chosen)
            flat = [g.reshape(-1) for g in chosen if g.is_contiguous()]
            if not flat:
                return
            parts = [f[(turn * each) % max(f.numel() - each, 1) :][:each].float() for f in flat]
            scale, x = _scale(self.recorder.core.loss_scale), torch.cat(parts)
            fp8 = torch.cat([scaled_to(NARROW["e4m3"][0], part) for part in parts])
            spread = torch.where(torch.isfinite(x), x, 0.0).std(correction=0)
            found = torch.cat([shares(x * scale, "fp16"), shares(fp8, "e4m3"), spread[None]])
        step, at, ring = self.recorder.step, monotonic_ns(), self.recorder.ring

        def write(values: list[float]) -> None:
            for name, value in zip(NAMES, values, strict=True):
                ring.metric(name, step, at, value)

        self.recorder.device.later(found, write)


def _scale(scale: float) -> float:
    """The loss scale in use; 1 without a scaler."""
    return scale if scale == scale and scale > 0 else 1.0
