"""Tokens for the command line: made in the control database of a running or stopped server."""

from __future__ import annotations

from collections.abc import Sequence

from lanterne.backend.store import migrate
from lanterne.backend.store.control import ControlStore
from lanterne.settings import ServerSettings


def create(
    settings: ServerSettings,
    *,
    scope: str | Sequence[str] = "ingest",
    job: str = "",
    days: float = 90.0,
    label: str = "",
) -> str:
    """A new token, shown once. ``scope``: words of ingest, read, operate, admin. Raises UsageError."""
    scopes = scope.replace(",", " ").split() if isinstance(scope, str) else scope
    migrate.upgrade(settings, branch="control")
    control = ControlStore.open(settings)
    try:
        text, record = control.create_token(scopes, job=job, label=label, expires_s=days * 86_400)
        control.audit("command line", "token.create", record.id, {"scopes": sorted(record.scopes), "job": job})
    finally:
        control.close()
    return text
