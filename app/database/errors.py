"""Errors of the database, without passwords and without values of statements.

DatabaseError
├── DatabaseUnavailable   no answer in time, or none at all: trying again may help
│   ├── DatabaseBusy      it was not asked: too many requests of this gateway wait for it
│   ├── DatabaseLocked    another program has locked the file of SQLite
│   └── NewerDatabase     a newer gateway has changed the tables
└── ValuesRejected        the database rejected the values: trying again will not help
"""

import sqlite3

from sqlalchemy.exc import DataError, DBAPIError, IntegrityError


class DatabaseError(Exception):
    """Base class of all faults of the database."""


class DatabaseUnavailable(DatabaseError):
    """The database did not answer in time, or not at all."""


class DatabaseBusy(DatabaseUnavailable):
    """Too many requests wait for the database; this says nothing of the database itself."""


class DatabaseLocked(DatabaseUnavailable):
    """Another program has locked the file of SQLite, for now."""


class NewerDatabase(DatabaseUnavailable):
    """A newer gateway has changed the tables; only a backup from before the upgrade helps."""


class ValuesRejected(DatabaseError):
    """The database rejected these values; retrying will not help."""


def translate(error: Exception) -> DatabaseError:
    """Return the error of this package for one of SQLAlchemy, SQLite or the operating system."""
    # `orig` is without the statement and its parameters.
    cause: object = error.orig if isinstance(error, DBAPIError) else error
    reason = str(cause).partition("\n")[0] or type(cause).__name__
    if is_rejection(error):
        return ValuesRejected(f"the database rejected the values: {reason}")
    if (
        isinstance(cause, sqlite3.OperationalError)
        and cause.sqlite_errorcode == sqlite3.SQLITE_BUSY
    ):
        return DatabaseLocked(f"the database does not answer: {reason}")
    return DatabaseUnavailable(f"the database does not answer: {reason}")


def is_rejection(error: Exception) -> bool:
    """Return whether an error is about the values of a statement, and as permanent as they are.

    PostgreSQL's classes 22 (data exception) and 23 (integrity constraint violation); asyncpg's
    errors of class 22 have no class of their own in SQLAlchemy.
    """
    state = getattr(getattr(error, "orig", None), "sqlstate", None) or ""
    return isinstance(error, IntegrityError | DataError) or state[:2] in ("22", "23")
