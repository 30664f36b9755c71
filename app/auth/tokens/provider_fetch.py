"""Fetches documents of an identity provider, within bounds, without redirects and proxies."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.auth.tokens.key_set import KeySet, KeySetError
from app.settings import JwtSettings, ProviderSettings, is_fetched_safely

if TYPE_CHECKING:
    import httpx

# For everything that is fetched at once, such as discovery and keys.
FETCH_S = 10.0
MAX_DOCUMENT_BYTES = 2**20
MAX_TOKEN_FILE_BYTES = 2**16
DISCOVERY = "/.well-known/openid-configuration"
# OpenSSL's X509_V_ERR_… of a certificate that is signed by itself, or by one that is not known.
_UNKNOWN_AUTHORITY = {18, 19, 20, 21}


class FetchError(Exception):
    """Something could not be fetched; the message has the reason."""


@asynccontextmanager
async def connected(ca_file: Path | None) -> "AsyncIterator[httpx.AsyncClient]":
    """Open a client for a provider; its requests have FETCH_S together. Raises FetchError."""
    import httpx

    try:
        async with asyncio.timeout(FETCH_S):
            context = await asyncio.to_thread(_tls_context, ca_file)
            async with httpx.AsyncClient(
                verify=context, trust_env=False, follow_redirects=False, timeout=FETCH_S
            ) as client:
                yield client
    except TimeoutError:
        raise FetchError(f"no answer within {FETCH_S:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise FetchError(_reason(error)) from None
    except OSError as error:  # of a file
        raise FetchError(str(error)) from None


async def discover(client: "httpx.AsyncClient", issuer: str) -> Mapping[str, Any]:
    """Return the provider's document of OpenID Connect Discovery. Raises FetchError."""
    url = issuer.rstrip("/") + DISCOVERY
    found = read_object(url, await fetch(client, url))
    if found.get("issuer") != issuer:
        raise FetchError(f"{url} is of another issuer: check the setting issuer")
    return found


async def fetch_keys(
    client: "httpx.AsyncClient",
    uri: str,
    settings: ProviderSettings,
    headers: Mapping[str, str] | None = None,
) -> KeySet:
    """Return the provider's keys for the accepted algorithms. Raises FetchError."""
    document = await fetch(client, uri, headers)
    try:
        return await asyncio.to_thread(KeySet.parse, document, settings.algorithms)
    except KeySetError as error:
        raise FetchError(f"the answer is no key set: {error}") from None


def address_in(document: Mapping[str, Any], name: str, issuer: str) -> str:
    """Return an address in the document of discovery. Raises FetchError."""
    uri = document.get(name)
    if not isinstance(uri, str) or not is_fetched_safely(uri):
        raise FetchError(f"{issuer.rstrip('/')}{DISCOVERY} has no {name} with https://")
    return uri


async def fetch(
    client: "httpx.AsyncClient", url: str, headers: Mapping[str, str] | None = None
) -> bytes:
    """Return a document. Raises FetchError and httpx.HTTPError."""
    status, body = await send(client, "GET", url, headers=headers)
    if status != 200:
        raise FetchError(f"{url} answers with status {status}")
    return body


async def send(
    client: "httpx.AsyncClient",
    method: str,
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    form: Mapping[str, str] | None = None,
) -> tuple[int, bytes]:
    """Return the status and the body of a response. Raises FetchError and httpx.HTTPError."""
    body = bytearray()
    identity = {"accept": "application/json", "accept-encoding": "identity"}
    async with client.stream(
        method, url, headers={**identity, **(headers or {})}, data=form
    ) as response:
        async for part in response.aiter_raw():
            body += part
            if len(body) > MAX_DOCUMENT_BYTES:
                raise FetchError(f"{url} is over {MAX_DOCUMENT_BYTES} bytes")
    return response.status_code, bytes(body)


def read_object(url: str, body: bytes) -> Mapping[str, Any]:
    """Return an object of JSON; an empty one for another value. Raises FetchError."""
    try:
        found: Any = json.loads(body)
    except (ValueError, RecursionError):
        raise FetchError(f"{url} is not JSON") from None
    return found if isinstance(found, dict) else {}


class KeyFetch:
    """Fetches the keys of a provider of access tokens."""

    def __init__(self, settings: JwtSettings) -> None:
        self._settings = settings

    async def __call__(self) -> KeySet:
        """Return the keys. Raises FetchError."""
        settings = self._settings
        async with connected(settings.ca_file) as client:
            uri = settings.jwks_uri
            if uri is None:
                document = await discover(client, settings.issuer)
                uri = address_in(document, "jwks_uri", settings.issuer)
            return await fetch_keys(client, uri, settings, self._headers())

    def _headers(self) -> dict[str, str]:
        file = self._settings.jwks_token_file
        if file is None:
            return {}
        with file.open("rb") as opened:
            token = opened.read(MAX_TOKEN_FILE_BYTES).strip()
        if not token or not token.isascii() or len(token.split()) != 1:
            raise FetchError(f"{file} holds no token")
        return {"authorization": f"Bearer {token.decode()}"}


def _reason(error: Exception) -> str:
    """Return why a request failed; a certificate that is not accepted in words of its own."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            hint = (
                "; ca_file names its authority" if cause.verify_code in _UNKNOWN_AUTHORITY else ""
            )
            return f"its certificate is not accepted: {cause.verify_message.rstrip('.')}{hint}"
        cause = cause.__context__
    return str(error) or type(error).__name__


def _tls_context(ca_file: Path | None) -> ssl.SSLContext:
    """Return what trusts the authorities of a file as it is now. Raises OSError.

    None stands for the system's, which take 30 ms of CPU to read: they are read once.
    """
    if ca_file is not None:
        return _read_tls_context(ca_file, (_version(ca_file),))
    paths = ssl.get_default_verify_paths()  # None for what does not exist
    here = [Path(path) for path in (paths.cafile, paths.capath) if path]
    return _read_tls_context(None, tuple(map(_version, here)))


def _version(path: Path) -> tuple[int, ...]:
    """Return what changes with a file or directory. Raises OSError."""
    found = path.stat()
    return found.st_mtime_ns, found.st_ino, found.st_dev, found.st_size


@lru_cache(maxsize=8)
def _read_tls_context(
    ca_file: Path | None, _versions: tuple[tuple[int, ...], ...]
) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=ca_file)
