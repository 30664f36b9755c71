"""The body of a request: taken at once where it has arrived, else read piece by piece."""

import asyncio

import pytest

from app.asgi import ClientDisconnected, ClientExchange
from app.server.connection import HttpExchange
from tests.app.bare import serving
from tests.app.raw import Client, request
from tests.waiting import wait_until

LARGE = bytes(range(256)) * 400  # past uvicorn's high-water mark
CHUNKED = b"transfer-encoding: chunked"
EXPECT = b"expect: 100-continue"


class Echo:
    """Notes what of each body could be taken at once, and answers with the body."""

    def __init__(self) -> None:
        self.taken: list[bytes | None] = []

    async def serve(self, exchange: ClientExchange) -> None:
        body = exchange.take_body()
        self.taken.append(body)
        if body is None:
            body = await read(exchange)
        await exchange.send_response(200, [], body)


async def read(exchange: ClientExchange) -> bytes:
    body = b""
    while piece := await exchange.read_body():
        body += piece
    return body


@pytest.fixture
def echo() -> Echo:
    return Echo()


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
async def test_body_that_has_arrived_is_taken_at_once(echo: Echo, payload: bytes) -> None:
    async with serving(echo.serve) as server, server.connected() as client:
        assert await sent(client, payload) == b"hello"
    assert echo.taken == [b"hello"]


async def test_request_without_a_body_has_an_empty_one(echo: Echo) -> None:
    async with serving(echo.serve) as server, server.connected() as client:
        assert await sent(client, request(None, method=b"GET")) == b""
    assert echo.taken == [b""]


async def test_pipelined_bodies_are_taken_in_order(echo: Echo) -> None:
    async with serving(echo.serve) as server, server.connected() as client:
        client.send(request(b"one") + request(b"two") + request(LARGE) + request(b"four"))
        got = [(await client.answer()).body for _ in range(4)]
    assert got == [b"one", b"two", LARGE, b"four"]
    assert echo.taken[:2] == [b"one", b"two"]


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_incomplete_body_is_read(echo: Echo, version: bytes) -> None:
    async with serving(echo.serve) as server, server.connected() as client:
        payload = request(b"hello", version=version)
        client.send(payload[:-2])
        await wait_until(lambda: echo.taken)
        assert await sent(client, payload[-2:]) == b"hello"
    assert echo.taken == [None]


async def test_client_that_expects_100_gets_it_once(echo: Echo) -> None:
    async with serving(echo.serve) as server, server.connected() as client:
        client.send(request(None, EXPECT, b"content-length: 5"))
        assert (await client.answer()).status == 100
        client.send(b"he")
        await asyncio.sleep(0)
        client.send(b"llo")
        assert (await client.answer()).body == b"hello"
    assert echo.taken == [None]


async def test_client_that_expects_100_gets_it_although_its_body_has_arrived(
    echo: Echo,
) -> None:
    async with serving(echo.serve) as server, server.connected() as client:
        client.send(request(b"hello", EXPECT))
        assert (await client.answer()).status == 100
        assert (await client.answer()).body == b"hello"
    assert echo.taken == [None]


async def test_refused_client_that_expects_100_does_not_get_it() -> None:
    async def refuse(exchange: ClientExchange) -> None:
        await exchange.send_response(401, [], b"")

    async with serving(refuse) as server, server.connected() as client:
        client.send(request(None, EXPECT, b"content-length: 5"))
        assert (await client.answer()).status == 401
        assert await client.rest() == b""


async def test_body_is_taken_once_and_reading_on_finds_its_end() -> None:
    after: list[bytes | None] = []

    async def serve(exchange: ClientExchange) -> None:
        body = exchange.take_body()
        after.append(exchange.take_body())
        after.append(await exchange.read_body())
        await exchange.send_response(200, [], body or b"")

    async with serving(serve) as server, server.connected() as client:
        assert await sent(client, request(b"hello")) == b"hello"
    assert after == [b"", b""]


async def test_client_that_disconnects_while_its_body_is_read_cancels_the_request() -> None:
    faults: list[object] = []

    async def serve(exchange: ClientExchange) -> None:
        try:
            await read(exchange)
        except asyncio.CancelledError:
            faults.append(exchange.take_fault())
            faults.append(exchange.take_fault())

    async with serving(serve) as server:
        async with server.connected() as client:
            client.send(request(b"hello")[:-2])
            await wait_until(lambda: server.state.tasks)
        await wait_until(lambda: not server.state.tasks)
    assert [type(fault) for fault in faults] == [ClientDisconnected, type(None)]


async def test_body_that_is_taken_is_released_and_reading_continues() -> None:
    held: list[int] = []
    resumed: list[bool] = []

    async def serve(exchange: ClientExchange) -> None:
        assert isinstance(exchange, HttpExchange)
        await wait_until(lambda: not exchange.more_body)
        [connection] = server.connections
        paused = connection.flow.read_paused
        body = exchange.take_body()
        held.append(len(connection.cycle._body))
        resumed.append(paused and not connection.flow.read_paused)
        await exchange.send_response(200, [], body or b"")

    async with serving(serve) as server, server.connected() as client:
        assert await sent(client, request(LARGE[:70_000])) == LARGE[:70_000]
    assert held == [0]
    assert resumed == [True]


async def test_body_of_a_slow_reader_is_buffered_up_to_a_bound() -> None:
    may_read = asyncio.Event()
    held: list[int] = []

    async def serve(exchange: ClientExchange) -> None:
        [connection] = server.connections
        await wait_until(lambda: connection.flow.read_paused)
        held.append(sum(map(len, connection.cycle._body)))
        await may_read.wait()
        await exchange.send_response(200, [], b"%d" % len(await read(exchange)))

    body = b"b" * 8_000_000
    async with serving(serve) as server, server.connected() as client:
        client.send(request(body))
        await wait_until(lambda: held)
        may_read.set()
        assert (await client.answer()).body == b"%d" % len(body)
    assert 65536 < held[0] < 1_000_000
