"""Alembic environment of the control branch; the engine's connection comes from ``backend.store.migrate``."""

from alembic import context

from lanterne.backend.store.models import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,
    compare_type=True,
)
with context.begin_transaction():
    context.run_migrations()
