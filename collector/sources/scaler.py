"""GradScaler: the loss before it is scaled, the scale, and the steps it skips.

On overflow the scaler does not call ``optimizer.step``, so no optimizer hook fires: ``step`` and ``update`` of the
class are wrapped instead. On a CUDA device scale and overflow flag are copied without waiting, and told a bit later.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from lanterne.blackbox_files import SEPARATOR
from lanterne.collector.sources.device import on_device
from lanterne.collector.sources.patches import Patches
from lanterne.collector.steps import Recorder
from lanterne.nouns import EventName

if TYPE_CHECKING:
    import torch

_KEYS = SEPARATOR.join(("scale_before", "scale_after"))
AMP_CALLS = "amp_calls"
"""Event: the order of the calls around the scaler in one step (``calls`` = names, joined by commas)."""
CALLS_MAX, ORDERS_TOLD_MAX = 16, 8


class ScalerSource:
    """Watches every enabled GradScaler. ``stepping`` is true inside ``scaler.step``, ``end_step`` called after it."""

    def __init__(self, recorder: Recorder, end_step: Callable[[], None]) -> None:
        self.recorder, self.end_step = recorder, end_step
        self.stepping = False
        self.optimizer_fired = False
        self.scaling = False
        self.active = False  # a scaler is at work in this run
        self._calls: list[str] = []
        self._told: tuple[str, ...] | None = None
        self._steps = self._orders = 0

    # --- the order of calls -----------------------------------------------------------------------

    def called(self, name: str) -> None:
        """A call of this step, kept once in a row; nothing while no scaler is at work."""
        calls = self._calls
        if self.active and len(calls) < CALLS_MAX and (not calls or calls[-1] != name):
            calls.append(name)

    def called_backward(self) -> None:
        import torch

        self.called("backward_in_autocast" if torch.is_autocast_enabled() else "backward")

    def step_ends(self) -> None:
        """Tell the order where it is a new one. The first step is left out: it may have begun before us."""
        order, self._calls = tuple(self._calls), []
        self._steps += 1
        if self._steps == 1 or order == self._told or self._orders >= ORDERS_TOLD_MAX or not order:
            return
        self._told = order
        self._orders += 1
        self.recorder.ring.note(AMP_CALLS, self.recorder.step, monotonic_ns(), {"calls": ",".join(order)})

    # --- wrapping ---------------------------------------------------------------------------------

    def install(self, patches: Patches) -> None:
        """Wrap ``scale``, ``unscale_``, ``step`` and ``update`` of torch's GradScaler class."""
        from torch.amp.grad_scaler import GradScaler

        patches.wrap(GradScaler, "scale", self._scale)
        patches.wrap(GradScaler, "unscale_", self._unscale)
        patches.wrap(GradScaler, "step", self._step)
        patches.wrap(GradScaler, "update", self._update)

    def _scale(self, original: Callable[..., Any]) -> Callable[..., Any]:
        recorder = self.recorder

        def scale(scaler: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(outputs, "ndim", None) == 0 and scaler.is_enabled():
                recorder.core.loss(outputs)
                self.active = True
                self.called("scale")
                self.scaling = True  # what backward is called on is this loss again, scaled
            return original(scaler, outputs, *args, **kwargs)

        return scale

    def _unscale(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def unscale(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            if scaler.is_enabled() and not self.stepping:
                self.called("unscale")
            return original(scaler, *args, **kwargs)

        return unscale

    def _step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            if not scaler.is_enabled():
                return original(scaler, *args, **kwargs)
            self.active = True
            self.called("step")
            self.stepping, self.optimizer_fired = True, False
            try:
                return original(scaler, *args, **kwargs)
            finally:
                self.stepping = False
                self.end_step()

        return step

    def _update(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def update(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            if not scaler.is_enabled():
                return original(scaler, *args, **kwargs)
            self.called("update")
            before, found = self._flags(scaler)
            result = original(scaler, *args, **kwargs)
            try:
                self._tell(before, found, getattr(scaler, "_scale", None))
            except Exception as error:
                self.recorder.failed("GradScaler.update", error)
            return result

        return update

    def _flags(self, scaler: Any) -> tuple[Any, list[torch.Tensor]]:
        """(scale before, overflow flags) as tensors; ``update`` clears the flags, so they are taken before it."""
        try:
            states = scaler._per_optimizer_states.values()
            found = [v for state in states for v in state.get("found_inf_per_device", {}).values()]
            scale = scaler._scale
            return None if scale is None else scale.detach().clone(), found
        except Exception as error:
            self.recorder.failed("GradScaler state", error)
            return None, []

    def _tell(self, before: Any, found: list[torch.Tensor], after: Any) -> None:
        import torch

        recorder, step, at = self.recorder, self.recorder.step, monotonic_ns()
        if before is None or after is None or not found:
            return
        if not on_device(after) and not any(on_device(f) for f in found):
            self._write(step, at, [float(before), float(after), max(float(f) for f in found)])
            return
        with torch.no_grad():
            flag = torch.stack([f.to(after.device) for f in found]).max().reshape(1)
            three = torch.cat([before.reshape(1), after.detach().clone().reshape(1), flag])
        recorder.device.later(three, lambda v: self._write(step, at, v))

    def _write(self, step: int, at: int, three: list[float]) -> None:
        before, after, skipped = three
        self.recorder.core.loss_scale = before
        if skipped:
            self.recorder.ring.event(EventName.OVERFLOW, step, at, _KEYS, (before, after))
