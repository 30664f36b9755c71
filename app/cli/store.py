"""The database behind `keys` and `owners`: the commands work with the gateway up or down.

A running gateway notices a change within a second.
"""

import asyncio
import getpass
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from pydantic import ValidationError

from app.cli.check import without_password
from app.cli.faults import fail, faults
from app.settings import Settings

if TYPE_CHECKING:  # SQLAlchemy is slow to import
    from app.audit import Actor
    from app.database import Database

S = TypeVar("S")
T = TypeVar("T")


def run_with_store(
    settings: Settings, store: "Callable[[Database], S]", work: Callable[[S], Awaitable[T]]
) -> T:
    """Open the configured database, do some work on a store in it, and return the result.

    Fails where there is none: what a command made in it, no gateway would read.
    """
    from app.database import Database

    async def run() -> T:
        url = settings.state.database_url.get_secret_value()
        database = Database(url)
        try:
            if not await database.is_made():
                fail(
                    f"{without_password(url)}: no gateway has made a database there; start one "
                    "with this configuration first, or name its configuration with --config"
                )
            await database.migrate()
            return await work(store(database))
        finally:
            await database.close()

    return asyncio.run(run())


def command_actor() -> "Actor":
    """Return who runs this command, as `user@host`: the user behind sudo, if that is used."""
    from app.audit import Actor

    try:
        user = os.environ.get("SUDO_USER") or getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = f"uid-{os.getuid()}"
    host = socket.gethostname()
    return Actor("".join(c if c.isprintable() else "?" for c in f"{user}@{host}")[:200])


@contextmanager
def store_faults() -> Iterator[None]:
    """Turn faults of a key, an owner or the database into one line each and exit code 2."""
    from app.auth import NameTaken, UnknownKey, UnknownOwner, validation
    from app.database import DatabaseError

    with faults():
        try:
            yield
        except ValidationError as error:
            fail(*validation.faults(error.errors()))
        except (DatabaseError, NameTaken, UnknownKey, UnknownOwner) as error:
            fail(str(error))
