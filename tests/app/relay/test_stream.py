"""Keep-alive comments of silent streams, and errors after them."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from app.asgi import ClientExchange
from app.errors import EngineFailed
from app.relay.response import send_error
from app.relay.stream import SSE_HEADERS, send_comments
from app.settings import ServerSettings
from app.sse import COMMENT
from tests.app.raw import Client, answers, asking, connected, request
from tests.app.server.connection.exchanges import exchanging, in_flight
from tests.fakes.chat_stream import chunk
from tests.fakes.vllm import Fake
from tests.gateway import Gateway, remote, running, serving_demo, settings_for
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

QUIET_S = 0.03
EVENT = chunk("demo", {"content": "x"})


def serving(
    fake: Fake, tmp_path: Path, timeouts: dict[str, float] | None = None, **server: Any
) -> AbstractAsyncContextManager[Gateway]:
    """Run a gateway; by default its streams are kept alive and its engine has all the time."""
    model = {"name": "demo", "engines": [remote(fake.url, timeouts=timeouts or {})]}
    server = {"sse_keepalive_s": QUIET_S, **server}
    return running(settings_for(model, run_dir=tmp_path, server=server))


@pytest.fixture
async def gateway(fake: Fake, tmp_path: Path) -> AsyncIterator[Gateway]:
    async with serving(fake, tmp_path) as one:
        yield one
        await asyncio.wait_for(one.state.admission.wait_until_idle(), PATIENCE_S)
        await fake.until_idle()


def stream(verb: str, path: bytes = b"/v1/chat/completions", **more: Any) -> bytes:
    """Return a request for a stream in which the engine performs `verb`."""
    version = more.pop("version", b"1.1")
    return request(asking(stream=True, fake=verb, **more), path=path, version=version)


async def comments(client: Client, count: int) -> None:
    """Read so many comments and nothing else, as far as chunks and events go."""
    for _ in range(count):
        # A chunk of its own: the size, the comment, the end of the chunk.
        assert await client.until(b"\r\n") == b"%x\r\n" % len(COMMENT)
        assert await client.until(b"\n\n\r\n") == COMMENT + b"\r\n"


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/v1/messages"])
async def test_comment_is_sent_while_the_engine_has_not_answered(
    gateway: Gateway, path: bytes
) -> None:
    async with connected(gateway) as client:
        client.send(stream("hang", path))
        head = await client.until(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        assert b"content-type: text/event-stream; charset=utf-8\r\n" in head
        assert b"cache-control: no-cache\r\n" in head
        assert head.count(b"x-request-id: ") == 1
        await comments(client, 3)


async def test_comment_is_sent_between_tokens(gateway: Gateway) -> None:
    async with connected(gateway) as client:
        client.send(stream("stall:1"))
        assert b" 200 " in await client.until(b"\r\n\r\n")
        await client.until(EVENT + b"\r\n")
        await comments(client, 3)


async def test_comment_reaches_an_http_1_0_client(gateway: Gateway) -> None:
    async with connected(gateway) as client:
        client.send(stream("hang", version=b"1.0"))
        assert b" 200 " in await client.until(b"\r\n\r\n")
        for _ in range(3):
            assert await client.until(b"\n\n") == COMMENT
    async with connected(gateway) as client:
        client.send(stream("stall:1", version=b"1.0"))
        await client.until(EVENT)
        for _ in range(3):
            assert await client.until(b"\n\n") == COMMENT


# An engine that says what a test tells it, when the test tells it


class Puppet:
    """An engine that is well and answers every request with what `say` gives it."""

    def __init__(self) -> None:
        self._words: asyncio.Queue[bytes | None] = asyncio.Queue()

    def say(self, data: bytes | None) -> None:
        """Have it send this; None: hang up."""
        self._words.put_nowait(data)

    def say_chunk(self, data: bytes) -> None:
        """Have it send one chunk; an empty one is the last."""
        self.say(b"%x\r\n%b\r\n" % (len(data), data))

    def say_head(self) -> None:
        """Have it begin a stream."""
        self.say(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET"):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        else:
            while (data := await self._words.get()) is not None:
                writer.write(data)
        writer.close()


@pytest.fixture
async def puppet() -> Puppet:
    return Puppet()


@pytest.fixture
async def before_puppet(puppet: Puppet, tmp_path: Path) -> AsyncIterator[Gateway]:
    """A gateway with the puppet as its engine."""
    server = await asyncio.start_server(puppet.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    quick = {"sse_keepalive_s": QUIET_S}
    async with serving_demo(tmp_path, url, server=quick) as one:
        yield one
        puppet.say(None)
        await asyncio.wait_for(one.state.admission.wait_until_idle(), PATIENCE_S)
    server.close()
    await server.wait_closed()


def without_comments(body: bytes) -> bytes:
    """Return the events of a stream, after making sure that each comment stands between two."""
    kept = []
    for block in body.split(b"\n\n"):
        if block != COMMENT.strip():
            assert COMMENT.strip() not in block, "a comment inside an event"
            kept.append(block)
    return b"\n\n".join(kept)


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
async def test_stream_without_its_comments_is_byte_for_byte_the_engines(
    before_puppet: Gateway, puppet: Puppet, version: bytes
) -> None:
    async with connected(before_puppet) as client:
        client.send(stream("-", version=version))
        raw = await client.until(COMMENT)
        puppet.say_head()
        raw += await client.until(COMMENT)
        half = len(EVENT) // 2
        for piece in (EVENT, EVENT[:half], EVENT[half:] + EVENT[:-1], EVENT[-1:]):
            puppet.say_chunk(piece)
            raw += await client.until(COMMENT)
        puppet.say_chunk(b"data: [DONE]\n\n")
        raw += await client.until(b"[DONE]\n\n")
        puppet.say_chunk(b"")
        if version == b"1.1":
            raw += await client.until(b"0\r\n\r\n")
        else:
            raw += await client.rest()
    [answer] = await answers(raw)
    assert answer.whole
    assert without_comments(answer.body) == EVENT * 3 + b"data: [DONE]\n\n"


async def test_comment_is_not_sent_inside_an_event(before_puppet: Gateway, puppet: Puppet) -> None:
    async with connected(before_puppet) as client:
        client.send(stream("-"))
        puppet.say_head()
        puppet.say_chunk(EVENT + EVENT[:9])
        raw = await client.until(EVENT + b"\r\n")
        for _ in range(3):  # the rest of the event is late
            raw += await client.until(COMMENT)
        puppet.say_chunk(EVENT[9:])
        puppet.say_chunk(b"")
        raw += await client.until(b"0\r\n\r\n")
    [answer] = await answers(raw)
    assert without_comments(answer.body) == EVENT * 2


OPENAI_REFUSAL = (
    b'{"error":{"message":"no","type":"invalid_request_error","param":null,"code":null}}'
)
ANTHROPIC_REFUSAL = b'{"type":"error","error":{"type":"invalid_request_error","message":"no"}}'


@pytest.mark.parametrize(
    ("path", "refusal", "name"),
    [
        (b"/v1/chat/completions", OPENAI_REFUSAL, b""),
        (b"/v1/messages", ANTHROPIC_REFUSAL, b"event: error\n"),
    ],
)
async def test_refusal_after_a_comment_is_one_event_and_no_done(
    before_puppet: Gateway, puppet: Puppet, path: bytes, refusal: bytes, name: bytes
) -> None:
    async with connected(before_puppet) as client:
        client.send(stream("-", path))
        raw = await client.until(COMMENT)
        puppet.say(
            b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(refusal), refusal)
        )
        [answer] = await answers(raw + await client.chunked())
    assert answer.status == 200
    assert answer.whole, "the body ends in order, without an end mark"
    assert without_comments(answer.body) == name + b"data: " + refusal + b"\n\n"


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/v1/messages"])
async def test_fault_after_a_comment_is_one_event_in_the_callers_dialect_and_no_done(
    before_puppet: Gateway, puppet: Puppet, path: bytes
) -> None:
    async with connected(before_puppet) as client:
        client.send(stream("-", path))
        raw = await client.until(COMMENT)
        puppet.say(b"this is not HTTP\r\n\r\n")
        [answer] = await answers(raw + await client.chunked())
    assert answer.status == 200
    assert answer.whole
    event = without_comments(answer.body)
    assert event.count(b"data: ") == 1
    error = json.loads(event.split(b"data: ")[1])["error"]
    if path == b"/v1/messages":
        assert event.startswith(b"event: error\n")
        assert error["type"] == "api_error"
    else:
        assert error["code"] == "engine_failed"


async def test_large_plain_answer_after_a_comment_is_an_error_event(
    before_puppet: Gateway, puppet: Puppet
) -> None:
    async with connected(before_puppet) as client:
        client.send(stream("-"))
        raw = await client.until(COMMENT)
        body = b'{"x":"' + b"y" * 4_000_000 + b'"}'
        puppet.say(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )
        [answer] = await answers(raw + await client.chunked())
    assert answer.whole
    event = without_comments(answer.body)
    assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == "engine_failed"


# Where no comment belongs


async def test_no_comment_by_default(fake: Fake, tmp_path: Path) -> None:
    assert ServerSettings().sse_keepalive_s is None
    async with serving(fake, tmp_path, sse_keepalive_s=None) as one, connected(one) as client:
        client.send(stream("hang"))
        await fake.until_running(timeout=PATIENCE_S)
        await asyncio.sleep(10 * QUIET_S)
        client.writer.write_eof()
        assert await client.rest() == b""


async def test_plain_request_gets_no_comment(gateway: Gateway, fake: Fake) -> None:
    async with connected(gateway) as client:
        client.send(request(asking(fake="hang")))
        await fake.until_running(timeout=PATIENCE_S)
        await asyncio.sleep(10 * QUIET_S)
        client.writer.write_eof()
        assert await client.rest() == b""


async def test_refusal_before_the_first_comment_keeps_its_status(
    fake: Fake, tmp_path: Path
) -> None:
    async with serving(fake, tmp_path, sse_keepalive_s=PATIENCE_S) as one:
        assert (await one.chat(stream=True, fake="status:400")).status_code == 400
        assert (await one.chat(stream=True, fake="close")).status_code == 502


async def test_active_stream_gets_no_comment(fake: Fake, tmp_path: Path) -> None:
    async with serving(fake, tmp_path, sse_keepalive_s=PATIENCE_S) as one:
        with_setting = await one.chat(stream=True)
    async with serving(fake, tmp_path, sse_keepalive_s=None) as one:
        assert (await one.chat(stream=True)).content == with_setting.content


async def test_disconnect_between_comments_aborts_the_engines_work(
    gateway: Gateway, fake: Fake
) -> None:
    async with connected(gateway) as client:
        client.send(stream("hang"))
        await client.until(b"\r\n\r\n")
        await comments(client, 2)
    await fake.until_idle()
    assert fake.aborted == 1
    await asyncio.wait_for(gateway.state.admission.wait_until_idle(), PATIENCE_S)
    assert await gateway.metric("gateway_client_disconnects_total") == 1


async def test_engine_timeout_after_comments_is_an_error_event(fake: Fake, tmp_path: Path) -> None:
    async with (
        serving(fake, tmp_path, {"first_byte_s": 0.2, "stall_s": 0.2}) as one,
        connected(one) as client,
    ):
        client.send(stream("hang"))
        [answer] = await answers(await client.chunked())
    assert COMMENT in answer.body
    event = without_comments(answer.body)
    assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == "engine_timeout"


@pytest.mark.parametrize("kind", ["stream", "whole", "error"])
async def test_comment_waits_until_the_response_before_is_read(kind: str) -> None:
    size = 8_000_000
    begun: list[ClientExchange] = []
    silent = asyncio.Event()

    async def handler(exchange: ClientExchange) -> None:
        begun.append(exchange)
        if len(begun) == 1:
            await exchange.send_response(200, [], b"x" * size)
            return
        awake = asyncio.create_task(send_comments(exchange, 0.001))
        await asyncio.sleep(0.02)
        silent.set()
        if kind == "error":
            awake.cancel()
            await send_error(in_flight(exchange), EngineFailed("it failed"))
        elif kind == "whole":
            await exchange.send_response(200, [], b"one")
        else:
            await exchange.start_response(200, SSE_HEADERS)
            await exchange.send_body(b"one", more=False)
        awake.cancel()

    async with exchanging(handler, request() * 2, slow=True) as served:
        await silent.wait()
        served.read_on()
        assert len((await served.client.answer()).body) == size
        answer = await served.client.answer()
    assert answer.whole
    assert answer.status == (502 if kind == "error" else 200)
    assert kind == "error" or answer.body == b"one"
