"""What the training thread does at every hook of every step: compiled (``native/core.cpp``), or here in Python.

Both write the same records and have the same members. The compiled one is built at first use in about two seconds;
where it cannot be (no compiler, no Python headers, ``LANTERNE_TAP=python``) :class:`PythonCore` takes its place.
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from contextlib import suppress
from importlib.machinery import ExtensionFileLoader
from math import isfinite, nan, sqrt
from pathlib import Path
from time import monotonic_ns, process_time_ns
from typing import TYPE_CHECKING, Any, cast
from zlib import crc32

from lanterne import blackbox_files as blackbox
from lanterne import native
from lanterne.blackbox_files import EVENT_RECORD, METRICS_RECORD, PHASE_RECORD, SEPARATOR, STEP_RECORD
from lanterne.collector.sources.device import on_device
from lanterne.collector.sources.loss import SlidingSpikeness
from lanterne.nouns import EventName, Phase

if TYPE_CHECKING:
    from lanterne.collector.ring import Ring
    from lanterne.collector.sources.collectives import TapFile

PHASES = tuple(Phase)
DATA_WAIT, H2D, FORWARD, BACKWARD, OPTIMIZER, CHECKPOINT, EVAL, COMPILE, OTHER = range(len(PHASES))
SPANS_A_PHASE = 8
"""Occurrences of one phase in one step that get a span of their own; the rest become one span with a count."""
CPU_READING_NS, CPU_READING_STEPS = 1_000, 64
SHADOW_EVERY = 16
GROUP_RATES_EVERY = 10
"""Steps between readings of the rates of the parameter groups behind the first."""
RECENT = 2 * SHADOW_EVERY
BYTES_HASHED = 64

HITS, NORM, RATIO, RATES, RATE, AVERAGING, RANGES = 1, 2, 4, 8, 16, 32, 64
"""What :meth:`PythonCore.begin_optimizer` leaves to do: look for non-finite gradients, compute a norm, keep weights for
the update ratio, tell the rates of further groups, read an unusual rate, learn what DDP divides by,
hold gradients against narrow formats."""

BOUNDARY_NAMES = (
    "training.lr", "training.lr_planned", "training.lr_drift", "training.loss_scale", "training.samples",
    "training.tokens", "process.cpu.time", "training.throughput",
)  # fmt: skip
VALUE_NAMES = (
    "training.loss", "training.loss_spikeness", "training.grad_norm", "training.grad_norm_local",
    "training.grad_nonfinite", "training.update_ratio", "process.gc.time", "training.mfu",
)  # fmt: skip
SOURCE = Path(__file__).parent / "native" / "core.cpp"
BUILD_WAIT_S = 20.0
_TAP_AT = (blackbox.TAP_STEP_AT, blackbox.TAP_BACKWARD_AT, blackbox.TAP_HITS_AT, blackbox.TAP_SQUARES_AT)


def fingerprint(first: Any) -> int | None:
    """64 bits from 192 bytes of a CPU tensor (start, middle, end) and its size; None where there are no bytes."""
    from ctypes import string_at

    at, size = first.data_ptr(), first.nbytes
    if not size:
        return None
    length = min(BYTES_HASHED, size)
    head = string_at(at, length) + string_at(at + (size - length) // 2, length)
    return crc32(head) << 32 | crc32(string_at(at + size - length, length), size & 0xFFFFFFFF)


class PythonCore:
    """State of the step under way and the writers of its records; times in ns of CLOCK_MONOTONIC.

    ``on`` says that this is a shadow step, on which ``spent`` gathers what the hooks take. ``root`` is the id of the
    model whose forward counts. ``norm_every`` and ``ratio_every`` are steps between computed norms and update ratios.
    ``averaging`` turns the norm of what enters DDP's buckets into the local gradient's, NaN until known.
    """

    def __init__(self, ring: Ring, tap: TapFile, ids: list[int], window: int) -> None:
        self._ring, self._tap, self.ids = ring, tap, ids
        self.span, self.record, self._progress, self.take = ring.span, ring.record, ring.progress, ring.take
        self.total, self.times, self.rest = ([0] * len(PHASES) for _ in range(3))
        self.step, self.began, self.at, self._took = 0, monotonic_ns(), 0, 0
        self.samples, self.tokens, self.gc_ns, self.steps, self.spent = 0, 0, 0, 0, 0
        self.user_phase, self.on, self.in_backward, self.explicit_loss = -1, False, False, False
        self.norm_every, self.ratio_every, self.ranges_every, self.root = 0, 0, 0, 0
        self.hits_seen = tap.hits()
        self.lr, self.lr_planned, self.lr_zero, self.loss_scale = nan, nan, nan, nan
        self.nonfinite, self.mfu, self.averaging = nan, nan, nan
        self.flops_per_step, self.flops_per_sample, self.peak_flops, self.step_ns = 0.0, 0.0, 0.0, 0.0
        self.boundary_ids, self.value_ids, self.batch_id, self.fingerprint_id = 0, 0, 0, 0
        self.losses: list[Any] = []
        self.grad_norm: Any = None
        self.local_norm: Any = None
        self.update_ratio: Any = None
        self.checksum: Any = None
        self._forward_phase, self._forward_began, self._backward_began, self._optimizer_began = FORWARD, 0, 0, 0
        self._cpu, self.cpu_step, self.cpu_due = process_time_ns(), 0, 0
        self._boundaries = [0] * RECENT
        self._spikeness = SlidingSpikeness(window)
        self.spikeness = self._spikeness.add

    # --- phases -----------------------------------------------------------------------------------

    def enter(self, phase: int, /) -> int:
        """A phase begins; returns its start for :meth:`leave`."""
        at = monotonic_ns()
        self._progress(self.step, self.ids[phase], at, at)
        return at

    def leave(self, phase: int, began: int, /) -> None:
        """A phase ends. Up to eight a step get their own span."""
        at = monotonic_ns()
        took = at - began
        self.total[phase] += took
        times = self.times[phase] = self.times[phase] + 1
        if times <= SPANS_A_PHASE:
            self.span(PHASE_RECORD, 1, self.ids[phase], self.step, began, took)
        else:
            self.rest[phase] += took
        self._progress(self.step, self.ids[OTHER], at, at)

    def begin_forward(self, module: Any, /) -> None:
        """The root module is called: forward, or eval where it is not in training."""
        if self.user_phase >= 0 or self.in_backward or id(module) != self.root:
            return
        self._forward_phase = FORWARD if module.training else EVAL
        self._forward_began = self.enter(self._forward_phase)

    def end_forward(self, module: Any, /) -> None:
        if self._forward_began and id(module) == self.root:
            self.leave(self._forward_phase, self._forward_began)
            self._forward_began = 0

    def begin_backward(self, loss: Any, /) -> bool:
        """Backward is called, on a 0-dim ``loss`` or None; False where it is part of something else."""
        if self.in_backward or self.user_phase >= 0:
            return False
        self._backward_began = self.enter(BACKWARD)
        self.in_backward = True
        self._tap.tell_backward(1)
        if getattr(loss, "ndim", None) == 0:
            with suppress(Exception):  # an object of the user's that only looks like a loss
                self.loss(loss)
        return True

    def end_backward(self) -> None:
        self._tap.tell_backward(0)
        self.in_backward = False
        self.leave(BACKWARD, self._backward_began)

    def begin_optimizer(self, optimizer: Any, /) -> int:
        """The optimizer is about to step; returns what is left to do (:data:`HITS` | :data:`NORM` | …)."""
        self._optimizer_began = self.enter(OPTIMIZER) if self.user_phase < 0 else 0
        groups = optimizer.param_groups
        lr = groups[0].get("lr")
        left = 0
        if lr.__class__ is float:
            self.lr = lr
        else:
            left = RATE
        if len(groups) > 1 and self.step % GROUP_RATES_EVERY == 0:
            left |= RATES
        if self.hit():
            left |= HITS
        if self.averaging == self.averaging:
            self.take_squares()
        elif self._tap.buckets():
            left |= AVERAGING
        if self.grad_norm is None and self.norm_every and self.step % self.norm_every == 0:
            left |= NORM
        if self.ratio_every and self.step and self.step % self.ratio_every == 0:
            left |= RATIO
        if self.ranges_every and self.step and self.step % self.ranges_every == 0:
            left |= RANGES
        return left

    def end_optimizer(self) -> None:
        if self._optimizer_began:
            self.leave(OPTIMIZER, self._optimizer_began)
            self._optimizer_began = 0

    # --- values -----------------------------------------------------------------------------------

    def hit(self) -> bool:
        """Did a reduction begin with non-finite gradients since ``hits_seen``?"""
        return self._tap.hits() != self.hits_seen

    def take_squares(self) -> None:
        """Make ``local_norm`` of what entered the reductions of this step."""
        squares, buckets = self._tap.take_squares()
        if buckets:
            scale = self.loss_scale
            self.local_norm = sqrt(squares) * (self.averaging / scale if scale > 0 else self.averaging)

    def loss(self, value: Any, explicit: bool = False, /) -> None:
        """A loss of this step. What the user logs wins over what backward was called on; several are summed."""
        if explicit and not self.explicit_loss:
            self.losses.clear()
            self.explicit_loss = True
        elif self.explicit_loss and not explicit:
            return
        self.losses.append(value if value.__class__ is float else value.detach())

    def took(self, batch: Any, marked: bool, /) -> bool:
        """Count a batch that is a contiguous CPU tensor or begins with one, and write its fingerprint if ``marked``."""
        import torch

        if batch.__class__ in {list, tuple} and batch:
            batch = batch[0]
        if batch.__class__ is not torch.Tensor or not batch.is_cpu or batch.is_sparse or not batch.dim():
            return False
        if not batch.is_contiguous():
            return False
        shape = batch.shape
        self.samples += shape[0]
        if len(shape) == 2 and not batch.is_floating_point() and not batch.is_complex():
            self.tokens += shape[0] * shape[1]
        mark = fingerprint(batch) if marked else None
        if mark is not None:
            aux = mark - (1 << 64) if mark >> 63 else mark
            zeros = (0.0,) * 8
            self.record(
                EVENT_RECORD, 0, self.batch_id, self.step, monotonic_ns(), zeros, 0, self.fingerprint_id, aux
            )  # fmt: skip
        return True

    # --- the boundary -----------------------------------------------------------------------------

    def end_step(self) -> int:
        """Write the step, its phases and what is known of it already; returns its end."""
        self.at = monotonic_ns()
        self._took = self.at - self.began
        self._write_phases()
        self._write_boundary()
        return self.at

    def _write_phases(self) -> None:
        total, times, step, at, took = self.total, self.times, self.step, self.at, self._took
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

    def _write_boundary(self) -> None:
        mask, lr, planned, drift, used, took = 0, self.lr, self.lr_planned, nan, 0.0, self._took
        if self.step >= self.cpu_due:
            mask, used = 0x40, self._cpu_a_step()
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
        samples, tokens, rate = self.samples, self.tokens, 0.0
        if samples:
            mask |= 0x90
            rate = samples * 1e9 / took if took else 0.0
        if tokens:
            mask |= 0x20
        self.record(
            METRICS_RECORD, mask, self.boundary_ids, self.step, self.at,
            (lr, planned, drift, self.loss_scale, samples, tokens, used, rate),
        )  # fmt: skip
        if self.peak_flops and took:
            flops = self.flops_per_step or self.flops_per_sample * samples
            self.mfu = flops * 1e9 / (took * self.peak_flops)

    def _cpu_a_step(self) -> float:
        """CPU seconds of this process a step since the last reading.

        The clock adds up all threads in the kernel: from under 1 us to hundreds, by machine. It is read as often as
        keeps it below :data:`CPU_READING_NS` a step on average.
        """
        began = monotonic_ns()
        cpu = process_time_ns()
        cost = monotonic_ns() - began
        used = (cpu - self._cpu) * 1e-9 / (self.step + 1 - self.cpu_step)
        self._cpu, self.cpu_step = cpu, self.step + 1
        self.cpu_due = self.step + min(CPU_READING_STEPS, max(1, cost // CPU_READING_NS))
        return used

    def write_values(self) -> bool:
        """Write the step's values and forget them. False, with nothing done, where one is on a device or unusual."""
        if self.update_ratio is not None or self.checksum is not None or self.nonfinite == self.nonfinite:
            return False
        kept = (*self.losses, self.grad_norm, self.local_norm)
        if any(v is not None and v.__class__ is not float and on_device(v) for v in kept):
            return False
        loss = sum(map(float, self.losses)) if self.losses else nan
        norm = float(self.grad_norm) if self.grad_norm is not None else nan
        if (self.losses and not isfinite(loss)) or (self.grad_norm is not None and not isfinite(norm)):
            return False
        local = float(self.local_norm) if self.local_norm is not None else nan
        spikeness = self.spikeness(loss) if self.losses else nan
        mask = (1 if self.losses else 0) | (2 if spikeness == spikeness else 0)
        mask |= (0 if self.grad_norm is None else 4) | (0 if self.local_norm is None else 8)
        mask |= (0x40 if self.gc_ns else 0) | (0x80 if self.mfu == self.mfu else 0)
        if mask:
            self.record(
                METRICS_RECORD, mask, self.value_ids, self.step, self.at,
                (loss, spikeness, norm, local, nan, nan, self.gc_ns * 1e-9, self.mfu),
            )  # fmt: skip
        self.forget_values()
        return True

    def forget_values(self) -> None:
        self.losses.clear()
        self.grad_norm = self.local_norm = self.update_ratio = self.checksum = None
        self.nonfinite = self.mfu = nan
        self.gc_ns, self.explicit_loss = 0, False

    def begin_step(self) -> bool:
        """Begin the next step. True after a shadow step: then the meter takes stock."""
        step = self.step = self.step + 1
        self._tap.tell_step(step)
        self.samples = self.tokens = 0
        self.began = self.at
        done = monotonic_ns()
        self._progress(step, self.ids[OTHER], self.at, done)
        self._boundaries[self.steps % RECENT] = done - self.at
        steps = self.steps = self.steps + 1
        self.step_ns += (self._took - self.step_ns) * (0.1 if steps > 10 else 1.0 / steps)
        was, self.on = self.on, steps % SHADOW_EVERY == SHADOW_EVERY - 1
        if not was:
            self.spent = 0
        return was

    def recent(self) -> list[int]:
        """What the last boundaries took."""
        return self._boundaries[: min(self.steps, RECENT)]


def build() -> Path:
    """The compiled core's shared object, compiled if need be. Raises :class:`lanterne.native.BuildFailed`."""
    headers = Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").exists():
        raise native.BuildFailed(f"no Python headers in {headers}")
    flags = (*native.FLAGS, "-std=c++17", f"-I{headers}")
    recipe = (*(p.read_text(encoding="utf-8") for p in (SOURCE, *sorted(SOURCE.parent.glob("core_*.hpp")))), *flags)
    tag = f"core-{sys.implementation.cache_tag}"
    return native.build(native.target(tag, (*recipe, sys.version)), (*flags, str(SOURCE)), BUILD_WAIT_S)


def load() -> Any:
    """The compiled module. Raises :class:`lanterne.native.BuildFailed` where it cannot be had."""
    found = sys.modules.get("lanterne_core")
    if found is not None:
        return found
    library = build()
    try:
        loader = ExtensionFileLoader("lanterne_core", str(library))
        spec = importlib.util.spec_from_loader("lanterne_core", loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise native.BuildFailed(f"{library.name} cannot be loaded: {error}") from error
    sys.modules["lanterne_core"] = module
    return module


def make(ring: Ring, tap: TapFile, *, first_step: int, window: int, compiled: bool = True) -> PythonCore:
    """The core for this ring and tap: the compiled one where it can be had and is wanted."""
    ids = [ring.intern(phase.value) for phase in PHASES]
    core: PythonCore | None = None
    if compiled:
        with suppress(native.BuildFailed, OSError):
            core = _compiled(load(), ring, tap, ids, window)
    core = PythonCore(ring, tap, ids, window) if core is None else core
    core.step = core.cpu_step = core.cpu_due = first_step
    core.boundary_ids = ring.intern(SEPARATOR.join(BOUNDARY_NAMES))
    core.value_ids = ring.intern(SEPARATOR.join(VALUE_NAMES))
    core.batch_id, core.fingerprint_id = ring.intern(EventName.BATCH.value), ring.intern("fingerprint")
    tap.tell_step(first_step)
    ring.progress(first_step, ids[OTHER], core.began, core.began)
    return core


def _compiled(module: Any, ring: Ring, tap: TapFile, ids: list[int], window: int) -> PythonCore:
    import torch

    named = (DATA_WAIT, FORWARD, BACKWARD, OPTIMIZER, EVAL, OTHER)
    core = module.Core(
        ring.map, ring.base, ring.records, blackbox.PROGRESS_AT, tap.map, _TAP_AT, ids, named, window, torch.Tensor
    )
    core.taken = ring.take()
    ring.span, ring.record, ring.take = core.span, core.record, core.take
    return cast(PythonCore, core)
