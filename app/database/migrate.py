"""Bringing the tables to this version of the gateway, whichever gateway comes first."""

from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncEngine

# Any number that nothing else in the database uses: gateways that start together take turns.
_ADVISORY_LOCK = 7_345_620_981


def configuration() -> Config:
    """Return Alembic's configuration; it has no file, for nobody runs Alembic by hand."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    return config


def head() -> str:
    """Return the newest revision of the tables."""
    revision = ScriptDirectory.from_config(configuration()).get_current_head()
    assert revision is not None
    return revision


async def is_current(engine: AsyncEngine) -> bool:
    """Return whether the tables are this version's."""
    async with engine.connect() as connection:
        return await connection.run_sync(_revision) == head()


async def upgrade(engine: AsyncEngine) -> None:
    """Run what is missing, in one transaction."""
    async with engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            await connection.execute(text(f"SELECT pg_advisory_xact_lock({_ADVISORY_LOCK})"))
        await connection.run_sync(_upgrade)


def _revision(connection: Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()


def _upgrade(connection: Any) -> None:
    config = configuration()
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
