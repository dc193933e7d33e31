"""One step of one rank: phases, numbers and the boundary, written to the ring as they happen.

Everything here runs on the training thread. Tensors are kept, never read, until the step is closed (CPU) or until the
device says that a copy has arrived (``sources/device.py``). A hook that fails is counted and never felt by the trainer.
What happens every time is done by ``core.py``; here is the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from math import isfinite, isnan, nan
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from lanterne.blackbox_files import METRICS_RECORD
from lanterne.collector.core import PythonCore
from lanterne.collector.overhead import OverheadMeter
from lanterne.collector.ring import Ring
from lanterne.collector.sources.device import DeviceValues
from lanterne.nouns import EventName

if TYPE_CHECKING:
    import torch

NOW_AND_THEN = 16
"""Steps between calls of what need not look at every step."""
ERRORS_NOTED_MAX = 16
NONFINITE_NOTED_MAX = 16
_NO_VALUES = (0.0,) * 5


class StepValues:
    """What one step reports once it can be read, taken over from the core. Tensors are 0-dim and detached."""

    __slots__ = (
        "at",
        "checksum",
        "gc_ns",
        "grad_norm",
        "local_norm",
        "losses",
        "mfu",
        "nonfinite",
        "step",
        "update_ratio",
    )

    def __init__(self, core: PythonCore) -> None:
        self.step, self.at = core.step, core.at
        self.losses: list[torch.Tensor | float] = list(core.losses)
        self.grad_norm: torch.Tensor | float | None = core.grad_norm
        self.local_norm: torch.Tensor | float | None = core.local_norm
        self.update_ratio: torch.Tensor | None = core.update_ratio
        self.checksum: torch.Tensor | None = core.checksum
        self.nonfinite, self.gc_ns, self.mfu = core.nonfinite, core.gc_ns, core.mfu


class Recorder:
    """Writes steps and phases. ``enter``/``leave`` bracket a phase, ``close`` ends the step and begins the next."""

    def __init__(self, ring: Ring, core: PythonCore, meter: OverheadMeter) -> None:
        self.ring, self.core, self.meter = ring, core, meter
        self.enter, self.leave = core.enter, core.leave
        self.logged: list[tuple[str, torch.Tensor | float]] = []
        self.device = DeviceValues(self._report)
        self.at_boundary: list[Callable[[int], None]] = []
        self.now_and_then: list[Callable[[int], None]] = []
        self.before_close: list[Callable[[int], None]] = []
        self._nonfinite_noted = 0
        self._errors = 0

    @property
    def step(self) -> int:
        """The step that is under way."""
        return self.core.step

    def begin_at(self, step: int) -> None:
        """Count from ``step`` on: a script that resumes says so after the launcher has attached it."""
        core = self.core
        core.step = core.cpu_step = core.cpu_due = step

    # --- the boundary -----------------------------------------------------------------------------

    def close(self) -> None:
        """End the step now: write span, rest of the phases and numbers, then begin the next one."""
        core = self.core
        try:
            core.end_step()
            for source in self.before_close:
                source(core.step)
            if not core.write_values():
                self._settle()
            elif self.device.waiting:
                self.device.poll()
            if self.logged:
                for name, value in self.logged:
                    self._write_logged(name, core.step, core.at, value)
        except Exception as error:
            self.failed("step", error)
            core.forget_values()
        if self.logged:
            self.logged.clear()
        if core.begin_step():
            self.meter.shadow()
        step = core.step
        for call in self.at_boundary:
            try:
                call(step)
            except Exception as error:
                self.failed("step boundary", error)
        if not step % NOW_AND_THEN:
            self._look(step)

    def _settle(self) -> None:
        """A step's values that cannot be written at once."""
        values = StepValues(self.core)
        self.core.forget_values()
        self.device.settle(values)

    def _look(self, step: int) -> None:
        for call in self.now_and_then:
            try:
                call(step)
            except Exception as error:
                self.failed("step boundary", error)

    def group_rate(self, group: int, lr: float, planned: float, first: float) -> None:
        """Rate and drift of a further parameter group (label ``group N``), against its plan, else its first rate."""
        against = planned if planned == planned else first
        mask = 1 | (2 if planned == planned else 0) | (4 if against else 0)
        drift = (lr - against) / against if against else nan
        self.ring.record(
            METRICS_RECORD, mask, self.core.boundary_ids, self.step, monotonic_ns(), (lr, planned, drift, *_NO_VALUES),
            self.ring.intern(f"group {group}"),
        )  # fmt: skip

    # --- values -----------------------------------------------------------------------------------

    def _report(self, values: StepValues, read: Callable[[Any], float]) -> None:
        """Write a step's values; ``read`` turns a kept tensor into a float."""
        loss = sum(read(x) for x in values.losses) if values.losses else nan
        mask, spikeness, norm, local, ratio = 0, nan, nan, nan, nan
        if values.losses:
            mask = 1
            spikeness = self.core.spikeness(loss)
            if spikeness == spikeness:
                mask |= 2
            if not isfinite(loss):
                self.nonfinite("loss", values.step, loss)
        if values.grad_norm is not None:
            norm = read(values.grad_norm)
            mask |= 4
            if not isfinite(norm) and isnan(values.nonfinite):
                self.nonfinite("gradient", values.step, norm, reduced=True)
        if values.local_norm is not None:
            local = read(values.local_norm)
            mask |= 8
        if values.nonfinite == values.nonfinite:
            mask |= 0x10
        if values.update_ratio is not None:
            ratio = read(values.update_ratio)
            mask |= 0x20
        if values.gc_ns:
            mask |= 0x40
        if values.mfu == values.mfu:
            mask |= 0x80
        if mask:
            self.ring.record(
                METRICS_RECORD, mask, self.core.value_ids, values.step, values.at,
                (loss, spikeness, norm, local, values.nonfinite, ratio, values.gc_ns * 1e-9, values.mfu),
            )  # fmt: skip
        if values.checksum is not None:
            self.ring.metric("training.parameter_checksum", values.step, values.at, read(values.checksum))

    def nonfinite(self, where: str, step: int, value: float, **attributes: Any) -> None:
        """Tell of a NaN or infinity; the first sixteen of a run, for after the first everything is non-finite."""
        if self._nonfinite_noted >= NONFINITE_NOTED_MAX:
            return
        self._nonfinite_noted += 1
        given = {"where": where, "value": repr(value), **attributes}
        if self.core.loss_scale == self.core.loss_scale:
            given["scaled"] = True
        self.ring.note(EventName.NONFINITE, step, monotonic_ns(), given)

    def _write_logged(self, name: str, step: int, at: int, value: torch.Tensor | float) -> None:
        if isinstance(value, float):
            self.ring.metric(name, step, at, value)
        else:
            self.device.later(value.detach(), lambda v: self.ring.metric(name, step, at, v[0]))

    # --- failure ----------------------------------------------------------------------------------

    def failed(self, where: str, error: BaseException) -> None:
        """A hook of ours failed: count it, note the first ones, and go on."""
        self._errors += 1
        with suppress(Exception):
            self.ring.count("collector_error")
            if self._errors <= ERRORS_NOTED_MAX:
                said = {"type": type(error).__name__, "message": str(error)[:500], "where": f"collector: {where}"}
                self.ring.note("collector_error", self.step, monotonic_ns(), said)

    def finish(self) -> None:
        """Read what is still kept, waiting for the device: the run is over."""
        self.device.finish()
