"""Values that live on a device: copied to pinned memory without waiting, read when the copy's event says it is done.

On the CPU there is nothing to wait for and a value is read at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lanterne import limits

if TYPE_CHECKING:
    import torch

Read = Callable[[Any], float]
Report = Callable[[Any, Read], None]


def read_now(value: Any) -> float:
    """A float, or a 0-dim CPU tensor, as float. A DTensor gives its local part: reading all of it is a collective."""
    return float(value)


def local(value: Any) -> Any:
    """The local tensor of a DTensor, everything else as it is; never communicates."""
    to_local = getattr(value, "to_local", None)
    return value if to_local is None else to_local()


def on_device(value: Any) -> bool:
    """Does reading this value wait for a device?"""
    return not getattr(value, "is_cpu", True)


class DeviceValues:
    """Steps whose values are on their way from the device, oldest first; more than the bound are dropped, counted."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self.waiting: deque[tuple[Any, Callable[[Read], None]]] = deque()
        self.dropped = 0

    def settle(self, values: Any) -> None:
        """Report a step's values now where they can be read, else once they have arrived; also settles older ones."""
        kept = (*values.losses, values.grad_norm, values.local_norm, values.update_ratio, values.checksum)
        tensors = [v for v in kept if v is not None and v.__class__ is not float and on_device(v)]
        if not tensors:
            if self.waiting:
                self.poll()
            self._report(values, read_now)
            return
        copies = self._copy(tensors)

        def read(value: Any) -> float:
            return float(copies.get(id(value), value))

        self._wait(tensors[0], lambda _: self._report(values, read))

    def later(self, value: torch.Tensor, then: Callable[[list[float]], None]) -> None:
        """Call ``then`` with the values of a small tensor as floats, now on the CPU, else when they have arrived."""
        if not on_device(value):
            then([float(v) for v in value.reshape(-1).tolist()])
            return
        copies = self._copy([value])
        self._wait(value, lambda _: then([float(v) for v in copies[id(value)].reshape(-1).tolist()]))

    def _copy(self, tensors: list[torch.Tensor]) -> dict[int, torch.Tensor]:
        import torch

        kept: dict[int, torch.Tensor] = {}
        for tensor in tensors:
            target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
            kept[id(tensor)] = target.copy_(tensor, non_blocking=True)
        return kept

    def _wait(self, tensor: torch.Tensor, then: Callable[[Read], None]) -> None:
        import torch

        event: Any = None
        if tensor.device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(tensor.device))
        if len(self.waiting) >= limits.HELD_TENSORS_MAX:
            self.waiting.popleft()
            self.dropped += 1
        self.waiting.append((event, then))
        self.poll()

    def poll(self) -> None:
        """Report what has arrived; never waits."""
        while self.waiting and (self.waiting[0][0] is None or self.waiting[0][0].query()):
            self.waiting.popleft()[1](read_now)

    def finish(self) -> None:
        """Wait for the device and report everything that is left."""
        while self.waiting:
            event, then = self.waiting.popleft()
            if event is not None:
                event.synchronize()
            then(read_now)
