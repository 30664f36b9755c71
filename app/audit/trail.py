"""The table of audit records: written, listed, and deleted after its retention.

Nothing here changes a record. The ID of one begins with its time, so that IDs are in the order of
time and are the cursors of pages.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Row, insert, or_, select

from app.audit.record import Actor, AuditRecord, bounded
from app.database import AsyncConnection, Database, DatabaseError, Lane, delete_before
from app.database.schema import api_keys, audit_records

log = logging.getLogger(__name__)

# Characters of the columns.
MAX_TARGET = 300
RETENTION_EVERY_S = 3600.0
_DAY_MS = 86_400_000
_COLUMNS = audit_records.c


class AuditFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Selects records that have all of the given facts; None: any."""

    who: str | None = None  # the ID or the name of a key, root, or `user@host`
    action: str | None = None  # one action, or those of a kind of object, such as `key`
    target: str | None = None  # the ID or the name of a key, or any other name
    since_s: float | None = None  # in seconds since 1970
    until_s: float | None = None


class StoredRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A record as it was stored."""

    id: str
    at_ms: int
    record: AuditRecord
    who_name: str | None  # of the actor's key at that time
    target_name: str | None  # of the key that is the target, now


class AuditPage(msgspec.Struct, frozen=True):
    """A page of records, the latest first; `next` is behind which the next page begins."""

    records: list[StoredRecord]
    next: str | None


class AuditTrail:
    """Records what is done, and reads the records of all gateways of the database."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock

    async def record(self, record: AuditRecord) -> None:
        """Store and log what is about to be done; only log it while the database is away.

        Engines have to be operated during an outage, too.
        """
        log_record(record)
        try:
            async with self._database.write(Lane.PAGES) as connection:
                await write_records(connection, [record], int(self._clock() * 1000))
        except DatabaseError as error:
            log.error("audit: the record above is not stored: %s", error)

    async def page(self, chosen: AuditFilter, limit: int, after: str | None = None) -> AuditPage:
        """Return up to `limit` records behind the record `after`. Raises DatabaseError."""
        target_key = api_keys.alias("target_key")
        query = (
            select(audit_records, target_key.c.name.label("target_name"))
            .join(target_key, target_key.c.id == _COLUMNS.target, isouter=True)
            .where(*_conditions(chosen, target_key.c.name))
            .order_by(_COLUMNS.id.desc())
            .limit(limit + 1)
        )
        if after is not None:
            query = query.where(_COLUMNS.id < after)
        async with self._database.read(Lane.PAGES) as connection:
            found = [_stored(row) for row in await connection.execute(query)]
        page = found[:limit]
        return AuditPage(page, page[-1].id if len(found) > limit else None)

    async def delete_old(self, retention_days: int) -> int:
        """Delete records beyond the retention; return their number. Raises DatabaseError."""
        before_ms = int(self._clock() * 1000) - retention_days * _DAY_MS
        return await delete_before(self._database, _COLUMNS.id, _COLUMNS.at_ms, before_ms)

    async def run(self, retention_days: int) -> None:
        """Delete old records until canceled."""
        while True:
            with contextlib.suppress(DatabaseError):  # retried in the next round
                await self.delete_old(retention_days)
            await asyncio.sleep(RETENTION_EVERY_S)


async def write_records(
    connection: AsyncConnection, records: Sequence[AuditRecord], at_ms: int
) -> None:
    """Insert records in the transaction of the change that they are about."""
    first_ns = time.time_ns()
    rows = [
        {
            "id": f"{first_ns + place:016x}{secrets.token_hex(4)}",
            "at_ms": at_ms,
            "who": record.actor.id,
            "role": record.actor.role,
            "address": record.actor.address,
            "action": record.action,
            "target": record.target[:MAX_TARGET],
            "before": bounded(record.before),
            "after": bounded(record.after),
        }
        for place, record in enumerate(records)
    ]
    # The name at this time: a key may be renamed.
    name = select(api_keys.c.name).where(api_keys.c.id == records[0].actor.id).scalar_subquery()
    await connection.execute(insert(audit_records).values(who_name=name), rows)


def log_record(record: AuditRecord) -> None:
    """Log what has been done, or is about to be."""
    actor = record.actor
    fields = {"action": record.action, "target": record.target, "by": actor.id}
    where = ""
    if actor.address is not None:
        fields["address"] = actor.address
        where = f" from {actor.address}"
    log.info("%s %s by %s%s", record.action, record.target, actor.id, where, extra=fields)


def _conditions(
    chosen: AuditFilter, target_name: ColumnElement[str]
) -> Sequence[ColumnElement[bool]]:
    found: list[ColumnElement[bool]] = []
    if chosen.who is not None:
        found.append(or_(_COLUMNS.who == chosen.who, _COLUMNS.who_name == chosen.who))
    if chosen.action is not None:
        kind = _COLUMNS.action.startswith(f"{chosen.action}.", autoescape=True)
        found.append(or_(_COLUMNS.action == chosen.action, kind))
    if chosen.target is not None:
        found.append(or_(_COLUMNS.target == chosen.target, target_name == chosen.target))
    if chosen.since_s is not None:
        found.append(_COLUMNS.at_ms >= int(chosen.since_s * 1000))
    if chosen.until_s is not None:
        found.append(_COLUMNS.at_ms < int(chosen.until_s * 1000))
    return found


def _stored(row: Row[Any]) -> StoredRecord:
    return StoredRecord(
        id=row.id,
        at_ms=row.at_ms,
        record=AuditRecord(
            actor=Actor(row.who, row.role, row.address),
            action=row.action,
            target=row.target,
            before=row.before,
            after=row.after,
        ),
        who_name=row.who_name,
        target_name=row.target_name,
    )
