"""A client that writes its own bytes, faults included, and reads its answers one by one."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from tests.gateway import AUTH, Gateway
from tests.waiting import PATIENCE_S

BODY = b'{"model":"demo"}'
KEY_LINE = b"authorization: %s" % AUTH["authorization"].encode()


def request(
    body: bytes | None = BODY,
    *headers: bytes,
    method: bytes = b"POST",
    path: bytes = b"/v1/completions",
    version: bytes = b"1.1",
    key: bool = True,
) -> bytes:
    """Return the bytes of a request; with `body` None only the head, without a length."""
    lines = [b"%b %b HTTP/%b" % (method, path, version), b"host: x"]
    if key:
        lines.append(KEY_LINE)
    lines += headers
    if body is not None:
        lines.append(b"content-length: %d" % len(body))
    return b"\r\n".join(lines) + b"\r\n\r\n" + (body or b"")


def asking(**fields: Any) -> bytes:
    """Return the body of a request to the model."""
    return json.dumps({"model": "demo", **fields}).encode()


@dataclass
class Answer:
    """One answer, its body without the framing."""

    status: int
    version: bytes
    headers: dict[str, str]
    body: bytes
    # It came to its own end; False for a chunked body that breaks off.
    whole: bool = True

    @property
    def code(self) -> str:
        """The code of an error."""
        code: str = json.loads(self.body)["error"]["code"]
        return code


@dataclass
class Client:
    """One connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, data: bytes) -> None:
        """Send, unless the server has hung up."""
        if not self.writer.transport.is_closing():
            self.writer.write(data)

    async def answer(self, *, head_only: bool = False) -> Answer:
        """Return the next answer, read to its end."""
        async with asyncio.timeout(PATIENCE_S):
            return await read_answer(self.reader, head_only=head_only)

    async def until(self, data: bytes) -> bytes:
        """Read up to and with `data`."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.reader.readuntil(data)

    async def chunked(self) -> bytes:
        """Return all that comes up to the end of a chunked body, of any size."""
        said = b""
        async with asyncio.timeout(PATIENCE_S):
            while not said.endswith(b"\r\n0\r\n\r\n"):
                piece = await self.reader.read(1024 * 1024)
                assert piece, "the body does not end in order"
                said += piece
        return said

    async def rest(self) -> bytes:
        """Return all that comes until the server closes the connection."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.reader.read()


@asynccontextmanager
async def connected(gateway: Gateway) -> AsyncIterator[Client]:
    """Open a connection of one's own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    try:
        yield Client(reader, writer)
    finally:
        writer.transport.abort()


async def answers(raw: bytes) -> list[Answer]:
    """Split what came back on a connection that has closed into its answers."""
    reader = asyncio.StreamReader()
    reader.feed_data(raw)
    reader.feed_eof()
    found: list[Answer] = []
    while not reader.at_eof():
        found.append(await read_answer(reader))
    return found


async def read_answer(reader: asyncio.StreamReader, *, head_only: bool = False) -> Answer:
    """Read one answer; a body without a length ends with the connection."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.split("\r\n")[:-2]
    version, status = first.split(" ")[:2]
    headers: dict[str, str] = {}
    for name, _, value in (line.partition(": ") for line in lines):
        assert name not in headers, f"{name} comes twice"
        headers[name] = value
    answer = Answer(int(status), version.encode(), headers, b"")
    if head_only or answer.status in (100, 204):
        return answer
    if headers.get("transfer-encoding") == "chunked":
        try:
            while size := int(await reader.readuntil(b"\r\n"), 16):
                answer.body += (await reader.readexactly(size + 2))[:-2]
            await reader.readexactly(2)
        except asyncio.IncompleteReadError:
            answer.whole = False
    elif "content-length" in headers:
        answer.body = await reader.readexactly(int(headers["content-length"]))
    else:
        answer.body = await reader.read()
    return answer
