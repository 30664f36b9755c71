"""The client's side of a request, against a server whose client reads when the test says so."""

import asyncio
import json
from time import perf_counter
from typing import Any

import pytest
from starlette.types import Message

from app.errors import Dialect, EngineFailed, TooManyConnections
from app.relay.exchange import ANSWER, WRITE, ClientStalled, Exchange, Headers
from app.telemetry.access import RequestRecord

AGES = 20.0
SOON = 0.05


class Server:
    """What a server does for one answer: `open` says whether the client reads."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.messages: list[Message] = []
        self.written: list[bytes] = []
        self.answers: list[tuple[int, Headers, bytes]] = []

    async def send(self, message: Message) -> None:
        await self.open.wait()
        self.messages.append(message)
        if message["type"] == "http.response.body":
            self.written.append(message["body"])

    def write(self, data: bytes) -> bool:
        """Take everything, as a socket's buffer does, and say whether more may come."""
        self.written.append(data)
        return self.open.is_set()

    def answer(self, status: int, headers: Headers, body: bytes) -> bool:
        if self.open.is_set():
            self.answers.append((status, headers, body))
        return self.open.is_set()

    @property
    def bytes(self) -> bytes:
        return b"".join(self.written)


@pytest.fixture
def server() -> Server:
    return Server()


def exchange_with(
    server: Server,
    *,
    write: bool = True,
    timeout_s: float = AGES,
    dialect: Dialect = Dialect.OPENAI,
    headers: tuple[tuple[bytes, bytes], ...] = (),
) -> Exchange:
    scope: dict[str, Any] = {"type": "http", "headers": list(headers)}
    if write:
        scope["extensions"] = {WRITE: server.write, ANSWER: server.answer}
    record = RequestRecord("id-1", "/v1/completions", perf_counter())
    return Exchange(scope, server.send, record, dialect, timeout_s)


async def test_head_carries_the_request_id_and_is_recorded(server: Server) -> None:
    exchange = exchange_with(server)
    assert not exchange.started
    await exchange.start(201, [(b"x-a", b"1")])
    assert exchange.started
    assert exchange.record.status == 201
    assert server.messages[0]["status"] == 201
    assert server.messages[0]["headers"] == [(b"x-a", b"1"), (b"x-request-id", b"id-1")]


async def test_header_of_the_request_is_the_last_of_several(server: Server) -> None:
    exchange = exchange_with(server, headers=((b"a", b"1"), (b"a", b"2")))
    assert exchange.header(b"a") == b"2"
    assert exchange.header(b"b") == b""


async def test_pushed_pieces_are_written_at_once(server: Server) -> None:
    exchange = exchange_with(server)
    await exchange.start(200, [])
    assert exchange.push(b"one")
    assert exchange.push(b"two")
    assert server.written == [b"one", b"two"]
    assert exchange.settled
    assert exchange.record.bytes_out == 6


@pytest.mark.parametrize("write", [True, False])
async def test_what_a_slow_client_was_not_sent_waits_in_order(server: Server, write: bool) -> None:
    exchange = exchange_with(server, write=write)
    await exchange.start(200, [])
    server.open.clear()
    assert not exchange.push(b"one")
    assert not exchange.push(b"two")
    assert not exchange.push(b"three")
    assert not exchange.settled
    assert server.bytes == (b"one" if write else b"")
    settling = asyncio.create_task(exchange.settle())
    await asyncio.sleep(0)
    assert not exchange.push(b"four")  # while it settles
    server.open.set()
    await settling
    assert exchange.settled
    assert server.bytes == b"onetwothreefour"
    await exchange.body(b"end", more=False)
    assert server.bytes == b"onetwothreefourend"
    assert exchange.record.bytes_out == len(server.bytes)


async def test_stream_goes_on_at_once_after_it_has_settled(server: Server) -> None:
    exchange = exchange_with(server)
    await exchange.start(200, [])
    server.open.clear()
    assert not exchange.push(b"one")
    server.open.set()
    await exchange.settle()
    assert exchange.push(b"two")
    assert server.bytes == b"onetwo"


async def test_body_waits_for_what_was_pushed_before_it(server: Server) -> None:
    exchange = exchange_with(server, write=False)
    await exchange.start(200, [])
    exchange.push(b"one")
    await exchange.body(b"two", more=False)
    assert server.bytes == b"onetwo"
    assert exchange.complete


async def test_nothing_to_settle_costs_no_message(server: Server) -> None:
    exchange = exchange_with(server)
    await exchange.start(200, [])
    await exchange.settle()
    assert len(server.messages) == 1


async def test_answer_with_a_length_is_never_written_as_a_chunk(server: Server) -> None:
    exchange = exchange_with(server)
    await exchange.start(200, [(b"content-length", b"3")])
    assert not exchange.push(b"one")
    assert server.written == []
    await exchange.settle()
    assert server.messages[-1] == {"type": "http.response.body", "body": b"one", "more_body": True}


async def test_client_that_reads_nothing_more_has_stalled(server: Server) -> None:
    exchange = exchange_with(server, timeout_s=SOON)
    await exchange.start(200, [])
    server.open.clear()
    assert not exchange.push(b"one")
    with pytest.raises(ClientStalled, match=r"the client read nothing for 0\.05 s"):
        await exchange.settle()
    with pytest.raises(ClientStalled):
        await exchange.body(b"two", more=True)


async def test_client_that_reads_a_little_has_not_stalled(server: Server) -> None:
    exchange = exchange_with(server, timeout_s=AGES)
    await exchange.start(200, [])
    for number in range(20):
        server.open.clear()
        assert not exchange.push(b"%d," % number)
        settling = asyncio.create_task(exchange.settle())
        await asyncio.sleep(0)
        assert not settling.done()
        server.open.set()
        await settling
    assert server.bytes == b"".join(b"%d," % number for number in range(20))


# Whole answers

LENGTH = (b"content-length", b"3")


async def test_whole_answer_is_written_at_once(server: Server) -> None:
    exchange = exchange_with(server)
    exchange.standing = [(b"x-ratelimit-limit-requests", b"5")]
    await exchange.whole(201, [LENGTH], b"one")
    headers = [LENGTH, (b"x-request-id", b"id-1"), (b"x-ratelimit-limit-requests", b"5")]
    assert server.answers == [(201, headers, b"one")]
    assert server.messages == []
    assert exchange.started
    assert exchange.complete
    assert (exchange.record.status, exchange.record.bytes_out) == (201, 3)


@pytest.mark.parametrize(
    ("headers", "asked"),
    [
        pytest.param([], (), id="its length is not told"),
        pytest.param([LENGTH], ((b"origin", b"https://page"),), id="a layer adds to its head"),
    ],
)
async def test_whole_answer_goes_through_the_layers_where_it_must(
    server: Server, headers: Headers, asked: tuple[tuple[bytes, bytes], ...]
) -> None:
    exchange = exchange_with(server, headers=asked)
    await exchange.whole(200, headers, b"one")
    assert server.answers == []
    head, body = server.messages
    assert head["headers"] == [*headers, (b"x-request-id", b"id-1")]
    assert body == {"type": "http.response.body", "body": b"one", "more_body": False}
    assert exchange.complete


async def test_whole_answer_that_cannot_be_written_at_once_waits(server: Server) -> None:
    exchange = exchange_with(server)
    server.open.clear()
    sending = asyncio.create_task(exchange.whole(200, [LENGTH], b"one"))
    await asyncio.sleep(0)
    assert not sending.done()
    server.open.set()
    await sending
    assert server.answers == []
    assert [message["type"] for message in server.messages] == [
        "http.response.start",
        "http.response.body",
    ]
    assert exchange.record.bytes_out == 3


# Faults


@pytest.mark.parametrize("write", [True, False])
async def test_fault_before_the_head_is_a_whole_answer(server: Server, write: bool) -> None:
    exchange = exchange_with(server, write=write)
    await exchange.fail(TooManyConnections("too many"))
    if not write:
        head, last = server.messages
        assert not last["more_body"]
        server.answers = [(head["status"], head["headers"], last["body"])]
    [(status, pairs, body)] = server.answers
    headers = dict(pairs)
    assert status == exchange.record.status == 503
    assert headers[b"content-type"] == b"application/json"
    assert int(headers[b"content-length"]) == len(body)
    assert b"retry-after" in headers
    assert json.loads(body)["error"]["code"] == "too_many_connections"
    assert exchange.complete


@pytest.mark.parametrize("dialect", list(Dialect))
async def test_fault_in_a_stream_is_one_event_behind_what_was_pushed(
    server: Server, dialect: Dialect
) -> None:
    exchange = exchange_with(server, write=False, dialect=dialect)
    await exchange.start(200, [])
    exchange.streaming = True
    exchange.push(b"data: 1\n\n")
    await exchange.fail(EngineFailed("it failed"))
    name = b"event: error\n" if dialect is Dialect.ANTHROPIC else b""
    assert server.bytes.startswith(b"data: 1\n\n" + name + b'data: {"')
    assert server.bytes.endswith(b"}\n\n")
    assert not exchange.complete, "the framing shows that the stream is not whole"
    assert all(message.get("more_body", True) for message in server.messages)


async def test_fault_in_a_plain_answer_cannot_be_told(server: Server) -> None:
    exchange = exchange_with(server)
    await exchange.start(200, [(b"content-length", b"9")])
    await exchange.body(b"one", more=True)
    await exchange.fail(EngineFailed("it failed"))
    assert server.bytes == b"one"
    assert not exchange.complete


async def test_fault_after_a_whole_answer_is_not_told(server: Server) -> None:
    exchange = exchange_with(server)
    await exchange.start(200, [])
    exchange.streaming = True
    await exchange.body(b"one", more=False)
    await exchange.fail(EngineFailed("it failed"))
    assert server.bytes == b"one"
