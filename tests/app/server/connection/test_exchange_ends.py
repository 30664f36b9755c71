"""Slow and disconnected clients, canceled requests, and reports of unhandled exceptions."""

import asyncio
import json
from typing import ClassVar, cast

import pytest

from app.asgi import ClientDisconnected, ClientExchange, ClientStalled, ExchangeHandler
from app.errors import EngineFailed, GatewayError, InvalidApiKey, TooManyConnections
from app.relay.response import send_error
from app.server.connection import HttpExchange
from app.server.connection.exchange import Connection
from tests.app.raw import request
from tests.app.server.connection.exchanges import (
    PIECE,
    answered,
    exchanging,
    fill,
    forever,
    in_flight,
)
from tests.waiting import wait_until

SOON = 0.05


# A slow client


async def test_pieces_for_a_slow_client_are_queued_in_order() -> None:
    filled: list[bytes] = []
    seen: list[object] = []

    async def handler(exchange: ClientExchange) -> None:
        await exchange.start_response(200, [])
        filled.append(await fill(exchange))
        seen.extend((exchange.push(b"one"), exchange.push(b"two"), exchange.writable))
        settling = asyncio.create_task(exchange.flush())
        await asyncio.sleep(0)
        seen.append(exchange.push(b"three"))  # while it settles
        filled.append(b"")
        await settling
        seen.append(exchange.writable)
        await exchange.send_body(b"end", more=False)
        seen.append(exchange.bytes_out)

    async with exchanging(handler, slow=True) as served:
        await wait_until(lambda: len(filled) >= 2)
        served.read_on()
        answer = await served.client.answer()
    expected = filled[0] + b"onetwothreeend"
    assert answer.body == expected
    assert seen == [False, False, False, False, True, len(expected)]


async def test_stream_continues_at_once_after_flush() -> None:
    filled: list[bytes] = []
    seen: list[object] = []

    async def handler(exchange: ClientExchange) -> None:
        await exchange.start_response(200, [])
        filled.append(await fill(exchange))
        await exchange.flush()
        seen.append(exchange.push(b"two"))
        await exchange.send_body(b"", more=False)

    async with exchanging(handler, slow=True) as served:
        await wait_until(lambda: filled)
        served.read_on()
        assert (await served.client.answer()).body == filled[0] + b"two"
    assert seen == [True]


async def test_client_that_has_read_its_chunks_gets_more_although_no_chunk_follows() -> None:
    full = asyncio.Event()
    sent = [b"one"]

    async def handler(exchange: ClientExchange) -> None:
        await exchange.start_response(200, [])
        exchange.push(b"one")
        while exchange.takes_chunks:
            exchange.push_chunk(b"%x\r\n%b\r\n" % (len(PIECE), PIECE), len(PIECE))
            sent.append(PIECE)
        assert not exchange.writable
        full.set()
        await wait_until(lambda: exchange.writable)
        exchange.push(b"two")
        await exchange.flush()
        await exchange.send_body(b"", more=False)

    async with exchanging(handler, slow=True) as served:
        await full.wait()
        served.read_on()
        assert (await served.client.answer()).body == b"".join([*sent, b"two"])


async def test_two_writers_that_wait_for_a_slow_client_both_continue() -> None:
    filled: list[bytes] = []
    waiting = asyncio.Event()

    async def handler(exchange: ClientExchange) -> None:
        await exchange.start_response(200, [])
        filled.append(await fill(exchange))
        exchange.push(b"one")
        other = asyncio.create_task(exchange.flush())  # as a keep-alive does next to the stream
        await asyncio.sleep(0)
        exchange.push(b"two")
        waiting.set()
        await exchange.flush()
        await other
        await exchange.send_body(b"end", more=False)

    async with exchanging(handler, slow=True) as served:
        await waiting.wait()
        served.read_on()
        assert (await served.client.answer()).body == filled[0] + b"onetwoend"


async def test_piece_waits_for_a_slow_client() -> None:
    size = 8_000_000
    seen: list[bool] = []

    async def handler(exchange: ClientExchange) -> None:
        await exchange.start_response(200, [])
        await exchange.send_body(b"x" * size, more=True)
        last = asyncio.create_task(exchange.send_body(b"last", more=False))
        await asyncio.sleep(0.01)
        seen.append(last.done())
        await last

    async with exchanging(handler, slow=True) as served:
        await wait_until(lambda: seen)
        served.read_on()
        assert len((await served.client.answer()).body) == size + 4
    assert seen == [False]


async def test_pipelined_response_waits_until_the_previous_one_is_read() -> None:
    size = 8_000_000
    begun: list[ClientExchange] = []

    async def handler(exchange: ClientExchange) -> None:
        begun.append(exchange)
        await exchange.send_response(200, [], b"x" * size)

    async with exchanging(handler, request() * 2, slow=True) as served:
        await wait_until(lambda: len(begun) >= 2)
        await asyncio.sleep(0.01)
        assert [exchange.response_complete for exchange in begun] == [True, False]
        served.read_on()
        for _ in range(2):
            assert len((await served.client.answer()).body) == size


async def test_flush_without_unsent_pieces_does_not_wait() -> None:
    async def handler(exchange: ClientExchange) -> None:
        await exchange.start_response(200, [])
        with pytest.raises(StopIteration):
            exchange.flush().send(None)
        await exchange.send_body(b"", more=False)

    await answered(handler)


async def test_client_that_reads_nothing_more_has_stalled() -> None:
    seen: list[str] = []

    async def handler(exchange: ClientExchange) -> None:
        await exchange.start_response(200, [])
        await fill(exchange)
        exchange.stall_s = SOON
        for send in (exchange.flush(), exchange.send_body(b"two", more=True)):
            try:
                await send
            except ClientStalled as fault:
                seen.append(str(fault))

    async with exchanging(handler, slow=True) as served:
        await wait_until(lambda: len(seen) >= 2)
        served.read_on()
        assert b"two" not in await served.client.rest()  # and the connection closes
    assert seen == ["the client read nothing for 0.05 s"] * 2


async def test_disconnect_while_waiting_for_a_slow_client_is_noticed() -> None:
    faults: list[object] = []
    filled = asyncio.Event()

    async def handler(exchange: ClientExchange) -> None:
        await exchange.start_response(200, [])
        await fill(exchange)
        filled.set()
        try:
            await exchange.flush()
        except asyncio.CancelledError:
            faults.append(exchange.take_fault())

    async with exchanging(handler, slow=True):
        await filled.wait()
    assert [type(fault) for fault in faults] == [ClientDisconnected]


# Cut off from outside


@pytest.mark.parametrize("first", [EngineFailed("it failed"), None])
async def test_request_that_is_cut_gets_the_fault_once(first: GatewayError | None) -> None:
    faults: list[object] = []
    begun: list[ClientExchange] = []

    async def handler(exchange: ClientExchange) -> None:
        assert isinstance(exchange, HttpExchange)
        begun.append(exchange)
        try:
            await forever()
        except asyncio.CancelledError:
            task = exchange.task
            assert task is not None
            faults.extend((task.cancelling(), exchange.take_fault(), exchange.take_fault()))
            faults.append(task.cancelling())
            await asyncio.sleep(0)  # it may wait again
            await exchange.send_response(401, [], b"")

    async with exchanging(handler) as served:
        while not begun:
            await asyncio.sleep(0)
        second = InvalidApiKey("cut off", "disabled")
        for error in filter(None, (first, second)):
            begun[0].cut(error)
        assert (await served.client.answer()).status == 401
        begun[0].cut(second)  # it has ended
    assert faults == [1, first or second, None, 0]


async def test_request_with_a_complete_response_is_not_cut() -> None:
    ended = asyncio.Event()

    async def handler(exchange: ClientExchange) -> None:
        await exchange.send_response(200, [], b"one")
        assert isinstance(exchange, HttpExchange)
        exchange.cut(EngineFailed("too late"))
        exchange.disconnect()
        await asyncio.sleep(0)
        ended.set()

    assert (await answered(handler)).body == b"one"
    assert ended.is_set()


# Errors


def failing(error: GatewayError, before: ExchangeHandler) -> ExchangeHandler:
    """Return a handler that fails after it has begun."""

    async def handler(exchange: ClientExchange) -> None:
        await before(exchange)
        await send_error(in_flight(exchange), error)

    return handler


async def test_error_before_the_head_is_a_whole_response() -> None:
    async def nothing(_: ClientExchange) -> None: ...

    answer = await answered(failing(TooManyConnections("too many"), nothing))
    assert answer.status == 503
    assert answer.headers["content-type"] == "application/json"
    assert int(answer.headers["content-length"]) == len(answer.body)
    assert "retry-after" in answer.headers
    assert answer.code == "too_many_connections"


@pytest.mark.parametrize("path", [b"/v1/messages", b"/v1/chat/completions"])
async def test_error_in_a_stream_is_one_event_after_the_pushed_pieces(path: bytes) -> None:
    async def stream(exchange: ClientExchange) -> None:
        await exchange.start_response(200, [])
        exchange.streaming = True
        exchange.push(b"data: 1\n\n")

    answer = await answered(failing(EngineFailed("it failed"), stream), request(path=path))
    name = b"event: error\n" if path == b"/v1/messages" else b""
    assert answer.body.startswith(b"data: 1\n\n" + name + b'data: {"')
    assert answer.body.endswith(b"}\n\n")
    assert answer.whole, "agents report a cut connection instead of the event before it"
    json.loads(answer.body.rpartition(b"data: ")[2])


async def test_error_in_a_plain_response_closes_the_connection() -> None:
    async def plain(exchange: ClientExchange) -> None:
        await exchange.start_response(200, [(b"content-length", b"9")])
        await exchange.send_body(b"one", more=True)

    async with exchanging(failing(EngineFailed("it failed"), plain)) as served:
        assert (await served.client.rest()).endswith(b"\r\n\r\none")


async def test_error_after_a_complete_response_is_not_sent() -> None:
    async def whole(exchange: ClientExchange) -> None:
        await exchange.start_response(200, [])
        exchange.streaming = True
        await exchange.send_body(b"one", more=False)

    last = request(b"", b"connection: close")
    async with exchanging(failing(EngineFailed("it failed"), whole), last) as served:
        assert (await served.client.answer()).body == b"one"
        assert await served.client.rest() == b""


async def test_disconnect_before_the_first_step_still_runs_the_handler() -> None:
    """A request whose task was canceled unstarted would leave no record."""
    faults: list[object] = []
    ended = asyncio.Event()

    async def handler(exchange: ClientExchange) -> None:
        try:
            await forever()
        except asyncio.CancelledError:
            faults.append(exchange.take_fault())
            ended.set()

    class StubConnection:
        loop = asyncio.get_running_loop()
        tasks: ClassVar[set[asyncio.Task[None]]] = set()

    connection = cast(Connection, StubConnection())
    exchange = HttpExchange(connection, handler, method="POST", path="/", query=b"", headers=[])
    exchange.start()
    exchange.disconnect()
    await ended.wait()
    assert [type(fault) for fault in faults] == [ClientDisconnected]
