"""How far the journal has been stored.

Revision ID: e002
Revises: e001
"""

from alembic import op

revision = "e002"
down_revision = "e001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("CREATE TABLE journal_stored (number BIGINT NOT NULL)")
    op.execute("INSERT INTO journal_stored VALUES (0)")


def downgrade() -> None:
    op.execute("DROP TABLE journal_stored")
