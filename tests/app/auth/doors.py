"""An Authenticator with clocks that the test controls."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from app.auth.authenticator import Authenticator
from app.auth.key_store import KeyStore
from app.auth.keys import Change, Credential
from app.database import Database, DatabaseUnavailable
from app.settings import LimitSettings

Headers = list[tuple[bytes, bytes]]

LIMITS = LimitSettings(requests_per_minute=60, tokens_per_minute=1000, concurrent_requests=2)


@dataclass
class Clock:
    """A wall clock and a monotonic clock."""

    wall: float = 1_800_000_000.0
    monotonic: float = 0.0

    def advance(self, seconds: float) -> None:
        """Advance both clocks."""
        self.wall += seconds
        self.monotonic += seconds

    def wall_ms(self) -> int:
        return round(self.wall * 1000)


class WatchedStore(KeyStore):
    """The real store, whose look-ups are counted and may be slow, held or made to fail."""

    def __init__(self, database: Database, clock: Clock) -> None:
        super().__init__(database, now_ms=clock.wall_ms)
        self.finds: Counter[str] = Counter()
        self.delay_s = 0.0
        self.at_once = 0
        self.most_at_once = 0
        self.down = False
        self.broken = False
        self.read = asyncio.Event()  # a look-up has read what it will come back with
        # Set: look-ups come back at once; cleared: when it is set.
        self.released = asyncio.Event()
        self.released.set()

    async def find(self, key_id: str) -> tuple[int, Credential | None]:
        self._check_up()
        self.finds[key_id] += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            found = await super().find(key_id)
            self.read.set()
            await self.released.wait()
            await asyncio.sleep(self.delay_s)
        finally:
            self.at_once -= 1
        return found

    async def changed_since(self, seen: int | None) -> tuple[int, dict[str, Change]]:
        self._check_up()
        return await super().changed_since(seen)

    async def touch(self, used_ms: Mapping[str, int]) -> None:
        self._check_up()
        await super().touch(used_ms)

    def _check_up(self) -> None:
        if self.broken:
            raise ZeroDivisionError
        if self.down:
            raise DatabaseUnavailable("the database does not answer: it is a test")


def nowhere() -> KeyStore:
    """A store that is never reached."""
    return KeyStore(Database("sqlite+aiosqlite://"))


def door(
    static: Iterable[bytes] = (),
    *,
    store: KeyStore | None = None,
    clock: Clock | None = None,
    **fields: Any,
) -> Authenticator:
    """Return an Authenticator; `static` are digests."""
    clock = clock or Clock()
    return Authenticator(
        store or nowhere(),
        static=tuple(static),
        now=lambda: clock.wall,
        monotonic=lambda: clock.monotonic,
        **{"limits": LIMITS, "offline_grace_s": 3600.0, **fields},
    )


def bearer(key: bytes | str) -> Headers:
    """Return the headers of a request with this key."""
    return [(b"authorization", b"Bearer " + (key.encode() if isinstance(key, str) else key))]
