"""Columns -> ``[steps, ranks]`` arrays: the pivot behind every Facts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lanterne.backend.align.frame import Floats, Frame, Ints
from lanterne.backend.align.matching import Calls
from lanterne.backend.align.waits import Attribution
from lanterne.nouns import NO_STEP

PHASES = ("data_wait", "h2d", "forward", "backward", "optimizer", "checkpoint", "eval", "compile", "other")


@dataclass(frozen=True, slots=True)
class Gauge:
    """How a metric becomes a series: scale to the series' unit; ``counter`` = cumulative, so take what a step added."""

    series: str
    scale: float = 1.0
    counter: bool = False


GAUGES: Mapping[str, Gauge] = {
    "training.loss": Gauge("loss"),
    "training.grad_norm": Gauge("grad_norm"),
    "training.grad_norm_local": Gauge("grad_norm_local"),
    "training.grad_nonfinite": Gauge("grad_nonfinite"),
    "training.loss_spikeness": Gauge("loss_spikeness"),
    "training.lr": Gauge("lr"),
    "training.lr_planned": Gauge("lr_planned"),
    "training.lr_drift": Gauge("lr_drift"),
    "training.loss_scale": Gauge("loss_scale"),
    "training.update_ratio": Gauge("update_ratio"),
    "training.tokens": Gauge("tokens"),
    "training.samples": Gauge("samples"),
    "training.parameter_checksum": Gauge("parameter_checksum"),
    "training.fp16_underflow": Gauge("fp16_underflow"),
    "training.fp16_overflow": Gauge("fp16_overflow"),
    "training.e4m3_underflow": Gauge("e4m3_underflow"),
    "training.e4m3_overflow": Gauge("e4m3_overflow"),
    "training.grad_std": Gauge("grad_std"),
    "process.memory.usage": Gauge("rss_bytes"),
    "process.memory.limit": Gauge("rss_limit_bytes"),
    "container.memory.usage": Gauge("cgroup_bytes"),
    "hw.gpu.memory.usage": Gauge("gpu_allocated_bytes"),
    "hw.gpu.memory.reserved": Gauge("gpu_reserved_bytes"),
    "hw.gpu.memory.limit": Gauge("gpu_limit_bytes"),
    "system.shm.usage": Gauge("shm_bytes"),
    "hw.gpu.clock": Gauge("gpu_clock_mhz"),
    "hw.temperature": Gauge("gpu_temperature_c"),
    "hw.gpu.throttle": Gauge("gpu_throttle"),
    "hw.power": Gauge("gpu_power_w"),
    "hw.errors": Gauge("gpu_ecc_errors"),
    "system.cpu.utilization": Gauge("host_cpu_percent", 100.0),
    "system.cpu.steal": Gauge("host_steal_percent", 100.0),
    "system.cpu.runqueue": Gauge("host_runqueue"),
    "process.cpu.time": Gauge("process_cpu_ms", 1e3),
    "process.gc.time": Gauge("gc_ms", 1e3),
    "process.cpu.delay": Gauge("cpu_delay_percent", 100.0),
    "system.network.retransmits": Gauge("net_retries", counter=True),
    "system.network.send_queue": Gauge("send_queue_bytes"),
    "system.disk.io_time": Gauge("disk_ms", 1e3, counter=True),
    "process.file.read_time": Gauge("file_read_ms", 1e3, counter=True),
}
_NUMERIC = frozenset({"loss", "grad_norm", "grad_norm_local", "parameter_checksum", "update_ratio"})
_TOLD_BY_STEP = frozenset({"process.cpu.time", "process.gc.time"})
"""Beside ``training.*``: what the rank itself reports of each step. The rest is sampled beside it, by time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The axes: sorted steps [T] and ranks [R], and each step's own start and end (Unix ns, 0 = unknown) [T, R]."""

    steps: Ints
    ranks: Ints
    start_ns: Ints
    end_ns: Ints

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.steps), len(self.ranks)

    def cells(self, step: Ints, rank: Ints) -> tuple[Ints, np.ndarray]:
        """Flat cell of each (step, rank) and which of them are on the grid."""
        if not len(self.steps) or not len(self.ranks):
            return np.zeros(len(step), np.int64), np.zeros(len(step), bool)
        t = np.clip(np.searchsorted(self.steps, step), 0, len(self.steps) - 1)
        r = np.clip(np.searchsorted(self.ranks, rank), 0, len(self.ranks) - 1)
        return t * len(self.ranks) + r, (self.steps[t] == step) & (self.ranks[r] == rank)

    def blank(self) -> Floats:
        return np.full(self.shape, np.nan)


def grid(frame: Frame, ranks: Sequence[int]) -> Grid:
    """Steps from step spans; where a source sends none, from points that carry a step."""
    spans = frame.spans
    whole = spans.kind.where("training.step") & (spans.step > NO_STEP)
    steps = np.unique(spans.step[whole] if whole.any() else frame.points.step[frame.points.step > NO_STEP])
    none = np.zeros((0, 0), np.int64)
    axes = Grid(steps=steps, ranks=np.array(sorted(ranks), np.int64), start_ns=none, end_ns=none)
    start, end = np.zeros(axes.shape, np.int64), np.zeros(axes.shape, np.int64)
    cell, on = axes.cells(spans.step[whole], spans.rank[whole])
    start.reshape(-1)[cell[on]] = spans.start_ns[whole][on]
    end.reshape(-1)[cell[on]] = spans.end_ns[whole][on]
    return Grid(steps=axes.steps, ranks=axes.ranks, start_ns=start, end_ns=end)


def _add(axes: Grid, step: Ints, rank: Ints, value: Floats) -> Floats:
    """Sum of values a cell; NaN where there is none."""
    cell, on = axes.cells(step, rank)
    size = axes.shape[0] * axes.shape[1]
    total = np.bincount(cell[on], value[on], size)
    seen = np.bincount(cell[on], minlength=size)
    return np.where(seen > 0, total, np.nan).reshape(axes.shape)


def timings(frame: Frame, axes: Grid) -> dict[str, Floats]:
    """step_ms and the phases as the host saw them."""
    spans = frame.spans
    known = axes.end_ns > 0
    series = {"step_ms": np.where(known, (axes.end_ns - axes.start_ns) / 1e6, np.nan)}
    phase = spans.kind.where("training.phase")
    length = (spans.end_ns - spans.start_ns) / 1e6
    for name in PHASES:
        mask = phase & spans.name.where(name)
        if mask.any():
            series[f"{name}_ms"] = _add(axes, spans.step[mask], spans.rank[mask], length[mask])
    return series


def waiting(calls: Calls, a: Attribution, axes: Grid, step_ms: Floats) -> dict[str, Floats]:
    """lateness_ms, wait_ms, transfer_ms and busy_ms."""
    keep = a.whole & ~np.isnan(a.transfer_ns)
    if not keep.any():
        return {}
    cell, on = axes.cells(calls.step, calls.rank)
    use = keep & on
    late = np.full(axes.shape[0] * axes.shape[1], -np.inf)
    np.maximum.at(late, cell[use], a.lateness_ns[use] / 1e6)
    transfer = _add(axes, calls.step[use], calls.rank[use], a.transfer_ns[use] / 1e6)
    waited = _covered(calls.rank, a.blocked_from_ns, a.last_ns, use)
    held = _covered(calls.rank, a.blocked_from_ns, np.maximum(a.completed_ns, a.last_ns), use)
    wait = _add(axes, calls.step[use], calls.rank[use], waited[use] / 1e6)
    blocked = _add(axes, calls.step[use], calls.rank[use], held[use] / 1e6)
    late = np.where(np.isfinite(late), late, np.nan).reshape(axes.shape)
    busy = np.maximum(step_ms - blocked, 0.0)
    return {"lateness_ms": late, "wait_ms": wait, "transfer_ms": transfer, "busy_ms": busy}


def _covered(rank: Ints, begin: Ints, end: Ints, use: np.ndarray) -> Floats:
    """Length of each interval that no earlier interval of the same rank covers, ns [N]; 0 outside ``use``."""
    out = np.zeros(len(rank))
    rows = np.flatnonzero(use)
    if not len(rows):
        return out
    order = rows[np.lexsort((end[rows], begin[rows], rank[rows]))]
    edges = np.flatnonzero(np.diff(rank[order], prepend=-1))
    for part in np.split(order, edges[1:]):
        reach = np.maximum.accumulate(end[part])
        before = np.concatenate([begin[part[:1]], reach[:-1]])
        out[part] = np.maximum(end[part] - np.maximum(begin[part], before), 0)
    return out


def metrics(frame: Frame, axes: Grid) -> dict[str, Floats]:
    """Gauges and counters by step; what is sampled beside the training falls into the step that ran at its time."""
    points, series = frame.points, {}
    for code, name in enumerate(points.name.values):
        gauge = GAUGES.get(name)
        if gauge is None:
            continue
        mask = points.name.codes == code
        step, rank, at = points.step[mask], points.rank[mask], points.time_ns[mask]
        value = points.value[mask] * gauge.scale
        if gauge.series in _NUMERIC:
            value = np.where(np.isnan(value), np.inf, value)  # recorded as not a number: NaN means unknown here
        if gauge.counter:
            series[gauge.series] = _counted(axes, rank, at, value)
        elif name.startswith("training.") or name in _TOLD_BY_STEP:
            found = axes.blank()
            cell, on = axes.cells(step, rank)
            order = np.argsort(at[on], kind="stable")
            found.reshape(-1)[cell[on][order]] = value[on][order]
            series[gauge.series] = found
        else:
            series[gauge.series] = _sampled(axes, rank, at, value)
    return series


def _by_rank(axes: Grid, rank: Ints, at: Ints) -> list[tuple[int, Ints]]:
    """(column, rows sorted by time) of each rank on the grid."""
    order = np.lexsort((at, rank))
    edges = np.flatnonzero(np.diff(rank[order], prepend=-(1 << 40)))
    found = []
    for part in np.split(order, edges[1:]) if len(order) else []:
        column = int(np.searchsorted(axes.ranks, rank[part[0]]))
        if column < len(axes.ranks) and axes.ranks[column] == rank[part[0]]:
            found.append((column, part))
    return found


def _sampled(axes: Grid, rank: Ints, at: Ints, value: Floats) -> Floats:
    """The last sample at or before each step's end (the first one before there is any)."""
    found = axes.blank()
    for column, rows in _by_rank(axes, rank, at):
        known = axes.end_ns[:, column] > 0
        index = np.searchsorted(at[rows], axes.end_ns[known, column], side="right") - 1
        found[known, column] = value[rows][np.maximum(index, 0)]
    return found


def _counted(axes: Grid, rank: Ints, at: Ints, value: Floats) -> Floats:
    """What a cumulative counter gained in each step, interpolated between samples; NaN outside their span."""
    found = axes.blank()
    for column, rows in _by_rank(axes, rank, at):
        known = (axes.end_ns[:, column] > 0) & (axes.end_ns[:, column] <= at[rows[-1]])
        known &= axes.start_ns[:, column] >= at[rows[0]]
        if len(rows) < 2 or not known.any():
            continue
        zero = int(at[rows[0]])
        x = (at[rows] - zero).astype(np.float64)
        end = np.interp((axes.end_ns[known, column] - zero).astype(np.float64), x, value[rows])
        begin = np.interp((axes.start_ns[known, column] - zero).astype(np.float64), x, value[rows])
        found[known, column] = np.maximum(end - begin, 0.0)
    return found


def events_as_series(frame: Frame, axes: Grid) -> dict[str, Floats]:
    """Series that arrive as events: garbage collection pauses, checksums of parameters, non-finite counts."""
    series: dict[str, Floats] = {}
    for event, key, name in (
        ("gc_pause", "duration_ms", "gc_ms"),
        ("checksum", "value", "parameter_checksum"),
        ("nonfinite", "count", "grad_nonfinite"),
    ):
        rows = [
            (log.step, log.rank, float(log.attributes[key]))
            for log in frame.logs
            if log.name == event
            and isinstance(log.attributes.get(key), (int, float))
            and (event != "checksum" or log.attributes.get("what", "parameters") == "parameters")
        ]
        if not rows:
            continue
        step = np.array([r[0] for r in rows], np.int64)
        rank = np.array([r[1] for r in rows], np.int64)
        value = np.array([r[2] for r in rows], np.float64)
        if name == "parameter_checksum":
            found = axes.blank()
            cell, on = axes.cells(step, rank)
            found.reshape(-1)[cell[on]] = value[on]
        else:
            found = _add(axes, step, rank, value)
            if name == "gc_ms":
                found = np.where(np.isnan(found) & (axes.end_ns > 0), 0.0, found)
        series[name] = found
    return series
