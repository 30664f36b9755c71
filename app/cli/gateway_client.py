"""Client of a running gateway's admin API.

    address   --url, else GATEWAY_URL, else host and port of the configuration
    key       --admin-key, else GATEWAY_KEY, else GATEWAY_ADMIN_KEY, the gateway's root key
    TLS       GATEWAY_CLIENT_CERT, where server.tls.client_ca_file asks for a certificate

The variables may be set in .env. GATEWAY_KEY is not a setting: otherwise a gateway started in the
same shell would take an admin key of its store for its root key.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import msgspec

from app.cli.faults import fail
from app.cli.output import printable
from app.settings import ConfigError, TlsSettings, load_server, variables

if TYPE_CHECKING:  # slow to import
    import ssl

    import httpx

TIMEOUT_S = 30.0
T = TypeVar("T")

DEFAULT_URL = "http://127.0.0.1:8000"
_END_OF_CERTIFICATE = "-----END CERTIFICATE-----"
_INVALID_URL = "--url must look like http://127.0.0.1:8000"


class _ErrorBody(msgspec.Struct):
    class Error(msgspec.Struct):
        message: str

    error: Error


class RequestRefused(Exception):
    """The gateway answered with an error; its message is safe on a terminal."""

    def __init__(self, address: str, status: int, message: str) -> None:
        super().__init__(f"{address} answers {status}: {message}")
        self.status = status
        self.message = message


class GatewayClient:
    """A running gateway. A fault ends the command with one line, which never holds the key."""

    def __init__(self, url: str | None, admin_key: str | None, config: Path | None = None) -> None:
        """Take the options as given; None stands for an option that is not."""
        import httpx

        try:
            environment = variables()
            url, self._hint, tls = _find_url(url, environment, config)
        except ConfigError as error:
            fail(*error.faults)
        if admin_key is None:
            admin_key = environment.get("GATEWAY_KEY") or environment.get("GATEWAY_ADMIN_KEY")
        if not admin_key:
            fail(
                "the admin key is missing: set GATEWAY_KEY or give --admin-key; "
                "`vllm-gateway keys create --name me --role admin` makes one"
            )
        if not (admin_key.isascii() and admin_key.isprintable()):
            fail("the admin key holds a character that a header cannot carry")
        try:
            base = httpx.URL(url)
        except httpx.InvalidURL:
            fail(_INVALID_URL)
        if base.scheme not in ("http", "https") or not base.host:
            fail(_INVALID_URL)
        self._base = base
        # The gateway's paths are below that of the URL, where a proxy serves it.
        self._root_path = base.path.rstrip("/")
        netloc = base.netloc.decode()  # without credentials
        self.address = f"{base.scheme}://{netloc}{self._root_path}"
        # A proxy of HTTP_PROXY would see the key in plain text, and has a loopback of its own.
        is_plain = base.scheme == "http" and _is_loopback(base.host)
        self._options: dict[str, Any] = {
            "headers": {"authorization": f"Bearer {admin_key}"},
            "trust_env": tls is None and not is_plain,
            # Reading the authorities takes longer than a request, which needs none here.
            "verify": not is_plain and _verification(tls, environment.get("GATEWAY_CLIENT_CERT")),
        }

    def url(self, path: str) -> "httpx.URL":
        """Return the URL of a path, which is already quoted."""
        import httpx

        try:
            return self._base.join(self._root_path + path)
        except httpx.InvalidURL:
            fail(_INVALID_URL)

    def request(
        self,
        path: str,
        kind: type[T],
        *,
        params: Mapping[str, Any] | None = None,
        method: str = "GET",
        timeout: "float | httpx.Timeout" = TIMEOUT_S,
        json: object = None,
    ) -> T:
        """Send a request and return the decoded response. Raises RequestRefused."""
        return self.decode(
            self.send(path, params=params, method=method, timeout=timeout, json=json), kind
        )

    def send(self, path: str, *, method: str = "GET", **options: Any) -> "httpx.Response":
        """Send a request and return the response."""
        import httpx

        with self.transport_faults():
            return httpx.request(
                method, self.url(path), **self._options, **{"timeout": TIMEOUT_S, **options}
            )

    def stream(
        self, path: str, *, params: Mapping[str, Any], timeout: "httpx.Timeout"
    ) -> "AbstractContextManager[httpx.Response]":
        """Return the response of a GET request whose body is read as it arrives."""
        import httpx

        url = self.url(path)
        return httpx.stream("GET", url, params=params, timeout=timeout, **self._options)

    def decode(self, response: "httpx.Response", kind: type[T]) -> T:
        """Return the decoded body of a response. Raises RequestRefused."""
        self.check(response)
        try:
            return msgspec.json.decode(response.content, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self.fail_unexpected()

    def fail_unexpected(self) -> NoReturn:
        """End the command: the response is not one that a gateway sends."""
        fail(f"{self.address} does not answer as a gateway does")

    def check(self, response: "httpx.Response") -> None:
        """Raise RequestRefused for an error response, whose body must have been read."""
        if not response.is_success:
            message = _error_message(response.content)
            raise RequestRefused(self.address, response.status_code, message)

    @contextmanager
    def transport_faults(self) -> Iterator[None]:
        """Turn connection errors into one line and exit code 2."""
        import httpx

        try:
            yield
        except httpx.InvalidURL:
            fail(_INVALID_URL)
        except httpx.HTTPError as error:
            reason = printable(str(error)) or type(error).__name__
            hint = self._hint
            if "unable to get local issuer certificate" in reason or "self-signed" in reason:
                hint = "; set SSL_CERT_FILE to the certificate of an authority of your own"
            fail(f"no answer from {self.address}: {reason}{hint}")


def _find_url(
    url: str | None, environment: Mapping[str, str], config: Path | None
) -> tuple[str, str, TlsSettings | None]:
    """Return the gateway's URL, what to do if it does not answer, and its TLS if known.

    Raises ConfigError.
    """
    if url is not None:
        return url, "", None
    if (url := environment.get("GATEWAY_URL")) is not None:
        return url, "", None
    server = load_server(config)
    if server is None:
        hint = "; there is no gateway.yaml here: name the gateway with --config, --url or "
        return DEFAULT_URL, f"{hint}GATEWAY_URL", None
    if not server.port:
        raise ConfigError(["server.port is 0, a free port: name the address with --url"])
    hint = (
        "; if the gateway has started before server.port or server.tls changed, give --url or "
        "restart it"
    )
    return f"{server.scheme}://{server.local_host}:{server.port}", hint, server.tls


def _verification(tls: TlsSettings | None, client_cert: str | None) -> "ssl.SSLContext | bool":
    """Return what verifies the gateway's certificate; True: the authorities of the system.

    `tls` is that of a gateway on this machine: its own certificate is accepted and no other, since
    it names another host. `client_cert` is a PEM file with what the gateway asks of its clients.
    """
    if tls is None and client_cert is None:
        return True
    import ssl

    if tls is None:
        context = ssl.create_default_context()
    else:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        try:
            # The first of the file; the authority that follows has signed others' as well.
            leaf, end, _ = tls.cert_file.read_text("ascii").partition(_END_OF_CERTIFICATE)
            context.load_verify_locations(cadata=leaf + end)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            fail(f"server.tls.cert_file {tls.cert_file} cannot be read: {error}")
    if client_cert is not None:
        try:
            context.load_cert_chain(client_cert)
        except OSError as error:
            fail(f"GATEWAY_CLIENT_CERT {client_cert} has no certificate with its key: {error}")
    return context


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@contextmanager
def refusal_faults() -> Iterator[None]:
    """Turn an error response of the gateway into its lines and exit code 2."""
    try:
        yield
    except RequestRefused as refused:
        fail(*str(refused).splitlines())
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _error_message(body: bytes) -> str:
    """Return the message of an error object, safe on a terminal."""
    try:
        message = msgspec.json.decode(body, type=_ErrorBody).error.message
    except (msgspec.DecodeError, UnicodeDecodeError):
        return "is that a gateway?"
    return "\n".join(map(printable, message.splitlines()))
