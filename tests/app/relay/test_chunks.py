"""Chunks that pass with the engine's framing: nothing else differs from those that are parsed."""

import asyncio
import random
from typing import Any, cast

import httptools
import pytest

from app.asgi import ClientExchange, Headers
from app.relay.stream import SSE_HEADERS, EventStream
from app.server.connection.exchange import Connection, HttpExchange
from app.telemetry.metrics import Buckets
from app.usage import StreamMeter
from engines.http.connection import Http1Connection, Pool
from engines.spec import Timeouts
from tests.app.server.connection.exchanges import in_flight
from tests.fakes.chat_stream import chunk

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
TOKEN = chunk("demo", {"content": "x"})
EVENTS = (
    TOKEN,
    TOKEN,
    TOKEN.replace(b"\n", b"\r\n"),
    b"event: delta\n" + TOKEN,
    b": comment\n\n",
    b'data: {"text":"\\n\\n \\"error\\" 3\\r\\n"}\n\n',
    b'data: {"error":{"message":"it failed"}}\n\n',
    b'data: {"choices":[{"finish_reason":"stop"}]}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n',
)


class Transport:
    """The connection to a client, which is full now and then; and one to an engine."""

    def __init__(self, seed: int | None = None) -> None:
        self.written = b""
        self.write_paused = self.read_paused = False
        self._random = None if seed is None else random.Random(seed)

    def write(self, data: bytes) -> None:
        self.written += data
        self.write_paused = self._random is not None and self._random.random() < 0.1

    async def drain(self) -> None:
        self.write_paused = False

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        pass

    resume_reading = abort = pause_reading


class Engine:
    """A pool of no connections."""

    address = "engine"
    timeouts = Timeouts()
    least_timeout_s = 60.0

    def release(self, connection: Http1Connection) -> None:
        pass

    discard = release


class Client:
    """The client's end of its connection."""

    headers: Headers = ()

    def __init__(self, transport: Transport) -> None:
        self.loop = asyncio.get_running_loop()
        self.transport = self.flow = transport
        self.server_state = self
        self.default_headers = self.headers

    def exchange_completed(self, exchange: HttpExchange) -> None:
        pass


class Answer:
    """Reads the body of a response."""

    def __init__(self, response: bytes) -> None:
        self.body, self.whole = b"", False
        httptools.HttpResponseParser(self).feed_data(response)

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.whole = True


async def forwarded(
    reads: list[bytes], seed: int | None = None
) -> tuple[HttpExchange, EventStream]:
    """Return what is left of a stream whose bytes have come from the engine in these reads."""
    client = Client(Transport(seed))
    exchange = HttpExchange(
        cast(Connection, client), cast(Any, None), "POST", "/v1/chat/completions", b"", []
    )
    engine = Http1Connection(cast(Pool, Engine()), client.loop)
    engine.connection_made(cast(asyncio.BaseTransport, Transport()))
    response, head = engine.begin(b"", b"")
    engine.data_received(HEAD)
    await head
    context = in_flight(cast(ClientExchange, exchange))
    meter = StreamMeter(withhold=True)
    stream = EventStream(response, context, cast(ClientExchange, exchange), meter, Buckets((1.0,)))
    running = asyncio.create_task(stream.run(SSE_HEADERS))
    await asyncio.sleep(0)
    for data in reads:
        engine.data_received(data)
        if seed is not None and seed % 2:
            await asyncio.sleep(0)
    await running
    engine.connection_lost(None)
    return exchange, stream


def written(exchange: HttpExchange) -> bytes:
    """Return the bytes that the client has been sent."""
    return cast(Client, exchange._connection).transport.written


def framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def reads_of(rng: random.Random) -> list[bytes]:
    """Return a stream in reads, most of which are one event in one chunk."""
    reads = [b""]
    for _ in range(30):
        data = rng.choice(EVENTS) if rng.random() < 0.5 else TOKEN
        way = rng.random()
        if way < 0.1:  # two chunks, or two events, or both
            cut = rng.randrange(1, len(data))
            pieces = [framed(data[:cut]), framed(data[cut:] + rng.choice((b"", TOKEN)))]
        elif way < 0.2:
            pieces = [b"0%X;a=b\r\n%b\r\n" % (len(data), data)]
        else:
            pieces = [framed(data)]
        for piece in pieces:
            cut = rng.randrange(len(piece)) if rng.random() < 0.2 else 0
            reads[-1] += piece[:cut]  # behind the one before, in one read
            reads.append(piece[cut:])
    return [data for data in [*reads, framed(b"data: [DONE]\n\n"), b"0\r\n\r\n"] if data]


@pytest.mark.parametrize("seed", range(60))
async def test_client_gets_the_same_whichever_way_chunks_take(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = reads_of(random.Random(seed))
    exchange, stream = await forwarded(reads, seed)
    monkeypatch.setattr(EventStream, "pass_chunk", lambda *_: False)
    parsed_exchange, parsed = await forwarded(reads, seed)
    answer = Answer(written(exchange))
    assert answer.whole
    assert answer.body == Answer(written(parsed_exchange)).body
    assert exchange.bytes_out == parsed_exchange.bytes_out == len(answer.body)
    assert stream.meter.events == parsed.meter.events
    assert stream.meter.usage == parsed.meter.usage
    assert stream.failed == parsed.failed


async def test_one_event_a_chunk_passes_with_its_framing(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[bytes] = []
    monkeypatch.setattr(HttpExchange, "push_chunk", lambda _, piece, size: passed.append(piece))
    await forwarded([framed(TOKEN)] * 5 + [b"0\r\n\r\n"])
    # The first one is sent behind the headers, after the parser has seen that it is whole.
    assert passed == [framed(TOKEN)] * 4


async def test_size_that_comes_in_two_reads_is_not_taken_for_a_smaller_chunk() -> None:
    digits = b"%x" % len(TOKEN)
    payload = TOKEN + b"\r\n" + b"x" * (int(b"1" + digits, 16) - len(TOKEN) - 4) + b"\n\n"
    chunks = [framed(TOKEN), framed(TOKEN) + b"1", digits + b"\r\n" + TOKEN + b"\r\n"]
    rest = framed(payload)[len(b"1" + chunks[-1]) :]
    exchange, _ = await forwarded([*chunks, rest, b"0\r\n\r\n"])
    assert Answer(written(exchange)).body == TOKEN * 2 + payload
