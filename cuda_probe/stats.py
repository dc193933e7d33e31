"""Overflow and underflow shares of many tensors in one pass (see ``include/lanterne_stats.h`` for the limits)."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_DTYPES = {"torch.float32": 0, "torch.float16": 1, "torch.bfloat16": 2}
COUNT_NAMES = (
    "total", "zeros", "infinite", "nan", "fp16_over", "fp16_under", "e4m3_over", "e4m3_under", "e5m2_over",
    "e5m2_under",
)  # fmt: skip


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("count", ctypes.c_uint64),
        ("dtype", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


class _Stats(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in COUNT_NAMES),
        ("max_abs_bits", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


@dataclass(frozen=True, slots=True)
class TensorStats:
    """Counts of elements; ``max_abs`` is the largest finite magnitude.

    ``over`` = finite and at or above the format's largest value, ``under`` = nonzero and below its smallest subnormal.
    """

    total: int
    zeros: int
    infinite: int
    nan: int
    fp16_over: int
    fp16_under: int
    e4m3_over: int
    e4m3_under: int
    e5m2_over: int
    e5m2_under: int
    max_abs: float


class Stats:
    """The loaded library. Raises OSError where it cannot be loaded."""

    def __init__(self, library: str | Path) -> None:
        self._lib = ctypes.CDLL(str(library))
        self._lib.ls_stats_cpu.argtypes = [ctypes.POINTER(_Tensor), ctypes.c_uint32, ctypes.POINTER(_Stats)]

    @property
    def has_cuda(self) -> bool:
        """Was the device kernel built?"""
        return hasattr(self._lib, "ls_stats_cuda")

    def cpu(self, tensors: Iterable[Any]) -> TensorStats:
        """Count over contiguous CPU tensors of float32, float16 or bfloat16.

        Raises ValueError on another dtype, device or layout.
        """
        kept = list(tensors)
        for t in kept:
            if str(t.dtype) not in _DTYPES or t.device.type != "cpu" or not t.is_contiguous():
                raise ValueError(f"{t.dtype} on {t.device}: needs a contiguous CPU tensor of {', '.join(_DTYPES)}")
        array = (_Tensor * len(kept))(*(_Tensor(t.data_ptr(), t.numel(), _DTYPES[str(t.dtype)], 0) for t in kept))
        out = _Stats()
        self._lib.ls_stats_cpu(array, len(kept), ctypes.byref(out))
        (largest,) = struct.unpack("<f", struct.pack("<I", out.max_abs_bits))
        return TensorStats(**{n: int(getattr(out, n)) for n in COUNT_NAMES}, max_abs=largest)
