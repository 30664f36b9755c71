"""An identity provider: its public keys, fetched in the background and replaced when they change.

No request waits for the provider, with one exception: a token that names a key which is not known
yet has the keys fetched, at most once in COOLDOWN_S, and waits for that. While the provider does
not answer, the keys that are known stay in use.
"""

import asyncio
import json
import logging
import ssl
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.auth.presented_key import invalid_key
from app.auth.tokens.key_set import KeySet, KeySetError
from app.errors import ServiceUnavailable
from app.settings import JwtSettings, is_fetched_safely

if TYPE_CHECKING:
    import httpx
    import jwt

log = logging.getLogger(__name__)

# Time from one fetch to the next, and after one that failed.
REFRESH_S = 300.0
RETRY_S = 15.0
# Time after a fetch in which unknown keys cause none.
COOLDOWN_S = 10.0
# For a whole fetch: discovery and keys.
FETCH_S = 10.0
MAX_DOCUMENT_BYTES = 2**20
MAX_TOKEN_FILE_BYTES = 2**16
DISCOVERY = "/.well-known/openid-configuration"


class FetchError(Exception):
    """The keys could not be fetched; the message has the reason."""


class IdentityProvider:
    """The keys of one provider."""

    def __init__(
        self,
        settings: JwtSettings,
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
        self._failed = False
        self._fetched_at = -COOLDOWN_S  # end of the last fetch
        self._fetching: asyncio.Task[None] | None = None

    async def find_key(self, kid: str | None, algorithm: str) -> "jwt.PyJWK":
        """Return the key of a token. Raises InvalidApiKey, and ServiceUnavailable without keys."""
        if algorithm not in self.settings.algorithms:
            raise invalid_key()
        key = self.keys.find(kid, algorithm)
        if key is None and self._monotonic() - self._fetched_at >= COOLDOWN_S:
            await self.refresh()
            key = self.keys.find(kid, algorithm)
        if key is None:
            if not self.keys:
                raise ServiceUnavailable("access tokens cannot be checked at the moment; try again")
            raise invalid_key()
        return key

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
            if not self._failed:
                trace = None if isinstance(error, FetchError) else error
                log.warning("public keys of %s cannot be fetched: %s", name, error, exc_info=trace)
            self._failed = True
        else:
            if self._failed:
                log.info("public keys of %s fetched again", name)
            self._failed = False
            self.keys = keys
            self._on_keys()
        finally:
            self._fetched_at = self._monotonic()
            self._fetching = None

    async def run(self) -> None:
        """Fetch the keys again and again, until canceled."""
        while True:
            await self.refresh()
            await asyncio.sleep(RETRY_S if self._failed else REFRESH_S)

    async def close(self) -> None:
        """Cancel a fetch that is under way."""
        if self._fetching is not None:
            self._fetching.cancel()
            await asyncio.gather(self._fetching, return_exceptions=True)


class KeyFetch:
    """Fetches the keys of a provider, within bounds, without redirects and proxies."""

    def __init__(self, settings: JwtSettings) -> None:
        self._settings = settings

    async def __call__(self) -> KeySet:
        """Return the keys. Raises FetchError."""
        import httpx

        try:
            async with asyncio.timeout(FETCH_S):
                context = await asyncio.to_thread(_context, self._settings.ca_file)
                async with httpx.AsyncClient(
                    verify=context, trust_env=False, follow_redirects=False, timeout=FETCH_S
                ) as client:
                    uri = self._settings.jwks_uri or await self._discover(client)
                    document = await _get(client, uri, self._headers())
                return await asyncio.to_thread(KeySet.parse, document, self._settings.algorithms)
        except TimeoutError:
            raise FetchError(f"no answer within {FETCH_S:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise FetchError(str(error) or type(error).__name__) from None
        except KeySetError as error:
            raise FetchError(f"the answer is no key set: {error}") from None
        except OSError as error:  # of a file
            raise FetchError(str(error)) from None

    async def _discover(self, client: "httpx.AsyncClient") -> str:
        """Return the address of the keys. Raises FetchError."""
        issuer = self._settings.issuer
        url = issuer.rstrip("/") + DISCOVERY
        try:
            document: Any = json.loads(await _get(client, url, {}))
        except (ValueError, RecursionError):
            raise FetchError(f"{url} is not JSON") from None
        found = document if isinstance(document, dict) else {}
        if found.get("issuer") != issuer:
            raise FetchError(f"{url} is of another issuer: check auth.jwt[].issuer")
        uri = found.get("jwks_uri")
        if not isinstance(uri, str) or not is_fetched_safely(uri):
            raise FetchError(f"{url} has no jwks_uri with https://")
        return uri

    def _headers(self) -> dict[str, str]:
        file = self._settings.jwks_token_file
        if file is None:
            return {}
        with file.open("rb") as opened:
            token = opened.read(MAX_TOKEN_FILE_BYTES).strip()
        if not token or not token.isascii() or len(token.split()) != 1:
            raise FetchError(f"{file} holds no token")
        return {"authorization": f"Bearer {token.decode()}"}


async def _get(client: "httpx.AsyncClient", url: str, headers: dict[str, str]) -> bytes:
    """Return a document. Raises FetchError and httpx.HTTPError."""
    body = bytearray()
    identity = {"accept": "application/json", "accept-encoding": "identity"}
    async with client.stream("GET", url, headers={**identity, **headers}) as response:
        if response.status_code != 200:
            raise FetchError(f"{url} answers with status {response.status_code}")
        async for part in response.aiter_raw():
            body += part
            if len(body) > MAX_DOCUMENT_BYTES:
                raise FetchError(f"{url} is over {MAX_DOCUMENT_BYTES} bytes")
    return bytes(body)


def _context(ca_file: Path | None) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=ca_file)
