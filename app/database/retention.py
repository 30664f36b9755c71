"""Deletes old rows in small transactions, between which other writers get their turn."""

import asyncio
from functools import cache
from typing import Any

from sqlalchemy import Column, Connection, Delete, bindparam, delete, select

from app.database.database import Database
from app.database.lanes import Lane

# Rows per transaction, and the pause between two transactions.
CHUNK = 500
PAUSE_S = 0.05


async def delete_before(
    database: Database,
    row_id: "Column[Any]",
    time: "Column[Any]",
    before_ms: int,
    chunk: int = CHUNK,
) -> int:
    """Delete the rows older than a time, so many per transaction; return their number.

    Raises DatabaseError.
    """
    statement = _deletion(row_id, time, chunk)

    def delete_chunk(connection: Connection) -> int:
        return connection.execute(statement, {"before_ms": before_ms}).rowcount

    total = 0
    while True:
        deleted = await database.transact(delete_chunk, Lane.PAGES)
        total += deleted
        if deleted < chunk:
            return total
        await asyncio.sleep(PAUSE_S)


@cache
def _deletion(row_id: "Column[Any]", time: "Column[Any]", chunk: int) -> Delete:
    old = (
        select(row_id)
        .where(time < bindparam("before_ms"))
        .order_by(time)
        .limit(chunk)
        # Gateways that delete at the same time take different rows; SQLite has one writer.
        .with_for_update(skip_locked=True)
    )
    return delete(row_id.table).where(row_id.in_(old))
