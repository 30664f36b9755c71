"""Runs migrations in a child process: Alembic takes 11 MiB that are never returned.

The child is this module, run with `-m`:

    stdin        the database's URL; its password belongs neither in argv nor in the environment
    exit code    0, or one of FAULTS
    stdout       the fault's message

A child with another exit code has left its traceback on standard error.
"""

import asyncio
import os
import subprocess
import sys

from app.database.database import Database
from app.database.errors import DatabaseError, DatabaseLocked, DatabaseUnavailable, NewerDatabase
from engines.environment import PRIVATE_PREFIX

FAULTS: dict[int, type[DatabaseUnavailable]] = {
    3: DatabaseUnavailable,
    4: NewerDatabase,
    5: DatabaseLocked,
}


def migrate_in_child(url: str) -> None:
    """Upgrade the tables to this version. Raises DatabaseUnavailable and NewerDatabase."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(PRIVATE_PREFIX)
    }
    try:
        child = subprocess.run(  # noqa: S603 - runs this module, no user input
            # -P: the working directory may have a package `app` as well.
            (sys.executable, "-P", "-m", __name__),
            input=url,
            stdout=subprocess.PIPE,
            env=inherited,
            text=True,
            check=False,
            process_group=0,  # Ctrl+C is for the gateway, which then kills the child
        )
    except OSError as error:
        raise DatabaseUnavailable(f"cannot start the migration: {error.strerror}") from None
    if fault := FAULTS.get(child.returncode):
        raise fault(child.stdout)
    if child.returncode:
        raise DatabaseUnavailable(f"the migration failed with exit code {child.returncode}")


async def _migrate(url: str) -> None:
    database = Database(url)
    try:
        await database.migrate()
    finally:
        await database.close()


def main() -> int:
    """Migrate the database whose URL is on standard input; return the exit code."""
    try:
        asyncio.run(_migrate(sys.stdin.read()))
    except DatabaseError as error:
        print(error, end="")
        return next((code for code, kind in FAULTS.items() if type(error) is kind), 3)
    return 0


if __name__ == "__main__":
    sys.exit(main())
