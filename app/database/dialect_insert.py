"""INSERT with ON CONFLICT, which both databases have and SQLAlchemy builds per dialect."""

from typing import TYPE_CHECKING

from sqlalchemy import Table
from sqlalchemy.dialects import sqlite

if TYPE_CHECKING:
    from sqlalchemy.dialects import postgresql


def dialect_insert(table: Table, dialect: str) -> "sqlite.Insert | postgresql.Insert":
    """Return an INSERT into a table, in the dialect `postgresql` or `sqlite`."""
    if dialect == "postgresql":
        from sqlalchemy.dialects import postgresql  # 3 MiB that a gateway on SQLite does not use

        return postgresql.insert(table)
    return sqlite.insert(table)
