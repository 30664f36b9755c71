"""Upgrades the tables to this version of the gateway, with Alembic."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, inspect, text
from sqlalchemy.ext.asyncio import AsyncEngine

if TYPE_CHECKING:
    from alembic.config import Config

# The newest revision in migrations/versions; they are numbered.
HEAD = "0015"
# Serializes the migrations of gateways that start together; any number unused in the database.
_ADVISORY_LOCK = 7_345_620_981


class NewerTables(Exception):
    """A newer gateway has changed the tables; the message gives the remedy."""


def configuration() -> "Config":
    """Return Alembic's configuration, which has no file: Alembic is not run by hand."""
    from alembic.config import Config  # 10 MiB, and at most starts there is nothing to migrate

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    return config


async def is_current(engine: AsyncEngine) -> bool:
    """Return whether the tables have this gateway's version. Raises NewerTables."""
    async with engine.connect() as connection:
        return await connection.run_sync(has_newest_tables)


def has_newest_tables(connection: Connection) -> bool:
    """Return whether the tables have this gateway's version. Raises NewerTables."""
    return _revision(connection) == HEAD


async def is_made(engine: AsyncEngine) -> bool:
    """Return whether there are tables of any version. Raises NewerTables."""
    async with engine.connect() as connection:
        return await connection.run_sync(_revision) is not None


async def upgrade(engine: AsyncEngine) -> None:
    """Run the missing migrations in one transaction. Raises NewerTables."""
    async with engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            await connection.execute(text(f"SELECT pg_advisory_xact_lock({_ADVISORY_LOCK})"))
        await connection.run_sync(_upgrade)


def _revision(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    revision: str | None = connection.scalar(text("SELECT version_num FROM alembic_version"))
    if revision is not None and revision > HEAD:
        raise NewerTables(
            f"the tables are those of a newer gateway (revision {revision}, this one has {HEAD}):"
            " start the newer gateway, or restore the backup from before the upgrade"
        )
    return revision


def _upgrade(connection: Any) -> None:
    from alembic import command

    _revision(connection)  # a newer gateway may have migrated while this one waited
    config = configuration()
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
