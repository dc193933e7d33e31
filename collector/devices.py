"""One protocol over the accelerators that torch knows, and a fixed small piece of work that tells a slow device.

CUDA, ROCm (torch's ``cuda``), Ascend (``npu``) and whatever ``torch.accelerator`` names are one :class:`TorchDevice`;
a vendor with its own library registers a factory under the entry-point group ``lanterne.devices`` (Hygon, others). The
straggler benchmark multiplies and copies the same bytes everywhere: a device far below its peers' figures is slow
itself, else its work is. :func:`measure_apart` does it in a process of its own, so that a device that faults or hangs
takes nothing down.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol

GROUP = "lanterne.devices"
TIMEOUT_S = 60.0
SIZES = {"cpu": (256, 8 << 20), "": (4096, 256 << 20)}
"""Side of the square GEMM and bytes of the copy: about a millisecond each."""
TRAINER_SIZES = {"cpu": (256, 8 << 20), "": (2048, 32 << 20)}
"""The same beside a training that has the memory: 112 MiB at most on an accelerator ("" = any)."""
ROUNDS = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The straggler benchmark's best rounds. ``error`` says why there is none; the numbers are 0 then."""

    device: str
    gemm_ms: float = 0.0
    gemm_tflops: float = 0.0
    copy_ms: float = 0.0
    copy_gb_per_s: float = 0.0
    error: str = ""


class Device(Protocol):
    """One kind of device. ``absent`` is the reason why there is none here, empty where there is."""

    kind: str
    absent: str

    def count(self) -> int: ...

    def synchronize(self, index: int) -> None:
        """Wait until the device is idle."""
        ...

    def tensor(self, index: int, side: int) -> Any:
        """A float32 tensor ``[side, side]`` of ones on the device."""
        ...


class TorchDevice:
    """A device type of torch: ``cpu``, ``cuda`` (NVIDIA and ROCm), ``npu``, ``xpu``, …"""

    def __init__(self, kind: str) -> None:
        self.kind, self.absent = kind, ""
        self._module: Any = None
        try:
            import torch

            self._torch = torch
            self._module = getattr(torch, kind, None)
            if kind != "cpu" and (self._module is None or not self._module.is_available()):
                self.absent = f"torch sees no {kind} device"
        except Exception as error:  # a broken driver is a reason, not an end
            self.absent = f"{type(error).__name__}: {error}"[:200]

    def count(self) -> int:
        if self.absent:
            return 0
        return 1 if self.kind == "cpu" else int(self._module.device_count())

    def synchronize(self, index: int) -> None:
        if self.kind != "cpu":
            self._module.synchronize(index)

    def tensor(self, index: int, side: int) -> Any:
        name = "cpu" if self.kind == "cpu" else f"{self.kind}:{index}"
        return self._torch.ones(side, side, dtype=self._torch.float32, device=name)


def kinds() -> dict[str, Callable[[], Device]]:
    """Kind -> factory: torch's own and those that vendors register; a vendor's name wins."""
    known: dict[str, Callable[[], Device]] = {kind: partial(TorchDevice, kind) for kind in _torch_kinds()}
    known |= {entry.name: partial(_of_vendor, entry) for entry in entry_points(group=GROUP)}
    return known


def _of_vendor(entry: EntryPoint) -> Device:
    made: Device = entry.load()()
    return made


def _torch_kinds() -> Iterable[str]:
    found = ["cpu", "cuda", "npu", "xpu"]
    try:
        import torch

        current = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
        if current is not None and current.type not in found:
            found.append(current.type)
    except Exception:  # without torch, or with a broken driver, the list stays as it is
        return found
    return found


def _milliseconds(work: Callable[[], object], wait: Callable[[], None]) -> float:
    work()
    wait()
    took = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        work()
        wait()
        took.append((time.perf_counter() - began) * 1e3)
    return min(took)  # what else runs on the device or core disturbs a round, a slow device all of them


def current() -> tuple[Device, int]:
    """The device that this process trains on, and its index: what torch has initialised, else the CPU."""
    try:
        import torch

        if hasattr(torch, "accelerator") and (found := torch.accelerator.current_accelerator()) is not None:
            return TorchDevice(found.type), int(torch.accelerator.current_device_index())
    except Exception:  # a driver that does not start
        return TorchDevice("cpu"), 0
    return TorchDevice("cpu"), 0


def measure(device: Device, index: int = 0, *, sizes: Mapping[str, tuple[int, int]] = SIZES) -> Measured:
    """The straggler benchmark on one device: the best of nine runs. Never raises."""
    name = f"{device.kind}:{index}"
    if device.absent:
        return Measured(device=name, error=device.absent)
    try:
        side, copied = sizes.get(device.kind) or sizes[""]
        a, source = device.tensor(index, side), device.tensor(index, int((copied / 4) ** 0.5))
        target = source.clone()
        gemm = _milliseconds(lambda: a @ a, lambda: device.synchronize(index))
        copy = _milliseconds(lambda: target.copy_(source), lambda: device.synchronize(index))
        moved = 2 * source.numel() * 4  # read and written
        return Measured(
            device=name, gemm_ms=gemm, gemm_tflops=2 * side**3 / gemm / 1e9, copy_ms=copy,
            copy_gb_per_s=moved / copy / 1e6,
        )  # fmt: skip
    except Exception as error:
        return Measured(device=name, error=f"{type(error).__name__}: {error}"[:300])


def measure_apart(kind: str, index: int = 0, *, timeout_s: float = TIMEOUT_S) -> Measured:
    """:func:`measure` in a child process: a device that faults or does not answer is an ``error`` here."""
    name = f"{kind}:{index}"
    command = [sys.executable, "-m", "lanterne.collector.devices", kind, str(index)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        return Measured(**json.loads(done.stdout.strip().splitlines()[-1]))
    except subprocess.TimeoutExpired:
        return Measured(device=name, error=f"no answer within {timeout_s:g} s")
    except (OSError, ValueError, IndexError, TypeError):
        return Measured(device=name, error=f"ended with {done.returncode}: {done.stderr.strip()[-200:]}")


def main(arguments: list[str]) -> int:
    """``python -m lanterne.collector.devices KIND [INDEX]``: print one measurement as JSON."""
    kind, index = arguments[0], int(arguments[1]) if len(arguments) > 1 else 0
    known = kinds()
    found = measure(known[kind](), index) if kind in known else Measured(device=kind, error="unknown kind of device")
    sys.stdout.write(json.dumps(asdict(found)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
