"""What the control store hands out: plain frozen records, no database session behind them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from lanterne.nouns import Identity, Incident

COMMAND_STATES = (
    "proposed", "pending", "sent", "committed", "applied", "refused", "expired", "cancelled", "undone",
)  # fmt: skip
BY_HAND = "closed"
"""Ledger stamp of an incident that a person resolved or dismissed: what they said stands."""
OPEN_STATUSES = ("open", "diagnosed", "acting", "verifying")


def rfc3339(unix_ns: int) -> str:
    """Unix ns as RFC 3339 in UTC with microseconds; empty text for 0 and for years beyond 9999."""
    if unix_ns <= 0:
        return ""
    try:
        stamp = datetime.fromtimestamp(unix_ns // 1_000_000_000, UTC)
    except (ValueError, OverflowError, OSError):
        return ""
    return stamp.strftime("%Y-%m-%dT%H:%M:%S") + f".{unix_ns % 1_000_000_000 // 1000:06d}Z"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    job: str
    attempt: int
    world_size: int
    first_seen_ns: int
    last_seen_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    id: str
    first_seen_ns: int
    last_seen_ns: int
    service: str
    attempts: Sequence[AttemptRecord] = ()

    @property
    def attempt(self) -> AttemptRecord | None:
        """The newest attempt; None before the first event."""
        return self.attempts[-1] if self.attempts else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    identity: Identity
    first_seen_ns: int
    last_seen_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentRecord:
    incident: Incident
    job: str
    attempt: int
    opened_ns: int
    updated_ns: int
    fingerprint: str = ""
    verdict: str = ""

    @property
    def open(self) -> bool:
        return str(self.incident.status) in OPEN_STATUSES


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentSummary:
    """A job's incidents in short: how many are open, GPU-hours lost by the first causes of all of them, the verdict
    of the newest open one, and whether one of the open ones is a hang."""

    open: int = 0
    gpu_hours_lost: float = 0.0
    verdict: str = ""
    hang_open: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRecord:
    incident: str
    job: str
    policy: str
    chose: str
    says: str
    at_ns: int
    body: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandRecord:
    """One command with its life. ``wire`` is what the shipper fetches and rank 0 verifies."""

    id: str
    job: str
    attempt: int
    action: str
    parameters: Mapping[str, Any]
    ranks: Any
    state: str
    reason: str
    incident: str
    policy: str
    author: str
    issued_ns: int
    expires_ns: int
    counter: int
    signature: str
    timestamps: Mapping[str, str]
    results: Sequence[Mapping[str, Any]]

    @property
    def wire(self) -> dict[str, Any]:
        """The signed JSON of docs/seams.md section 5."""
        return {
            "id": self.id,
            "job": self.job,
            "attempt": self.attempt,
            "action": self.action,
            "parameters": dict(self.parameters),
            "ranks": self.ranks,
            "issued_ns": self.issued_ns,
            "expires_ns": self.expires_ns,
            "counter": self.counter,
            "signature": self.signature,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRecord:
    name: str
    version: int
    enabled: bool
    body: Mapping[str, Any]
    author: str = ""
    created_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRecord:
    id: str
    scopes: frozenset[str]
    job: str
    label: str
    created_ns: int
    expires_ns: int
    revoked_ns: int
    used_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteRecord:
    incident: str
    author: str
    says: str
    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SilenceRecord:
    id: int
    job: str
    fingerprint: str
    until_ns: int
    author: str = ""
    says: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRecord:
    id: int
    at_ns: int
    actor: str
    action: str
    subject: str
    detail: Mapping[str, Any]
    request_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookRecord:
    """A target of alerts that was set through the API."""

    id: int
    format: str
    url: str
    secret: str
    severities: frozenset[str]
    author: str
    created_ns: int
