"""Owners of stored responses: the key, the model and the engine of each, by the response's id.

vLLM's store of responses knows no owner: whoever has an id reads, continues and deletes what is
behind it. So an id is claimed for a key before the client can know it, and an id that another key
has claimed is not found, as one that never was.

The gateway makes the ids, at random, so none is used twice: what is remembered of one can be out of
date (its row was deleted by another gateway) but is never another key's.
"""

import asyncio
import contextlib
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy import delete, select

from app.database import AsyncConnection, Database, DatabaseError, ValuesRejected, dialect_insert
from app.database.schema import stored_responses

# Responses of one key; the oldest go.
MOST_PER_KEY = 10_000
RETENTION_S = 30 * 86_400
CACHE_SIZE = 10_000
SWEEP_EVERY_S = 3600.0
# Rows that go in one transaction, and the pause in which others may write.
SWEEP_CHUNK = 500
SWEEP_PAUSE_S = 0.05
# What no database chokes on; a client may ask for any id.
_ID = re.compile(r"[A-Za-z0-9._-]{1,128}", re.ASCII)

_id = stored_responses.c.id
_key_id = stored_responses.c.key_id
_at_ms = stored_responses.c.at_ms


class ResponseIdTaken(ValuesRejected):
    """Another key has claimed the id."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """Where a stored response is."""

    model: str
    engine: str


class StoredResponses:
    """The owners of stored responses. Every method raises DatabaseUnavailable."""

    def __init__(self, database: Database, *, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock
        # The owner and the place by id, the one used longest ago first.
        self._recent: OrderedDict[str, tuple[str, StoredResponse]] = OrderedDict()

    async def claim(self, response_id: str, key_id: str, model: str, engine: str) -> None:
        """Make a key the owner of a response that is about to be stored.

        A key may claim its own id again: the response is stored anew. Raises ResponseIdTaken where
        the id is another key's, and ValueError for what cannot be an id.
        """
        if not _ID.fullmatch(response_id):
            raise ValueError("not the id of a response")
        claimed = dialect_insert(stored_responses, self._database.dialect).values(
            id=response_id,
            key_id=key_id,
            model=model,
            engine=engine,
            at_ms=int(self._clock() * 1000),
        )
        statement = claimed.on_conflict_do_update(
            index_elements=[_id],
            set_={name: claimed.excluded[name] for name in ("model", "engine", "at_ms")},
            where=_key_id == claimed.excluded.key_id,
        )
        async with self._database.write() as connection:
            if (await connection.execute(statement)).rowcount != 1:
                raise ResponseIdTaken("the id of the response is another key's")
            await _drop_oldest(connection, key_id)
        self._remember(response_id, key_id, StoredResponse(model, engine))

    async def find(self, response_id: str, key_id: str) -> StoredResponse | None:
        """Return where a response of a key is; None: there is none, or another key owns it."""
        recent = self._recent.get(response_id)
        if recent is not None:
            owner, found = recent
            if owner != key_id:
                return None
            self._recent.move_to_end(response_id)
            return found
        if not _ID.fullmatch(response_id):
            return None
        columns = stored_responses.c.model, stored_responses.c.engine
        query = select(*columns).where(_id == response_id, _key_id == key_id)
        async with self._database.read() as connection:
            row = (await connection.execute(query)).first()
        if row is None:
            return None
        found = StoredResponse(row.model, row.engine)
        self._remember(response_id, key_id, found)
        return found

    async def run(self) -> None:
        """Remove what is old, until cancelled."""
        while True:
            with contextlib.suppress(DatabaseError):  # there is time until the next round
                await self.sweep()
            await asyncio.sleep(SWEEP_EVERY_S)

    async def sweep(self) -> int:
        """Remove the rows whose time is over, a few at a time; return how many those were."""
        before_ms = int((self._clock() - RETENTION_S) * 1000)
        old = (
            select(_id)
            .where(_at_ms < before_ms)
            .order_by(_at_ms)
            .limit(SWEEP_CHUNK)
            # Gateways that sweep at the same time take different ones; SQLite has one writer.
            .with_for_update(skip_locked=True)
        )
        removed = 0
        while True:
            async with self._database.write() as connection:
                done = await connection.execute(delete(stored_responses).where(_id.in_(old)))
            removed += done.rowcount
            if done.rowcount < SWEEP_CHUNK:
                return removed
            await asyncio.sleep(SWEEP_PAUSE_S)

    def _remember(self, response_id: str, key_id: str, found: StoredResponse) -> None:
        self._recent[response_id] = key_id, found
        self._recent.move_to_end(response_id)
        if len(self._recent) > CACHE_SIZE:
            self._recent.popitem(last=False)


async def _drop_oldest(connection: AsyncConnection, key_id: str) -> None:
    """Remove what a key has beyond MOST_PER_KEY."""
    query = select(_id).where(_key_id == key_id).order_by(_at_ms.desc())
    excess = (await connection.execute(query.offset(MOST_PER_KEY).limit(SWEEP_CHUNK))).scalars()
    # In one order everywhere: gateways that remove the same rows must not lock each other out.
    for response_id in sorted(excess):
        await connection.execute(delete(stored_responses).where(_id == response_id))
