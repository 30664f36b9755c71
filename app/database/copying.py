"""Copies every row of one database into another, of either kind: all of them or none.

Captures are left out.

The source is read in one transaction and the target written in one, so a copy that was interrupted
has left nothing and is made again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import BigInteger, ColumnElement, Integer, Table, delete, func, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from app.database.database import Database, make_engine
from app.database.migrate import is_current
from app.database.schema import captures, metadata, revision, secrets
from app.database.sqlite_backup import BackupFault

# PostgreSQL ends a transaction that is idle for ten seconds: a batch is written in less.
_BATCH = 1000
# What a gateway makes in an empty database when it starts.
_MADE_AT_START = (revision, secrets)


@dataclass(frozen=True, slots=True)
class Contents:
    """What two copies of a table have in common: the number of rows, and sums of their integers."""

    rows: int
    sums: Mapping[str, int]


async def copy_rows(source_url: str, target_url: str) -> dict[str, int]:
    """Copy every row; return how many there are of each table, counted in the target.

    The source has this version's tables; the target gets them, and must have no rows. Raises
    BackupFault, DatabaseError, and SQLAlchemyError or OSError of the drivers.
    """
    target = Database(target_url)
    try:
        await target.migrate()
    finally:
        await target.close()
    engines = make_engine(source_url), make_engine(target_url)
    try:
        if not await is_current(engines[0]):
            raise BackupFault(
                "the source has an older version's tables: start its gateway with this version once"
            )
        return await _copy(*engines)
    finally:
        for engine in engines:
            await engine.dispose()


async def count_rows(url: str) -> dict[str, int]:
    """Return the number of rows of each table. Raises SQLAlchemyError or OSError."""
    engine = make_engine(url)
    try:
        async with engine.connect() as connection:
            found = {table.name: await _contents(connection, table) for table in _tables()}
            return {name: one.rows for name, one in found.items()}
    finally:
        await engine.dispose()


async def _copy(source: AsyncEngine, target: AsyncEngine) -> dict[str, int]:
    if source.dialect.name == "postgresql":
        source = source.execution_options(isolation_level="REPEATABLE READ")
    writing = target.execution_options(writing=True)
    async with source.connect() as read, writing.begin() as written:
        await _require_empty(written)
        for table in _MADE_AT_START:
            await written.execute(delete(table))
        counts = {}
        for table in _tables():
            await _copy_table(read, written, table)
            before, after = await _contents(read, table), await _contents(written, table)
            if before != after:
                raise BackupFault(f"{table.name}: {before} became {after}; nothing was copied")
            counts[table.name] = after.rows
        return counts


async def _require_empty(connection: AsyncConnection) -> None:
    for table in _tables():
        if table in _MADE_AT_START:
            continue
        if rows := (await _contents(connection, table)).rows:
            raise BackupFault(
                f"the target is not empty: {rows} rows in {table.name}; copy into a new database"
            )


async def _copy_table(read: AsyncConnection, written: AsyncConnection, table: Table) -> None:
    result = await read.stream(select(table))
    async for batch in result.mappings().partitions(_BATCH):
        await written.execute(insert(table), [dict(row) for row in batch])


async def _contents(connection: AsyncConnection, table: Table) -> Contents:
    names = [c.name for c in table.columns if isinstance(c.type, BigInteger | Integer)]
    asked: Sequence[ColumnElement[Any]] = [func.sum(table.c[name]) for name in names]
    (row,) = await connection.execute(select(func.count(), *asked).select_from(table))
    # PostgreSQL's sum is a Decimal, and of no rows it is null.
    return Contents(
        row[0], {name: int(total or 0) for name, total in zip(names, row[1:], strict=True)}
    )


def _tables() -> Sequence[Table]:
    # A copy would outlive the retention of captures.
    return [table for table in metadata.sorted_tables if table is not captures]
