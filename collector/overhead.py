"""What the collector costs, measured while it runs, and what it gives up when that is too much.

The boundary's cost is known every step (its own two clock readings). On every 16th step, the shadow step, each hook
also measures itself. Over budget, sources are switched off in the order of :data:`SHED_ORDER`, one at a time.
"""

from __future__ import annotations

from time import monotonic_ns

from lanterne.collector.ring import Ring
from lanterne.nouns import EventName

SHED_ORDER = ("layer_norms", "update_ratio", "fingerprint", "grad_norm", "checksum")
"""The dearest and least needed first. Steps, phases, loss, lr and collectives are never shed."""
SHADOW_EVERY = 16
SETTLE_STEPS = 128
"""Steps between two decisions, so that the effect of one is measured before the next."""
FLOOR_NS = 150_000
"""Below this a step the collector is always within its budget (a step of a toy model is shorter than its hooks)."""


class OverheadMeter:
    """``spent`` gathers nanoseconds of hooks on shadow steps; ``on`` says whether this step is one."""

    def __init__(self, ring: Ring, budget: float) -> None:
        self.ring, self.budget = ring, budget
        self.on, self.spent = False, 0
        self.shed: list[str] = []
        self.hooks_ns = self.boundary_ns = self.step_ns = 0.0
        self._steps = self._since = 0

    def allows(self, source: str) -> bool:
        """Is this source still on?"""
        return source not in self.shed

    @property
    def cost_ns(self) -> float:
        """Smoothed cost of the collector a step, in ns."""
        return self.hooks_ns + self.boundary_ns

    def step_closed(self, step: int, took_ns: int, boundary_ns: int) -> None:
        """Account one step of ``took_ns``, of which the boundary took ``boundary_ns``."""
        steps = self._steps = self._steps + 1
        weight = 0.1 if steps > 10 else 1.0 / steps
        if steps > 10:  # a boundary during which the core was taken away says nothing about our cost
            boundary_ns = min(boundary_ns, int(4 * self.boundary_ns))
        self.boundary_ns += weight * (boundary_ns - self.boundary_ns)
        self.step_ns += weight * (took_ns - self.step_ns)
        if self.on:
            shadows = steps // SHADOW_EVERY
            weight = 0.3 if shadows > 3 else 1.0 / max(1, shadows)
            if shadows > 3:
                self.spent = min(self.spent, int(4 * self.hooks_ns))
            self.hooks_ns += weight * (self.spent - self.hooks_ns)
            self.ring.metric("lanterne.collector.time", step - 1, monotonic_ns(), self.cost_ns * 1e-9)
            self._decide(step)
        self.spent = 0
        self.on = steps % SHADOW_EVERY == SHADOW_EVERY - 1

    def _decide(self, step: int) -> None:
        allowed = max(self.budget * self.step_ns, FLOOR_NS)
        if self.cost_ns <= allowed or self._steps - self._since < SETTLE_STEPS or len(self.shed) == len(SHED_ORDER):
            return
        source = SHED_ORDER[len(self.shed)]
        self.shed.append(source)
        self._since = self._steps
        said = {"source": source, "overhead_us": round(self.cost_ns / 1e3, 1), "budget_us": round(allowed / 1e3, 1)}
        self.ring.note(EventName.SHED, step, monotonic_ns(), said)
        self.ring.count("shed")
