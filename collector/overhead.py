"""What the collector costs, measured while it runs, and what it gives up when that is too much.

The boundary's cost is known every step (its own two clock readings). On every 16th step, the shadow step, each hook
also measures itself. Over budget, sources are switched off in the order of :data:`SHED_ORDER`, one at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from time import monotonic_ns

from lanterne.collector.core import PythonCore
from lanterne.collector.ring import Ring
from lanterne.nouns import EventName

SHED_ORDER = ("layer_norms", "ranges", "update_ratio", "fingerprint", "grad_norm", "checksum")
"""The dearest and least needed first. Steps, phases, loss, lr and collectives are never shed."""
SETTLE_STEPS = 128
"""Steps between two decisions, so that the effect of one is measured before the next."""
FLOOR_NS = 150_000
"""Below this a step the collector is always within its budget (a step of a toy model is shorter than its hooks)."""


class OverheadMeter:
    """Takes stock after each shadow step of what the core gathered: ``core.spent`` (hooks) and ``core.recent()``."""

    def __init__(self, ring: Ring, core: PythonCore, budget: float) -> None:
        self.ring, self.core, self.budget = ring, core, budget
        self.shed: list[str] = []
        self.hooks_ns = self.boundary_ns = 0.0
        self._hooks: deque[int] = deque(maxlen=8)
        self._since = 0

    def allows(self, source: str) -> bool:
        """Is this source still on?"""
        return source not in self.shed

    @property
    def cost_ns(self) -> float:
        """Cost of the collector a step in ns: hooks and boundary, undisturbed (the lower quartile of recent ones)."""
        return self.hooks_ns + self.boundary_ns

    def shadow(self) -> None:
        """A shadow step has ended: account it."""
        core = self.core
        self._hooks.append(core.spent)
        core.spent = 0
        # a run during which the core was taken away says nothing about our cost
        self.hooks_ns = _lower_quartile(self._hooks)
        self.boundary_ns = _lower_quartile(core.recent())
        self.ring.metric("lanterne.collector.time", core.step - 1, monotonic_ns(), self.cost_ns * 1e-9)
        self._decide(core.step)

    def _decide(self, step: int) -> None:
        allowed = max(self.budget * self.core.step_ns, FLOOR_NS)
        if self.cost_ns <= allowed or self.core.steps - self._since < SETTLE_STEPS or len(self.shed) == len(SHED_ORDER):
            return
        source = SHED_ORDER[len(self.shed)]
        self.shed.append(source)
        self._since = self.core.steps
        said = {"source": source, "overhead_us": round(self.cost_ns / 1e3, 1), "budget_us": round(allowed / 1e3, 1)}
        self.ring.note(EventName.SHED, step, monotonic_ns(), said)
        self.ring.count("shed")


def _lower_quartile(values: Iterable[int]) -> float:
    ordered = sorted(values)
    return float(ordered[len(ordered) // 4])
