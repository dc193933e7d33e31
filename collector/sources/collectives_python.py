"""The tiers without a compiler: torch's process-group hooks (>= 2.14), and wrapped ``torch.distributed`` functions."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from lanterne.collector.sources.collectives import PythonWriter
from lanterne.collector.sources.patches import Patches

HOOK_ID = 0x1A97
_CALLS = {
    "all_reduce": "allreduce", "broadcast": "broadcast", "reduce": "reduce", "all_gather": "allgather",
    "all_gather_into_tensor": "allgather_base", "all_gather_single": "allgather_base",
    "reduce_scatter": "reduce_scatter", "reduce_scatter_tensor": "reduce_scatter_base",
    "reduce_scatter_single": "reduce_scatter_base", "all_to_all": "alltoall", "all_to_all_single": "alltoall_base",
    "gather": "gather", "scatter": "scatter", "barrier": "barrier", "send": "send", "isend": "send", "recv": "recv",
    "irecv": "recv",
}  # fmt: skip
"""Public function -> op of the record."""
_inside = threading.local()
_SIDE = {"gather": 0, "scatter": 0, "alltoall": 1, "alltoall_base": 1}
"""Which tensor argument has the same size on every rank; elsewhere it is the largest (as in tap.cpp)."""


def hooks_available() -> bool:
    """Does this torch have hooks on its process groups?"""
    import torch.distributed as dist

    return dist.is_available() and hasattr(dist.ProcessGroup, "register_pre_hook")


def install_hooks(writer: PythonWriter, patches: Patches) -> None:
    """Register hooks on every group there is, and on every group that is made from now on."""
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    hooked: set[Any] = set()

    def add(pg: Any) -> None:
        if not isinstance(pg, dist.ProcessGroup) or pg in hooked:
            return
        hooked.add(pg)
        live: dict[int, int] = {}

        def before(call: Any) -> None:
            tensors = list(call.input_tensors or call.output_tensors or ())
            name = str(call.name).rpartition(".")[2].lower().rstrip("_")
            live[call.op_id] = writer.enter(pg, name if name in _CALLS.values() else "other", tensors)

        def after(call: Any) -> None:
            number = live.pop(call.op_id, None)
            if number is not None:
                _when_done(call.work, lambda: writer.leave(number))

        hookable: Any = pg  # torch >= 2.14
        hookable.register_pre_hook(HOOK_ID, before)
        hookable.register_post_hook(HOOK_ID, after)

    def remove() -> None:
        for pg in hooked:
            pg.unregister_pre_hook(HOOK_ID)
            pg.unregister_post_hook(HOOK_ID)

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def helper(*args: Any, **kwargs: Any) -> Any:
            made = original(*args, **kwargs)
            add(made[0] if isinstance(made, tuple) else made)
            return made

        return helper

    for pg in list(c10d._world.pg_map):
        add(pg)
    patches.add(remove)
    patches.wrap(c10d, "_new_process_group_helper", make)


def install_wrappers(writer: PythonWriter, patches: Patches) -> None:
    """Wrap the public functions of ``torch.distributed``."""
    import torch.distributed as dist

    if not dist.is_available():
        return
    import torch.distributed.distributed_c10d as c10d

    for name, op in _CALLS.items():
        for module in (dist, c10d):
            patches.wrap(module, name, _maker(writer, op))


def _maker(writer: PythonWriter, op: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if getattr(_inside, "call", False):  # send calls isend: one call, one record
                return original(*args, **kwargs)
            _inside.call = True
            try:
                return outermost(*args, **kwargs)
            finally:
                _inside.call = False

        def outermost(*args: Any, **kwargs: Any) -> Any:
            try:
                number = _begin(writer, op, args, kwargs)
            except Exception:  # a private detail of torch changed: the call itself must go on
                number = None
            work = original(*args, **kwargs)
            if number is not None:
                if work is None:
                    writer.leave(number)
                else:
                    _when_done(work, lambda: writer.leave(number))
            return work

        return call

    return make


def _begin(writer: PythonWriter, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    import torch
    import torch.distributed as dist

    group = kwargs.get("group") or next((a for a in args if isinstance(a, dist.ProcessGroup)), None)
    pg = group or dist.distributed_c10d._get_default_group()
    if not isinstance(pg, dist.ProcessGroup) or dist.get_rank(pg) < 0:
        return None
    given = [a for a in (*args, *kwargs.values()) if isinstance(a, (torch.Tensor, list, tuple))]
    sides = [[a] if isinstance(a, torch.Tensor) else _flat(a) for a in given]
    sides = [side for side in sides if side] or [[]]
    largest = max(sides, key=lambda side: sum(t.nbytes for t in side))
    tensors = sides[min(_SIDE[op], len(sides) - 1)] if op in _SIDE else largest
    peer = _peer(pg, args, kwargs) if op in {"send", "recv"} else -1
    return writer.enter(pg, op, tensors, peer)


def _peer(pg: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The other side's rank within the group; -1 where any sender will do."""
    import torch.distributed as dist

    within = kwargs.get("group_dst", kwargs.get("group_src"))
    if within is not None:
        return int(within)
    to = kwargs.get("dst", kwargs.get("src", args[1] if len(args) > 1 else None))
    return dist.get_group_rank(pg, to) if isinstance(to, int) else -1


def _flat(values: Any) -> list[Any]:
    import torch

    out: list[Any] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            out.append(value)
        elif isinstance(value, (list, tuple)):
            out += _flat(value)
    return out


def _when_done(work: Any, done: Callable[[], None]) -> None:
    try:
        work.get_future().add_done_callback(lambda _: done())
    except Exception:  # this backend gives no future: the end of the call stands for its completion
        done()
