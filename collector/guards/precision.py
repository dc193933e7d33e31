"""An autocast whose dtype an order can change.

    precision = Precision("cuda", "float16")
    with precision.autocast():
        loss = model(batch)

``float32`` switches autocast off. The dtype changes only between steps, on all ranks at the same step.
"""

from __future__ import annotations

import weakref
from typing import Any

from lanterne.errors import UsageError

DTYPES = ("float32", "bfloat16", "float16")
_active: weakref.ref[Precision] | None = None


class Precision:
    """The last one made is the one that orders reach."""

    def __init__(self, device_type: str, dtype: str) -> None:
        global _active
        self.device_type = device_type
        self.dtype_name = ""
        self.set(dtype)
        _active = weakref.ref(self)

    def set(self, dtype: str) -> None:
        """Raises UsageError for a dtype that autocast does not know."""
        if dtype not in DTYPES:
            raise UsageError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
        self.dtype_name = dtype

    def autocast(self) -> Any:
        """A fresh ``torch.autocast`` with the present dtype."""
        import torch

        enabled = self.dtype_name != "float32"
        dtype = getattr(torch, self.dtype_name) if enabled else torch.bfloat16
        return torch.autocast(self.device_type, dtype=dtype, enabled=enabled)


def active() -> Precision | None:
    """The Precision that the training loop uses, if it uses one."""
    return None if _active is None else _active()
