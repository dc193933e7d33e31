"""Adaptive gradient clipping: the bound follows what this run's own gradients look like.

A fixed bound is right for one run and one phase of it. Each guard here learns its bound from the norms it saw
and clips what exceeds it; a clipped norm enters the memory as clipped, so that a burst does not raise the bound
that should have caught it. Call ``clip()`` between ``backward`` and ``optimizer.step``; gradients are scaled in
place. Replicas see the same reduced gradients, so they clip alike without talking to each other.

=================== ================================================================================
LayerClip           per parameter tensor: median + 3 sigma of a window (sigma = 1.4826 x MAD)
EmaClip             global: factor x exponential moving average of the norm, gamma 0.99 to 0.999
QuantileClip        global: the 99.5% quantile of a window; what a clip cut off is given back over the next
                    ``delay`` steps (delayed compensation), as far as the bound leaves room
CurvatureClip       global: step length <= 2 / (lr x largest curvature), the curvature from power iteration
=================== ================================================================================

Cost: one norm a tensor (``torch._foreach_norm``) and one read of the norms a step: a device synchronisation on
CUDA, as with every clipping whose bound depends on a value. Use what the loop already pays for.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from lanterne.errors import UsageError

if TYPE_CHECKING:
    import torch

MAD_TO_SIGMA = 1.4826
WARM_UP = 10
BURST = 3
"""Steps over the bound in a row that still are a burst (the spike tracker's three steps running)."""


@dataclass(frozen=True, slots=True)
class Clipped:
    """One call: the global L2 norm before, the bound in force (inf while it is being learned), and was it cut."""

    norm: float
    bound: float
    clipped: bool


def _gradients(parameters: Iterable[torch.nn.Parameter]) -> list[torch.Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def _norms(gradients: Sequence[torch.Tensor]) -> list[float]:
    """L2 norm of each gradient, float64 on the host; one synchronisation."""
    import torch

    if not gradients:
        return []
    found: Any = torch._foreach_norm([g.detach() for g in gradients])
    values: list[float] = torch.stack([n.to(torch.float64).to(found[0].device) for n in found]).tolist()
    return values


def _total(norms: Sequence[float]) -> float:
    return math.sqrt(sum(n * n for n in norms))


def _scale(gradients: Sequence[torch.Tensor], factor: float) -> None:
    import torch

    if gradients and factor != 1.0:
        torch._foreach_mul_(list(gradients), factor)


class LayerClip:
    """Per tensor: bound = median + ``sigmas`` x 1.4826 x MAD over the last ``window`` norms of that tensor.

    The first ``warm_up`` steps learn and do not clip. A non-finite norm is not learned; its gradient is zeroed.
    """

    def __init__(
        self, parameters: Iterable[torch.nn.Parameter], *, window: int = 50, sigmas: float = 3.0, warm_up: int = WARM_UP
    ) -> None:
        self.parameters = list(parameters)
        if window < warm_up or warm_up < 2:
            raise UsageError(f"window {window} and warm_up {warm_up}: 2 <= warm_up <= window is needed")
        self.sigmas, self.warm_up = sigmas, warm_up
        self.seen: list[deque[float]] = [deque(maxlen=window) for _ in self.parameters]

    def bound(self, index: int) -> float:
        """The bound of parameter ``index``; inf while it is being learned."""
        seen = self.seen[index]
        if len(seen) < self.warm_up:
            return math.inf
        middle = median(seen)
        spread = MAD_TO_SIGMA * median(abs(n - middle) for n in seen)
        return middle + self.sigmas * max(spread, 0.01 * middle)

    def clip(self) -> Clipped:
        have = [(i, p.grad) for i, p in enumerate(self.parameters) if p.grad is not None]
        norms, cut, bounds = _norms([g for _, g in have]), False, []
        for (index, gradient), norm in zip(have, norms, strict=True):
            bound = self.bound(index)
            bounds.append(bound)
            if not math.isfinite(norm):
                gradient.zero_()
                cut = True
                continue
            if norm > bound:
                gradient.mul_(bound / norm)
                cut = True
            self.seen[index].append(min(norm, bound))
        return Clipped(_total(norms), _total(bounds), cut)


class _Global:
    """The common part of the guards over the global norm."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.steps = 0

    def bound(self) -> float:
        raise NotImplementedError

    def learn(self, norm: float, bound: float) -> None:
        raise NotImplementedError

    def clip(self) -> Clipped:
        gradients = _gradients(self.parameters)
        norm, bound = _total(_norms(gradients)), self.bound()
        if not math.isfinite(norm):
            for gradient in gradients:
                gradient.zero_()
            return Clipped(norm, bound, True)
        if norm > bound:
            _scale(gradients, bound / norm)
        self.learn(norm, bound)
        self.steps += 1
        return Clipped(norm, bound, norm > bound)


class EmaClip(_Global):
    """Bound = ``factor`` x EMA of the (clipped) norm with decay ``gamma``, bias-corrected as in Adam."""

    def __init__(
        self, parameters: Iterable[torch.nn.Parameter], *, gamma: float = 0.99, factor: float = 2.0,
        warm_up: int = WARM_UP,
    ) -> None:  # fmt: skip
        super().__init__(parameters)
        if not 0.0 < gamma < 1.0:
            raise UsageError(f"gamma: {gamma} is outside 0 to 1; 0.99 to 0.999 is usual")
        self.gamma, self.factor, self.warm_up, self._sum = gamma, factor, warm_up, 0.0

    @property
    def mean(self) -> float:
        """The moving average of the norm; NaN before the first step."""
        return self._sum / (1.0 - self.gamma**self.steps) if self.steps else math.nan

    def bound(self) -> float:
        return math.inf if self.steps < self.warm_up else self.factor * self.mean

    def learn(self, norm: float, bound: float) -> None:
        self._sum = self.gamma * self._sum + (1.0 - self.gamma) * min(norm, bound)


class QuantileClip(_Global):
    """Bound = ``quantile`` of the last ``window`` norms; what was cut is given back over ``delay`` later steps.

    Compensation: a step that cut the gradient g to c g leaves (1 - c) g owed; each of the next ``delay`` steps
    adds a share of it before it is clipped itself. ``delay`` 0 drops what was cut. The owed gradient costs one
    copy of the gradients while it is owed. A cut norm is remembered as the quantile itself, so that spikes do not
    raise the bound that cuts them; more than ``BURST`` cuts in a row are no burst but a new level, which raises it.
    """

    def __init__(
        self, parameters: Iterable[torch.nn.Parameter], *, quantile: float = 0.995, window: int = 200, delay: int = 2,
        slack: float = 1.5, warm_up: int = WARM_UP,
    ) -> None:  # fmt: skip
        super().__init__(parameters)
        if not 0.5 <= quantile < 1.0:
            raise UsageError(f"quantile: {quantile} is outside 0.5 to 1")
        self.quantile, self.delay, self.slack, self.warm_up = quantile, delay, slack, warm_up
        self.seen: deque[float] = deque(maxlen=window)
        self._in_row = 0
        self._owed: list[torch.Tensor] = []
        self._left = 0

    def bound(self) -> float:
        if len(self.seen) < self.warm_up:
            return math.inf
        ordered = sorted(self.seen)
        return self.slack * ordered[min(len(ordered) - 1, math.ceil(self.quantile * len(ordered)) - 1)]

    def learn(self, norm: float, bound: float) -> None:
        self._in_row = self._in_row + 1 if norm > bound else 0
        cut_to = bound if self._in_row > BURST else bound / self.slack
        self.seen.append(norm if norm <= bound else cut_to)

    def clip(self) -> Clipped:
        gradients = _gradients(self.parameters)
        norm, bound = _total(_norms(gradients)), self.bound()
        cut = math.isfinite(norm) and norm > bound
        owed = [g.detach().clone().mul_(1.0 - bound / norm) for g in gradients] if cut and self.delay else []
        found = super().clip()
        if self._left and not cut and len(self._owed) == len(gradients):
            for gradient, rest in zip(gradients, self._owed, strict=True):
                gradient.add_(rest, alpha=1.0 / self.delay)
            self._left -= 1
            again = _total(_norms(gradients))
            _scale(gradients, min(1.0, bound / again) if again > 0 else 1.0)
        if not self._left:
            self._owed = []
        if owed:  # a share no longer than the bound itself: a spike of 1000 x is not paid back in full
            length = _total(_norms(owed))
            _scale(owed, min(1.0, bound / length) if length > 0 else 1.0)
            self._owed, self._left = owed, self.delay
        return found


class CurvatureClip(_Global):
    """Bound from the largest curvature of the loss: the gradient step stays within the stable length 2 / (lr x L).

    ``measure(loss_of)`` estimates L, the largest eigenvalue of the Hessian, by power iteration with Hessian-vector
    products (two backward passes an iteration); call it now and then, off the hot path. Gradient descent on a
    quadratic is stable for lr x L < 2, so where lr x L exceeds ``stable`` gradients are scaled by
    ``stable / (lr x L)``, whatever their norm. Before the first ``measure`` nothing is clipped.
    """

    def __init__(
        self, parameters: Iterable[torch.nn.Parameter], rate: Callable[[], float], *, stable: float = 1.8,
        iterations: int = 8,
    ) -> None:  # fmt: skip
        super().__init__(parameters)
        self.rate, self.stable, self.iterations, self.curvature = rate, stable, iterations, 0.0

    def measure(self, loss_of: Callable[[], torch.Tensor]) -> float:
        """Estimate the curvature at the present parameters; ``loss_of`` gives the scalar loss with its graph."""
        import torch

        trained = [p for p in self.parameters if p.requires_grad]
        first = torch.autograd.grad(loss_of(), trained, create_graph=True, allow_unused=True)
        pairs = [(g, p) for g, p in zip(first, trained, strict=True) if g is not None]
        generator = torch.Generator().manual_seed(0)
        vector = [torch.randn(p.shape, generator=generator).to(p) for _, p in pairs]
        value = 0.0
        for _ in range(self.iterations):
            length = _total(_norms(vector))
            if not length:
                break
            vector = [v / length for v in vector]
            product = torch.autograd.grad(
                [g for g, _ in pairs], [p for _, p in pairs], grad_outputs=vector, retain_graph=True, allow_unused=True
            )
            product_known = [torch.zeros_like(v) if h is None else h for h, v in zip(product, vector, strict=True)]
            value = float(sum((h * v).sum() for h, v in zip(product_known, vector, strict=True)))
            vector = [h.detach() for h in product_known]
        self.curvature = max(value, 0.0)
        return self.curvature

    def clip(self) -> Clipped:
        gradients = _gradients(self.parameters)
        norm = _total(_norms(gradients))
        sharp = self.rate() * self.curvature
        factor = self.stable / sharp if sharp > self.stable else 1.0
        if not math.isfinite(norm):
            for gradient in gradients:
                gradient.zero_()
            return Clipped(norm, math.inf, True)
        _scale(gradients, factor)
        self.steps += 1
        return Clipped(norm, norm * factor if factor < 1.0 else math.inf, factor < 1.0)
