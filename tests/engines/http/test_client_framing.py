"""Which answers the client accepts, and when their connection carries another request."""

import asyncio
import datetime
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from engines.base import ConnectTimeout, EngineNotReady, EngineProtocolError, EngineRequest
from engines.http.client import MAX_HEAD_BYTES, Address, Http1Client, Http1Response
from engines.spec import Timeouts

GET = EngineRequest("GET", "/", (), b"")
# More than the kernel buffers for a socket that nobody reads.
LARGE = EngineRequest("POST", "/", (), b"x" * 16_000_000)
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
REFUSAL = b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno"


@dataclass
class Peer:
    """A server that answers every request's head at once, and reads bodies only if told to."""

    answer: bytes
    # Sent when the body has been read; None: it is never read.
    end: bytes | None = None
    connections: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(self.answer)
                if self.end is not None:
                    await reader.readexactly(len(LARGE.body))
                    writer.write(self.end)
                await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def answering(
    answer: bytes, tls: ssl.SSLContext | None = None, end: bytes | None = None
) -> AsyncIterator[tuple[Peer, Http1Client]]:
    """Run a peer, and a client of it."""
    peer = Peer(answer, end)
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
    """A file with a certificate of 127.0.0.1 and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "engine")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(IPv4Address("127.0.0.1"))]), True
        )
        .sign(key, hashes.SHA256())
    )
    file = tmp_path_factory.mktemp("tls") / "engine.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    file.write_bytes(private + made.public_bytes(serialization.Encoding.PEM))
    return file


@pytest.fixture
def tls(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """What a server encrypts with; clients that are made later trust it."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


async def whole(response: Http1Response) -> bytes:
    body = b""
    while data := await response.read():
        body += data
    return body


# Framing


async def test_trailer_does_not_become_a_header_field() -> None:
    answer = CHUNKED + b"2\r\nhi\r\n0\r\nset-cookie: a=b\r\nx-role: admin\r\n\r\n"
    async with answering(answer) as (peer, client):
        for _ in range(2):
            response = await client.send(GET)
            assert await whole(response) == b"hi"
            assert [name for name, _ in response.headers] == [b"transfer-encoding"]
        assert peer.connections == 1


@pytest.mark.parametrize(
    "more",
    [
        b"x-filler: y\r\n" * 10_000,  # trailers
        b"x-filler: " + b"y" * 200_000,  # one that does not end
    ],
)
async def test_trailers_are_bounded(more: bytes) -> None:
    async with answering(CHUNKED + b"2\r\nhi\r\n0\r\n" + more) as (_, client):
        response = await client.send(GET)
        with pytest.raises(EngineProtocolError, match=f"over {MAX_HEAD_BYTES} bytes"):
            await whole(response)


async def test_header_field_that_does_not_end_is_bounded() -> None:
    async with answering(b"HTTP/1.1 200 OK\r\nx-filler: " + b"y" * 200_000) as (_, client):
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
    answer = b"HTTP/1.1 200 OK\r\n" + lines + b"\r\n2\r\nhi\r\n0\r\n\r\n"
    async with answering(answer) as (_, client):
        with pytest.raises(EngineProtocolError, match=r"transfer coding|Transfer-Encoding"):
            await client.send(GET)


async def test_chunked_is_read_however_it_is_capitalized() -> None:
    answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding:  CHUNKED \r\n\r\n2\r\nhi\r\n0\r\n\r\n"
    async with answering(answer) as (_, client):
        assert await whole(await client.send(GET)) == b"hi"


@pytest.mark.parametrize("status", ["000", "099", "600", "999"])
async def test_status_outside_of_http_is_a_protocol_error(status: str) -> None:
    answer = f"HTTP/1.1 {status} X\r\ncontent-length: 0\r\n\r\n".encode()
    async with answering(answer) as (_, client):
        with pytest.raises(EngineProtocolError, match=f"the status {int(status)}"):
            await client.send(GET)


async def test_highest_status_of_http_is_an_answer() -> None:
    async with answering(b"HTTP/1.1 599 X\r\ncontent-length: 0\r\n\r\n") as (_, client):
        assert (await client.send(GET)).status == 599


# The pool


@pytest.mark.slow
@pytest.mark.parametrize("encrypted", [False, True])
async def test_connection_with_an_unsent_request_body_is_not_reused(
    encrypted: bool, request: pytest.FixtureRequest
) -> None:
    context = request.getfixturevalue("tls") if encrypted else None
    async with answering(REFUSAL, context) as (peer, client):
        for count in (1, 2):
            response = await client.send(LARGE)
            assert response.status == 413
            assert await whole(response) == b"no"
            assert client.in_flight == 0
            assert not client._idle
            assert peer.connections == count


@pytest.mark.slow
@pytest.mark.parametrize("encrypted", [False, True])
async def test_connection_whose_answer_began_early_is_reused_once_all_was_sent(
    encrypted: bool, request: pytest.FixtureRequest
) -> None:
    context = request.getfixturevalue("tls") if encrypted else None
    async with answering(CHUNKED + b"2\r\nhi\r\n", context, b"0\r\n\r\n") as (peer, client):
        for _ in range(2):
            assert await whole(await client.send(LARGE)) == b"hi"
        assert peer.connections == 1


# TLS


async def test_encrypted_connection_is_reused(tls: ssl.SSLContext) -> None:
    async with answering(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi", tls) as (peer, client):
        for _ in range(3):
            assert await whole(await client.send(GET)) == b"hi"
        assert peer.connections == 1


async def test_certificate_that_is_not_trusted_is_unavailable(
    tls: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE")
    async with answering(REFUSAL, tls) as (_, client):
        with pytest.raises(EngineNotReady, match="certificate"):
            await client.send(GET)
        assert not client._open


async def test_handshake_that_does_not_end_is_a_connect_timeout() -> None:
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
