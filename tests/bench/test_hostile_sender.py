import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from bench.hostile_bodies import CHAT, JSON, HostileBody, escapes, nesting
from bench.hostile_sender import Outcome, exchange, head_of, send
from bench.stub_engine import MAX_PARSED_BYTES, Connection, Stub

BODY = HostileBody("escapes", CHAT, JSON, lambda: escapes(MAX_PARSED_BYTES + 4096))
REFUSAL = b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 2\r\n\r\n{}"


@asynccontextmanager
async def stub() -> AsyncIterator[str]:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(Stub("stub", 0.0, 0.0)), "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def sent_to(server: "Server", size: int, hold_s: float = 0.0) -> Outcome:
    """Send a body of so many bytes to a server; return how that ended."""
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    async with listening:
        address = listening.sockets[0].getsockname()[:2]
        head = head_of(BODY, size, "host", "key")
        outcome = await asyncio.to_thread(exchange, address, head, b"x" * size, hold_s=hold_s)
        await server.done.wait()
    return outcome


class Server:
    """A server that responds to the headers alone, or to none, and counts the body."""

    def __init__(self, response: bytes = b"", *, reads: bool = True) -> None:
        self.body_bytes = 0
        self.done = asyncio.Event()
        self._response = response
        self._reads = reads

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(self._response)
        writer.write_eof()
        while self._reads and (piece := await reader.read(65536)):
            self.body_bytes += len(piece)
        writer.close()
        self.done.set()


async def test_every_request_is_answered_by_its_status() -> None:
    async with stub() as url:
        sent = await asyncio.to_thread(send, url, "key", BODY, BODY.build(), 3)

    assert sent.outcomes == ["200"] * 3
    assert sent.began < sent.ended
    assert sent.before_body is None  # it was not held back


async def test_stub_refuses_malformed_requests_and_continues() -> None:
    raw = nesting(50_000)
    body = HostileBody("nesting", CHAT, JSON, lambda: raw)

    async with stub() as url:
        sent = await asyncio.to_thread(send, url, "key", body, raw, 1)

    assert sent.outcomes == ["400"]


async def test_a_response_to_the_headers_alone_does_not_stop_the_body() -> None:
    server = Server(REFUSAL)

    assert await sent_to(server, 2**20) == Outcome("429", before_body=False)
    assert server.body_bytes == 2**20


async def test_withheld_body_reveals_an_early_response() -> None:
    assert await sent_to(Server(REFUSAL), 10, hold_s=5.0) == Outcome("429", before_body=True)


async def test_a_server_that_waits_for_the_body_does_not_respond_before_it() -> None:
    async with stub() as url:
        host, port = url.removeprefix("http://").split(":")
        raw = escapes(1000)
        head = head_of(BODY, len(raw), "host", "key")

        ended = await asyncio.to_thread(exchange, (host, int(port)), head, raw, hold_s=0.01)

    assert ended == Outcome("200", before_body=False)


@pytest.mark.parametrize("size", [10, 2**24])  # the larger one is not sent when the server closes
async def test_connection_closed_without_a_response_is_reported(size: int) -> None:
    outcome = await sent_to(Server(reads=False), size)

    assert outcome.name in {"closed without a response", "ConnectionResetError", "BrokenPipeError"}
