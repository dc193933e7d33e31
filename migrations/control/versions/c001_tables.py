"""Control tables

Revision ID: c001
Revises:
"""

import sqlalchemy as sa
from alembic import op

revision = "c001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "audit",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("at_ns", sa.BigInteger(), nullable=False),
        sa.Column("actor", sa.String(length=128), nullable=False),
        sa.Column("action", sa.String(length=64), nullable=False),
        sa.Column("subject", sa.String(length=256), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("request_id", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    with op.batch_alter_table("audit", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_audit_at_ns"), ["at_ns"], unique=False)

    op.create_table(
        "commands",
        sa.Column("id", sa.String(length=128), nullable=False),
        sa.Column("job", sa.String(length=128), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("action", sa.String(length=64), nullable=False),
        sa.Column("parameters", sa.Text(), nullable=False),
        sa.Column("ranks", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("incident", sa.String(length=128), nullable=False),
        sa.Column("policy", sa.String(length=128), nullable=False),
        sa.Column("author", sa.String(length=128), nullable=False),
        sa.Column("idempotency_key", sa.String(length=256), nullable=True),
        sa.Column("issued_ns", sa.BigInteger(), nullable=False),
        sa.Column("expires_ns", sa.BigInteger(), nullable=False),
        sa.Column("counter", sa.BigInteger(), nullable=False),
        sa.Column("signature", sa.String(length=128), nullable=False),
        sa.Column("timestamps", sa.Text(), nullable=False),
        sa.Column("results", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("idempotency_key", name="uq_commands_idempotency"),
        sa.UniqueConstraint("job", "attempt", "counter", name="uq_commands_counter"),
    )
    with op.batch_alter_table("commands", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_commands_incident"), ["incident"], unique=False)
        batch_op.create_index("ix_commands_job_state", ["job", "attempt", "state"], unique=False)

    op.create_table(
        "decisions",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("incident", sa.String(length=128), nullable=False),
        sa.Column("job", sa.String(length=128), nullable=False),
        sa.Column("policy", sa.String(length=128), nullable=False),
        sa.Column("chose", sa.String(length=64), nullable=False),
        sa.Column("says", sa.Text(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("at_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    with op.batch_alter_table("decisions", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_decisions_incident"), ["incident"], unique=False)

    op.create_table(
        "incidents",
        sa.Column("id", sa.String(length=128), nullable=False),
        sa.Column("job", sa.String(length=128), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(length=64), nullable=False),
        sa.Column("severity", sa.String(length=2), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("opened_step", sa.BigInteger(), nullable=True),
        sa.Column("opened_ns", sa.BigInteger(), nullable=False),
        sa.Column("updated_ns", sa.BigInteger(), nullable=False),
        sa.Column("fingerprint", sa.String(length=128), nullable=False),
        sa.Column("verdict", sa.Text(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("graph", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    with op.batch_alter_table("incidents", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_incidents_fingerprint"), ["fingerprint"], unique=False)
        batch_op.create_index(batch_op.f("ix_incidents_job"), ["job"], unique=False)
        batch_op.create_index(batch_op.f("ix_incidents_opened_ns"), ["opened_ns"], unique=False)
        batch_op.create_index(batch_op.f("ix_incidents_status"), ["status"], unique=False)

    op.create_table(
        "job_keys",
        sa.Column("job", sa.String(length=128), nullable=False),
        sa.Column("private", sa.LargeBinary(), nullable=False),
        sa.Column("public", sa.LargeBinary(), nullable=False),
        sa.Column("created_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("job"),
    )
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(length=128), nullable=False),
        sa.Column("first_seen_ns", sa.BigInteger(), nullable=False),
        sa.Column("last_seen_ns", sa.BigInteger(), nullable=False),
        sa.Column("service", sa.String(length=256), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    with op.batch_alter_table("jobs", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_jobs_last_seen_ns"), ["last_seen_ns"], unique=False)

    op.create_table(
        "policies",
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("enabled", sa.Boolean(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("author", sa.String(length=128), nullable=False),
        sa.Column("created_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", "version"),
    )
    op.create_table(
        "policy_states",
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("job", sa.String(length=128), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("updated_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", "job"),
    )
    op.create_table(
        "silences",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("job", sa.String(length=128), nullable=False),
        sa.Column("fingerprint", sa.String(length=128), nullable=False),
        sa.Column("until_ns", sa.BigInteger(), nullable=False),
        sa.Column("author", sa.String(length=128), nullable=False),
        sa.Column("says", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    with op.batch_alter_table("silences", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_silences_job"), ["job"], unique=False)

    op.create_table(
        "tokens",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("hash", sa.LargeBinary(), nullable=False),
        sa.Column("scopes", sa.String(length=64), nullable=False),
        sa.Column("job", sa.String(length=128), nullable=False),
        sa.Column("label", sa.String(length=128), nullable=False),
        sa.Column("created_ns", sa.BigInteger(), nullable=False),
        sa.Column("expires_ns", sa.BigInteger(), nullable=False),
        sa.Column("revoked_ns", sa.BigInteger(), nullable=False),
        sa.Column("used_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "attempts",
        sa.Column("job", sa.String(length=128), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("world_size", sa.Integer(), nullable=False),
        sa.Column("first_seen_ns", sa.BigInteger(), nullable=False),
        sa.Column("last_seen_ns", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job", "attempt"),
    )
    op.create_table(
        "causes",
        sa.Column("incident", sa.String(length=128), nullable=False),
        sa.Column("place", sa.Integer(), nullable=False),
        sa.Column("category", sa.String(length=64), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=True),
        sa.Column("host", sa.String(length=256), nullable=True),
        sa.Column("since_step", sa.BigInteger(), nullable=True),
        sa.Column("confidence", sa.Double(), nullable=False),
        sa.Column("gpu_hours", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["incident"], ["incidents.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("incident", "place"),
    )
    with op.batch_alter_table("causes", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_causes_category"), ["category"], unique=False)

    op.create_table(
        "notes",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("incident", sa.String(length=128), nullable=False),
        sa.Column("author", sa.String(length=128), nullable=False),
        sa.Column("says", sa.Text(), nullable=False),
        sa.Column("at_ns", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["incident"], ["incidents.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id"),
    )
    with op.batch_alter_table("notes", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_notes_incident"), ["incident"], unique=False)

    op.create_table(
        "ranks",
        sa.Column("job", sa.String(length=128), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("local_rank", sa.Integer(), nullable=False),
        sa.Column("host", sa.String(length=256), nullable=False),
        sa.Column("device", sa.String(length=128), nullable=False),
        sa.Column("pid", sa.BigInteger(), nullable=False),
        sa.Column("backend", sa.String(length=64), nullable=False),
        sa.Column("mesh", sa.Text(), nullable=False),
        sa.Column("first_seen_ns", sa.BigInteger(), nullable=False),
        sa.Column("last_seen_ns", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job", "attempt", "rank"),
    )


def downgrade() -> None:
    op.drop_table("ranks")
    with op.batch_alter_table("notes", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_notes_incident"))

    op.drop_table("notes")
    with op.batch_alter_table("causes", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_causes_category"))

    op.drop_table("causes")
    op.drop_table("attempts")
    op.drop_table("tokens")
    with op.batch_alter_table("silences", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_silences_job"))

    op.drop_table("silences")
    op.drop_table("policy_states")
    op.drop_table("policies")
    with op.batch_alter_table("jobs", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_jobs_last_seen_ns"))

    op.drop_table("jobs")
    op.drop_table("job_keys")
    with op.batch_alter_table("incidents", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_incidents_status"))
        batch_op.drop_index(batch_op.f("ix_incidents_opened_ns"))
        batch_op.drop_index(batch_op.f("ix_incidents_job"))
        batch_op.drop_index(batch_op.f("ix_incidents_fingerprint"))

    op.drop_table("incidents")
    with op.batch_alter_table("decisions", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_decisions_incident"))

    op.drop_table("decisions")
    with op.batch_alter_table("commands", schema=None) as batch_op:
        batch_op.drop_index("ix_commands_job_state")
        batch_op.drop_index(batch_op.f("ix_commands_incident"))

    op.drop_table("commands")
    with op.batch_alter_table("audit", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_audit_at_ns"))

    op.drop_table("audit")
