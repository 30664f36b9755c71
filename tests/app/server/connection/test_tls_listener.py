"""HTTPS by the gateway itself: handshakes and their bounds, and what differs from plain HTTP."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.app.raw import Answer, Client, asking, request
from tests.certificates import Identity, make_identity
from tests.fakes.vllm import Fake
from tests.gateway import AUTH, Gateway, serving_demo
from tests.waiting import PATIENCE_S, wait_until

IDENTITY = make_identity()


@pytest.fixture
async def gateway(fake: Fake, tmp_path: Path) -> AsyncIterator[Gateway]:
    async with serving(fake, tmp_path) as one:
        yield one


def serving(
    fake: Fake, tmp_path: Path, tls: dict[str, Any] | None = None, **server: Any
) -> AbstractAsyncContextManager[Gateway]:
    """Run a gateway with this certificate and other settings of the server."""
    file = str(IDENTITY.write(tmp_path / "gateway.pem"))
    server["tls"] = {"cert_file": file, "key_file": file, **(tls or {})}
    return serving_demo(tmp_path, fake.url, model={"isolation": "none"}, server=server)


def trusting(identity: Identity = IDENTITY, client: Path | None = None) -> ssl.SSLContext:
    """Return the context of a client that trusts one certificate."""
    context = ssl.create_default_context(cadata=identity.certificate_pem.decode())
    if client is not None:
        context.load_cert_chain(client)
    return context


@asynccontextmanager
async def connected(gateway: Gateway, context: ssl.SSLContext) -> AsyncIterator[Client]:
    """Open a connection of one's own, encrypted."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port, ssl=context)
    try:
        yield Client(reader, writer)
    finally:
        writer.transport.abort()


async def ask(gateway: Gateway, context: ssl.SSLContext) -> Answer:
    """Return the answer to a request on a connection of its own."""
    async with connected(gateway, context) as client:
        client.send(request())
        return await client.answer()


async def failed(gateway: Gateway, reason: str) -> float:
    return await gateway.metric("gateway_tls_handshake_failures_total", reason=reason)


async def test_requests_and_streams_are_served(gateway: Gateway) -> None:
    answer = await gateway.chat(fake="say:hello")
    assert answer.json()["choices"][0]["message"]["content"] == "hello"
    stream = await gateway.chat(fake="say:hello", stream=True)
    assert stream.text.endswith("data: [DONE]\n\n")
    assert "strict-transport-security" not in stream.headers


async def test_body_of_megabytes_arrives_whole(gateway: Gateway, fake: Fake) -> None:
    text = "x" * 3_000_000
    assert (await gateway.chat(messages=[{"role": "user", "content": text}])).status_code == 200
    assert text in fake.seen[-1].body.decode()


async def test_certificate_is_verified_by_a_client_that_trusts_it(gateway: Gateway) -> None:
    url = f"https://127.0.0.1:{gateway.port}/v1/models"
    async with httpx.AsyncClient(verify=trusting(), headers=AUTH) as client:
        assert (await client.get(url)).status_code == 200
    async with httpx.AsyncClient(verify=trusting(make_identity()), headers=AUTH) as client:
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await client.get(url)


async def test_expiry_is_a_metric(gateway: Gateway) -> None:
    expires = await gateway.metric("gateway_tls_certificate_expiry_timestamp_seconds")
    assert expires == IDENTITY.certificate.not_valid_after_utc.timestamp()


async def test_request_in_the_last_bytes_of_the_handshake_is_served(gateway: Gateway) -> None:
    """With TLS 1.3 a client may send both in one packet."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = trusting().wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    writer.write(outgoing.read())
    while True:
        incoming.write(await asyncio.wait_for(reader.read(65536), PATIENCE_S))
        try:
            tls.do_handshake()
            break
        except ssl.SSLWantReadError:
            continue
    tls.write(request())
    writer.write(outgoing.read())
    while True:
        incoming.write(await asyncio.wait_for(reader.read(65536), PATIENCE_S))
        try:
            assert tls.read(65536).startswith(b"HTTP/1.1 200")
            break
        except ssl.SSLWantReadError:
            continue
    writer.transport.abort()


async def test_plain_http_is_cut_off_and_counted(gateway: Gateway) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        async with httpx.AsyncClient() as client:
            await client.get(f"http://127.0.0.1:{gateway.port}/health")
    assert await failed(gateway, "protocol") == 1


async def test_client_that_leaves_in_its_handshake_is_counted(gateway: Gateway) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(b"\x16\x03\x01")
    await writer.drain()
    writer.transport.abort()
    async with asyncio.timeout(PATIENCE_S):
        while await failed(gateway, "closed") != 1:
            await asyncio.sleep(0.01)


async def test_refusal_is_read_by_a_client_that_is_still_sending(gateway: Gateway) -> None:
    async with connected(gateway, trusting()) as client:
        client.send(request(None, b"content-length: 999999999"))
        answer = await client.answer()
        assert (answer.status, answer.code) == (413, "request_too_large")


async def test_bytes_that_are_no_request_are_refused_and_the_connection_closed(
    gateway: Gateway,
) -> None:
    async with connected(gateway, trusting()) as client:
        client.send(b"\x00 nonsense\r\n\r\n")
        assert (await client.answer()).status == 400


async def test_client_that_disconnects_aborts_its_generation(gateway: Gateway, fake: Fake) -> None:
    async with connected(gateway, trusting()) as client:
        body = asking(stream=True, prompt="hi", fake="pace:20")
        client.send(request(body))
        assert await client.until(b"data: ")
    await wait_until(lambda: gateway.state.admission.in_flight == 0)
    await fake.until_idle()


async def test_browsers_are_told_to_use_https_only_where_it_is_set(
    fake: Fake, tmp_path: Path
) -> None:
    async with serving(fake, tmp_path, {"hsts_s": 3600}) as gateway:
        assert (await gateway.chat()).headers["strict-transport-security"] == "max-age=3600"
        page = await gateway.client.get("/console/login")
        assert page.headers["strict-transport-security"] == "max-age=3600"


async def test_older_versions_than_allowed_are_refused(fake: Fake, tmp_path: Path) -> None:
    async with serving(fake, tmp_path, {"min_version": "1.3"}) as gateway:
        old = trusting()
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(OSError, match=r"(?i)version|^$"):
            await ask(gateway, old)
        assert await failed(gateway, "protocol") == 1
        assert (await ask(gateway, trusting())).status == 200


class TestClientCertificates:
    async def test_client_needs_a_certificate_of_the_authority(
        self, fake: Fake, tmp_path: Path
    ) -> None:
        authority = make_identity("authority")
        (tmp_path / "ca.pem").write_bytes(authority.certificate_pem)
        mine = make_identity("client", issuer=authority).write(tmp_path / "client.pem")
        foreign = make_identity("client").write(tmp_path / "foreign.pem")
        tls = {"client_ca_file": str(tmp_path / "ca.pem")}
        async with serving(fake, tmp_path, tls) as gateway:
            async with connected(gateway, trusting(client=mine)) as client:
                client.send(request())
                assert (await client.answer()).status == 200
                client.send(request(key=False))  # the certificate replaces no key
                assert (await client.answer()).status == 401
            for other in (trusting(client=foreign), trusting()):
                # With TLS 1.3 a client's own end of the handshake comes before it is refused.
                with pytest.raises((OSError, asyncio.IncompleteReadError)):
                    await ask(gateway, other)
            async with connected(gateway, trusting(client=mine)) as client:
                client.send(request(None, method=b"GET", path=b"/metrics"))
                page = (await client.answer()).body
            name = b"gateway_tls_handshake_failures_total"
            assert name + b'{reason="protocol"} 2.0' in page


class TestBounds:
    async def test_silent_client_is_cut_off(self, fake: Fake, tmp_path: Path) -> None:
        async with serving(fake, tmp_path, header_timeout_s=0.05) as gateway:
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
            writer.close()
            # The metrics would need a handshake within that time.
            counted = gateway.state.metrics.tls_handshake_failures.values
            assert counted["timeout",] == 1

    @pytest.mark.parametrize("bound", ["max_connections", "max_connections_per_peer"])
    async def test_handshakes_past_a_bound_are_cut_off(
        self, fake: Fake, tmp_path: Path, bound: str
    ) -> None:
        bounds: dict[str, Any] = {bound: 2}
        async with serving(fake, tmp_path, **bounds) as gateway:
            silent = [socket.create_connection(("127.0.0.1", gateway.port)) for _ in range(2)]
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
            writer.close()
            for one in silent:
                one.close()
            counted = gateway.state.metrics.tls_handshake_failures.values
            await wait_until(lambda: counted["closed",] == 2)
            assert counted["refused",] == 1
            assert (await gateway.chat()).status_code == 200


async def test_replaced_certificate_reaches_new_connections_and_breaks_no_open_one(
    fake: Fake, tmp_path: Path
) -> None:
    successor = make_identity(days_left=9)
    async with serving(fake, tmp_path) as gateway:
        tls = gateway.state.settings.server.tls
        assert tls is not None
        assert gateway.certificate is not None
        async with connected(gateway, trusting()) as before:
            before.send(request(asking(prompt="hi", stream=True, fake="pace:20")))
            await before.until(b"data: ")
            successor.write(tmp_path / "new.pem").replace(tls.cert_file)
            gateway.certificate.refresh()
            assert (await ask(gateway, trusting(successor))).status == 200
            assert await before.until(b"data: ")
