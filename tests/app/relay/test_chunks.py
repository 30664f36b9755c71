"""Chunks that pass with the engine's framing: nothing else differs from those that are parsed."""

import asyncio
import random
from typing import Any, cast

import httptools
import pytest

from app.asgi import ClientExchange, Headers
from app.continuation import Answer, Origin, Recording, Ways
from app.continuation.answer import without_token_ids
from app.relay.stream import SSE_HEADERS, EventStream
from app.routing import ContinuationTerms
from app.server.connection.exchange import Connection, HttpExchange
from app.telemetry.metrics import Buckets
from app.usage import StreamMeter
from engines.base import EngineDied, EngineFacts
from engines.http.connection import Http1Connection, Pool
from engines.spec import Timeouts
from tests.app.server.connection.exchanges import in_flight
from tests.fakes.chat_stream import chunk

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
TOKEN = chunk("demo", {"content": "x"})
OPENING = chunk("demo", {"role": "assistant", "content": ""}).replace(
    b'"prompt_token_ids":null', b'"prompt_token_ids":[1,2]'
)
WITH_ID = TOKEN.replace(b'"token_ids":null', b'"token_ids":[7]')
MARK = WITH_ID.replace(b'{"content":"x"}', b"{}")  # a token without text
EVENTS = (
    TOKEN,
    WITH_ID,
    WITH_ID,
    MARK,
    b"event: delta\n" + TOKEN,
    b"\n" + WITH_ID,
    b": comment\n\n",
    b'data: {"text":"\\n\\n \\"error\\" 3\\r\\n"}\n\n',
    b'data: {"error":{"message":"it failed"}}\n\n',
    b'data: {"choices":[{"finish_reason":"stop"}]}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n',
)
WAYS = (None, Ways(verify=True), Ways(replay=True), Ways(replay=True, verify=True))


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


class ResponseReader:
    """Reads the body of a response."""

    def __init__(self, response: bytes) -> None:
        self.body, self.whole = b"", False
        httptools.HttpResponseParser(self).feed_data(response)

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.whole = True


async def forwarded(
    reads: list[bytes],
    seed: int | None = None,
    ways: Ways | None = None,
    replayed: Answer | None = None,
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
    recording = None
    if ways is not None:
        origin = Origin("e", "demo", None, EngineFacts())
        recording = Recording("/v1/chat/completions", ways, ContinuationTerms(), origin)
    if recording is not None and replayed is not None:
        recording.begin_replay(replayed, 0, lambda: None)
    stream = EventStream(
        response,
        context,
        cast(ClientExchange, exchange),
        meter,
        Buckets((1.0,)),
        recording=recording,
    )
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


def recorded(stream: EventStream) -> tuple[object, ...]:
    """Return what is known of a stream for its continuation."""
    one = stream.recording
    if one is None:
        return ()
    # When the text is dropped for the token IDs depends on how many reads a batch is.
    way = None if one.ways.verify and one.ways.replay else one.next_way(begun=True).way
    return way, one.count_tokens(), one.has_ended()


def framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def reads_of(rng: random.Random) -> list[bytes]:
    """Return a stream in reads, most of which are one event in one chunk."""
    line_end = rng.choice((b"\n", b"\n", b"\r\n"))
    token, opening, *events, done = (
        event.replace(b"\n", line_end) for event in (TOKEN, OPENING, *EVENTS, b"data: [DONE]\n\n")
    )
    reads = [b"" if rng.random() < 0.3 else framed(opening)]
    for _ in range(30):
        data = rng.choice(events) if rng.random() < 0.5 else token
        way = rng.random()
        if way < 0.1:  # two chunks, or two events, or both
            cut = rng.randrange(1, len(data))
            pieces = [framed(data[:cut]), framed(data[cut:] + rng.choice((b"", token)))]
        elif way < 0.2:
            pieces = [b"0%X;a=b\r\n%b\r\n" % (len(data), data)]
        else:
            pieces = [framed(data)]
        for piece in pieces:
            cut = rng.randrange(len(piece)) if rng.random() < 0.2 else 0
            reads[-1] += piece[:cut]  # behind the one before, in one read
            reads.append(piece[cut:])
    return [data for data in [*reads, framed(done), b"0\r\n\r\n"] if data]


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("ways", WAYS)
async def test_client_gets_the_same_whichever_way_chunks_take(
    ways: Ways | None, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = reads_of(random.Random(seed))
    exchange, stream = await forwarded(reads, seed, ways)
    monkeypatch.setattr(EventStream, "pass_chunk", lambda *_: False)
    parsed_exchange, parsed = await forwarded(reads, seed, ways)
    answer = ResponseReader(written(exchange))
    assert answer.whole
    assert answer.body == ResponseReader(written(parsed_exchange)).body
    assert exchange.bytes_out == parsed_exchange.bytes_out == len(answer.body)
    assert stream.meter.events == parsed.meter.events
    assert stream.meter.usage == parsed.meter.usage
    assert stream.failed == parsed.failed
    assert recorded(stream) == recorded(parsed)


async def test_one_event_a_chunk_passes_with_its_framing(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[bytes] = []
    monkeypatch.setattr(HttpExchange, "push_chunk", lambda _, piece, size: passed.append(piece))
    await forwarded([framed(TOKEN)] * 5 + [b"0\r\n\r\n"])
    # The first one is sent behind the headers, after the parser has seen that it is whole.
    assert passed == [framed(TOKEN)] * 4


async def test_recorded_chunk_without_its_token_ids_is_framed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passed: list[tuple[bytes, int]] = []
    monkeypatch.setattr(
        HttpExchange, "push_chunk", lambda _, piece, size: passed.append((piece, size))
    )
    reads = [framed(one) for one in (OPENING, WITH_ID, WITH_ID, MARK)]
    _, stream = await forwarded([*reads, b"0\r\n\r\n"], ways=Ways(replay=True))
    assert passed == [(framed(TOKEN), len(TOKEN))] * 2
    assert stream.recording is not None
    assert stream.recording.count_tokens() == (2, 3)


def interrupted() -> Answer:
    """Return the record of a stream of one token."""
    answer = Answer(100)
    answer.add(OPENING + WITH_ID)
    answer.flush()
    return answer


@pytest.mark.parametrize("cut", [1, 20, len(OPENING) // 2, len(OPENING)])
async def test_replay_goes_on_where_its_first_event_comes_in_two_reads(cut: int) -> None:
    """It has the IDs of the whole prompt: over a network it is many reads."""
    first = framed(OPENING.replace(b"[1,2]", b"[1,2,7]"))
    reads = [first[:cut], first[cut:], framed(WITH_ID), b"0\r\n\r\n"]
    exchange, _ = await forwarded(reads, ways=Ways(replay=True), replayed=interrupted())
    assert ResponseReader(written(exchange)).body == TOKEN


async def test_ids_of_a_very_long_prompt_are_cut_out_of_many_reads() -> None:
    ids = b",".join([b"100000"] * 200_000)
    first = framed(OPENING.replace(b"[1,2]", b"[%b]" % ids))
    reads = [first[at : at + 65_536] for at in range(0, len(first), 65_536)]
    reads += [framed(WITH_ID), b"0\r\n\r\n"]
    exchange, stream = await forwarded(reads, ways=Ways(replay=True))
    assert ResponseReader(written(exchange)).body == without_token_ids(OPENING) + TOKEN
    assert stream.recording is not None
    assert stream.recording.count_tokens()[0] == 200_000


async def test_replay_that_begins_with_the_death_of_its_engine_may_go_on_elsewhere() -> None:
    dead = b'data: {"error":{"message":"EngineCore encountered an issue. See stack trace (above) '
    dead += b'for the root cause.","type":"InternalServerError","code":500}}\n\n'
    with pytest.raises(EngineDied):
        await forwarded([framed(dead)], ways=Ways(replay=True), replayed=interrupted())


async def test_size_that_comes_in_two_reads_is_not_taken_for_a_smaller_chunk() -> None:
    digits = b"%x" % len(TOKEN)
    payload = TOKEN + b"\r\n" + b"x" * (int(b"1" + digits, 16) - len(TOKEN) - 4) + b"\n\n"
    chunks = [framed(TOKEN), framed(TOKEN) + b"1", digits + b"\r\n" + TOKEN + b"\r\n"]
    rest = framed(payload)[len(b"1" + chunks[-1]) :]
    exchange, _ = await forwarded([*chunks, rest, b"0\r\n\r\n"])
    assert ResponseReader(written(exchange)).body == TOKEN * 2 + payload
