"""Data: the time spent waiting for a batch, what the batch is (sample ids or a cheap hash), the work it carries."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from lanterne.blackbox_files import EVENT_RECORD, LIST_KEY
from lanterne.collector.core import DATA_WAIT, fingerprint
from lanterne.collector.overhead import OverheadMeter
from lanterne.collector.sources.patches import Patches
from lanterne.collector.steps import Recorder

if TYPE_CHECKING:
    import torch

IDS_HASHED, IDS_TOLD = 64, 8
_ZEROS = (0.0,) * 8
TOKEN_KEYS = ("input_ids", "tokens", "inputs")
_MASK64 = (1 << 64) - 1
_IDS = "__lanterne_ids__"


def tensors_in(batch: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Tensors of a batch in a fixed order: tensors, sequences and mappings, three levels deep."""
    import torch

    if isinstance(batch, torch.Tensor):
        yield batch
    elif depth < 3 and isinstance(batch, dict):
        for value in batch.values():
            yield from tensors_in(value, depth + 1)
    elif depth < 3 and isinstance(batch, (list, tuple)):
        for value in batch:
            yield from tensors_in(value, depth + 1)


def size_of(batch: Any) -> tuple[int, int]:
    """(samples, tokens) of a batch; tokens are counted where its tensor holds integer ids ``[samples, length]``."""
    first = batch if hasattr(batch, "is_floating_point") else next(tensors_in(batch), None)
    if isinstance(batch, dict):
        first = next((batch[k] for k in TOKEN_KEYS if k in batch and hasattr(batch[k], "shape")), first)
    if first is None or first.dim() == 0:
        return 0, 0
    tokens = first.numel() if first.dim() == 2 and not first.is_floating_point() and not first.is_complex() else 0
    return int(first.shape[0]), tokens


def fingerprint_of_values(batch: Any) -> int | None:
    """:func:`core.fingerprint` of the first tensor; None for data on a device or not contiguous."""
    import torch

    first = next(tensors_in(batch), None)
    if first is None or first.layout is not torch.strided or first.device.type != "cpu" or not first.is_contiguous():
        return None
    return fingerprint(first)


class DataLoaderSource:
    """Times ``next`` of every DataLoader and describes the batches that training takes."""

    def __init__(self, recorder: Recorder, meter: OverheadMeter) -> None:
        self.recorder, self.core, self.meter = recorder, recorder.core, meter
        intern = recorder.ring.intern
        self._keys = intern(LIST_KEY + "sample_ids")
        self.outer = False  # session.steps is timing this very ``next``

    def install(self, patches: Patches) -> None:
        """Wrap torch's DataLoader iterators. Nothing is changed in worker processes."""
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        patches.wrap(_BaseDataLoaderIter, "__next__", self._timed)
        patches.wrap(_BaseDataLoaderIter, "_next_index", self._indexed)

    def _timed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        recorder, core = self.recorder, self.core

        def next_batch(iterator: Any) -> Any:
            if self.outer or core.user_phase >= 0:
                return original(iterator)
            began = recorder.enter(DATA_WAIT)
            try:
                batch = original(iterator)
            finally:
                recorder.leave(DATA_WAIT, began)
            at = monotonic_ns()
            self.took(batch, iterator)
            if core.on:
                core.spent += monotonic_ns() - at
            return batch

        return next_batch

    def _indexed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def next_index(iterator: Any) -> Any:
            index = original(iterator)
            if isinstance(index, list):
                kept = iterator.__dict__.get(_IDS)
                if kept is None:
                    kept = iterator.__dict__[_IDS] = deque(maxlen=256)
                kept.append(index)
            return index

        return next_index

    def took(self, batch: Any, iterator: Any) -> None:
        """Training took this batch: count its work and write its fingerprint."""
        core = self.core
        try:
            kept = getattr(iterator, _IDS, None)
            marked = not self.meter.shed or self.meter.allows("fingerprint")
            if not kept and core.took(batch, marked):
                return
            samples, tokens = size_of(batch)
            core.samples += samples
            core.tokens += tokens
            if not marked:
                return
            ids: list[int] = []
            if kept:
                ids = kept.popleft()
            if not ids or not isinstance(ids[0], int):
                ids = []
            mark = hash((len(ids), *ids[:IDS_HASHED])) & _MASK64 if ids else fingerprint_of_values(batch)
            if mark is not None:
                told = tuple(map(float, ids[:IDS_TOLD])) if ids else ()
                self.recorder.ring.record(
                    EVENT_RECORD, (1 << len(told)) - 1, core.batch_id, core.step, monotonic_ns(),
                    told + _ZEROS[len(told) :], self._keys if told else 0, core.fingerprint_id,
                    mark - (1 << 64) if mark >> 63 else mark,
                )  # fmt: skip
        except Exception as error:
            self.recorder.failed("batch", error)


def sampler_facts(loader: Any) -> dict[str, Any]:
    """What must be equal on all ranks (or tell why not): the sampler's seed, epoch, shuffling and share."""
    sampler = getattr(loader, "sampler", None)
    inner = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    facts: dict[str, Any] = {}
    for one in (sampler, inner):
        if one is None:
            continue
        facts.setdefault("sampler", type(one).__name__)
        for name in ("seed", "epoch", "shuffle", "num_replicas", "rank"):
            value = getattr(one, name, None)
            if isinstance(value, (int, bool)):
                facts.setdefault(f"sampler_{name}", value)
        generator = getattr(one, "generator", None)
        if generator is not None:
            facts.setdefault("sampler_generator_seed", int(generator.initial_seed()))
    try:
        facts["dataset_samples"] = len(loader.dataset)
    except (TypeError, AttributeError):
        pass
    return facts
