"""Bringing the tables to this version of the gateway, whichever gateway comes first."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, inspect, text

from app.database.async_engine import AsyncEngine

if TYPE_CHECKING:
    from alembic.config import Config

# The newest revision in migrations/versions; they are numbered.
HEAD = "0003"
# Any number that nothing else in the database uses: gateways that start together take turns.
_ADVISORY_LOCK = 7_345_620_981


class NewerTables(Exception):
    """A newer gateway has changed the tables; the message says what to do."""


def configuration() -> "Config":
    """Return Alembic's configuration; it has no file, for nobody runs Alembic by hand."""
    from alembic.config import Config  # 10 MiB, and mostly there is nothing to do

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    return config


async def is_current(engine: AsyncEngine) -> bool:
    """Return whether the tables are this version's. Raises NewerTables."""
    async with engine.connect() as connection:
        return await connection.run_sync(_revision) == HEAD


async def upgrade(engine: AsyncEngine) -> None:
    """Run what is missing, in one transaction. Raises NewerTables."""
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
            f"the tables are those of a newer gateway (revision {revision}, this one knows {HEAD}):"
            " start that one, or put back the copy of the database from before the upgrade"
        )
    return revision


def _upgrade(connection: Any) -> None:
    from alembic import command

    _revision(connection)  # another gateway may have come first, a newer one
    config = configuration()
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
