"""Splitting a batch into parts whose number an order can raise when memory runs out.

    micro = MicroBatch()
    for part, share in micro.split(batch):
        (model(part).mean() * share).backward()

``share`` is the part's fraction of the samples, so the summed gradients equal those of the whole batch for a
loss that is a mean over samples. With DistributedDataParallel wrap all but the last part in ``no_sync()``.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Iterator
from typing import Any

from lanterne.errors import UsageError

_active: weakref.ref[MicroBatch] | None = None


class MicroBatch:
    """The last one made is the one that orders reach. ``parts`` is 1 until an order raises it.

    An order that started this attempt (``restart`` with ``micro_batch``) has set ``LANTERNE_MICRO_BATCH`` already.
    """

    def __init__(self, parts: int | None = None) -> None:
        global _active
        parts = int(os.environ.get("LANTERNE_MICRO_BATCH", "1")) if parts is None else parts
        if parts < 1:
            raise UsageError(f"parts: {parts} is below 1")
        self.parts = parts
        _active = weakref.ref(self)

    def split(self, batch: Any) -> Iterator[tuple[Any, float]]:
        """Yield ``(part, share)``; a tensor, or a tuple, list or dict of tensors, is cut along dimension 0."""
        size = _size(batch)
        parts = min(self.parts, max(size, 1))
        edges = [round(i * size / parts) for i in range(parts + 1)]
        for low, high in itertools.pairwise(edges):
            yield _cut(batch, low, high), (high - low) / max(size, 1)


def _size(batch: Any) -> int:
    if isinstance(batch, dict):
        return _size(next(iter(batch.values())))
    if isinstance(batch, (list, tuple)):
        return _size(batch[0])
    return int(batch.shape[0])


def _cut(batch: Any, low: int, high: int) -> Any:
    if isinstance(batch, dict):
        return {key: _cut(value, low, high) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)(_cut(value, low, high) for value in batch)
    return batch[low:high]


def active() -> MicroBatch | None:
    """The MicroBatch that the training loop uses, if it uses one."""
    return None if _active is None else _active()
