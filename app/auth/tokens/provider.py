"""An identity provider: its public keys, fetched in the background and replaced when they change.

No request waits for the provider, with one exception: a token that names a key which is not known
yet has the keys fetched, at most once in COOLDOWN_S, and waits for that. While the provider does
not answer, the keys that are known stay in use.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from app.auth.presented_key import invalid_key
from app.auth.tokens.key_set import KeySet
from app.auth.tokens.provider_fetch import FetchError
from app.errors import ServiceUnavailable
from app.settings import ProviderSettings

if TYPE_CHECKING:
    import jwt

log = logging.getLogger(__name__)

# Time from one fetch to the next, and after one that failed.
REFRESH_S = 300.0
RETRY_S = 15.0
# Time after a fetch in which unknown keys cause none.
COOLDOWN_S = 10.0


Chosen = TypeVar("Chosen", bound=ProviderSettings)


class IdentityProvider(Generic[Chosen]):
    """The keys of one provider."""

    def __init__(
        self,
        settings: Chosen,
        fetch: Callable[[], Awaitable[KeySet]],
        *,
        on_keys: Callable[[], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`fetch` raises FetchError; `on_keys` is called when the keys have changed."""
        self.settings = settings
        self._fetch = fetch
        self._on_keys = on_keys
        self._monotonic = monotonic
        self.keys = KeySet()
        self.failed = False  # the last fetch
        self._fetched_at = -COOLDOWN_S  # end of the last fetch
        self._fetching: asyncio.Task[None] | None = None

    async def find_key(self, kid: str | None, algorithm: str) -> "jwt.PyJWK":
        """Return the key of a token.

        Raises InvalidApiKey, and ServiceUnavailable while it may be a key that cannot be fetched.
        """
        if algorithm not in self.settings.algorithms:
            raise invalid_key()
        key = self.keys.find(kid, algorithm)
        if key is None:
            await self.refresh_if_old()
            key = self.keys.find(kid, algorithm)
        if key is None:
            if self.failed or not self.keys:
                raise ServiceUnavailable("access tokens cannot be checked at the moment; try again")
            raise invalid_key()
        return key

    async def refresh_if_old(self) -> None:
        """Fetch the keys, unless that was done a moment ago."""
        if self._monotonic() - self._fetched_at >= COOLDOWN_S:
            await self.refresh()

    async def refresh(self) -> None:
        """Fetch the keys; callers at the same time share the fetch."""
        if self._fetching is None:
            self._fetching = asyncio.create_task(self._refresh(), name="fetch public keys")
        # The cancellation of one caller must not cancel the fetch of the others.
        await asyncio.shield(self._fetching)

    async def _refresh(self) -> None:
        name = self.settings.name
        try:
            keys = await self._fetch()
        except Exception as error:
            if not self.failed:
                trace = None if isinstance(error, FetchError) else error
                log.warning("public keys of %s cannot be fetched: %s", name, error, exc_info=trace)
            self.failed = True
        else:
            if self.failed:
                log.info("public keys of %s fetched again", name)
            self.failed = False
            self.keys = keys
            self._on_keys()
        finally:
            self._fetched_at = self._monotonic()
            self._fetching = None

    async def run(self) -> None:
        """Fetch the keys again and again, until canceled."""
        while True:
            await self.refresh()
            await asyncio.sleep(RETRY_S if self.failed else REFRESH_S)

    async def close(self) -> None:
        """Cancel a fetch that is under way."""
        if self._fetching is not None:
            self._fetching.cancel()
            await asyncio.gather(self._fetching, return_exceptions=True)
