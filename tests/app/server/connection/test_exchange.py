"""One request and its response, from a handler to the socket of a real client."""

import asyncio
from typing import Any

import pytest
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT

from app.asgi import BUFFERED_BYTES, ClientExchange
from tests.app.bare import serving
from tests.app.raw import request
from tests.app.server.connection.exchanges import OLD, PIECE, answered, exchanging, forever

LENGTH = (b"content-length", b"3")


# The head


async def test_head_carries_the_request_id_and_is_recorded() -> None:
    seen: list[object] = []

    async def handler(exchange: ClientExchange) -> None:
        seen.append(exchange.started)
        exchange.rate_lines = b"x-ratelimit-limit-requests: 5\r\n"
        exchange.extra_headers = [(b"vary", b"Origin")]
        await exchange.start_response(201, [(b"x-a", b"1")])
        seen.extend((exchange.started, exchange.status))
        await exchange.send_body(b"", more=False)

    answer = await answered(handler, request(b"", b"x-request-id: id-1"))
    assert seen == [False, True, 201]
    assert answer.status == 201
    assert answer.headers == {
        "x-a": "1",
        "x-ratelimit-limit-requests": "5",
        "vary": "Origin",
        "x-request-id": "id-1",
        "transfer-encoding": "chunked",
    }


async def test_header_of_the_request_is_the_last_of_several() -> None:
    async def handler(exchange: ClientExchange) -> None:
        await exchange.send_response(200, [], exchange.header(b"a") + b"," + exchange.header(b"b"))

    assert (await answered(handler, request(b"", b"A: 1", b"a: 2"))).body == b"2,"


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        (b"/v1/score", "/v1/score", b""),
        (b"/v1/score?a=%2F&b", "/v1/score", b"a=%2F&b"),
        (b"/v1/a%2Fb%3Fc", "/v1/a/b?c", b""),
        (b"/v1/a#fragment", "/v1/a", b""),
        (b"http://other/v1/score?a", "/v1/score", b"a"),
    ],
)
async def test_path_is_unquoted_and_without_host_and_query(
    target: bytes, path: str, query: bytes
) -> None:
    seen: list[object] = []

    async def handler(exchange: ClientExchange) -> None:
        seen.extend((exchange.path, exchange.query))
        await exchange.send_response(200, [], b"")

    await answered(handler, request(b"", path=target))
    assert seen == [path, query]


async def test_head_leaves_although_nothing_of_the_body_follows() -> None:
    async def handler(exchange: ClientExchange) -> None:
        await exchange.start_response(200, [])
        await forever()

    with pytest.raises(asyncio.CancelledError):
        async with exchanging(handler) as served:
            assert (await served.client.until(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")


# Pieces


async def test_pushed_pieces_leave_at_once() -> None:
    seen: list[object] = []

    async def handler(exchange: ClientExchange) -> None:
        await exchange.start_response(200, [])
        seen.extend((exchange.push(b"one"), exchange.push(b"two")))
        seen.extend((exchange.writable, exchange.bytes_out))
        await forever()

    with pytest.raises(asyncio.CancelledError):
        async with exchanging(handler) as served:
            assert (await served.client.until(b"two\r\n")).endswith(b"3\r\none\r\n3\r\ntwo\r\n")
    assert seen == [True, True, True, 6]


async def test_empty_piece_does_not_end_the_body() -> None:
    async def handler(exchange: ClientExchange) -> None:
        await exchange.start_response(200, [])
        for piece in (b"one", b"", b"two"):
            assert exchange.push(piece)
        await exchange.send_body(b"three", more=False)

    assert (await answered(handler)).body == b"onetwothree"


async def test_copy_begins_with_the_piece_after_it_was_set() -> None:
    copied: list[bytes] = []

    class Copy:
        def add(self, data: bytes) -> None:
            copied.append(data)

    async def handler(exchange: ClientExchange) -> None:
        await exchange.start_response(200, [])
        exchange.push(b"one")
        exchange.push(b"two")
        exchange.answer_copy = Copy()
        exchange.push(b"three")
        await exchange.send_body(b"four", more=False)

    assert (await answered(handler)).body == b"onetwothreefour"
    assert copied == [b"three", b"four"]


FRAMED = {
    "chunks": (request(), [], 200),
    "its length is told": (request(), [(b"content-length", b"6")], 200),
    "HTTP/1.0": (OLD, [], 200),
    "HTTP/1.0, its length is told": (OLD, [(b"content-length", b"6")], 200),
}


@pytest.mark.parametrize("kind", FRAMED)
async def test_pieces_are_framed_for_the_http_version(kind: str) -> None:
    payload, headers, status = FRAMED[kind]

    async def handler(exchange: ClientExchange) -> None:
        await exchange.start_response(status, headers)
        exchange.push(b"")
        exchange.push(b"one")
        await exchange.send_body(b"", more=True)
        await exchange.send_body(b"two", more=False)

    async with exchanging(handler, payload) as served:
        answer = await served.client.answer()
        if payload is OLD:
            assert await served.client.rest() == b""
    assert answer.body == b"onetwo"
    assert answer.whole
    assert ("transfer-encoding" in answer.headers) == (kind == "chunks")
    assert answer.headers.get("content-length") == ("6" if "length" in kind else None)


@pytest.mark.parametrize("size", [1, 15, 16, 4095, 4096, 70_000])
async def test_chunks_of_all_sizes_come_through(size: int) -> None:
    body = (PIECE + PIECE)[:size]

    async def handler(exchange: ClientExchange) -> None:
        await exchange.start_response(200, [])
        exchange.push(body)
        await exchange.send_body(body, more=True)
        await exchange.send_body(body, more=False)

    assert (await answered(handler)).body == body * 3


@pytest.mark.parametrize("whole", [False, True])
async def test_head_request_has_no_response_body(whole: bool) -> None:
    async def handler(exchange: ClientExchange) -> None:
        if whole:
            await exchange.send_response(200, [], b"one")
        else:
            await exchange.start_response(200, [LENGTH])
            exchange.push(b"on")
            await exchange.send_body(b"e", more=False)

    payload = request(None, method=b"HEAD")
    async with exchanging(handler, payload) as served:
        first = await served.client.answer(head_only=True)
        served.client.send(payload)
        second = await served.client.answer(head_only=True)
    assert first.headers["content-length"] == second.headers["content-length"] == "3"


@pytest.mark.parametrize("status", [204, 304])
@pytest.mark.parametrize("whole", [False, True])
async def test_status_without_a_body_has_no_framing(status: int, whole: bool) -> None:
    async def handler(exchange: ClientExchange) -> None:
        if whole:
            await exchange.send_response(status, [], b"")
        else:
            await exchange.start_response(status, [])
            await exchange.send_body(b"", more=False)

    async with exchanging(handler) as served:
        served.client.send(request())
        for _ in range(2):
            answer = await served.client.answer(head_only=True)
            assert answer.status == status
            assert {"transfer-encoding", "content-length"}.isdisjoint(answer.headers)


@pytest.mark.parametrize("status", [204, 205, 304])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("headers", [[], [LENGTH]], ids=["no length", "a length"])
async def test_body_of_a_status_without_one_is_not_sent(
    status: int, whole: bool, headers: list[tuple[bytes, bytes]]
) -> None:
    async def handler(exchange: ClientExchange) -> None:
        if whole:
            await exchange.send_response(status, headers, b"one")
        else:
            await exchange.start_response(status, headers)
            exchange.push(b"on")
            await exchange.send_body(b"e", more=False)

    async with exchanging(handler) as served:
        served.client.send(request())
        for _ in range(2):
            answer = await served.client.answer(head_only=True)
            assert answer.status == status
            assert "transfer-encoding" not in answer.headers
            length = {204: None, 205: "0", 304: "3" if headers else None}[status]
            assert answer.headers.get("content-length") == length


# Whole responses


async def test_whole_response_is_recorded_and_has_its_length() -> None:
    seen: list[object] = []

    async def handler(exchange: ClientExchange) -> None:
        await exchange.send_response(201, [(b"x-a", b"1")], b"one")
        seen.extend(
            (exchange.started, exchange.response_complete, exchange.status, exchange.bytes_out)
        )

    answer = await answered(handler)
    assert (answer.status, answer.body) == (201, b"one")
    assert (answer.headers["x-a"], answer.headers["content-length"]) == ("1", "3")
    assert seen == [True, True, 201, 3]


# The connection behind a response

KEPT = {
    "HTTP/1.1": (request(), True),
    "close": (request(b"", b"connection: close"), False),
    "HTTP/1.0": (OLD, False),
    "HTTP/1.0 that would stay": (
        request(b"", b"connection: keep-alive", version=b"1.0"),
        False,
    ),
}


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("kind", KEPT)
async def test_connection_is_kept_or_closed_as_requested(kind: str, whole: bool) -> None:
    payload, kept = KEPT[kind]

    async def handler(exchange: ClientExchange) -> None:
        if whole:
            await exchange.send_response(200, [], b"one")
        else:
            await exchange.start_response(200, [])
            await exchange.send_body(b"one", more=False)

    async with exchanging(handler, payload) as served:
        answer = await served.client.answer()
        assert answer.body == b"one"
        assert ("connection" in answer.headers) == (not kept)
        if kept:
            served.client.send(request())
            assert (await served.client.answer()).body == b"one"
        else:
            assert await served.client.rest() == b""


@pytest.mark.parametrize("started", [False, True])
async def test_response_that_is_not_whole_closes_the_connection(started: bool) -> None:
    async def handler(exchange: ClientExchange) -> None:
        if started:
            await exchange.start_response(200, [])
            await exchange.send_body(b"one", more=True)

    async with exchanging(handler, request() + request()) as served:
        said = await served.client.rest()
    assert said.endswith(b"3\r\none\r\n" if started else b"")
    assert said.count(b"HTTP/1.1") == int(started)


async def test_exception_of_a_handler_closes_the_connection_and_is_reported() -> None:
    contexts: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: contexts.append(context))

    async def handler(_: ClientExchange) -> None:
        raise LookupError("missing")

    async with serving(handler) as server, server.connected() as client:
        client.send(request())
        assert await client.rest() == b""
    assert [type(context["exception"]) for context in contexts] == [LookupError]


def test_buffered_bytes_is_the_high_water_mark_of_uvicorn() -> None:
    assert BUFFERED_BYTES == HIGH_WATER_LIMIT
