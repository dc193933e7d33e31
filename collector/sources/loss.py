"""loss_spikeness: std / |mean| of the loss over a sliding window (DESIGN 6), in constant time a step."""

from __future__ import annotations

from collections import deque
from math import isfinite, sqrt


class SlidingSpikeness:
    """Population std over |mean| of the last ``window`` finite losses (unitless); NaN until eight are there.

    >>> s = SlidingSpikeness(50)
    >>> [s.add(x) for x in (1.0, 3.0) * 4][-1]
    0.5
    """

    LEAST = 8

    def __init__(self, window: int) -> None:
        self._values: deque[float] = deque(maxlen=max(window, self.LEAST))
        self._sum = self._squares = 0.0
        self._since = 0

    def add(self, loss: float) -> float:
        values = self._values
        if isfinite(loss) and abs(loss) < 1e150:
            if len(values) == values.maxlen:
                old = values[0]
                self._sum -= old
                self._squares -= old * old
            values.append(loss)
            self._sum += loss
            self._squares += loss * loss
            self._since += 1
            if self._since >= len(values):  # once a window the sums are made anew, so rounding does not pile up
                self._sum, self._squares, self._since = sum(values), sum(x * x for x in values), 0
        n = len(values)
        if n < self.LEAST:
            return float("nan")
        mean = self._sum / n
        if mean == 0.0:
            return float("nan")
        return sqrt(max(0.0, self._squares / n - mean * mean)) / abs(mean)
