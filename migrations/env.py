"""Runs migrations on the connection that `fp8scope_server.database` hands over."""

from alembic import context

from fp8scope_server.models import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    transaction_per_migration=False,
)
context.run_migrations()
