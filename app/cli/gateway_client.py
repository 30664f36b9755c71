"""Client of a running gateway: its address, the key for it, and its answers.

    address   --url, else GATEWAY_URL, else host and port of the configuration
    key       --admin-key, else GATEWAY_KEY, else GATEWAY_ADMIN_KEY, the root key of the gateway

GATEWAY_KEY is not a setting of the gateway, so that a gateway that is started in the same shell
does not take a key of its store for its root key. Variables may stand in .env.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import typer

from app.cli.faults import fail
from app.settings import ConfigError, load_server, variables

if TYPE_CHECKING:  # slow to import, and other commands need not wait
    import httpx

TIMEOUT_S = 30.0
T = TypeVar("T")

UrlOption = Annotated[
    str | None,
    typer.Option(
        help="Address of the gateway; default: GATEWAY_URL, then server.host and server.port of "
        "the configuration."
    ),
]
AdminKeyOption = Annotated[
    str | None,
    typer.Option(
        help="A key to /admin; default: GATEWAY_KEY, then GATEWAY_ADMIN_KEY, the gateway's root "
        "key."
    ),
]
DEFAULT_URL = "http://127.0.0.1:8000"
_NO_URL = "--url must be such as http://127.0.0.1:8000"


class _Error(msgspec.Struct):
    message: str


class _Refusal(msgspec.Struct):
    error: _Error


class Refused(Exception):
    """The gateway answered, with an error; its own words, fit for a terminal."""

    def __init__(self, where: str, status: int, message: str) -> None:
        super().__init__(f"{where} answers {status}: {message}")
        self.status = status
        self.message = message


class Gateway:
    """A running gateway. A fault ends the command with one line that does not hold the key."""

    def __init__(self, url: str | None, admin_key: str | None, config: Path | None = None) -> None:
        """Options that were not given are None."""
        import httpx

        hint = ""
        try:
            set_here = variables()
            if url is None:
                url = set_here.get("GATEWAY_URL")
            if url is None and (url := _configured_url(config)) is not None:
                hint = "; if the gateway has started with another port, give --url"
            if url is None:
                url = DEFAULT_URL
                hint = "; there is no gateway.yaml here: --config, --url or GATEWAY_URL says where"
        except ConfigError as error:
            fail(*error.faults)
        if admin_key is None:
            admin_key = set_here.get("GATEWAY_KEY") or set_here.get("GATEWAY_ADMIN_KEY")
        if not admin_key:
            fail(
                "the admin key is missing: set GATEWAY_KEY or give --admin-key; "
                "`vllm-gateway keys create --name me --role admin` makes one"
            )
        if not (admin_key.isascii() and admin_key.isprintable()):
            fail("the admin key holds a character that a header cannot carry")
        self._hint = hint
        try:
            base = httpx.URL(url)
        except httpx.InvalidURL:
            fail(_NO_URL)
        if base.scheme not in ("http", "https") or not base.host:
            fail(_NO_URL)
        self._base = base
        self.shown = f"{base.scheme}://{base.netloc.decode()}"  # without a password
        self.headers = {"authorization": f"Bearer {admin_key}"}
        # HTTP_PROXY would be sent the key, unencrypted, and reaches a loopback of its own machine.
        self.trust_env = base.scheme == "https" or not _is_loopback(base.host)

    def url(self, path: str) -> "httpx.URL":
        """Return the address of a path, which is quoted where it has to be."""
        import httpx

        try:
            return self._base.join(path)
        except httpx.InvalidURL:
            fail(_NO_URL)

    def ask(
        self,
        path: str,
        kind: type[T],
        params: Mapping[str, Any] | None = None,
        method: str = "GET",
        timeout: "float | httpx.Timeout" = TIMEOUT_S,
        json: object = None,
    ) -> T:
        """Return what the gateway answers. Raises Refused."""
        import httpx

        with self.told():
            answer = httpx.request(
                method,
                self.url(path),
                params=params,
                json=json,
                headers=self.headers,
                timeout=timeout,
                trust_env=self.trust_env,
            )
        return self.read(answer, kind)

    def read(self, answer: "httpx.Response", kind: type[T]) -> T:
        """Return what is in an answer. Raises Refused."""
        self.check(answer)
        try:
            return msgspec.json.decode(answer.content, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError):
            fail(f"{self.shown} does not answer as a gateway does")

    def check(self, answer: "httpx.Response") -> None:
        """Raise Refused for an error; its body must have been read."""
        if not answer.is_success:
            raise Refused(self.shown, answer.status_code, _message(answer.content))

    @contextmanager
    def told(self) -> Iterator[None]:
        """Turn what may go wrong on the way into one line."""
        import httpx

        try:
            yield
        except httpx.InvalidURL:
            fail(_NO_URL)
        except httpx.HTTPError as error:
            why = shown(str(error)) or type(error).__name__
            fail(f"no answer from {self.shown}: {why}{self._hint}")


def _configured_url(config: Path | None) -> str | None:
    """Return where the gateway of a configuration listens; None: there is no configuration.

    Raises ConfigError.
    """
    server = load_server(config)
    if server is None:
        return None
    if not server.port:
        raise ConfigError(["server.port is 0, a free one: name the address with --url"])
    return f"http://{server.local_host}:{server.port}"


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@contextmanager
def refusals() -> Iterator[None]:
    """Turn an error that the gateway answers into its lines and exit code 2."""
    try:
        yield
    except Refused as refused:
        fail(*str(refused).splitlines())
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def shown(text: str) -> str:
    """Return a text without what would steer a terminal or break a line."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


def _message(body: bytes) -> str:
    """Return what an error object says, for a terminal."""
    try:
        message = msgspec.json.decode(body, type=_Refusal).error.message
    except (msgspec.DecodeError, UnicodeDecodeError):
        return "is that a gateway?"
    return "\n".join(map(shown, message.splitlines()))
