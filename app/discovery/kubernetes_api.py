"""The API server of Kubernetes, as far as EndpointSlices need it: list and watch over HTTPS.

Every error that leaves this module is an ApiError, without the token. Redirects are not followed
and proxies of the environment do not apply, since either could carry the token elsewhere.
"""

import asyncio
import contextlib
import os
import re
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from app.discovery.endpoint_slices import (
    MAX_REASON_CHARS,
    ApiError,
    LineSplitter,
    Page,
    VersionExpired,
    decode_page,
    decode_status,
    printable,
)

if TYPE_CHECKING:  # imported only where EndpointSlices are read
    import httpx

# Where the kubelet puts the files of a pod's service account.
DIRECTORY = Path("/var/run/secrets/kubernetes.io/serviceaccount")
MAX_FILE_BYTES = 2**20

CONNECT_S = 5.0
# Without a byte of a list for so long, or of a watch. The API server sends a bookmark about every
# minute, but promises none: a watch that is only quiet loses nothing by a new connection.
LIST_STALL_S = 30.0
WATCH_STALL_S = 120.0
# The API server ends a watch itself. The client's own bound is later by so much.
OVERDUE_S = 30.0

PAGE_SLICES = 100
# More than MAX_ENDPOINTS take.
MAX_PAGE_BYTES = 8 * 2**20
MAX_ERROR_BYTES = 64 * 2**10


class ServiceAccount:
    """The service account of this pod. Files are read at each use, since the kubelet renews them.

    All methods block for the time of a file access, and raise ApiError.
    """

    def __init__(
        self, directory: Path = DIRECTORY, environ: Mapping[str, str] = os.environ
    ) -> None:
        self._directory = directory
        self._environ = environ

    def address(self) -> tuple[str, int]:
        """Return host and port of the API server."""
        host = self._environ.get("KUBERNETES_SERVICE_HOST", "")
        port = self._environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise ApiError("this is no pod of Kubernetes: KUBERNETES_SERVICE_HOST is not set")
        if not re.fullmatch(r"[0-9A-Za-z.:-]+", host) or not re.fullmatch(r"[0-9]{1,5}", port):
            raise ApiError("KUBERNETES_SERVICE_HOST or KUBERNETES_SERVICE_PORT is malformed")
        return host, int(port)

    def namespace(self) -> str:
        """Return the namespace of this pod."""
        name = self._read("namespace").strip()
        if not re.fullmatch(rb"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", name):
            raise ApiError(f"{self._directory / 'namespace'} has no namespace")
        return name.decode()

    def token(self) -> str:
        """Return the bearer token."""
        token = self._read("token").strip()
        # A library's error about a malformed header would contain it.
        if not re.fullmatch(rb"[!-~]+", token):
            raise ApiError(f"{self._directory / 'token'} has no token")
        return token.decode()

    def tls(self) -> ssl.SSLContext:
        """Return a context that trusts the cluster's authority alone.

        It checks the host that is connected to, usually an IP address, against the addresses and
        names of the certificate. `ssl.create_default_context` would also apply VERIFY_X509_STRICT
        from Python 3.13 on, which authorities of many clusters do not pass.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        file = self._directory / "ca.crt"
        try:
            context.load_verify_locations(cafile=file)
        except OSError as error:  # also SSLError
            raise ApiError(f"{file}: {error.strerror or error}") from None
        return context

    def _read(self, name: str) -> bytes:
        path = self._directory / name
        try:
            with path.open("rb") as file:
                return file.read(MAX_FILE_BYTES)
        except OSError as error:
            raise ApiError(f"{path}: {error.strerror}") from None


class EndpointSliceApi:
    """The EndpointSlices of one namespace that a label selector matches."""

    def __init__(
        self,
        transport: "httpx.AsyncBaseTransport",
        account: ServiceAccount,
        namespace: str,
        selector: str,
        stall_s: float,
    ) -> None:
        self._transport = transport
        self._account = account
        self._path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        self._selector = selector
        self._stall_s = stall_s

    async def list_page(self, next_page: str = "") -> Page:
        """Return a page of the list: the first, or the next. Raises ApiError."""
        query = {"limit": str(PAGE_SLICES)}
        if next_page:
            query["continue"] = next_page
        body = bytearray()
        async with self._get(query, LIST_STALL_S) as response:
            async for part in response.aiter_raw():
                body += part
                if len(body) > MAX_PAGE_BYTES:
                    raise ApiError(f"a page of the list is over {MAX_PAGE_BYTES} bytes")
        return decode_page(bytes(body))

    @contextlib.asynccontextmanager
    async def watch(self, version: str, timeout_s: int) -> AsyncIterator[AsyncIterator[bytes]]:
        """Return the events after a version once the API server has accepted the watch.

        They end after `timeout_s` in seconds. Raises ApiError.
        """
        query = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(timeout_s),
        }
        try:
            async with (
                asyncio.timeout(timeout_s + OVERDUE_S),
                self._get(query, self._stall_s) as response,
                contextlib.aclosing(_lines(response)) as lines,
            ):
                yield lines
        except TimeoutError:
            raise ApiError("the API server did not end the watch in time", resumable=True) from None

    @contextlib.asynccontextmanager
    async def _get(
        self, query: Mapping[str, str], stall_s: float
    ) -> AsyncIterator["httpx.Response"]:
        """Send a request; return the response if it is a 200. Raises ApiError, also in the body."""
        import httpx

        host, port = self._account.address()
        token = await asyncio.to_thread(self._account.token)
        timeout = httpx.Timeout(CONNECT_S, read=stall_s)
        request = httpx.Request(
            "GET",
            httpx.URL(scheme="https", host=host, port=port, path=self._path),
            params={"labelSelector": self._selector, **query},
            headers={
                "Accept": "application/json",
                "Authorization": f"Bearer {token}",
                "User-Agent": "vllm-gateway",
            },
            extensions={"timeout": timeout.as_dict()},
        )
        try:
            response = await self._transport.handle_async_request(request)
            try:
                if response.status_code != 200:
                    raise await _refusal(response, token)
                yield response
            finally:
                await response.aclose()
        except httpx.TimeoutException as error:
            words = _words(error, token)
            raise ApiError(f"the API server timed out: {words}", resumable=True) from None
        except (httpx.TransportError, OSError) as error:
            raise ApiError(f"the API server: {_words(error, token)}", resumable=True) from None


@contextlib.asynccontextmanager
async def connect(
    account: ServiceAccount, namespace: str | None, selector: str, stall_s: float = WATCH_STALL_S
) -> AsyncIterator[EndpointSliceApi]:
    """Return the EndpointSlices of a namespace, by default this pod's. Raises ApiError."""
    import httpx

    if namespace is None:
        namespace = await asyncio.to_thread(account.namespace)
    tls = await asyncio.to_thread(account.tls)
    # Not a client: it would log URLs and follow the environment.
    transport = httpx.AsyncHTTPTransport(
        verify=tls, trust_env=False, limits=httpx.Limits(max_connections=2)
    )
    try:
        yield EndpointSliceApi(transport, account, namespace, selector, stall_s)
    finally:
        await transport.aclose()


async def _lines(response: "httpx.Response") -> AsyncGenerator[bytes, None]:
    splitter = LineSplitter()
    async for part in response.aiter_raw():
        for line in splitter.feed(part):
            yield line


async def _refusal(response: "httpx.Response", token: str) -> ApiError:
    """Return the error of a response that is not a 200."""
    body = bytearray()
    async for part in response.aiter_raw():
        body += part
        if len(body) > MAX_ERROR_BYTES:
            break
    status = decode_status(bytes(body))
    code = response.status_code
    if code == 410:
        return VersionExpired("the resource version has expired")
    words = printable(status.message or "").replace(token, "…")
    reason = f"the API server answered {code}: {words}"[:MAX_REASON_CHARS].rstrip(": ")
    given = response.headers.get("retry-after", "")
    retry_after_s = float(given) if re.fullmatch(r"[0-9]{1,6}", given) else status.retry_after_s
    # Too many requests: a list would cost more than a watch. After other errors the version may be
    # wrong: an API server whose database was restored answers 504 to a version from its future.
    return ApiError(reason, resumable=code == 429, retry_after_s=retry_after_s)


def _words(error: Exception, token: str) -> str:
    """Return what an error of the connection says, at least its name.

    The error for a response that is not HTTP quotes it, and it may be an echo of the request.
    """
    text = f"{type(error).__name__} {error}".replace(token, "…")
    return text[:MAX_REASON_CHARS].strip()
