"""Real allocations under a sampling thread: what the out-of-memory predictors are fitted and judged on.

A child process trains small torch models and allocates as training does (steady, growing sequences, a leak, a sudden
evaluation, a filling cache, fragments); a thread reads glibc's allocator (``mallinfo2``) and the process's resident
size every 20 ms. ``python -m benchmarks._oom_traces KIND SEEDS SECONDS FOLDER`` writes ``KIND-SEED.npy``, each
``[N, 5]`` bytes.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
PERIOD_S = 0.02
MB = 1 << 20
FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS]


def _reader() -> Callable[[], list[float]]:
    library = ctypes.CDLL("libc.so.6")
    library.mallinfo2.restype = _Info
    page = os.sysconf("SC_PAGE_SIZE")

    def read() -> list[float]:
        info = library.mallinfo2()
        resident = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * page
        return [
            info.uordblks + info.hblkhd, info.arena + info.hblkhd, resident, info.fordblks, info.keepcost,
        ]  # fmt: skip

    return read


class Sampler(threading.Thread):
    """Rows of :class:`lanterne.backend.detect.oom.Sample` every 20 ms until ``stop``."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.rows: list[list[float]] = []
        self._stop_now = threading.Event()

    def run(self) -> None:
        read, due = _reader(), time.monotonic()
        while not self._stop_now.is_set():
            self.rows.append(read())
            due += PERIOD_S
            self._stop_now.wait(max(0.0, due - time.monotonic()))

    def stop(self) -> Floats:
        self._stop_now.set()
        self.join()
        return np.array(self.rows, np.float64)


def _steps(rng: np.random.Generator) -> Iterator[Callable[[int], None]]:
    """Training steps of a small network; the argument is the batch in samples."""
    import torch

    torch.manual_seed(int(rng.integers(1 << 30)))
    width = int(rng.choice([256, 384, 512]))
    model = torch.nn.Sequential(*[m for _ in range(4) for m in (torch.nn.Linear(width, width), torch.nn.GELU())])
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch: int) -> None:
        loss = model(torch.randn(batch, width)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        time.sleep(0.03)  # the rest of a step, spent elsewhere

    while True:
        yield step


def _block(megabytes: float) -> object:
    """A tensor whose pages are touched."""
    import torch

    return torch.ones(int(max(megabytes, 0.1) * MB) // 4)


def run(kind: str, rng: np.random.Generator, seconds: float) -> None:
    """Allocate as ``kind`` does for so long."""
    step = next(_steps(rng))
    base, kept, end, n = int(rng.integers(256, 1024)), [], time.monotonic() + seconds, 0
    onset, size = int(rng.integers(10, 40)), float(rng.uniform(2, 12))
    while time.monotonic() < end:
        n += 1
        match kind:
            case "steady":
                step(int(base * rng.uniform(0.7, 1.3)))
            case "growing":
                step(int(base * (1 + 0.04 * n)))
            case "leak":
                step(base)
                kept += [_block(size)] if n > onset else []
            case "sudden":
                step(base)
                kept = [_block(20 * size)] if onset < n < onset + 25 else []
            case "cache":
                step(base)
                kept += [_block(size)] if len(kept) < onset else []
            case "fragments":
                step(base)
                kept += [_block(float(rng.exponential(size))) for _ in range(4)]
                kept = [b for b in kept if rng.random() < 0.8]


KINDS = ("steady", "growing", "leak", "sudden", "cache", "fragments")


def main() -> None:
    import torch

    torch.set_num_threads(1)
    kind, seeds, seconds, folder = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4])
    for seed in range(seeds):
        rng = np.random.default_rng([KINDS.index(kind), seed])
        next(_steps(rng))(64)
        sampler = Sampler()
        sampler.start()
        run(kind, rng, seconds)
        np.save(folder / f"{kind}-{seed}.npy", sampler.stop(), allow_pickle=False)


if __name__ == "__main__":
    main()
