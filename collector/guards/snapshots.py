"""Snapshots in host memory: a way back that costs no storage and no collective.

A snapshot holds this rank's own shard of parameters and buffers, the optimizer's state and the loss scale.
It is taken and restored by all ranks at the same step, so the parts fit together. The learning rate and the
schedule are not taken back: the steps go on counting, and so does the plan. The position of the data is not
taken back either: the batches that led to the damage are not met again.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

KEEP = 2
REACH = 4
"""The oldest snapshot goes when it is 2^(keep + this) times older than the newest two are apart."""


def _local(tensor: Any) -> Any:
    """The local shard of a DTensor, the tensor itself otherwise."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if callable(to_local) else tensor


def _to_host(value: Any) -> Any:
    if hasattr(value, "detach"):
        return _local(value.detach()).to("cpu", copy=True)
    if isinstance(value, dict):
        return {k: _to_host(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_to_host(v) for v in value)
    return copy.copy(value)


def _bytes(value: Any) -> int:
    if hasattr(value, "nbytes"):
        return int(value.nbytes)
    if isinstance(value, dict):
        return sum(_bytes(v) for v in value.values())
    if isinstance(value, (list, tuple)):
        return sum(_bytes(v) for v in value)
    return 0


class Snapshots:
    """The last ``keep`` snapshots of a host with ``model``, ``optimizer`` and ``scaler`` (any may be None)."""

    def __init__(self, host: Any, keep: int = KEEP) -> None:
        self.host, self.keep = host, keep
        self._held: OrderedDict[int, dict[str, Any]] = OrderedDict()

    def _tensors(self) -> Iterator[tuple[str, Any]]:
        model = getattr(self.host, "model", None)
        if model is not None:
            yield from model.named_parameters()
            yield from model.named_buffers()

    def finite(self) -> bool:
        """Are all parameters finite? Reads every parameter: for use off the hot path."""
        import torch

        return all(bool(torch.isfinite(_local(t.detach())).all()) for _, t in self._tensors() if t.is_floating_point())

    def take(self, step: int) -> int:
        """Copy the state to host memory; returns its size in bytes."""
        state: dict[str, Any] = {"tensors": {name: _to_host(tensor) for name, tensor in self._tensors()}}
        for part in ("optimizer", "scaler"):
            found = getattr(self.host, part, None)
            if found is not None:
                state[part] = _to_host(found.state_dict())
        self._held[step] = state
        while len(self._held) > self.keep:
            del self._held[self._needless()]
        return _bytes(state)

    def _needless(self) -> int:
        """Which to let go: ages shall grow by a factor, so that trouble that was noticed late still has a way back.

        Of three neighbours the middle one goes where the outer two are closest together for their age; the newest
        stays, and the oldest until it is out of reach. The answer depends on the steps alone: all ranks let go alike.
        """
        held = sorted(self._held)
        newest = held[-1]
        if len(held) < 3 or newest - held[0] > (newest - held[-2]) * 2 ** (self.keep + REACH):
            return held[0]
        gaps = {held[i]: (held[i + 1] - held[i - 1]) / (newest - held[i - 1]) for i in range(1, len(held) - 1)}
        return min(gaps, key=lambda step: (gaps[step], -step))

    def latest(self, before_step: int) -> int | None:
        """The newest step with a snapshot that is older than ``before_step``."""
        return max((step for step in self._held if step < before_step), default=None)

    def restore(self, step: int) -> Callable[[], None]:
        """Put the state of ``step`` back in place; returns the undo. Raises KeyError when it is not held."""
        wanted, now = self._held[step], Snapshots(self.host, keep=1)
        now.take(-1)
        self._put(wanted)
        for newer in [held for held in self._held if held > step]:
            del self._held[newer]
        return lambda: self._put(now._held[-1])

    def _put(self, state: dict[str, Any]) -> None:
        import torch

        with torch.no_grad():
            for name, tensor in self._tensors():
                if name in state["tensors"]:
                    _local(tensor.detach()).copy_(state["tensors"][name])
        optimizer = getattr(self.host, "optimizer", None)
        if optimizer is not None and "optimizer" in state:
            self._put_optimizer(optimizer, state["optimizer"])
        scaler = getattr(self.host, "scaler", None)
        if scaler is not None and state.get("scaler"):
            scaler.load_state_dict(state["scaler"])

    @staticmethod
    def _put_optimizer(optimizer: Any, state: dict[str, Any]) -> None:
        """Moments in place where they exist (shards and devices stay), dropped where they did not exist yet."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for index, parameter in enumerate(parameters):
            wanted = state["state"].get(index)
            if wanted is None:
                optimizer.state.pop(parameter, None)
                continue
            held = optimizer.state[parameter]
            for key, value in wanted.items():
                if hasattr(held.get(key), "copy_"):
                    _local(held[key].detach()).copy_(value)
                elif hasattr(value, "detach"):
                    held[key] = value.clone().to(parameter.device)
                else:
                    held[key] = copy.copy(value)
