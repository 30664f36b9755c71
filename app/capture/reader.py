"""Reads captures. Reading another's leaves a record in the audit, in the same transaction."""

from collections.abc import Callable, Iterator

import msgspec
from sqlalchemy import ColumnElement, Row, delete, select

from app.audit import Action, Actor, AuditRecord, log_record, write_records
from app.capture.sealing import Sealer, Unreadable
from app.capture.store import CaptureRow, CaptureStore
from app.database import Lane
from app.database.schema import captures

_COLUMNS = captures.c
_NO_KEY = "GATEWAY_CAPTURE__ENCRYPTION_KEYS is not set"


class CaptureFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Selects captures that have all of the given facts; None: any."""

    key_id: str | None = None
    model: str | None = None
    since_s: float | None = None  # in seconds since 1970
    until_s: float | None = None

    def conditions(self) -> Iterator[ColumnElement[bool]]:
        """Yield the conditions of a query."""
        if self.key_id is not None:
            yield _COLUMNS.key_id == self.key_id
        if self.model is not None:
            yield _COLUMNS.model == self.model
        if self.since_s is not None:
            yield _COLUMNS.at_ms >= int(self.since_s * 1000)
        if self.until_s is not None:
            yield _COLUMNS.at_ms < int(self.until_s * 1000)


class Capture(msgspec.Struct, frozen=True):
    """One capture: its document, or why it cannot be read."""

    id: str
    key_id: str
    expires_ms: int
    document: bytes | None  # JSON; None: it cannot be decrypted
    fault: str = ""

    def __repr__(self) -> str:
        return f"<Capture {self.id}>"


class CapturePage(msgspec.Struct, frozen=True):
    """A page of captures in the order of their IDs; `next` is behind which the next begins."""

    captures: list[Capture]
    next: str | None


class CaptureReader:
    """Reads what the store has, by the keys in force. Every method raises DatabaseError."""

    def __init__(self, store: CaptureStore, sealer: Callable[[], Sealer | None]) -> None:
        self._store = store
        self._sealer = sealer

    async def exists(self, id_: str, only_key: str | None = None) -> bool:
        """Return whether a request has a capture; with `only_key`, one of that key."""
        query = select(_COLUMNS.id).where(*self._unexpired(), _COLUMNS.id == id_)
        if only_key is not None:
            query = query.where(_COLUMNS.key_id == only_key)
        async with self._store.database.read(Lane.PAGES) as connection:
            return (await connection.scalar(query)) is not None

    async def read(self, id_: str, actor: Actor, only_key: str | None = None) -> Capture | None:
        """Return the capture of a request; None: there is none, or it is not of `only_key`."""
        conditions = [_COLUMNS.id == id_]
        if only_key is not None:
            conditions.append(_COLUMNS.key_id == only_key)
        found = await self._read(conditions, 1, actor)
        return found[0] if found else None

    async def page(
        self, chosen: CaptureFilter, limit: int, actor: Actor, after: str | None = None
    ) -> CapturePage:
        """Return up to `limit` captures behind the capture `after`."""
        conditions = list(chosen.conditions())
        if after is not None:
            conditions.append(_COLUMNS.id > after)
        found = await self._read(conditions, limit, actor)
        return CapturePage(found, found[-1].id if len(found) == limit else None)

    async def delete(self, chosen: CaptureFilter, actor: Actor) -> int:
        """Delete captures, expired ones too; return their number."""
        facts = {
            name: value
            for name, value in msgspec.structs.asdict(chosen).items()
            if value is not None
        }
        record = AuditRecord(
            actor=actor,
            action=Action.CAPTURE_DELETE,
            target=chosen.key_id or chosen.model or "*",
            after=facts or None,
        )
        async with self._store.database.write(Lane.BACKGROUND) as connection:
            await write_records(connection, [record], self._store.now_ms())
            done = await connection.execute(delete(captures).where(*chosen.conditions()))
        log_record(record)
        return done.rowcount

    async def _read(
        self, conditions: list[ColumnElement[bool]], limit: int, actor: Actor
    ) -> list[Capture]:
        query = select(captures).where(*self._unexpired(), *conditions)
        query = query.order_by(_COLUMNS.id).limit(limit)
        async with self._store.database.write(Lane.PAGES) as connection:
            rows = [_row(row) for row in await connection.execute(query)]
            records = [
                AuditRecord(actor=actor, action=Action.CAPTURE_READ, target=row.id)
                for row in rows
                if row.key_id != actor.id
            ]
            if records:
                await write_records(connection, records, self._store.now_ms())
        for record in records:
            log_record(record)
        sealer = self._sealer()
        return [_opened(row, sealer) for row in rows]

    def _unexpired(self) -> Iterator[ColumnElement[bool]]:
        """Yield the condition that hides what its retention has not yet deleted."""
        yield _COLUMNS.expires_ms > self._store.now_ms()


def _row(row: Row[tuple[object, ...]]) -> CaptureRow:
    return CaptureRow(
        id=row.id,
        at_ms=row.at_ms,
        expires_ms=row.expires_ms,
        key_id=row.key_id,
        tenant=row.tenant,
        model=row.model,
        sealed=row.sealed,
    )


def _opened(row: CaptureRow, sealer: Sealer | None) -> Capture:
    document, fault = None, _NO_KEY
    if sealer is not None:
        try:
            document, fault = sealer.open(row.sealed, row.facts), ""
        except Unreadable as error:
            fault = str(error)
    return Capture(row.id, row.key_id, row.expires_ms, document, fault)
