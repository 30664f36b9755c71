"""The database before a gateway starts on it: sound, of this version, and the one that is meant."""

import asyncio
from pathlib import Path

from app.database import Database, DatabaseLocked, DatabaseUnavailable, NewerDatabase, disk_fault
from app.database.backup import count_keys, damage_after_unclean_end
from app.database.migration_process import migrate_in_child
from app.settings import ConfigError, Settings, StateSettings


def prepare_database(settings: Settings) -> bool:
    """Bring the database's tables to this version; return whether it made them.

    Raises ConfigError when the file of the database cannot be made, is no database, is damaged, or
    is too new. A database server may only be down for now, a disk be full, a file be locked: then
    the gateway starts, and opens the database later. That its tables are too new is known at once.
    """
    url = settings.state.database_url.get_secret_value()
    database = Database(url)
    if (file := settings.state.database_file) and (damage := damage_after_unclean_end(file)):
        advice = "restore a backup: vllm-gateway db restore FILE"
        raise ConfigError([f"state.database_url {database!r}: damaged: {damage}; {advice}"])

    async def inspect() -> tuple[bool, bool]:
        try:
            is_current = await database.is_current()
            return is_current or await database.is_made(), is_current
        finally:
            await database.close()

    try:
        is_made, is_current = asyncio.run(inspect())
        if not is_current:
            migrate_in_child(url)
    except DatabaseUnavailable as error:
        file = settings.state.database_file
        passing = isinstance(error, DatabaseLocked) or (file is not None and disk_fault(file))
        if (database.dialect == "sqlite" and not passing) or isinstance(error, NewerDatabase):
            raise ConfigError([f"state.database_url {database!r}: {error}"]) from None
        return False
    return not is_made


def other_database(settings: Settings) -> str | None:
    """Return a warning where a database was made beside one with keys, of which nobody thought."""
    default = StateSettings().database_file
    assert default is not None
    own, file = settings.state.database_file, settings.source.file
    near = [Path.cwd(), *(() if file is None else (file.parent.absolute(),))]
    for other in dict.fromkeys(directory / default for directory in near):
        if own is not None and other == own.absolute():
            continue
        if other.exists() and (keys := count_keys(other)):
            return (
                f"the database is new and has no keys, but {other} has {keys}: to use that one, "
                "set state.database_url; to copy it, stop the gateway: vllm-gateway db copy"
            )
    return None
