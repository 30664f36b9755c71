"""The key that an engine on a network asks for on every path."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from engines.inside.vllm_gateway_key import FLAG, KEY, RequireKey

Message = dict[str, Any]
RIGHT = (b"authorization", b"Bearer secret")
WRONG = [
    [],
    [(b"authorization", b"Bearer secre")],
    [(b"authorization", b"Bearer secret2")],
    [(b"authorization", b"Basic secret")],
    [(b"authorization", "Bearer sécret".encode())],
    [(b"authorization", b"Bearer other"), RIGHT],
    [(b"x-api-key", b"secret")],
]


async def passed(
    scope_type: str, headers: list[tuple[bytes, bytes]], **scope: Any
) -> tuple[bool, list[Message]]:
    """Return whether a request reaches the application, and what is sent in its place."""
    reached, sent = [], []

    async def app(scope: Message, _: Callable[[], Awaitable[Message]], send: Any) -> None:
        reached.append(scope)

    async def receive() -> Message:
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    await RequireKey(app)({"type": scope_type, "headers": headers, **scope}, receive, send)
    return bool(reached), sent


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "secret")


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/health", "/score", "/"])
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
async def test_request_needs_the_key_on_every_path(path: str, method: str) -> None:
    assert await passed("http", [RIGHT], path=path, method=method) == (True, [])
    reached, [start, _] = await passed("http", [], path=path, method=method)
    assert (reached, start["status"]) == (False, 401)


@pytest.mark.parametrize("headers", WRONG)
async def test_wrong_key_is_refused(headers: list[tuple[bytes, bytes]]) -> None:
    reached, [start, body] = await passed("http", headers)
    assert (reached, start["status"]) == (False, 401)
    assert b"secret" not in body["body"]


async def test_websocket_needs_the_key() -> None:
    assert await passed("websocket", [RIGHT]) == (True, [])
    reached, [close] = await passed("websocket", [])
    assert (reached, close["type"]) == (False, "websocket.close")


async def test_unknown_scope_is_refused_and_lifespan_is_not() -> None:
    assert (await passed("new", []))[0] is False
    assert (await passed("lifespan", []))[0] is True


@pytest.mark.parametrize("value", [None, ""])
def test_server_without_a_key_does_not_start(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEY) if value is None else monkeypatch.setenv(KEY, value)
    with pytest.raises(KeyError):
        RequireKey(lambda *_: None)  # type: ignore[arg-type]


def test_flag_names_the_class() -> None:
    assert f"--middleware={RequireKey.__module__}.{RequireKey.__name__}" == FLAG
