"""The control store: one narrow repository over the control database.

Its parts, by subject: jobs (``control_jobs``), incidents (``control_incidents``), commands, policies and
audit (``control_commands``), tokens (``control_tokens``), webhooks (``control_webhooks``). All methods are
synchronous and thread-safe; all raise :class:`lanterne.errors.StoreUnavailable` when the database is away.
"""

from __future__ import annotations

from pathlib import Path

from lanterne.backend.store.control_commands import Commands
from lanterne.backend.store.control_incidents import Incidents
from lanterne.backend.store.control_tokens import Tokens
from lanterne.backend.store.control_webhooks import Webhooks
from lanterne.clock import Clock
from lanterne.settings import ServerSettings


def control_url(settings: ServerSettings) -> str:
    """The SQLAlchemy URL in force: ``control_url``, else SQLite in the data folder."""
    return settings.control_url or f"sqlite:///{Path(settings.data).absolute() / 'control.sqlite'}"


class ControlStore(Commands, Incidents, Tokens, Webhooks):
    """Jobs, incidents, commands, policies, audit and tokens. The schema must be there (``migrate.upgrade``)."""

    @classmethod
    def open(cls, settings: ServerSettings, *, clock: Clock | None = None) -> ControlStore:
        return cls(control_url(settings), clock=clock)
