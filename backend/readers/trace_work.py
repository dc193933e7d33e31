"""What a rank did itself in each step of a profiler trace: data, kernels, operators, garbage collection.

Spans are kept as pairs of numbers until the file is read, because a step's own span may stand after what lies in it.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

SPANS_MAX = 2_000_000
_GC = ("Python GC", "gc.collect")


def _kind(name: str, category: str) -> str:
    """Series that a span adds to; empty for everything else."""
    if category.lower() == "kernel":
        return "" if name.startswith("nccl") else "device_ms"
    if name.startswith("enumerate(DataLoader)"):
        return "data_wait_ms"
    if name.startswith(_GC):
        return "gc_ms"
    return "operators_ms" if category in ("cpu_op", "Operator") and name.startswith("aten::") else ""


@dataclass
class Work:
    """``spans``: series name -> starts and lengths in us, one after the other. ``left_out``: beyond ``SPANS_MAX``."""

    spans: dict[str, array[float]] = field(default_factory=dict)
    left_out: int = 0

    def take(self, name: str, category: str, ts_us: float, dur_us: float) -> None:
        """Note one span of the trace."""
        kind = _kind(name, category)
        if not kind or dur_us <= 0:
            return
        held = self.spans.setdefault(kind, array("d"))
        if len(held) >= 2 * SPANS_MAX:
            self.left_out += 1
        else:
            held.extend((ts_us, dur_us))

    def per_step(self, steps: Mapping[int, tuple[float, float]]) -> dict[str, dict[int, float]]:
        """Series name -> step -> ms covered; nested and parallel spans count once. Spans belong where they begin."""
        edges = sorted((start, number) for number, (start, _) in steps.items())
        return {name: _covered(np.array(held).reshape(-1, 2), edges) for name, held in self.spans.items()}

    def count(self) -> int:
        """Kernels of the trace, operators where it has none: ranks with one role run equally many."""
        return len(self.spans.get("device_ms") or self.spans.get("operators_ms") or ()) // 2


def _covered(spans: np.ndarray, edges: list[tuple[float, int]]) -> dict[int, float]:
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    ends = spans.sum(axis=1)
    until = np.concatenate([[-np.inf], np.maximum.accumulate(ends)[:-1]])
    fresh = np.maximum(ends - np.maximum(spans[:, 0], until), 0.0)
    at = np.searchsorted([start for start, _ in edges], spans[:, 0], side="right") - 1
    total = np.bincount(at[at >= 0], weights=fresh[at >= 0], minlength=len(edges))
    return {number: float(total[i]) / 1000 for i, (_, number) in enumerate(edges)}
