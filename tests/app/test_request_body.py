"""The body of a request that has arrived is taken at once, as `receive` would return it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from app.relay.exchange import BODY
from tests.app.bare import serving_app
from tests.app.raw import PATIENCE_S, Client, request

LARGE = bytes(range(256)) * 400  # past uvicorn's high-water mark
CHUNKED = b"transfer-encoding: chunked"
EXPECT = b"expect: 100-continue"

Application = Callable[[Scope, Receive, Send], Awaitable[None]]


def echo(taken: list[bytes | None]) -> Application:
    """Return an application that notes what it could take at once and answers with the body."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body = scope["extensions"][BODY]()
        taken.append(body)
        if body is None:
            body = await read(receive)
        await reply(send, body)

    return app


async def read(receive: Receive) -> bytes:
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return b"disconnected"
        piece: bytes = message["body"]
        body += piece
        if not message["more_body"]:
            return body


async def reply(send: Send, body: bytes) -> None:
    length = b"%d" % len(body)
    headers = [(b"content-length", length)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def sent(client: Client, payload: bytes) -> bytes:
    client.send(payload)
    return (await client.answer()).body


WHOLE = {
    "length": request(b"hello"),
    "chunked": request(None, CHUNKED) + b"2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n",
    "HTTP/1.0": request(b"hello", version=b"1.0"),
    "HTTP/1.0 that expects 100": request(b"hello", EXPECT, version=b"1.0"),
    "declined upgrade": request(b"hello", b"connection: upgrade", b"upgrade: h2c"),
}


@pytest.mark.parametrize("payload", WHOLE.values(), ids=WHOLE)
async def test_body_that_has_arrived_is_taken_at_once(payload: bytes) -> None:
    taken: list[bytes | None] = []
    async with serving_app(echo(taken)) as server, server.connected() as client:
        assert await sent(client, payload) == b"hello"
    assert taken == [b"hello"]


async def test_request_without_a_body_has_an_empty_one() -> None:
    taken: list[bytes | None] = []
    async with serving_app(echo(taken)) as server, server.connected() as client:
        assert await sent(client, request(None, method=b"GET")) == b""
    assert taken == [b""]


async def test_pipelined_bodies_are_taken_in_order() -> None:
    taken: list[bytes | None] = []
    async with serving_app(echo(taken)) as server, server.connected() as client:
        client.send(request(b"one") + request(b"two") + request(LARGE) + request(b"four"))
        got = [(await client.answer()).body for _ in range(4)]
    assert got == [b"one", b"two", LARGE, b"four"]
    assert taken[:2] == [b"one", b"two"]


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_body_of_which_more_is_to_come_is_read_with_receive(version: bytes) -> None:
    taken: list[bytes | None] = []
    async with serving_app(echo(taken)) as server, server.connected() as client:
        payload = request(b"hello", version=version)
        client.send(payload[:-2])
        async with asyncio.timeout(PATIENCE_S):
            while not taken:
                await asyncio.sleep(0.001)
        assert await sent(client, payload[-2:]) == b"hello"
    assert taken == [None]


async def test_client_that_expects_100_is_not_passed_over() -> None:
    taken: list[bytes | None] = []
    async with serving_app(echo(taken)) as server, server.connected() as client:
        client.send(request(b"hello", EXPECT))
        assert (await client.answer()).status == 100
        assert (await client.answer()).body == b"hello"
    assert taken == [None]


async def test_body_is_taken_once_and_then_receive_waits_for_the_disconnect() -> None:
    after: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        take = scope["extensions"][BODY]
        body = take()
        after.append(take())
        waiting: asyncio.Future[Message] = asyncio.ensure_future(receive())
        await asyncio.sleep(0)
        after.append(waiting.done())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body, "more_body": True})
        after.append((await waiting)["type"])
        after.append(take())

    async with serving_app(app) as server:
        async with server.connected() as client:
            client.send(request(b"hello"))
            await client.until(b"hello")
        async with asyncio.timeout(PATIENCE_S):
            while len(after) < 4:
                await asyncio.sleep(0.001)
    assert after == [None, False, "http.disconnect", None]


async def test_body_that_is_taken_is_not_kept_and_reading_goes_on() -> None:
    held: list[int] = []
    resumed: list[bool] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(0.05)  # for all of it to arrive
        [connection] = server.connections
        paused = connection.flow.read_paused
        body = scope["extensions"][BODY]()
        held.append(len(connection.cycle.body))
        resumed.append(paused and not connection.flow.read_paused)
        await reply(send, body or b"")

    async with serving_app(app) as server, server.connected() as client:
        assert await sent(client, request(LARGE[:70_000])) == LARGE[:70_000]
    assert held == [0]
    assert resumed == [True]
