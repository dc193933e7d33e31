"""Alembic environment of the events branch: it renders SQL text, which ``backend.store.migrate`` runs in DuckDB.

No DuckDB dialect for SQLAlchemy survives autogenerate, and a second engine on the file would clash with
the store's connection settings; so Alembic orders the revisions and keeps the version table, and DuckDB
gets plain SQL in one transaction.
"""

from alembic import context

context.configure(
    dialect_name="sqlite",
    output_buffer=context.config.output_buffer,
    version_table="schema_version",
    version_table_pk=False,
)
with context.begin_transaction():
    context.run_migrations()
