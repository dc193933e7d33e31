"""Derived rows tell when they were stored, so that they can be shipped on from there.

Revision ID: e003
Revises: e002
"""

from alembic import op

revision = "e003"
down_revision = "e002"
branch_labels = None
depends_on = None

_TABLES = ("waits", "rank_steps", "clocks")


def upgrade() -> None:
    for table in _TABLES:
        op.execute(f"ALTER TABLE {table} ADD COLUMN received_ns BIGINT DEFAULT 0")


def downgrade() -> None:
    for table in _TABLES:
        op.execute(f"ALTER TABLE {table} DROP COLUMN received_ns")
