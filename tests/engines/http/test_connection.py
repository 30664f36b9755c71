"""Accepted and refused responses, and reuse of their connections."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from engines.base import ConnectTimeout, EngineNotReady, EngineProtocolError, EngineRequest
from engines.http import Address, Http1Client
from engines.http.connection import MAX_HEAD_BYTES
from engines.spec import Timeouts
from tests.certificates import make_identity
from tests.engines.http.exchanges import read_all

GET = EngineRequest("GET", "/", (), b"")
# More than the kernel buffers for a socket that is not read.
LARGE = EngineRequest("POST", "/", (), b"x" * 16_000_000)
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
REFUSAL = b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno"


@dataclass
class Peer:
    """A server that responds to request headers at once, and reads bodies only if `end` is set."""

    response: bytes
    # Sent after the body has been read; None: the body is not read.
    end: bytes | None = None
    connections: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(self.response)
                if self.end is not None:
                    await reader.readexactly(len(LARGE.body))
                    writer.write(self.end)
                await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def serving(
    response: bytes, tls: ssl.SSLContext | None = None, end: bytes | None = None
) -> AsyncIterator[tuple[Peer, Http1Client]]:
    """Run a peer and a client for it."""
    peer = Peer(response, end)
    server = await asyncio.start_server(peer.serve, "127.0.0.1", 0, ssl=tls)
    port = server.sockets[0].getsockname()[1]
    address = Address.from_url(f"{'https' if tls else 'http'}://127.0.0.1:{port}")
    client = Http1Client(address, Timeouts(first_byte_s=20, stall_s=20))
    try:
        yield peer, client
    finally:
        client.close()
        server.close()


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a certificate for 127.0.0.1 and its key."""
    return make_identity("engine").write(tmp_path_factory.mktemp("tls") / "engine.pem")


@pytest.fixture
def tls(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """The TLS context of a server; clients created later trust it."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


# Framing


async def test_trailer_does_not_become_a_header_field() -> None:
    raw = CHUNKED + b"2\r\nhi\r\n0\r\nset-cookie: a=b\r\nx-role: admin\r\n\r\n"
    async with serving(raw) as (peer, client):
        for _ in range(2):
            response = await client.send(GET)
            assert await read_all(response) == b"hi"
            assert [name for name, _ in response.headers] == [b"transfer-encoding"]
        assert peer.connections == 1


@pytest.mark.parametrize(
    "more",
    [
        b"x-filler: y\r\n" * 10_000,  # trailers
        b"x-filler: " + b"y" * 200_000,  # an unfinished one
    ],
)
async def test_trailers_are_bounded(more: bytes) -> None:
    async with serving(CHUNKED + b"2\r\nhi\r\n0\r\n" + more) as (_, client):
        response = await client.send(GET)
        with pytest.raises(EngineProtocolError, match=f"over {MAX_HEAD_BYTES} bytes"):
            await read_all(response)


async def test_unfinished_header_field_is_bounded() -> None:
    async with serving(b"HTTP/1.1 200 OK\r\nx-filler: " + b"y" * 200_000) as (_, client):
        with pytest.raises(EngineProtocolError, match=f"over {MAX_HEAD_BYTES} bytes"):
            await client.send(GET)


@pytest.mark.parametrize(
    "lines",
    [
        b"transfer-encoding: gzip, chunked\r\n",
        b"transfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n",
        b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n",
        b"transfer-encoding: chunked, chunked\r\n",
        b"transfer-encoding: identity\r\n",
        b"transfer-encoding: \r\n",
    ],
)
async def test_transfer_coding_other_than_chunked_is_a_protocol_error(lines: bytes) -> None:
    response = b"HTTP/1.1 200 OK\r\n" + lines + b"\r\n2\r\nhi\r\n0\r\n\r\n"
    async with serving(response) as (_, client):
        with pytest.raises(EngineProtocolError, match=r"transfer coding|Transfer-Encoding"):
            await client.send(GET)


async def test_chunked_is_case_insensitive() -> None:
    response = b"HTTP/1.1 200 OK\r\nTransfer-Encoding:  CHUNKED \r\n\r\n2\r\nhi\r\n0\r\n\r\n"
    async with serving(response) as (_, client):
        assert await read_all(await client.send(GET)) == b"hi"


@pytest.mark.parametrize("status", ["000", "099", "600", "999"])
async def test_status_outside_of_http_is_a_protocol_error(status: str) -> None:
    response = f"HTTP/1.1 {status} X\r\ncontent-length: 0\r\n\r\n".encode()
    async with serving(response) as (_, client):
        with pytest.raises(EngineProtocolError, match=f"the status {int(status)}"):
            await client.send(GET)


async def test_status_599_is_accepted() -> None:
    async with serving(b"HTTP/1.1 599 X\r\ncontent-length: 0\r\n\r\n") as (_, client):
        assert (await client.send(GET)).status == 599


# The pool


@pytest.mark.slow
@pytest.mark.parametrize("encrypted", [False, True])
async def test_connection_with_an_unsent_request_body_is_not_reused(
    encrypted: bool, request: pytest.FixtureRequest
) -> None:
    context = request.getfixturevalue("tls") if encrypted else None
    async with serving(REFUSAL, context) as (peer, client):
        for count in (1, 2):
            response = await client.send(LARGE)
            assert response.status == 413
            assert await read_all(response) == b"no"
            assert client.in_flight == 0
            assert not client._idle
            assert peer.connections == count


@pytest.mark.slow
@pytest.mark.parametrize("encrypted", [False, True])
async def test_connection_is_reused_if_the_request_was_sent_by_the_end_of_the_response(
    encrypted: bool, request: pytest.FixtureRequest
) -> None:
    context = request.getfixturevalue("tls") if encrypted else None
    async with serving(CHUNKED + b"2\r\nhi\r\n", context, b"0\r\n\r\n") as (peer, client):
        for _ in range(2):
            assert await read_all(await client.send(LARGE)) == b"hi"
        assert peer.connections == 1


# TLS


async def test_encrypted_connection_is_reused(tls: ssl.SSLContext) -> None:
    async with serving(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi", tls) as (peer, client):
        for _ in range(3):
            assert await read_all(await client.send(GET)) == b"hi"
        assert peer.connections == 1


async def test_untrusted_certificate_is_unavailable(
    tls: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE")
    async with serving(REFUSAL, tls) as (_, client):
        with pytest.raises(EngineNotReady, match="certificate"):
            await client.send(GET)
        assert not client._open


async def test_unfinished_handshake_is_a_connect_timeout() -> None:
    closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(65536):
            pass
        closed.set()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        address = Address.from_url(f"https://127.0.0.1:{port}")
        client = Http1Client(address, Timeouts(connect_s=0.1))
        with pytest.raises(ConnectTimeout):
            await client.send(GET)
        async with asyncio.timeout(20):
            await closed.wait()
        client.close()
