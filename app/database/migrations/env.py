"""Alembic's entry point; the connection comes from `app.database.migrate`."""

from alembic import context

from app.database.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    # SQLite changes a table by copying it.
    render_as_batch=True,
)
context.run_migrations()
