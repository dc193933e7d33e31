"""One step of one rank: phases, numbers and the boundary, written to the ring as they happen.

Everything here runs on the training thread. Tensors are kept, never read, until the step is closed (CPU) or until the
device says that a copy has arrived (``sources/device.py``). A hook that fails is counted and never felt by the trainer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from math import isfinite, isnan
from time import monotonic_ns, process_time_ns
from typing import TYPE_CHECKING, Any

from lanterne.blackbox_files import METRICS_RECORD, PHASE_RECORD, SEPARATOR, STEP_RECORD
from lanterne.collector.overhead import OverheadMeter
from lanterne.collector.ring import Ring
from lanterne.collector.sources.device import DeviceValues
from lanterne.collector.sources.loss import SlidingSpikeness
from lanterne.nouns import EventName, Phase

if TYPE_CHECKING:
    import torch

PHASES = tuple(Phase)
DATA_WAIT, H2D, FORWARD, BACKWARD, OPTIMIZER, CHECKPOINT, EVAL, COMPILE, OTHER = range(len(PHASES))
SPANS_A_PHASE = 8
"""Occurrences of one phase in one step that get a span of their own; the rest become one span with a count."""
CPU_READING_NS, CPU_READING_STEPS = 1_000, 64
ERRORS_NOTED_MAX = 16
NONFINITE_NOTED_MAX = 16
NAN = float("nan")
_NO_VALUES = (0.0,) * 5

BOUNDARY_NAMES = (
    "training.lr", "training.lr_planned", "training.lr_drift", "training.loss_scale", "training.samples",
    "training.tokens", "process.cpu.time", "training.throughput",
)  # fmt: skip
VALUE_NAMES = (
    "training.loss", "training.loss_spikeness", "training.grad_norm", "training.grad_norm_local",
    "training.grad_nonfinite", "training.update_ratio", "process.gc.time", "training.mfu",
)  # fmt: skip


class StepValues:
    """What one step will report once it can be read. Tensors are 0-dim and detached."""

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

    def __init__(self, step: int) -> None:
        self.step, self.at = step, 0
        self.losses: list[torch.Tensor | float] = []
        self.grad_norm: torch.Tensor | float | None = None
        self.local_norm: torch.Tensor | float | None = None
        self.update_ratio: torch.Tensor | None = None
        self.checksum: torch.Tensor | None = None
        self.nonfinite, self.gc_ns, self.mfu = NAN, 0, NAN


class Recorder:
    """Writes steps and phases. ``enter``/``leave`` bracket a phase, ``close`` ends the step and begins the next."""

    def __init__(self, ring: Ring, meter: OverheadMeter, *, first_step: int, window: int) -> None:
        self.ring, self.meter = ring, meter
        self.span, self.record, self.progress = ring.span, ring.record, ring.progress
        self.ids = [ring.intern(phase.value) for phase in PHASES]
        self.total, self.times, self.rest = ([0] * len(PHASES) for _ in range(3))
        self.step, self.began = first_step, monotonic_ns()
        self._cpu, self._cpu_step, self._cpu_due = process_time_ns(), first_step, first_step
        self.values = StepValues(first_step)
        self.user_phase = -1
        self.lr, self.lr_planned, self.lr_zero, self.loss_scale = NAN, NAN, NAN, NAN
        self.samples, self.tokens = 0, 0
        self.flops_per_step = self.flops_per_sample = self.peak_flops = 0.0
        self.logged: list[tuple[str, torch.Tensor | float]] = []
        self.spikeness = SlidingSpikeness(window)
        self.device = DeviceValues(self._report)
        self.boundary_ids = ring.intern(SEPARATOR.join(BOUNDARY_NAMES))
        self.value_ids = ring.intern(SEPARATOR.join(VALUE_NAMES))
        self.at_boundary: list[Callable[[int], None]] = []
        self.before_close: list[Callable[[int], None]] = []
        self.tell_step: Callable[[int], None] = lambda _: None
        self.explicit_loss = False
        self._nonfinite_noted = 0
        self._errors = 0
        self.progress(first_step, self.ids[OTHER], self.began, self.began)

    def begin_at(self, step: int) -> None:
        """Count from ``step`` on: a script that resumes says so after the launcher has attached it."""
        self.step = self._cpu_step = self._cpu_due = self.values.step = step
        self.tell_step(step)

    # --- phases -----------------------------------------------------------------------------------

    def enter(self, phase: int) -> int:
        """A phase begins; returns its start for :meth:`leave`."""
        at = monotonic_ns()
        self.progress(self.step, self.ids[phase], at, at)
        return at

    def leave(self, phase: int, began: int) -> None:
        """A phase ends. Up to eight a step get their own span."""
        at = monotonic_ns()
        took = at - began
        self.total[phase] += took
        times = self.times[phase] = self.times[phase] + 1
        if times <= SPANS_A_PHASE:
            self.span(PHASE_RECORD, 1, self.ids[phase], self.step, began, took)
        else:
            self.rest[phase] += took
        self.progress(self.step, self.ids[OTHER], at, at)

    # --- the boundary -----------------------------------------------------------------------------

    def close(self) -> None:
        """End the step now: write span, rest of the phases and numbers, then begin the next one."""
        at = monotonic_ns()
        step, began = self.step, self.began
        took = at - began
        try:
            self._write_phases(step, at, took)
            self._write_boundary(step, at, took)
            for source in self.before_close:
                source(step)
            values = self.values
            values.at = at
            self.device.settle(values)
            for name, value in self.logged:
                self._write_logged(name, step, at, value)
        except Exception as error:
            self.failed("step", error)
        self.logged.clear()
        self.explicit_loss = False
        step = self.step = step + 1
        self.values = StepValues(step)
        self.samples = self.tokens = 0
        self.tell_step(step)
        done = monotonic_ns()
        self.began = at
        self.progress(step, self.ids[OTHER], at, done)
        self.meter.step_closed(step, took, done - at)
        for call in self.at_boundary:
            try:
                call(step)
            except Exception as error:
                self.failed("step boundary", error)

    def _write_phases(self, step: int, at: int, took: int) -> None:
        total, times = self.total, self.times
        other = took - sum(total)
        if other > 0:
            # what no phase claimed; its place in the step is not known, so it is put at the end
            self.span(PHASE_RECORD, 1, self.ids[OTHER], step, at - other, other)
        for phase, n in enumerate(times):
            if n:
                if n > SPANS_A_PHASE:
                    rest = self.rest[phase]
                    self.span(PHASE_RECORD, n - SPANS_A_PHASE, self.ids[phase], step, at - rest, rest)
                    self.rest[phase] = 0
                total[phase] = times[phase] = 0
        self.span(STEP_RECORD, 0, 0, step, at - took, took)

    def _write_boundary(self, step: int, at: int, took: int) -> None:
        mask, lr, planned, drift, used = 0, self.lr, self.lr_planned, NAN, 0.0
        if step >= self._cpu_due:
            mask, used = 0x40, self._cpu_a_step(step)
        if lr == lr:
            mask |= 1
            if planned == planned:
                mask |= 2
            against = planned if planned == planned else self.lr_zero
            if against:
                drift = (lr - against) / against
                mask |= 4
        if self.loss_scale == self.loss_scale:
            mask |= 8
        samples, tokens = self.samples, self.tokens
        rate = 0.0
        if samples:
            mask |= 0x90
            rate = samples * 1e9 / took if took else 0.0
        if tokens:
            mask |= 0x20
        self.record(
            METRICS_RECORD, mask, self.boundary_ids, step, at,
            (lr, planned, drift, self.loss_scale, samples, tokens, used, rate),
        )  # fmt: skip
        if self.peak_flops and took:
            flops = self.flops_per_step or self.flops_per_sample * samples
            self.values.mfu = flops * 1e9 / (took * self.peak_flops)

    def _cpu_a_step(self, step: int) -> float:
        """CPU seconds of this process a step since the last reading.

        The clock adds up all threads in the kernel: from under 1 us to hundreds, by machine. It is read as often as
        keeps it below :data:`CPU_READING_NS` a step on average.
        """
        began = monotonic_ns()
        cpu = process_time_ns()
        cost = monotonic_ns() - began
        used = (cpu - self._cpu) * 1e-9 / (step + 1 - self._cpu_step)
        self._cpu, self._cpu_step = cpu, step + 1
        self._cpu_due = step + min(CPU_READING_STEPS, max(1, cost // CPU_READING_NS))
        return used

    def group_rate(self, group: int, lr: float, planned: float, first: float) -> None:
        """Rate and drift of a further parameter group (label ``group N``), against its plan, else its first rate."""
        against = planned if planned == planned else first
        mask = 1 | (2 if planned == planned else 0) | (4 if against else 0)
        drift = (lr - against) / against if against else NAN
        self.record(
            METRICS_RECORD, mask, self.boundary_ids, self.step, monotonic_ns(), (lr, planned, drift, *_NO_VALUES),
            self.ring.intern(f"group {group}"),
        )  # fmt: skip

    # --- values -----------------------------------------------------------------------------------

    def loss(self, value: torch.Tensor | float, *, explicit: bool = False) -> None:
        """A loss of this step. What the user logs wins over what backward was called on; several are summed."""
        if explicit and not self.explicit_loss:
            self.values.losses.clear()
            self.explicit_loss = True
        elif self.explicit_loss and not explicit:
            return
        self.values.losses.append(value if isinstance(value, float) else value.detach())

    def _report(self, values: StepValues, read: Callable[[Any], float]) -> None:
        """Write a step's values; ``read`` turns a kept tensor into a float."""
        loss = sum(read(x) for x in values.losses) if values.losses else NAN
        mask, spikeness, norm, local, ratio = 0, NAN, NAN, NAN, NAN
        if values.losses:
            mask = 1
            spikeness = self.spikeness.add(loss)
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
            self.record(
                METRICS_RECORD, mask, self.value_ids, values.step, values.at,
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
        if self.loss_scale == self.loss_scale:
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
