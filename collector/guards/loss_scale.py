"""A loss scale that sees an overflow coming: the forecast of the largest gradient, not the crash, lowers it.

``torch.amp.GradScaler`` halves the scale after an overflow and loses that step. ``ForecastScaler`` follows the
largest absolute scaled gradient of each step: its logarithm is extrapolated by a robust slope (Theil-Sen over
the last steps) and the scale is lowered as soon as the forecast of the next steps comes within ``margin`` of
the format's largest finite value. It grows back when there is room. Limits come from ``torch.finfo``.

Joint schedule with clipping: while the scale is being lowered, or right after an overflow, ``clip_factor`` falls
to ``joint`` and recovers over ``recover`` steps; multiply the clipping bound by it.

Use in place of the scaler's own ``update``::

    scaler.scale(loss).backward()
    forecast.before_step(parameters)     # reads the largest scaled gradient
    scaler.unscale_(optimizer); ...; scaler.step(optimizer)
    forecast.update()                    # scaler.update(new scale)
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import TYPE_CHECKING, Any

from lanterne.errors import UsageError

if TYPE_CHECKING:
    import torch

WINDOW = 12
SCALE_MIN, SCALE_MAX = 1.0, 2.0**24


def largest(gradients: Iterable[torch.Tensor]) -> float:
    """Largest absolute value of all gradients (inf or NaN where one is not finite); one synchronisation."""
    import torch

    found = [g.detach().abs().max() for g in gradients if g.numel()]
    return float(torch.stack([f.float() for f in found]).max()) if found else 0.0


def slope(values: Iterable[float]) -> float:
    """Theil-Sen slope per step: the median of all pairwise slopes; 0 for fewer than three values."""
    known = list(values)
    if len(known) < 3:
        return 0.0
    return median((known[j] - known[i]) / (j - i) for i in range(len(known)) for j in range(i + 1, len(known)))


class ForecastScaler:
    """Drives a GradScaler. ``horizon`` is how many steps ahead the forecast looks; ``margin`` the head room."""

    def __init__(
        self, scaler: Any, dtype: str = "float16", *, horizon: int = 3, margin: float = 4.0, growth_interval: int = 200,
        joint: float = 0.5, recover: int = 20,
    ) -> None:  # fmt: skip
        import torch

        if not hasattr(torch, dtype):
            raise UsageError(f"dtype {dtype!r} is not a torch dtype")
        self.limit = float(torch.finfo(getattr(torch, dtype)).max)
        self.scaler, self.horizon, self.margin = scaler, horizon, margin
        self.growth_interval, self.joint, self.recover = growth_interval, joint, recover
        self.peaks: deque[float] = deque(maxlen=WINDOW)  # log2 of the largest unscaled gradient
        self.calm, self.last, self.clip_factor = 0, 0.0, 1.0

    def before_step(self, parameters: Iterable[torch.nn.Parameter]) -> float:
        """Read the largest scaled gradient (before ``unscale_``); returns it."""
        self.last = largest(p.grad for p in parameters if p.grad is not None)
        return self.last

    def forecast(self) -> float:
        """Largest unscaled gradient expected within ``horizon`` steps; 0 before anything was seen."""
        if not self.peaks:
            return 0.0
        rise = max(slope(self.peaks), 0.0)
        return float(2.0 ** min(max(self.peaks) + rise * self.horizon, 1000.0))

    def update(self) -> float:
        """Choose the next scale and give it to the scaler; returns it."""
        scale = float(self.scaler.get_scale())
        overflowed = not math.isfinite(self.last) or self.last >= self.limit
        if not overflowed and self.last > 0.0:
            self.peaks.append(math.log2(self.last / scale))
        wanted = self._wanted(scale, overflowed)
        lowered = wanted < scale
        self.clip_factor = self.joint if lowered else min(1.0, self.clip_factor + (1.0 - self.joint) / self.recover)
        self.calm = 0 if lowered else self.calm + 1
        self.scaler.update(new_scale=wanted)
        return wanted

    def _wanted(self, scale: float, overflowed: bool) -> float:
        if overflowed:
            return max(scale / 2.0, SCALE_MIN)
        room = self.limit / self.margin
        expected = self.forecast()
        if expected * scale > room and expected > 0.0:
            return min(max(2.0 ** math.floor(math.log2(room / expected)), SCALE_MIN), scale)
        if self.calm + 1 >= self.growth_interval and expected * scale * 2.0 <= room:
            self.calm = 0
            return min(scale * 2.0, SCALE_MAX)
        return scale
