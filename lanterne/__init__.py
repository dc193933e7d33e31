"""Lanterne: which rank, since when, why, what it costs, what to do.

The front door is :func:`attach`; everything else is reached through the CLI or HTTP.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lanterne.collector.session import Session, attach

try:
    __version__ = version("lanterne")
except PackageNotFoundError:  # a checkout on sys.path that was never installed
    __version__ = "0+unknown"

__all__ = ["Session", "__version__", "attach"]


def __getattr__(name: str) -> Any:
    """Import the collector only when a trainer asks for it (torch stays the user's own)."""
    if name in {"attach", "Session"}:
        from lanterne.collector import session

        return getattr(session, name)
    raise AttributeError(f"module 'lanterne' has no attribute {name!r}")
