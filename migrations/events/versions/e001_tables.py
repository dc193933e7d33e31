"""Tables of events, waits and roll-ups.

Revision ID: e001
Revises:
"""

from alembic import op

revision = "e001"
down_revision = None
branch_labels = None
depends_on = None

_COMMON = """
    job VARCHAR NOT NULL, attempt INTEGER NOT NULL, rank INTEGER NOT NULL, sequence BIGINT NOT NULL,
    lamport BIGINT NOT NULL"""

_TABLES = {
    "spans": f"""{_COMMON}, kind VARCHAR NOT NULL, name VARCHAR NOT NULL, step BIGINT NOT NULL,
    start_ns BIGINT NOT NULL, end_ns BIGINT NOT NULL, monotonic_ns BIGINT NOT NULL, group_name VARCHAR NOT NULL,
    group_sequence BIGINT NOT NULL, bytes BIGINT NOT NULL, dtype VARCHAR NOT NULL, host VARCHAR NOT NULL,
    service VARCHAR NOT NULL, trace_id BLOB NOT NULL, span_id BLOB NOT NULL, attributes MAP(VARCHAR, VARCHAR),
    received_ns BIGINT NOT NULL""",
    "points": f"""{_COMMON}, name VARCHAR NOT NULL, step BIGINT NOT NULL, time_ns BIGINT NOT NULL,
    monotonic_ns BIGINT NOT NULL, value DOUBLE, unit VARCHAR NOT NULL, label VARCHAR NOT NULL,
    host VARCHAR NOT NULL, service VARCHAR NOT NULL, attributes MAP(VARCHAR, VARCHAR), received_ns BIGINT NOT NULL""",
    "logs": f"""{_COMMON}, name VARCHAR NOT NULL, step BIGINT NOT NULL, time_ns BIGINT NOT NULL,
    monotonic_ns BIGINT NOT NULL, severity INTEGER NOT NULL, body VARCHAR NOT NULL, host VARCHAR NOT NULL,
    service VARCHAR NOT NULL, attributes MAP(VARCHAR, VARCHAR), received_ns BIGINT NOT NULL""",
    "waits": """
    job VARCHAR NOT NULL, attempt INTEGER NOT NULL, group_name VARCHAR NOT NULL, group_sequence BIGINT NOT NULL,
    step BIGINT NOT NULL, rank INTEGER NOT NULL, op VARCHAR NOT NULL, bytes BIGINT NOT NULL, lateness_ms DOUBLE,
    wait_ms DOUBLE, transfer_ms DOUBLE, error_ms DOUBLE""",
    "rank_steps": """
    job VARCHAR NOT NULL, attempt INTEGER NOT NULL, metric VARCHAR NOT NULL, rank INTEGER NOT NULL,
    step BIGINT NOT NULL, start_ns BIGINT NOT NULL, value DOUBLE""",
    "clocks": """
    job VARCHAR NOT NULL, attempt INTEGER NOT NULL, rank INTEGER NOT NULL, at_ns BIGINT NOT NULL,
    offset_ns BIGINT NOT NULL, error_ns BIGINT NOT NULL, drift_ppm DOUBLE NOT NULL""",
}


def upgrade() -> None:
    for name, columns in _TABLES.items():
        op.execute(f"CREATE TABLE {name} ({columns}\n)")


def downgrade() -> None:
    for name in reversed(_TABLES):
        op.execute(f"DROP TABLE {name}")
