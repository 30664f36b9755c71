"""Random bytes that all gateways of one database share, made by whichever gateway comes first."""

import asyncio
import logging
import secrets

from sqlalchemy import select

from app.database import schema
from app.database.async_engine import AsyncConnection
from app.database.database import RETRY_S, Database, DatabaseUnavailable
from app.database.upsert import insert

log = logging.getLogger(__name__)

LENGTH = 32


class SharedSecret:
    """32 random bytes by name, read once.

    Until the database has answered, they are this process's own; then `value` changes, once.
    """

    def __init__(self, database: Database, name: str, *, retry_s: float = RETRY_S) -> None:
        self._database = database
        self._name = name
        self._retry_s = retry_s
        self._value = secrets.token_bytes(LENGTH)
        self._shared = False

    def __repr__(self) -> str:
        return f"<SharedSecret {self._name}>"

    @property
    def value(self) -> bytes:
        """The shared bytes, or this process's own while `shared` is false."""
        return self._value

    @property
    def shared(self) -> bool:
        """Return whether the bytes are those of the database."""
        return self._shared

    async def load(self) -> None:
        """Take the shared bytes, made if there are none yet. Raises DatabaseUnavailable."""
        if self._shared:
            return
        async with self._database.read() as connection:
            found = await self._read(connection)
        if found is None:
            async with self._database.write() as connection:
                made = insert(schema.secrets, self._database.dialect).values(
                    name=self._name, value=self._value
                )
                await connection.execute(made.on_conflict_do_nothing())
                found = await self._read(connection)  # another gateway may have come first
        assert found is not None
        self._value, self._shared = found, True

    async def run(self) -> None:
        """Load the shared bytes, however long the database takes to answer."""
        waited = False
        while not self._shared:
            try:
                await self.load()
            except DatabaseUnavailable as error:
                if not waited:
                    log.warning("secret %s is not shared yet: %s", self._name, error)
                waited = True
                await asyncio.sleep(self._retry_s)
        if waited:
            log.info("secret %s is shared", self._name)

    async def _read(self, connection: AsyncConnection) -> bytes | None:
        value = schema.secrets.c.value
        query = select(value).where(schema.secrets.c.name == self._name)
        found: bytes | None = (await connection.execute(query)).scalar_one_or_none()
        return found
