"""Wrapping other people's functions and giving them back: every change of the collector's is undone by one call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_MARK = "__lanterne_wrapped__"


class Patches:
    """What was changed, in order. ``undo`` restores it in reverse; something patched over us stays as it is."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def wrap(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> bool:
        """Replace ``owner.name`` by ``make(original)``. False where there is nothing of that name."""
        original = owner.__dict__.get(name) if isinstance(owner, type) else getattr(owner, name, None)
        if original is None or hasattr(original, _MARK):
            return False
        wrapped = functools.wraps(original)(make(original))
        setattr(wrapped, _MARK, True)
        setattr(owner, name, wrapped)

        def restore() -> None:
            if getattr(owner, name, None) is wrapped or (
                isinstance(owner, type) and owner.__dict__.get(name) is wrapped
            ):
                setattr(owner, name, original)

        self._undo.append(restore)
        return True

    def add(self, undo: Callable[[], None]) -> None:
        """Something else to take back (a hook handle's ``remove``)."""
        self._undo.append(undo)

    def undo(self) -> None:
        while self._undo:
            try:
                self._undo.pop()()
            except Exception:  # the owner may be half torn down at exit; the rest must still be given back
                continue
