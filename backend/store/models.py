"""The control plane's tables (SQLAlchemy 2): small, keyed, updated in place. Events live in DuckDB.

Text columns that hold JSON say so. Times are Unix ns of the server's clock. SQLite and PostgreSQL alike.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, ForeignKey, Index, LargeBinary, String, Text, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    """Metadata of the control database; Alembic's control branch follows it."""


class Job(Base):
    __tablename__ = "jobs"
    id: Mapped[str] = mapped_column(String(128), primary_key=True)
    first_seen_ns: Mapped[int] = mapped_column(BigInteger)
    last_seen_ns: Mapped[int] = mapped_column(BigInteger, index=True)
    service: Mapped[str] = mapped_column(String(256), default="")


class Attempt(Base):
    __tablename__ = "attempts"
    job: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    world_size: Mapped[int] = mapped_column(default=0)
    first_seen_ns: Mapped[int] = mapped_column(BigInteger)
    last_seen_ns: Mapped[int] = mapped_column(BigInteger)


class Rank(Base):
    __tablename__ = "ranks"
    job: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    rank: Mapped[int] = mapped_column(primary_key=True)
    local_rank: Mapped[int] = mapped_column(default=-1)
    host: Mapped[str] = mapped_column(String(256), default="")
    device: Mapped[str] = mapped_column(String(128), default="")
    pid: Mapped[int] = mapped_column(BigInteger, default=0)
    backend: Mapped[str] = mapped_column(String(64), default="")
    mesh: Mapped[str] = mapped_column(Text, default="{}")  # JSON: axis -> coordinate
    first_seen_ns: Mapped[int] = mapped_column(BigInteger)
    last_seen_ns: Mapped[int] = mapped_column(BigInteger)


class JobKey(Base):
    """The Ed25519 pair that signs the job's commands; made once, never sent but for the public half."""

    __tablename__ = "job_keys"
    job: Mapped[str] = mapped_column(String(128), primary_key=True)
    private: Mapped[bytes] = mapped_column(LargeBinary)
    public: Mapped[bytes] = mapped_column(LargeBinary)
    created_ns: Mapped[int] = mapped_column(BigInteger)


class IncidentRow(Base):
    __tablename__ = "incidents"
    id: Mapped[str] = mapped_column(String(128), primary_key=True)
    job: Mapped[str] = mapped_column(String(128), index=True)
    attempt: Mapped[int]
    kind: Mapped[str] = mapped_column(String(64))
    severity: Mapped[str] = mapped_column(String(2))
    status: Mapped[str] = mapped_column(String(16), index=True)
    opened_step: Mapped[int | None] = mapped_column(BigInteger, nullable=True)
    opened_ns: Mapped[int] = mapped_column(BigInteger, index=True)
    updated_ns: Mapped[int] = mapped_column(BigInteger)
    fingerprint: Mapped[str] = mapped_column(String(128), default="", index=True)
    verdict: Mapped[str] = mapped_column(Text, default="")
    body: Mapped[str] = mapped_column(Text)  # JSON: the incident of the report schema
    graph: Mapped[str] = mapped_column(Text, default="")  # JSON: nodes and edges behind the diagnosis


class CauseRow(Base):
    """The causes of an incident as columns, for counting and grouping; the incident's body is the whole."""

    __tablename__ = "causes"
    incident: Mapped[str] = mapped_column(ForeignKey("incidents.id", ondelete="CASCADE"), primary_key=True)
    place: Mapped[int] = mapped_column(primary_key=True)  # 0 = first cause
    category: Mapped[str] = mapped_column(String(64), index=True)
    rank: Mapped[int | None] = mapped_column(nullable=True)
    host: Mapped[str | None] = mapped_column(String(256), nullable=True)
    since_step: Mapped[int | None] = mapped_column(BigInteger, nullable=True)
    confidence: Mapped[float] = mapped_column(default=0.0)
    gpu_hours: Mapped[float | None] = mapped_column(nullable=True)


class PolicyRow(Base):
    """One version of a policy; the highest version of a name is the one in force."""

    __tablename__ = "policies"
    name: Mapped[str] = mapped_column(String(128), primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True)
    enabled: Mapped[bool] = mapped_column(Boolean, default=True)
    body: Mapped[str] = mapped_column(Text)  # JSON: mode, when, action, budget, cool_down_s, …
    author: Mapped[str] = mapped_column(String(128), default="")
    created_ns: Mapped[int] = mapped_column(BigInteger)


class PolicyState(Base):
    """What a policy has used up for a job: budget, breaker, last action. Survives a restart."""

    __tablename__ = "policy_states"
    name: Mapped[str] = mapped_column(String(128), primary_key=True)
    job: Mapped[str] = mapped_column(String(128), primary_key=True)
    body: Mapped[str] = mapped_column(Text)  # JSON
    updated_ns: Mapped[int] = mapped_column(BigInteger)


class DecisionRow(Base):
    __tablename__ = "decisions"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    incident: Mapped[str] = mapped_column(String(128), index=True)
    job: Mapped[str] = mapped_column(String(128))
    policy: Mapped[str] = mapped_column(String(128), default="")
    chose: Mapped[str] = mapped_column(String(64))  # an action, or hold
    says: Mapped[str] = mapped_column(Text, default="")
    body: Mapped[str] = mapped_column(Text, default="{}")  # JSON: the whole decision
    at_ns: Mapped[int] = mapped_column(BigInteger)


class CommandRow(Base):
    __tablename__ = "commands"
    __table_args__ = (
        UniqueConstraint("job", "attempt", "counter", name="uq_commands_counter"),
        UniqueConstraint("idempotency_key", name="uq_commands_idempotency"),
        Index("ix_commands_job_state", "job", "attempt", "state"),
    )
    id: Mapped[str] = mapped_column(String(128), primary_key=True)
    job: Mapped[str] = mapped_column(String(128))
    attempt: Mapped[int]
    action: Mapped[str] = mapped_column(String(64))
    parameters: Mapped[str] = mapped_column(Text, default="{}")  # JSON
    ranks: Mapped[str] = mapped_column(Text, default='"all"')  # JSON: "all" or a list
    state: Mapped[str] = mapped_column(String(16))
    reason: Mapped[str] = mapped_column(Text, default="")
    incident: Mapped[str] = mapped_column(String(128), default="", index=True)
    policy: Mapped[str] = mapped_column(String(128), default="")
    author: Mapped[str] = mapped_column(String(128), default="")
    idempotency_key: Mapped[str | None] = mapped_column(String(256), nullable=True)
    issued_ns: Mapped[int] = mapped_column(BigInteger)
    expires_ns: Mapped[int] = mapped_column(BigInteger)
    counter: Mapped[int] = mapped_column(BigInteger)
    signature: Mapped[str] = mapped_column(String(128), default="")
    timestamps: Mapped[str] = mapped_column(Text, default="{}")  # JSON: state -> RFC 3339
    results: Mapped[str] = mapped_column(Text, default="[]")  # JSON: [{rank, step, before, after, phase, detail}]


class AuditRow(Base):
    __tablename__ = "audit"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    at_ns: Mapped[int] = mapped_column(BigInteger, index=True)
    actor: Mapped[str] = mapped_column(String(128))
    action: Mapped[str] = mapped_column(String(64))
    subject: Mapped[str] = mapped_column(String(256))
    detail: Mapped[str] = mapped_column(Text, default="{}")  # JSON
    request_id: Mapped[str] = mapped_column(String(64), default="")


class TokenRow(Base):
    """An API token: the SHA-256 of its secret, never the secret."""

    __tablename__ = "tokens"
    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    hash: Mapped[bytes] = mapped_column(LargeBinary)
    scopes: Mapped[str] = mapped_column(String(64))  # words of ingest, read, operate, admin joined by spaces
    job: Mapped[str] = mapped_column(String(128), default="")  # empty = every job
    label: Mapped[str] = mapped_column(String(128), default="")
    created_ns: Mapped[int] = mapped_column(BigInteger)
    expires_ns: Mapped[int] = mapped_column(BigInteger, default=0)  # 0 = never
    revoked_ns: Mapped[int] = mapped_column(BigInteger, default=0)  # 0 = valid
    used_ns: Mapped[int] = mapped_column(BigInteger, default=0)


class NoteRow(Base):
    __tablename__ = "notes"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    incident: Mapped[str] = mapped_column(ForeignKey("incidents.id", ondelete="CASCADE"), index=True)
    author: Mapped[str] = mapped_column(String(128))
    says: Mapped[str] = mapped_column(Text)
    at_ns: Mapped[int] = mapped_column(BigInteger)


class SilenceRow(Base):
    """No new incident of this fingerprint (kind, subject, cause) is announced before ``until_ns``."""

    __tablename__ = "silences"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    job: Mapped[str] = mapped_column(String(128), index=True)
    fingerprint: Mapped[str] = mapped_column(String(128))
    until_ns: Mapped[int] = mapped_column(BigInteger)
    author: Mapped[str] = mapped_column(String(128), default="")
    says: Mapped[str] = mapped_column(Text, default="")


class WebhookRow(Base):
    """A target of alerts beside those of the settings. The address and the secret are not shown again."""

    __tablename__ = "webhooks"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    format: Mapped[str] = mapped_column(String(32))
    url: Mapped[str] = mapped_column(Text)
    secret: Mapped[str] = mapped_column(String(256), default="")
    severities: Mapped[str] = mapped_column(String(64))  # words of P0, P1, P2 joined by spaces
    author: Mapped[str] = mapped_column(String(128), default="")
    created_ns: Mapped[int] = mapped_column(BigInteger)
