"""An Authenticator with clocks that the test controls."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from app.auth.authenticator import Authenticator
from app.auth.key_store import KeyStore
from app.database import Database
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
