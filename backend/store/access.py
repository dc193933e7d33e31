"""Who asks, and what they may do. Made by the guard, read by ingest and API."""

from __future__ import annotations

from dataclasses import dataclass

from lanterne.backend.store.control_tokens import SCOPES

KEY = "lanterne.principal"
"""Where the guard puts the principal in an ASGI scope."""
_IMPLIED = {"admin": frozenset(SCOPES), "operate": frozenset({"operate", "read"})}


@dataclass(frozen=True, slots=True)
class Principal:
    """``scopes`` are words of ``SCOPES``; ``job`` empty = all jobs."""

    actor: str
    scopes: frozenset[str]
    job: str = ""

    def may(self, scope: str) -> bool:
        """``admin`` may everything, ``operate`` may read too."""
        return any(scope == s or scope in _IMPLIED.get(s, ()) for s in self.scopes)

    def sees(self, job: str) -> bool:
        return not self.job or self.job == job


LOCAL = Principal("local", frozenset({"admin"}))
"""Anybody on the loopback interface of a server that has no token."""
