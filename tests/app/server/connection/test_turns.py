"""One client holds neither the event loop nor much memory, whatever it sends at once."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from app.asgi import ClientExchange
from app.server.connection import HttpExchange, protocol
from app.server.connection.protocol import MAX_PIPELINED
from tests.app.bare import Bare, serving, serving_app
from tests.app.raw import Client, request
from tests.waiting import wait_until

CHUNKED = b"transfer-encoding: chunked"
PIECE = 256 * 1024  # about what a socket is read of at once
MINIMAL = 18  # bytes of the shortest request


class Echo:
    """Answers with path and body, once it may go on."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.may_read = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.begun.set()
        await self.may_read.wait()
        body = b""
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message["body"]
            more = message["more_body"]
        self.bodies.append(body)
        await self.may_answer.wait()
        path = scope["path"].encode()
        headers = [(b"content-length", b"%d" % len(path))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": path})

    async def serve(self, exchange: ClientExchange) -> None:
        """Do the same for a request of the data plane."""
        self.begun.set()
        with suppress(asyncio.CancelledError):  # the client has disconnected
            await self.may_read.wait()
            body = b""
            while piece := await exchange.read_body():
                body += piece
            self.bodies.append(body)
            await self.may_answer.wait()
            await exchange.send_response(200, [], exchange.path.encode())


@pytest.fixture
def echo() -> Echo:
    return Echo()


Bound = Callable[..., AbstractAsyncContextManager[Bare]]


@pytest.fixture(params=["application", "data plane"])
def bound(request: pytest.FixtureRequest, echo: Echo) -> Bound:
    """Serves the echo with bounds of one's own, by either way through a connection."""
    if request.param == "application":
        return partial(serving_app, echo)
    return partial(serving, echo.serve)


@pytest.fixture
async def server(bound: Bound) -> AsyncIterator[Bare]:
    async with bound() as one:
        yield one


@asynccontextmanager
async def rounds() -> AsyncIterator[list[int]]:
    """Count the rounds of the event loop."""
    count = [0]

    async def tick() -> None:
        while True:
            count[0] += 1
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    try:
        yield count
    finally:
        ticking.cancel()


def only(server: Bare) -> Any:
    """Return the server's side of the only connection."""
    [connection] = server.connections
    return connection


def bytes_held(cycle: Any) -> int:
    """Return how much of a request's body is held by either kind of request."""
    return sum(map(len, cycle._body)) if isinstance(cycle, HttpExchange) else len(cycle.body)


async def until_settled(server: Bare) -> None:
    """Return when the only connection neither reads nor parses any more."""
    await wait_until(lambda: only(server).flow.read_paused)
    await asyncio.sleep(0.01)


def get(path: bytes) -> bytes:
    return b"GET %b HTTP/1.1\r\n\r\n" % path


async def read_paths(client: Client, count: int) -> list[bytes]:
    return [(await client.answer()).body for _ in range(count)]


# The event loop


@pytest.mark.parametrize("chunk", [b"1\r\na\r\n", b"1;ext\r\na\r\n"])
async def test_many_tiny_chunks_do_not_block_the_event_loop(
    server: Bare, echo: Echo, monkeypatch: pytest.MonkeyPatch, chunk: bytes
) -> None:
    monkeypatch.setattr(protocol, "MAX_PARSE_S", 0.0)
    echo.may_read.set()
    echo.may_answer.set()
    count = PIECE // len(chunk)
    async with server.connected() as client, rounds() as turns:
        client.send(request(None, CHUNKED) + chunk * count + b"0\r\n\r\n")
        assert (await client.answer()).status == 200
    assert echo.bodies == [b"a" * count]
    assert turns[0] > PIECE // protocol.SLICE // 2


async def test_body_of_known_length_is_parsed_in_one_iteration(
    server: Bare, echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "MAX_PARSE_S", 0.0)
    fed: list[int] = []
    feed = protocol.ClientConnection._feed

    def noted(connection: protocol.ClientConnection, data: bytes) -> None:
        fed.append(len(data))
        feed(connection, data)

    monkeypatch.setattr(protocol.ClientConnection, "_feed", noted)
    echo.may_read.set()
    echo.may_answer.set()
    body = bytes(range(256)) * 256
    async with server.connected() as client:
        client.send(request(body) + get(b"/next"))
        assert await read_paths(client, 2) == [b"/v1/completions", b"/next"]
    assert echo.bodies == [body, b""]
    assert max(fed) > protocol.SLICE


@pytest.mark.parametrize("turn_s", [0.0, 0.001])
async def test_chunks_of_all_sizes_come_through_slices_unchanged(
    server: Bare, echo: Echo, monkeypatch: pytest.MonkeyPatch, turn_s: float
) -> None:
    monkeypatch.setattr(protocol, "MAX_PARSE_S", turn_s)
    body = bytes(range(256)) * 2000
    pieces, start, size = [], 0, 1
    while start < len(body):
        pieces.append(body[start : start + size])
        start += size
        size = size * 3 % 10_007
    payload = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    async with server.connected() as client:
        client.send((request(None, CHUNKED) + payload + b"0\r\nx-trailer: 1\r\n\r\n") * 2)
        await until_settled(server)
        assert bytes_held(only(server).cycle) <= 65536 + protocol.SLICE
        echo.may_read.set()
        echo.may_answer.set()
        assert len(await read_paths(client, 2)) == 2
    assert echo.bodies == [body, body]


# Requests that wait behind another one


async def test_flood_of_requests_behind_one_waits_unparsed_and_is_answered_in_order(
    server: Bare, echo: Echo
) -> None:
    count = PIECE // MINIMAL
    paths = [b"/%d" % n for n in range(count)]
    echo.may_read.set()
    async with server.connected() as client:
        client.send(get(b"/first") + b"".join(get(path) for path in paths))
        await until_settled(server)
        assert echo.bodies == [b""]
        echo.may_answer.set()
        for path in [b"/first", *paths[:500]]:
            assert len(only(server).pipeline) <= MAX_PIPELINED + protocol.SLICE // MINIMAL
            assert await read_paths(client, 1) == [path]


async def test_bodies_of_requests_that_wait_are_bounded_in_sum(server: Bare, echo: Echo) -> None:
    body = b"b" * 30_000
    echo.may_read.set()
    async with server.connected() as client:
        client.send(request(body) * MAX_PIPELINED)
        await until_settled(server)
        waiting = sum(bytes_held(cycle) for cycle, _ in only(server).pipeline)
        assert waiting <= protocol.MAX_PIPELINED_BYTES + 2 * protocol.SLICE
        echo.may_answer.set()
        assert len(await read_paths(client, MAX_PIPELINED)) == MAX_PIPELINED
    assert echo.bodies == [body] * MAX_PIPELINED


async def test_pipelined_large_body_is_read_after_the_request_before_it(
    server: Bare, echo: Echo
) -> None:
    body = bytes(range(256)) * 4000
    echo.may_read.set()
    async with server.connected() as client:
        client.send(get(b"/first") + request(body) + get(b"/last"))
        await until_settled(server)
        echo.may_answer.set()
        assert await read_paths(client, 3) == [b"/first", b"/v1/completions", b"/last"]
    assert echo.bodies == [b"", body, b""]


@pytest.mark.slow
async def test_deadlines_do_not_run_while_reading_is_paused(bound: Bound, echo: Echo) -> None:
    half = request(None, b"content-length: 5") + b"he"
    behind = get(b"/x") * (2 * MAX_PIPELINED) + half
    echo.may_read.set()
    async with (
        bound(header_timeout_s=0.1, body_timeout_s=0.1) as server,
        server.connected() as client,
    ):
        client.send(get(b"/first") + behind)
        await until_settled(server)
        await asyncio.sleep(0.3)
        client.send(b"llo")
        echo.may_answer.set()
        got = await read_paths(client, 2 * MAX_PIPELINED + 2)
    assert got[-1] == b"/v1/completions"
    assert echo.bodies[-1] == b"hello"


@pytest.mark.slow
@pytest.mark.parametrize("half", [b"GET / HT", request(None, b"content-length: 5") + b"he"])
async def test_deadlines_run_again_once_reading_resumes(
    bound: Bound, echo: Echo, half: bytes
) -> None:
    echo.may_read.set()
    async with (
        bound(header_timeout_s=0.1, body_timeout_s=0.1) as server,
        server.connected() as client,
    ):
        client.send(get(b"/first") + get(b"/x") * (2 * MAX_PIPELINED) + half)
        await until_settled(server)
        echo.may_answer.set()
        await read_paths(client, 2 * MAX_PIPELINED + 1)
        assert (await client.answer()).status == 408


@pytest.mark.slow
async def test_connection_that_was_paused_is_kept_alive(bound: Bound, echo: Echo) -> None:
    async with bound(header_timeout_s=0.1) as server, server.connected() as client:
        for _ in range(2):
            client.send(request(b"b" * 100_000))
            await until_settled(server)
            echo.may_read.set()
            echo.may_answer.set()
            assert (await client.answer()).status == 200
            echo.may_read.clear()
            await asyncio.sleep(0.3)


@pytest.mark.parametrize("length", [60_000, 1_000_000])
async def test_unread_body_is_released_after_the_response(length: int) -> None:
    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body"})

    async def refuse_exchange(exchange: ClientExchange) -> None:
        await exchange.send_response(401, [], b"")

    for serve in (serving_app(refuse), serving(refuse_exchange)):
        async with serve as server, server.connected() as client:
            client.send(request(None, b"content-length: %d" % length) + b"b" * 60_000)
            assert (await client.answer()).status == 401
            assert bytes_held(only(server).cycle) == 0


async def test_disconnect_drops_unparsed_requests(server: Bare, echo: Echo) -> None:
    async with server.connected() as client:
        client.send(get(b"/first") + get(b"/x") * (PIECE // 20))
        await until_settled(server)
    echo.may_read.set()
    echo.may_answer.set()
    await wait_until(lambda: not server.connections)
    assert len(server.peers) == 0
    assert len(echo.bodies) < PIECE // 20
