"""Gradients and parameters: norms (global, local, by layer), the first non-finite parameter, update ratio, checksum.

Nothing here reads a device: what is computed stays a tensor until it has arrived (``device.py``). Only local parts
are touched under FSDP2 and tensor parallelism: reading more would be a collective.
"""

from __future__ import annotations

from math import nan
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from lanterne.collector.core import AVERAGING, HITS, NORM, RATIO
from lanterne.collector.overhead import OverheadMeter
from lanterne.collector.sources.collectives import TapFile
from lanterne.collector.sources.device import local, on_device
from lanterne.collector.steps import Recorder

if TYPE_CHECKING:
    import torch

LAYERS_MAX = 64
CHECKSUM_EVERY, CHECKSUM_ELEMENTS = 16, 1 << 20
CHECKSUM_BITS = (1 << 52) - 1
"""A checksum fits a double's mantissa, so it is carried exactly as a metric."""
UPDATE_EVERY, UPDATE_TENSORS, UPDATE_ELEMENTS = 64, 8, 1 << 16
SHARE = 2e-4
"""Share of the step time that one sampled source may take on average; its interval doubles until it keeps it."""


def layer_of(name: str) -> str:
    """The layer a parameter belongs to: its name up to the first number, else its module.

    >>> layer_of("encoder.layers.0.linear1.weight"), layer_of("head.bias"), layer_of("weight")
    ('encoder.layers.0', 'head', 'weight')
    """
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return parts[0]


def turn_of(step: int) -> int:
    """Which part of the parameters step ``step`` compares: of the step alone, because ranks may differ in how often
    they look, and scattered (MurmurHash3's finalizer), because whoever looks seldom shall see every part in the end."""
    mixed = step * 0x9E3779B1 & 0xFFFFFFFF
    mixed = (mixed ^ mixed >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    mixed = (mixed ^ mixed >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return mixed ^ mixed >> 16


class Interval:
    """How often a sampled source runs: every ``every`` steps, doubled while its average cost is above its share."""

    def __init__(self, every: int) -> None:
        self.every = max(1, every)
        self._best = 0

    def due(self, step: int) -> bool:
        return step % self.every == 0

    def cost(self, ns: int, step_ns: float) -> None:
        """One run took ``ns``. The cheapest run counts: the others were disturbed."""
        self._best = min(ns, self._best) if self._best else ns
        while step_ns and self._best > SHARE * step_ns * self.every and self.every < 4096:
            self.every *= 2


class Gradients:
    """``model`` may be wrapped (DDP, FSDP); ``replicated`` says that all ranks hold the same parameters."""

    def __init__(
        self, recorder: Recorder, meter: OverheadMeter, tap: TapFile, model: Any, *, every: int, replicated: bool
    ) -> None:
        self.recorder, self.meter, self.tap, self.core = recorder, meter, tap, recorder.core
        self.norms, self.ratios, self.sums = Interval(every), Interval(UPDATE_EVERY), Interval(CHECKSUM_EVERY)
        self._asked = False
        self._names: dict[int, str] | None = None
        self._layers: tuple[list[str], Any, int] | None = None
        self.kept: list[tuple[Any, Any]] = []  # weights before the step, for its update ratio
        self.follow(model, replicated=replicated)
        self._tell_intervals()

    # --- called by the hooks ----------------------------------------------------------------------

    def follow(self, model: Any, *, replicated: bool) -> None:
        """``model`` is the one that trains."""
        self.model, self._names, self._layers, self.core.averaging = model, None, None, nan
        if replicated and self.before_close not in self.recorder.before_close:
            self.recorder.before_close.append(self.before_close)

    def _tell_intervals(self) -> None:
        self.core.norm_every, self.core.ratio_every = self.norms.every, self.ratios.every

    def suspect(self) -> None:
        """Before clipping or stepping: a reduction of this step began with non-finite values of *this* rank."""
        self.core.hits_seen = self.tap.hits()
        name, count = self._first_nonfinite()
        self.core.nonfinite = float(count)
        self.recorder.nonfinite(
            "gradient", self.recorder.step, float("nan"), parameter=name, count=count, reduced=False
        )

    def before_step(self, optimizer: Any, left: int) -> None:
        """In the optimizer's pre-hook, gradients reduced and unscaled: what the core has left to do."""
        if left & HITS:
            self.suspect()
        if left & AVERAGING:
            self.core.averaging = self._bucket_factor()
            self.core.take_squares()
        if left & NORM and self.meter.allows("grad_norm"):
            began = monotonic_ns()
            self._norms(optimizer)
            self.norms.cost(monotonic_ns() - began, self.core.step_ns)
            self._tell_intervals()
        if left & RATIO and self.meter.allows("update_ratio"):
            self.kept = self._sample_weights(optimizer)

    def after_step(self) -> None:
        """In the optimizer's post-hook: relative size of the update, ||dw|| / ||w|| over the sampled tensors."""
        import torch

        pairs, self.kept = self.kept, []
        with torch.no_grad():
            now = [local(p.detach()) for p, _ in pairs]
            moved = torch._foreach_norm(torch._foreach_sub(now, [old for _, old in pairs]))
            size = torch._foreach_norm(now)
            ratio = torch.linalg.vector_norm(torch.stack(moved)) / torch.linalg.vector_norm(torch.stack(size))
        self.core.update_ratio = ratio

    def recheck(self) -> None:
        """All ranks just put their parameters back: compare them at the next boundary, not at the next turn."""
        self._asked = True

    def before_close(self, step: int) -> None:
        """At the boundary: a checksum of a rotating part of the parameters, at the same steps on all ranks."""
        asked, self._asked = self._asked, False
        if not (asked or self.sums.due(step)) or not self.meter.allows("checksum"):
            return
        began = monotonic_ns()
        self.core.checksum = self._checksum(turn_of(step))
        self.sums.cost(monotonic_ns() - began, self.core.step_ns)

    # --- norms ------------------------------------------------------------------------------------

    def _norms(self, optimizer: Any) -> None:
        import torch

        params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        grads = [local(p.grad) for p in params]
        if not grads or any(g.is_sparse for g in grads) or len({g.device for g in grads}) > 1:
            return
        with torch.no_grad():
            norms = torch.stack(torch._foreach_norm(grads)).float()
            total = torch.linalg.vector_norm(norms)
            sharded = any(g is not p.grad for g, p in zip(grads, params, strict=True))
            if sharded:
                self.core.local_norm = total
            else:
                self.core.grad_norm = total
            if self.meter.allows("layer_norms"):
                self._by_layer(params, norms, "training.grad_norm_local" if sharded else "training.grad_norm")

    def _by_layer(self, params: list[Any], norms: torch.Tensor, metric: str) -> None:
        import torch

        if self._layers is None or self._layers[2] != len(params):
            names = self.names()
            layer = [layer_of(names.get(id(p), "")) for p in params]
            order = list(dict.fromkeys(layer))[:LAYERS_MAX]
            index = [order.index(name) if name in order else len(order) for name in layer]
            self._layers = order, torch.tensor(index, device=norms.device), len(params)
        order, where, _ = self._layers
        squares = torch.zeros(len(order) + 1, device=norms.device).index_add_(0, where, norms * norms)
        step, at, ring = self.recorder.step, monotonic_ns(), self.recorder.ring

        def write(found: list[float]) -> None:
            for name, value in zip(order, found, strict=False):
                ring.metric(metric, step, at, value, name)

        self.recorder.device.later(squares.sqrt(), write)

    def _bucket_factor(self) -> float:
        """What turns the norm of what DDP put into its buckets into the norm of the local gradient.

        DDP divides by the group's size while it fills a bucket, unless a communication hook does the averaging.
        """
        own = vars(self.model) if self.model is not None else {}
        group = own.get("process_group") if "reducer" in own and not own.get("_comm_hooks") else None
        return 1.0 if group is None else float(group.size())

    # --- names ------------------------------------------------------------------------------------

    def names(self) -> dict[int, str]:
        """id of a parameter -> its name, without the wrappers' prefixes."""
        if self._names is None:
            found = self.model.named_parameters() if self.model is not None else ()
            self._names = {id(p): name.replace("module.", "").replace("_orig_mod.", "") for name, p in found}
        return self._names

    def _first_nonfinite(self) -> tuple[str, int]:
        """(name, number of non-finite elements) of the first parameter whose gradient is not finite."""
        import torch

        if self.model is None:
            return "", 0
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                if p.grad is None or on_device(p.grad):
                    continue
                bad = int((~torch.isfinite(local(p.grad))).sum())
                if bad:
                    return self.names().get(id(p), name), bad
        return "", 0

    # --- weights ----------------------------------------------------------------------------------

    def _sample_weights(self, optimizer: Any) -> list[tuple[Any, Any]]:
        import torch

        params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        small = [p for p in params if local(p.detach()).numel() <= UPDATE_ELEMENTS] or params[:1]
        chosen = small[:: max(1, len(small) // UPDATE_TENSORS)][:UPDATE_TENSORS]
        if len({p.device for p in chosen}) > 1:
            return []
        with torch.no_grad():
            return [(p, local(p.detach()).clone()) for p in chosen]

    def _checksum(self, turn: int) -> torch.Tensor | None:
        import torch

        params = [p.detach() for p in self.model.parameters() if p.is_contiguous()]
        if not params:
            return None
        total: torch.Tensor | None = None
        left, first = CHECKSUM_ELEMENTS, self._first_of_turn([p.numel() for p in params], turn)
        for i in range(len(params)):
            p = params[(first + i) % len(params)].reshape(-1)
            if p.numel() > left:
                windows = max(1, p.numel() // CHECKSUM_ELEMENTS)
                start = (turn % windows) * CHECKSUM_ELEMENTS if left == CHECKSUM_ELEMENTS else 0
                p = p[start : start + left]
            words = p.view(_integers(p.element_size()))
            part = words.sum(dtype=torch.int64) * (2 * ((first + i) % len(params)) + 1)
            total = part if total is None else total.to(part.device) + part
            left -= p.numel()
            if left <= 0:
                break
        return None if total is None else total & CHECKSUM_BITS

    @staticmethod
    def _first_of_turn(sizes: list[int], turn: int) -> int:
        """The parameter at which turn ``turn`` begins: the same on all ranks, moving through all of them."""
        if sum(sizes) <= CHECKSUM_ELEMENTS:
            return 0
        at = turn * CHECKSUM_ELEMENTS % sum(sizes)
        for i, size in enumerate(sizes):
            if at < size:
                return i
            at -= size
        return 0


def _integers(size: int) -> torch.dtype:
    import torch

    return {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
