"""The gateway's database, SQLite or PostgreSQL: connections, transactions, deadlines, migrations.

`Database` is the only way in; `schema` has the tables. `migration_process` is run with `-m` as
well, so it is not imported here.
"""

from sqlalchemy.ext.asyncio import AsyncConnection

from app.database.backup_schedule import BackupSchedule
from app.database.database import Database
from app.database.dialect_insert import dialect_insert
from app.database.errors import (
    DatabaseBusy,
    DatabaseError,
    DatabaseLocked,
    DatabaseUnavailable,
    NewerDatabase,
    ValuesRejected,
    is_rejection,
)
from app.database.lanes import Lane
from app.database.retention import delete_before
from app.database.shared_secret import SharedSecret
from app.database.sqlite_file import disk_fault

__all__ = (
    "AsyncConnection",
    "BackupSchedule",
    "Database",
    "DatabaseBusy",
    "DatabaseError",
    "DatabaseLocked",
    "DatabaseUnavailable",
    "Lane",
    "NewerDatabase",
    "SharedSecret",
    "ValuesRejected",
    "delete_before",
    "dialect_insert",
    "disk_fault",
    "is_rejection",
)
