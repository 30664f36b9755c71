"""The table of captures: bounded per tenant and in total, and emptied by retention.

A capture only ever replaces older ones of its own tenant. Where all room is taken by others, it is
not stored: no tenant can push another's captures out.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

import msgspec
from sqlalchemy import delete, func, select

from app.database import (
    AsyncConnection,
    Database,
    DatabaseError,
    Lane,
    delete_before,
    dialect_insert,
)
from app.database.schema import captures

# Retention is exact for those who read, and this late in the file.
RETENTION_EVERY_S = 60.0
# Of up to 4 MiB each: more would not be deleted within the deadline of a transaction.
DELETED_AT_ONCE = 64
# Rows that are looked at to make room for one.
_OLDEST = 1000

_COLUMNS = captures.c


class CaptureRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row; nothing but `sealed` has anything of a request's text."""

    id: str
    at_ms: int
    expires_ms: int
    key_id: str
    tenant: str
    model: str
    sealed: bytes = b""

    @property
    def facts(self) -> bytes:
        """What is authenticated with the sealed text."""
        facts = self.id, self.at_ms, self.expires_ms, self.key_id, self.tenant, self.model
        return msgspec.json.encode(facts)

    def __repr__(self) -> str:
        return f"<CaptureRow {self.id}>"


class CaptureStore:
    """Writes and deletes captures. Every method raises DatabaseError."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self.database = database
        self._clock = clock

    def now_ms(self) -> int:
        return int(self._clock() * 1000)

    async def add(self, rows: Sequence[CaptureRow], tenant_bytes: int, total_bytes: int) -> int:
        """Store captures within the bounds; return how many found room.

        A row that is there already counts as stored: a commit that was not confirmed is repeated.
        """
        stored = 0
        async with self.database.write(Lane.BACKGROUND) as connection:
            sums = select(_COLUMNS.tenant, func.sum(_COLUMNS.size)).group_by(_COLUMNS.tenant)
            used = {tenant: int(size) for tenant, size in await connection.execute(sums)}
            for row in rows:
                size, mine = len(row.sealed), used.get(row.tenant, 0)
                others = sum(used.values()) - mine
                room = min(tenant_bytes, total_bytes - others)
                if size > room or row.expires_ms <= self.now_ms():
                    continue
                if mine + size > room:
                    mine -= await _delete_oldest(connection, row.tenant, mine + size - room)
                if mine + size > room:
                    continue
                values = {**msgspec.structs.asdict(row), "size": size}
                new = dialect_insert(captures, self.database.dialect).values(values)
                await connection.execute(new.on_conflict_do_nothing())
                used[row.tenant] = mine + size
                stored += 1
        return stored

    async def delete_expired(self) -> int:
        """Delete captures at the end of their retention; return their number."""
        return await delete_before(
            self.database, _COLUMNS.id, _COLUMNS.expires_ms, self.now_ms() + 1, DELETED_AT_ONCE
        )

    async def run(self) -> None:
        """Delete expired captures until canceled."""
        while True:
            with contextlib.suppress(DatabaseError):  # retried in the next round
                await self.delete_expired()
            await asyncio.sleep(RETENTION_EVERY_S)


async def _delete_oldest(connection: AsyncConnection, tenant: str, size: int) -> int:
    """Delete the oldest captures of a tenant, of this size together; return what was freed."""
    query = select(_COLUMNS.id, _COLUMNS.size).where(_COLUMNS.tenant == tenant)
    query = query.order_by(_COLUMNS.at_ms, _COLUMNS.size).limit(_OLDEST)
    freed, gone = 0, []
    for row in await connection.execute(query):
        if freed >= size:
            break
        freed += row.size
        gone.append(row.id)
    await connection.execute(delete(captures).where(_COLUMNS.id.in_(gone)))
    return freed
