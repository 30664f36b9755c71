"""Reuse of connections to engines."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from tests.gateway import serving_demo

ANSWER = json.dumps({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}).encode()
PLAIN = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b"data: {}\n\n"
# What an engine writes, piece by piece.
PIECES = {
    "whole": [PLAIN % len(ANSWER) + ANSWER],
    "head and body": [PLAIN % len(ANSWER), ANSWER],
    "body in two pieces": [PLAIN % len(ANSWER), ANSWER[:10], ANSWER[10:]],
    "head, event, end": [STREAM, b"a\r\n%b\r\n" % EVENT, b"0\r\n\r\n"],
    "event and end": [STREAM, b"a\r\n%b\r\n0\r\n\r\n" % EVENT],
}


class Peer:
    """An engine that answers each POST with the same pieces, a moment apart."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces
        self.asked: list[object] = []  # the connection of each POST
        self.open: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open.append(writer)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if not head.startswith(b"POST"):
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                    continue
                size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                await reader.readexactly(size)
                self.asked.append(writer)
                for piece in self.pieces:
                    writer.write(piece)
                    await asyncio.sleep(0.01)


@asynccontextmanager
async def listening(peer: Peer) -> AsyncIterator[str]:
    server = await asyncio.start_server(peer.serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.close()
        for writer in peer.open:
            writer.transport.abort()
        await asyncio.sleep(0.01)  # for the transports to close


@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
async def test_complete_response_keeps_its_connection_alive(
    tmp_path: Path, pieces: list[bytes]
) -> None:
    peer = Peer(pieces)
    async with listening(peer) as url, serving_demo(tmp_path, url) as gateway:
        for _ in range(3):
            answer = await gateway.chat()
            assert answer.status_code == 200
    assert len(peer.asked) == 3
    assert len(set(peer.asked)) == 1
