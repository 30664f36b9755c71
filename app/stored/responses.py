"""The table of stored responses: the owning key, the model and the engine of each response ID.

vLLM's response store has no owners: anyone with an ID can read, continue and delete the response.
So an ID is claimed for a key before the client learns it, and the ID of another key is not found,
like one that does not exist.

The gateway generates the IDs at random, so none is used twice: a cached entry can be outdated
(another gateway deleted its row) but never belongs to another key.
"""

import asyncio
import contextlib
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy import delete, select

from app.database import (
    AsyncConnection,
    Database,
    DatabaseError,
    Lane,
    ValuesRejected,
    delete_before,
    dialect_insert,
)
from app.database.schema import stored_responses

# Responses per key; beyond it the oldest are deleted.
MAX_PER_KEY = 10_000
RETENTION_S = 30 * 86_400
CACHE_SIZE = 10_000
RETENTION_EVERY_S = 3600.0
# Rows that one claim deletes at most.
EXCESS_ROWS = 500
# Any client can request any ID; only these are looked up.
_ID = re.compile(r"[A-Za-z0-9._-]{1,128}", re.ASCII)

_id = stored_responses.c.id
_key_id = stored_responses.c.key_id
_at_ms = stored_responses.c.at_ms


class ResponseIdTaken(ValuesRejected):
    """Another key owns the ID."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """The model and the engine of a stored response."""

    model: str
    engine: str


class StoredResponses:
    """Reads and writes the owners of stored responses. Every method raises DatabaseError."""

    def __init__(self, database: Database, *, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock
        # Owner and location by ID, least recently used first.
        self._cache: OrderedDict[str, tuple[str, StoredResponse]] = OrderedDict()

    async def claim(self, response_id: str, key_id: str, model: str, engine: str) -> None:
        """Make a key the owner of a response that is about to be stored.

        A key may claim its own ID again. Raises ResponseIdTaken if another key owns the ID, and
        ValueError for an invalid ID.
        """
        if not _ID.fullmatch(response_id):
            raise ValueError("invalid response ID")
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
        async with self._database.write(Lane.REQUESTS) as connection:
            if (await connection.execute(statement)).rowcount != 1:
                raise ResponseIdTaken("another key owns the response ID")
            await _drop_oldest(connection, key_id)
        self._store_in_cache(response_id, key_id, StoredResponse(model, engine))

    async def find(self, response_id: str, key_id: str) -> StoredResponse | None:
        """Return the location of a key's response; None: it does not exist or is another key's."""
        cached = self._cache.get(response_id)
        if cached is not None:
            owner, found = cached
            if owner != key_id:
                return None
            self._cache.move_to_end(response_id)
            return found
        if not _ID.fullmatch(response_id):
            return None
        columns = stored_responses.c.model, stored_responses.c.engine
        query = select(*columns).where(_id == response_id, _key_id == key_id)
        async with self._database.read(Lane.REQUESTS) as connection:
            row = (await connection.execute(query)).first()
        if row is None:
            return None
        found = StoredResponse(row.model, row.engine)
        self._store_in_cache(response_id, key_id, found)
        return found

    async def run(self) -> None:
        """Delete old rows every hour until canceled."""
        while True:
            with contextlib.suppress(DatabaseError):  # retried in the next round
                await self.delete_old()
            await asyncio.sleep(RETENTION_EVERY_S)

    async def delete_old(self) -> int:
        """Delete rows older than RETENTION_S; return their number."""
        before_ms = int((self._clock() - RETENTION_S) * 1000)
        return await delete_before(self._database, _id, _at_ms, before_ms)

    def _store_in_cache(self, response_id: str, key_id: str, found: StoredResponse) -> None:
        self._cache[response_id] = key_id, found
        self._cache.move_to_end(response_id)
        if len(self._cache) > CACHE_SIZE:
            self._cache.popitem(last=False)


async def _drop_oldest(connection: AsyncConnection, key_id: str) -> None:
    """Delete the oldest responses of a key beyond MAX_PER_KEY."""
    query = select(_id).where(_key_id == key_id).order_by(_at_ms.desc())
    excess = (await connection.execute(query.offset(MAX_PER_KEY).limit(EXCESS_ROWS))).scalars()
    # Always in the same order, so that two gateways cannot deadlock.
    for response_id in sorted(excess):
        await connection.execute(delete(stored_responses).where(_id == response_id))
