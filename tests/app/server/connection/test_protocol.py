"""Slow, broken, greedy and hostile clients, byte by byte."""

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from app.relay.request_context import RequestContext
from app.server.connection import HttpExchange
from app.server.connection.asgi_transport import AsgiTransport
from app.server.connection.protocol import MAX_PIPELINED
from app.server.connection.request_parser import MAX_HEAD_BYTES, MAX_HEADERS
from tests.app.raw import BODY, KEY_LINE, Client, answers, asking, connected, request
from tests.fakes.vllm import Fake
from tests.gateway import Gateway, serving_demo
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMIT = 1_000_000
CHUNKED = b"transfer-encoding: chunked"


def serving(fake: Fake, tmp_path: Path, **server: Any) -> AbstractAsyncContextManager[Gateway]:
    """Run a gateway with settings of its own for the server."""
    # Without a salt a body reaches the engine as the client wrote it.
    server = {"max_body_bytes": LIMIT, **server}
    return serving_demo(tmp_path, fake.url, model={"isolation": "none"}, server=server)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[tuple[Gateway, Fake]]:
    """A gateway and its engine, on the loop of all tests here."""
    async with Fake() as fake, serving(fake, tmp_path_factory.mktemp("shared")) as gateway:
        yield gateway, fake


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(shared: tuple[Gateway, Fake], fake: Fake) -> AsyncIterator[Gateway]:
    yield shared[0]
    await asyncio.wait_for(shared[0].state.admission.wait_until_idle(), PATIENCE_S)
    await fake.until_idle()


@pytest.fixture
def fake(shared: tuple[Gateway, Fake]) -> Fake:
    """The engine, which has seen nothing yet."""
    fake = shared[1]
    fake.seen.clear()
    fake.aborted = 0
    return fake


def posts(fake: Fake) -> list[bytes]:
    """The bodies that reached the engine."""
    return [seen.body for seen in fake.seen if seen.method == "POST"]


async def until_asked(fake: Fake) -> None:
    """Return when a request has reached the engine."""
    await wait_until(lambda: posts(fake))


async def refused(gateway: Gateway, status: int) -> float:
    """Return the number of requests refused with this status, each counted once."""
    count = 0.0
    for endpoint in ("none", "/v1/completions"):
        labels = {"model": "unknown", "endpoint": endpoint, "status": str(status)}
        count += await gateway.metric("gateway_requests_total", **labels)
    return count


async def drip(client: Client, piece: bytes = b"a") -> bytes:
    """Send a piece every few milliseconds until the server hangs up; return what it said.

    What crosses the server's FIN on the way is answered by a reset.
    """
    said = asyncio.create_task(client.rest())
    while not said.done():
        client.send(piece)
        await asyncio.wait({said}, timeout=0.01)
    try:
        return await said
    except ConnectionResetError:
        return b""


# The size of a head


def head_of(size: int) -> bytes:
    """Return a request whose head has `size` bytes."""
    bare = len(request(BODY, b"x-filler: ")) - len(BODY)
    return request(BODY, b"x-filler: " + b"f" * (size - bare))


def fields_of(count: int) -> bytes:
    """Return a request whose head has `count` fields."""
    return request(BODY, *(b"x-%d: 1" % n for n in range(count - 3)))


async def test_head_at_the_size_limit_passes(gateway: Gateway) -> None:
    async with connected(gateway) as client:
        client.send(head_of(MAX_HEAD_BYTES))
        assert (await client.answer()).status == 200


@pytest.mark.parametrize("piece", [1024, 1_000_000])
async def test_head_over_the_size_limit_is_431(gateway: Gateway, fake: Fake, piece: int) -> None:
    before = await refused(gateway, 431)
    payload = head_of(MAX_HEAD_BYTES + 4096)
    async with connected(gateway) as client:
        for start in range(0, len(payload), piece):
            client.send(payload[start : start + piece])
            await asyncio.sleep(0)
        [answer] = await answers(await client.rest())
    assert (answer.status, answer.code) == (431, "request_head_too_large")
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["connection"] == "close"
    assert await refused(gateway, 431) == before + 1
    assert posts(fake) == []


async def test_head_without_an_end_is_431(gateway: Gateway) -> None:
    async with connected(gateway) as client:
        client.send(b"GET /" + b"a" * (MAX_HEAD_BYTES + 4096))
        [answer] = await answers(await client.rest())
    assert (answer.status, answer.code) == (431, "request_head_too_large")


async def test_refusal_reaches_a_client_that_sends_a_much_larger_head(gateway: Gateway) -> None:
    async with connected(gateway) as client:
        client.send(b"GET / HTTP/1.1\r\nx: " + b"a" * 8 * 1024 * 1024)
        assert (await client.answer()).status == 431


async def test_large_body_beside_a_small_head_is_no_large_head(gateway: Gateway) -> None:
    body = BODY.ljust(4 * MAX_HEAD_BYTES)
    async with connected(gateway) as client:
        client.send(request(body) + request(body))
        assert [(await client.answer()).status for _ in range(2)] == [200, 200]


async def test_large_head_behind_another_request_is_431(gateway: Gateway, fake: Fake) -> None:
    async with connected(gateway) as client:
        client.send(request() + head_of(2 * MAX_HEAD_BYTES))
        first = await client.answer()
        assert first.status == 200
        await client.rest()
    assert len(posts(fake)) == 1


async def test_head_with_as_many_fields_as_may_be_passes(gateway: Gateway) -> None:
    async with connected(gateway) as client:
        client.send(fields_of(MAX_HEADERS))
        assert (await client.answer()).status == 200


async def test_head_with_too_many_fields_is_431(gateway: Gateway, fake: Fake) -> None:
    before = await refused(gateway, 431)
    [answer] = await answers(await gateway.raw(fields_of(MAX_HEADERS + 1)))
    assert (answer.status, answer.code) == (431, "request_head_too_large")
    assert await refused(gateway, 431) == before + 1
    assert posts(fake) == []


async def test_head_with_too_many_fields_is_431_before_it_ends(gateway: Gateway) -> None:
    async with connected(gateway) as client:
        client.send(fields_of(MAX_HEADERS + 2).partition(b"\r\n\r\n")[0])
        assert (await client.answer()).status == 431


# Deadlines


@pytest.mark.slow
async def test_drip_fed_head_is_408(fake: Fake, tmp_path: Path) -> None:
    async with serving(fake, tmp_path, header_timeout_s=0.15) as gateway:
        async with connected(gateway) as client:
            client.send(b"POST /v1/completions HTTP/1.1\r\nx-drip: ")
            [answer] = await answers(await drip(client))
        assert (answer.status, answer.code) == (408, "request_timeout")
        assert answer.headers["connection"] == "close"
        assert await refused(gateway, 408) == 1


@pytest.mark.slow
async def test_drip_fed_head_of_a_second_request_is_408(fake: Fake, tmp_path: Path) -> None:
    async with serving(fake, tmp_path, header_timeout_s=0.15) as gateway:
        async with connected(gateway) as client:
            client.send(request())
            assert (await client.answer()).status == 200
            client.send(b"POST /v1/completions HTTP/1.1\r\nx-drip: ")
            [answer] = await answers(await drip(client))
        assert answer.status == 408


@pytest.mark.slow
async def test_silent_connection_is_closed_without_a_response(fake: Fake, tmp_path: Path) -> None:
    async with serving(fake, tmp_path, header_timeout_s=0.1) as gateway:
        async with connected(gateway) as client:
            assert await client.rest() == b""
        assert await refused(gateway, 408) == 0


@pytest.mark.slow
@pytest.mark.parametrize("answered", [False, True])
async def test_blank_lines_do_not_keep_a_connection_open(
    fake: Fake, tmp_path: Path, answered: bool
) -> None:
    async with serving(fake, tmp_path, header_timeout_s=0.15) as gateway, connected(gateway) as c:
        if answered:
            c.send(request())
            assert (await c.answer()).status == 200
        await drip(c, b"\r\n")
    assert len(posts(fake)) == int(answered)


async def test_blank_line_before_a_request_is_passed_over(gateway: Gateway) -> None:
    async with connected(gateway) as client:
        for _ in range(3):
            client.send(b"\r\n" + request() + b"\r\n")
            assert (await client.answer()).status == 200


@pytest.mark.slow
async def test_drip_fed_body_is_408(fake: Fake, tmp_path: Path) -> None:
    async with serving(fake, tmp_path, body_timeout_s=0.15) as gateway:
        async with connected(gateway) as client:
            client.send(request(None, b"content-length: 100000"))
            [answer] = await answers(await drip(client, b" "))
        assert (answer.status, answer.code) == (408, "request_timeout")
        labels = {"model": "unknown", "endpoint": "/v1/completions"}
        assert await gateway.metric("gateway_requests_total", **labels, status="408") == 1
        assert await refused(gateway, 408) == 1
        assert await refused(gateway, 499) == 0
        assert await gateway.metric("gateway_client_disconnects_total") == 0
        await gateway.state.admission.wait_until_idle()
    assert posts(fake) == []


@pytest.mark.slow
async def test_drip_fed_chunked_body_is_408(fake: Fake, tmp_path: Path) -> None:
    async with serving(fake, tmp_path, body_timeout_s=0.15) as gateway:
        async with connected(gateway) as client:
            client.send(request(None, CHUNKED))
            [answer] = await answers(await drip(client, b"1\r\n \r\n"))
        assert answer.status == 408


@pytest.mark.slow
async def test_slow_body_that_comes_to_its_end_passes(fake: Fake, tmp_path: Path) -> None:
    async with (
        serving(fake, tmp_path, header_timeout_s=0.1, body_timeout_s=PATIENCE_S) as gateway,
        connected(gateway) as client,
    ):
        client.send(request(None, b"content-length: %d" % len(BODY)))
        for byte in BODY:  # longer than a head may take
            client.send(bytes([byte]))
            await asyncio.sleep(0.02)
        assert (await client.answer()).status == 200
    assert posts(fake) == [BODY]


@pytest.mark.slow
async def test_slow_head_that_comes_to_its_end_passes(fake: Fake, tmp_path: Path) -> None:
    async with (
        serving(fake, tmp_path, header_timeout_s=PATIENCE_S, body_timeout_s=0.1) as gateway,
        connected(gateway) as client,
    ):
        for start in range(0, len(request()), 10):  # longer than a body may take
            client.send(request()[start : start + 10])
            await asyncio.sleep(0.02)
        assert (await client.answer()).status == 200


@pytest.mark.slow
async def test_deadlines_do_not_run_while_a_request_is_answered(fake: Fake, tmp_path: Path) -> None:
    async with (
        serving(fake, tmp_path, header_timeout_s=0.1, body_timeout_s=0.1) as gateway,
        connected(gateway) as client,
    ):
        client.send(request(asking(stream=True, fake="pace:20")))
        for _ in range(20):
            await client.until(b"data: ")


@pytest.mark.slow
async def test_half_a_request_behind_a_stream_does_not_cut_the_stream(
    fake: Fake, tmp_path: Path
) -> None:
    async with (
        serving(fake, tmp_path, header_timeout_s=0.1, body_timeout_s=0.1) as gateway,
        connected(gateway) as client,
    ):
        client.send(request(asking(stream=True, fake="pace:20")) + b"POST /v1/comp")
        for _ in range(20):
            await client.until(b"data: ")


@pytest.mark.slow
async def test_idle_connection_is_not_bound_by_the_deadline_of_a_head(
    fake: Fake, tmp_path: Path
) -> None:
    async with serving(fake, tmp_path, header_timeout_s=0.1) as gateway, connected(gateway) as c:
        for _ in range(2):
            c.send(request())
            assert (await c.answer()).status == 200
            await asyncio.sleep(0.3)


@pytest.mark.slow
async def test_idle_connection_is_closed_after_keep_alive(fake: Fake, tmp_path: Path) -> None:
    async with serving(fake, tmp_path, keep_alive_s=1) as gateway, connected(gateway) as client:
        client.send(request())
        assert (await client.answer()).status == 200
        assert await client.rest() == b""


# The number of connections


async def test_connection_over_the_limit_is_503_and_the_others_go_on(
    fake: Fake, tmp_path: Path
) -> None:
    async with serving(fake, tmp_path, max_connections=2) as gateway:
        async with connected(gateway) as one, connected(gateway) as two:
            for client in (one, two):
                client.send(request())
                assert (await client.answer()).status == 200
            for _ in range(3):
                async with connected(gateway) as third:
                    [answer] = await answers(await third.rest())
                assert (answer.status, answer.code) == (503, "too_many_connections")
                assert int(answer.headers["retry-after"]) > 0
                assert answer.headers["connection"] == "close"
            assert await refused(gateway, 503) == 3
            for client in (one, two):
                client.send(request())
                assert (await client.answer()).status == 200
        async with asyncio.timeout(PATIENCE_S):  # the server learns that those two have gone
            status = 503
            while status == 503:
                async with connected(gateway) as client:
                    client.send(request())
                    status = (await client.answer()).status
        assert status == 200


async def test_refused_connection_that_has_sent_a_request_gets_a_response(
    fake: Fake, tmp_path: Path
) -> None:
    async with serving(fake, tmp_path, max_connections=1) as gateway, connected(gateway) as first:
        first.send(request())
        assert (await first.answer()).status == 200
        async with connected(gateway) as second:
            second.send(request(BODY.ljust(500_000)))
            assert (await second.answer()).status == 503
        assert len(posts(fake)) == 1


# Requests that are none

BROKEN = {
    "two lengths": request(None, b"content-length: 16", b"content-length: 17") + BODY,
    "two equal lengths": request(BODY, b"content-length: 16"),
    "list of lengths": request(None, b"content-length: 16, 16") + BODY,
    "chunked and a length": request(BODY, CHUNKED),
    "length and chunked": request(None, b"content-length: 16", CHUNKED) + b"0\r\n\r\n",
    "xchunked": request(None, b"transfer-encoding: xchunked") + BODY,
    "chunked first": request(None, b"transfer-encoding: chunked, identity") + BODY,
    "identity": request(None, b"transfer-encoding: identity") + BODY,
    "gzip and chunked": request(None, b"transfer-encoding: gzip, chunked") + b"0\r\n\r\n",
    "two fields of codings": request(None, b"transfer-encoding: gzip", CHUNKED) + b"0\r\n\r\n",
    "chunked twice": request(None, b"transfer-encoding: chunked, chunked") + b"0\r\n\r\n",
    "two fields of chunked": request(None, CHUNKED, CHUNKED) + b"0\r\n\r\n",
    "chunked with a parameter": request(None, b"transfer-encoding: chunked;q=1") + b"0\r\n\r\n",
    "coding and no chunks": request(None, b"transfer-encoding: chunked, gzip") + b"0\r\n\r\n",
    "empty coding": request(None, b"transfer-encoding: ", b"content-length: 16") + BODY,
    "chunk size": request(None, CHUNKED) + b"zz\r\nabc\r\n0\r\n\r\n",
    "negative chunk size": request(None, CHUNKED) + b"-1\r\nabc\r\n0\r\n\r\n",
    "huge chunk size": request(None, CHUNKED) + b"f" * 17 + b"\r\nabc\r\n0\r\n\r\n",
    "chunk longer than its size": request(None, CHUNKED) + b"1\r\n{bc\r\n0\r\n\r\n",
    "length behind the body": request(None, CHUNKED) + b"0\r\ncontent-length: 7\r\n\r\n",
    "negative length": request(None, b"content-length: -1"),
    "length with a plus": request(None, b"content-length: +16") + BODY,
    "length in words": request(None, b"content-length: ten"),
    "hexadecimal length": request(None, b"content-length: 0x10") + BODY,
    "empty length": request(None, b"content-length: "),
    "overflowing length": request(None, b"content-length: 99999999999999999999"),
    "length of 20 digits": request(None, b"content-length: 10000000000000000000"),
    "length of 33 characters": request(None, b"content-length: " + b"16".zfill(33)) + BODY,
    "length of 5000 zeros": request(None, b"content-length: " + b"0" * 5000),
    "folded field": request(BODY, b"x-folded: a\r\n b"),
    "space before colon": request(BODY, b"x-space : a"),
    "field without a colon": request(BODY, b"nonsense"),
    "field without a name": request(BODY, b": a"),
    "NUL in a value": request(BODY, b"x-nul: a\0b"),
    "NUL in a name": request(BODY, b"x\0nul: a"),
    "bare CR in a value": request(BODY, b"x-cr: a\rb"),
    "space in the target": request(path=b"/v1/a b"),
    "no target": b"POST HTTP/1.1\r\nhost: x\r\n\r\n",
    "target without a slash": request(path=b"v1/completions"),
    "target that is not ASCII": request(path=b"/v1/\xff"),
    "target that is no URL": request(path=b"http://[/v1/completions"),
    "version 3": request(version=b"3.0"),
    "version x": request(version=b"x"),
    "no such method": request(method=b"FROB"),
    "CONNECT": request(None, method=b"CONNECT", path=b"example.com:443"),
    "CONNECT with a body": request(method=b"CONNECT", path=b"example.com:443"),
    "preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0",
    "TLS hello": b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03" + b"r" * 64,
    "garbage": b"this is not HTTP\r\n\r\n",
    "NULs": b"\0" * 100,
}


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("piece", [1, 1_000_000])
async def test_broken_request_is_400_and_reaches_no_engine(
    gateway: Gateway, fake: Fake, kind: str, piece: int
) -> None:
    counts = [await refused(gateway, status) for status in (400, 499)]
    async with connected(gateway) as client:
        for start in range(0, len(BROKEN[kind]), piece):
            client.send(BROKEN[kind][start : start + piece])
            if piece == 1:
                await asyncio.sleep(0)
        [answer] = await answers(await client.rest())
    assert (answer.status, answer.code) == (400, "invalid_request")
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["connection"] == "close"
    await asyncio.wait_for(gateway.state.admission.wait_until_idle(), PATIENCE_S)
    assert [await refused(gateway, status) for status in (400, 499)] == [counts[0] + 1, counts[1]]
    assert posts(fake) == []


FRAMED = {
    "zeros before a length": request(None, b"content-length: " + b"16".zfill(32)) + BODY,
    "spaces around a length": request(None, b"content-length:  16 \t") + BODY,
    "chunked in capitals": request(None, b"Transfer-Encoding: CHUNKED")
    + b"10\r\n%b\r\n0\r\n\r\n" % BODY,
}


@pytest.mark.parametrize("kind", FRAMED)
async def test_framing_that_is_unusual_but_clear_is_read(
    gateway: Gateway, fake: Fake, kind: str
) -> None:
    async with connected(gateway) as client:
        client.send(FRAMED[kind] + request())
        assert [(await client.answer()).status for _ in range(2)] == [200, 200]
    assert posts(fake) == [BODY, BODY]


async def test_length_of_19_digits_is_413(gateway: Gateway, fake: Fake) -> None:
    async with connected(gateway) as client:
        client.send(request(None, b"content-length: " + b"9" * 19))
        assert (await client.answer()).status == 413
    assert posts(fake) == []


# Chunked requests


def chunked(*pieces: bytes, trailers: bytes = b"", extension: bytes = b"") -> bytes:
    chunks = b"".join(b"%x%b\r\n%b\r\n" % (len(p), extension, p) for p in pieces)
    return chunks + b"0\r\n" + trailers + b"\r\n"


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    "framing",
    [{}, {"trailers": b"x-sum: 1\r\nx-more: 2\r\n"}, {"extension": b';name="value"'}],
    ids=["plain", "trailers", "extensions"],
)
async def test_chunked_request_reaches_the_engine_whole(
    gateway: Gateway, fake: Fake, framing: dict[str, bytes], whole: bool
) -> None:
    payload = request(None, CHUNKED) + chunked(BODY[:3], BODY[3:], **framing)
    async with connected(gateway) as client:
        for _ in range(2):  # the connection can carry another one
            for start in range(0, len(payload), len(payload) if whole else 1):
                client.send(payload[start : start + len(payload) if whole else start + 1])
                if not whole:
                    await asyncio.sleep(0)
            assert (await client.answer()).status == 200
    assert posts(fake) == [BODY, BODY]
    sent_on = dict(fake.seen[-1].headers)
    assert sent_on["content-length"] == str(len(BODY))
    assert "transfer-encoding" not in sent_on
    assert "x-sum" not in sent_on


@pytest.mark.parametrize(
    "trailer",
    [KEY_LINE, b"expect: 100-continue", b"connection: close", b"x-request-id: abc"],
)
async def test_trailers_are_no_header_fields(gateway: Gateway, fake: Fake, trailer: bytes) -> None:
    good = trailer is not KEY_LINE
    payload = request(None, CHUNKED, key=good) + chunked(BODY, trailers=trailer + b"\r\n")
    async with connected(gateway) as client:
        client.send(payload)
        assert (await client.answer()).status == (200 if good else 401)
    assert len(posts(fake)) == int(good)


async def test_trailers_without_an_end_are_refused(gateway: Gateway, fake: Fake) -> None:
    before = await refused(gateway, 431)
    for trailers in (b"x: " + b"a" * 2_000_000, b"x-y: z\r\n" * 250_000):
        async with connected(gateway) as client:
            client.send(request(None, CHUNKED) + b"10\r\n" + BODY + b"\r\n0\r\n" + trailers)
            assert (await client.answer()).status == 431
    assert await refused(gateway, 431) == before + 2
    assert posts(fake) == []


# Expect: 100-continue

EXPECT = b"expect: 100-continue"


async def test_client_that_expects_100_gets_it_and_then_the_response(
    gateway: Gateway, fake: Fake
) -> None:
    async with connected(gateway) as client:
        for _ in range(2):
            client.send(request(None, EXPECT, b"content-length: %d" % len(BODY)))
            assert (await client.answer()).status == 100
            client.send(BODY)
            assert (await client.answer()).status == 200
    assert posts(fake) == [BODY, BODY]


@pytest.mark.parametrize(
    ("length", "key", "status"), [(len(BODY), False, 401), (LIMIT + 1, True, 413)]
)
async def test_client_that_waits_for_100_is_refused_before_its_body(
    gateway: Gateway, fake: Fake, length: int, key: bool, status: int
) -> None:
    async with connected(gateway) as client:
        client.send(request(None, EXPECT, b"content-length: %d" % length, key=key))
        [answer] = await answers(await client.rest())  # so the connection is closed
    assert answer.status == status
    assert posts(fake) == []


@pytest.mark.parametrize("method", [b"HEAD", b"GET", b"OPTIONS"])
async def test_answer_without_a_body_reaches_a_client_that_waits_for_100(
    gateway: Gateway, method: bytes
) -> None:
    async with connected(gateway) as client:
        client.send(request(None, EXPECT, b"content-length: 5", method=method, path=b"/v1/models"))
        assert (await client.rest()).startswith(b"HTTP/1.1 20")


async def test_refusal_keeps_the_connection_of_a_client_that_did_not_wait(
    gateway: Gateway,
) -> None:
    async with connected(gateway) as client:
        client.send(request(BODY, EXPECT, key=False))
        assert (await client.answer()).status == 401
        client.send(request())
        assert (await client.answer()).status == 200


async def test_http_1_0_client_is_sent_no_100(gateway: Gateway) -> None:
    payload = request(None, EXPECT, b"content-length: %d" % len(BODY), version=b"1.0")
    async with connected(gateway) as client:
        client.send(payload)
        await asyncio.sleep(0.02)
        client.send(BODY)
        [answer] = await answers(await client.rest())
    assert answer.status == 200


# Upgrades

H2C = (
    b"connection: Upgrade, HTTP2-Settings",
    b"upgrade: h2c",
    b"http2-settings: AAMAAABkAAQAoAAAAAIAAAAA",
)
WEBSOCKET = (
    b"connection: Upgrade",
    b"upgrade: websocket",
    b"sec-websocket-version: 13",
    b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==",
)


@pytest.mark.parametrize("piece", [1, 7, 1_000_000])
@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_request_that_asks_for_h2c_is_answered_without(
    gateway: Gateway, fake: Fake, piece: int, framing: str
) -> None:
    payload = request(BODY, *H2C)
    if framing == "chunked":
        payload = request(None, *H2C, CHUNKED) + chunked(BODY)
    async with connected(gateway) as client:
        for _ in range(2):
            for start in range(0, len(payload), piece):
                client.send(payload[start : start + piece])
                await asyncio.sleep(0)
            answer = await client.answer()
            assert answer.status == 200
            assert "upgrade" not in answer.headers
    assert posts(fake) == [BODY, BODY]


async def test_websocket_handshake_is_an_ordinary_get(gateway: Gateway) -> None:
    async with connected(gateway) as client:
        client.send(request(None, *WEBSOCKET, method=b"GET", path=b"/v1/models"))
        answer = await client.answer()
    assert answer.status == 200
    assert json.loads(answer.body)["data"][0]["id"] == "demo"


async def test_several_upgrades_in_one_piece_are_each_answered(
    gateway: Gateway, fake: Fake
) -> None:
    async with connected(gateway) as client:
        client.send(request(BODY, *H2C) * 3 + request())
        assert [(await client.answer()).status for _ in range(4)] == [200] * 4
    assert posts(fake) == [BODY] * 4


async def test_declined_upgrade_keeps_the_wish_to_close(gateway: Gateway) -> None:
    [answer] = await answers(
        await gateway.raw(request(BODY, b"connection: close, upgrade", b"upgrade: h2c"))
    )
    assert answer.status == 200
    assert answer.headers["connection"] == "close"


async def test_declined_upgrade_keeps_the_version(gateway: Gateway) -> None:
    stream = asking(stream=True, messages=[])
    [answer] = await answers(await gateway.raw(request(stream, *H2C, version=b"1.0")))
    assert answer.status == 200
    assert "transfer-encoding" not in answer.headers
    assert answer.body.endswith(b"data: [DONE]\n\n")


async def test_fault_behind_a_declined_upgrade_is_400(gateway: Gateway, fake: Fake) -> None:
    payload = request(None, *H2C, CHUNKED) + b"zz\r\n"
    [answer] = await answers(await gateway.raw(payload))
    assert answer.status == 400
    assert posts(fake) == []


# What is left of a request


@pytest.fixture
def collects_nothing() -> Iterator[None]:
    gc.collect()
    gc.freeze()  # what there is already is not looked at again
    gc.disable()
    yield
    gc.enable()


def kept() -> int:
    """Return the number of new requests and responses, uncollected garbage included."""
    kinds = (RequestResponseCycle, AsgiTransport, HttpExchange, RequestContext)
    return sum(isinstance(one, kinds) for one in gc.get_objects())


HEALTH = request(None, method=b"GET", path=b"/health")
ANSWERED = {
    "plain": request(),
    "stream": request(asking(stream=True)),
    "refused by the engine": request(asking(fake="status:404")),
    "no such model": request(asking(model="absent")),
    "no JSON": request(b"{"),
    "no key": request(key=False),
    "another route": HEALTH,
    "no body": request(None, method=b"OPTIONS"),
    "pipelined": request() + request(asking(stream=True)) + HEALTH,
    "HTTP/1.0": request(version=b"1.0"),
    "a stream to HTTP/1.0": request(asking(stream=True), version=b"1.0"),
    "the last one": request(BODY, b"connection: close"),
}


@pytest.mark.parametrize("ask", ANSWERED.values(), ids=ANSWERED)
async def test_a_request_that_was_answered_leaves_no_garbage(
    gateway: Gateway, collects_nothing: None, ask: bytes
) -> None:
    before = kept()
    for _ in range(3):
        async with connected(gateway) as client:
            client.send(ask)
            for _ in range(ask.count(b"host: x")):
                await client.answer()
    await until_kept(before)


@pytest.mark.parametrize("stream", [False, True])
async def test_disconnect_leaves_no_garbage(
    gateway: Gateway, fake: Fake, collects_nothing: None, stream: bool
) -> None:
    before = kept()
    async with connected(gateway) as client:
        client.send(request(asking(stream=stream, fake="pace:5" if stream else "hang")))
        await until_asked(fake)
        if stream:
            await client.until(b"data: ")
    await until_kept(before)


async def until_kept(count: int) -> None:
    await wait_until(lambda: kept() <= count)


# Pipelining


async def test_pipelined_streams_and_plain_answers_come_in_order(
    gateway: Gateway, fake: Fake
) -> None:
    ask = [asking(fake="status:201"), asking(stream=True), asking(fake="status:404"), BODY]
    async with connected(gateway) as client:
        client.send(b"".join(request(body) for body in ask))
        got = [await client.answer() for _ in ask]
    assert [answer.status for answer in got] == [201, 200, 404, 200]
    assert got[1].body.endswith(b"data: [DONE]\n\n")
    # the gateway asks vLLM for the usage of a stream
    assert [json.loads(body).get("fake") for body in posts(fake)] == [
        json.loads(body).get("fake") for body in ask
    ]


async def test_more_pipelined_requests_than_are_read_ahead_are_all_answered(
    gateway: Gateway,
) -> None:
    count = 4 * MAX_PIPELINED
    async with connected(gateway) as client:
        client.send(request() * count)
        assert [(await client.answer()).status for _ in range(count)] == [200] * count


@pytest.mark.parametrize("ask", [BODY, asking(stream=True), asking(fake="flood:1", stream=True)])
async def test_good_request_before_garbage_gets_its_whole_answer(
    gateway: Gateway, ask: bytes
) -> None:
    async with connected(gateway) as client:
        client.send(request(ask) + b"\0garbage\r\n\r\n")
        answer = await client.answer()
        assert (answer.status, answer.whole) == (200, True)
        assert await client.rest() == b""


@pytest.mark.parametrize("behind", [1, 3])
async def test_hang_up_in_mid_stream_ends_the_engines_work_of_a_client_that_pipelines(
    gateway: Gateway, fake: Fake, behind: int
) -> None:
    before = await gateway.metric("gateway_client_disconnects_total")
    async with connected(gateway) as client:
        client.send(request(asking(stream=True, fake="pace:5")) + request() * behind)
        await client.until(b"data: ")
    await fake.until_idle()
    assert fake.aborted == 1
    await asyncio.wait_for(gateway.state.admission.wait_until_idle(), PATIENCE_S)
    assert await gateway.metric("gateway_client_disconnects_total") == before + 1
    assert len(posts(fake)) == 1, "what waited behind the stream is not asked any more"


async def test_hang_up_behind_garbage_ends_the_engines_work(gateway: Gateway, fake: Fake) -> None:
    async with connected(gateway) as client:
        client.send(request(asking(stream=True, fake="pace:5")) + b"\0garbage\r\n\r\n")
        await client.until(b"data: ")
    await fake.until_idle()
    assert fake.aborted == 1


# HTTP/1.0


async def test_plain_answer_to_http_1_0(gateway: Gateway) -> None:
    modern = await gateway.client.post("/v1/completions", content=BODY)
    [answer] = await answers(await gateway.raw(request(version=b"1.0")))
    assert answer.status == 200
    assert answer.body == modern.content
    assert "transfer-encoding" not in answer.headers
    assert answer.headers["connection"] == "close"


@pytest.mark.parametrize("ask", [asking(stream=True), asking(stream=True, fake="flood:1")])
async def test_stream_to_http_1_0_ends_with_the_connection(gateway: Gateway, ask: bytes) -> None:
    modern = await gateway.client.post("/v1/chat/completions", content=ask)
    payload = request(ask, path=b"/v1/chat/completions", version=b"1.0")
    [answer] = await answers(await gateway.raw(payload))
    assert answer.status == 200
    assert answer.body == modern.content
    assert "transfer-encoding" not in answer.headers
    assert "content-length" not in answer.headers
    assert answer.headers["connection"] == "close"


async def test_chunks_of_a_stream_to_http_1_0_are_sent_as_they_come(gateway: Gateway) -> None:
    async with connected(gateway) as client:
        client.send(request(asking(stream=True, fake="stall:2"), version=b"1.0"))
        await client.until(b"\r\n\r\n")
        assert (await client.until(b"\n\n")).startswith(b"data: ")
        assert (await client.until(b"\n\n")).startswith(b"data: ")


@pytest.mark.parametrize("path", [b"/health", b"/metrics", b"/v1/models", b"/nope"])
@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
async def test_other_routes_answer_http_1_0(gateway: Gateway, path: bytes, method: bytes) -> None:
    raw = await gateway.raw(request(None, method=method, path=path, version=b"1.0"))
    head, _, body = raw.partition(b"\r\n\r\n")
    assert head.split(b" ")[1] == (b"404" if path == b"/nope" else b"200")
    assert b"transfer-encoding" not in head
    assert bool(body) is (method == b"GET")


async def test_hang_up_of_an_http_1_0_client_ends_the_engines_work(
    gateway: Gateway, fake: Fake
) -> None:
    async with connected(gateway) as client:
        client.send(request(asking(stream=True, fake="pace:5"), version=b"1.0"))
        await client.until(b"data: ")
    await fake.until_idle()
    assert fake.aborted == 1


# Answers before the end of the request


@pytest.mark.parametrize("framing", ["length", "chunked"])
@pytest.mark.parametrize("kind", ["kept", "close", "1.0"])
async def test_413_is_received_by_a_client_that_sends_its_whole_body(
    gateway: Gateway, fake: Fake, framing: str, kind: str
) -> None:
    # 8 MiB: more than the sockets hold
    pieces = [b'{"model":"demo","x":"' + b"y" * 65515, *[b"y" * 65536] * 127]
    version = b"1.0" if kind == "1.0" else b"1.1"
    connection_header = b"connection: %s" % (b"keep-alive" if kind == "kept" else b"close")
    if framing == "length":
        payload = request(b"".join(pieces), connection_header, version=version)
    else:
        payload = request(None, connection_header, CHUNKED, version=version) + chunked(*pieces)
    async with connected(gateway) as client:
        client.send(payload)
        async with asyncio.timeout(PATIENCE_S):
            await client.writer.drain()
        answer = await client.answer()
        assert (answer.status, answer.code) == (413, "request_too_large")
        if kind == "kept":
            client.send(request())
            assert (await client.answer()).status == 200, "the connection can be used on"
        else:
            assert await client.rest() == b""
    assert posts(fake) == ([BODY] if kind == "kept" else [])


async def test_fault_in_a_body_that_was_refused_already_gets_no_second_answer(
    gateway: Gateway,
) -> None:
    before = await refused(gateway, 400)
    async with connected(gateway) as client:
        client.send(request(None, CHUNKED, key=False) + b"1\r\na\r\n")
        assert (await client.answer()).status == 401
        client.send(b"zz\r\n")
        assert await client.rest() == b""
    assert await refused(gateway, 400) == before


@pytest.mark.slow
async def test_body_that_was_refused_is_not_waited_for_for_ever(fake: Fake, tmp_path: Path) -> None:
    async with serving(fake, tmp_path, body_timeout_s=0.15) as gateway, connected(gateway) as c:
        c.send(request(None, CHUNKED, key=False))
        assert (await c.answer()).status == 401
        assert await drip(c, b"1\r\na\r\n") == b""


# Clients that do not read


async def unread(gateway: Gateway, payload: bytes) -> Client:
    """Send a request and read nothing of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=1024)
    writer.write(payload)
    return Client(reader, writer)


def server_sockets(gateway: Gateway) -> int:
    """Return the number of client connections on the gateway's side."""
    return sum(
        connection.laddr.port == gateway.port and connection.status == "ESTABLISHED"
        for connection in psutil.Process().net_connections("tcp4")
    )


def access_line(gateway: Gateway, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the line that the last request left."""
    gateway.state.access.flush()
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
async def test_client_that_reads_nothing_pauses_the_engine_and_is_let_go(
    fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str], version: bytes
) -> None:
    async with serving(fake, tmp_path, client_stall_s=0.2, keep_alive_s=1) as gateway:
        client = await unread(
            gateway, request(asking(stream=True, fake="flood:256"), version=version)
        )
        await until_asked(fake)
        await fake.until_idle()
        await asyncio.wait_for(gateway.state.admission.wait_until_idle(), PATIENCE_S)
        line = access_line(gateway, capsys)
        assert "the client read nothing for 0.2 s" in line
        # What the sockets of this machine hold, and not the 256 MiB of the answer.
        assert json.loads(line)["bytes_out"] < 64 * 1024 * 1024
        # The connection does not wait for ever for a client that reads nothing.
        await wait_until(lambda: not server_sockets(gateway))
        client.writer.transport.abort()


@pytest.mark.slow
async def test_client_that_reads_none_of_many_answers_is_let_go(fake: Fake, tmp_path: Path) -> None:
    async with serving(fake, tmp_path, client_stall_s=0.1) as gateway:
        metrics = request(None, method=b"GET", path=b"/metrics")
        client = await unread(gateway, metrics * 4000)  # more than the sockets hold
        await wait_until(lambda: not server_sockets(gateway))
        client.writer.transport.abort()


@pytest.mark.slow
async def test_client_that_reads_late_gets_every_byte(gateway: Gateway, fake: Fake) -> None:
    client = await unread(gateway, request(asking(stream=True, fake="flood:16")))
    await until_asked(fake)
    await asyncio.sleep(0.1)  # for the buffers to fill
    client.reader._limit = 2**20  # type: ignore[attr-defined]  # what a line may have
    answer = await client.answer()
    client.writer.transport.abort()
    assert (answer.status, answer.whole) == (200, True)
    event = answer.body[: answer.body.index(b"\n\n") + 2]
    assert answer.body == event * (16 * 64)


# Connections that are used on


@pytest.mark.parametrize(
    "first",
    [
        request(),
        request(asking(stream=True)),
        request(asking(fake="flood:1", stream=True)),
        request(asking(fake="status:204")),
        request(asking(fake="status:400")),
        request(asking(fake="status:500")),
        request(asking(fake="text:500")),
        request(b"not JSON"),
        request(None, CHUNKED) + chunked(BODY),
        request(BODY, *H2C),
        request(key=False),
        request(path=b"/nope"),
        request(None, method=b"GET", path=b"/v1/models"),
        request(None, method=b"GET", path=b"/metrics"),
        request(None, method=b"OPTIONS", path=b"/v1/completions"),
    ],
    ids=[
        "plain", "stream", "large stream", "empty", "400", "500", "502", "invalid", "chunked",
        "upgrade", "401", "404", "models", "metrics", "options",
    ],
)  # fmt: skip
async def test_connection_is_used_for_a_second_request(
    gateway: Gateway, fake: Fake, first: bytes
) -> None:
    async with connected(gateway) as client:
        client.send(first)
        assert (await client.answer()).whole
        client.send(request())
        second = await client.answer()
    assert second.status == 200
    assert posts(fake)[-1] == BODY


async def test_connection_is_used_on_after_head(gateway: Gateway) -> None:
    async with connected(gateway) as client:
        for path in (b"/health", b"/v1/models", b"/v1/completions", b"/nope"):
            client.send(request(None, method=b"HEAD", path=path))
            await client.answer(head_only=True)
        client.send(request())
        assert (await client.answer()).status == 200


async def test_connection_is_closed_where_the_client_asks(gateway: Gateway) -> None:
    for body in (BODY, asking(stream=True)):
        [answer] = await answers(await gateway.raw(request(body, b"connection: close")))
        assert (answer.status, answer.whole) == (200, True)
        assert answer.headers["connection"] == "close"


async def test_head_of_a_stream_leaves_before_its_first_byte(gateway: Gateway) -> None:
    async with connected(gateway) as client:
        client.send(request(asking(stream=True, fake="stall:0")))
        assert b" 200 " in await client.until(b"\r\n\r\n")


async def test_requests_on_one_connection_have_their_own_bodies_and_headers(
    gateway: Gateway, fake: Fake
) -> None:
    """Whether the parser reads them, or the head of the previous one: alone, in parts, several."""
    bodies = [asking(prompt="a", max_tokens=number) for number in (1, 1, 1, 20, 300, 4, 5)]
    async with connected(gateway) as client:
        for body in bodies:
            client.send(request(body))
            assert (await client.answer()).status == 200
        client.send(request(bodies[0])[:-5])
        await asyncio.sleep(0.01)
        client.send(request(bodies[0])[-5:] + request(bodies[1]) * 2)
        assert [(await client.answer()).status for _ in range(3)] == [200] * 3
        client.send(request(bodies[0]).replace(KEY_LINE, KEY_LINE[:-1] + b"-"))
        assert (await client.answer()).status == 401
        client.send(request(bodies[0]))
        assert (await client.answer()).status == 200

    seen = [json.loads(body)["max_tokens"] for body in posts(fake)]
    assert seen == [1, 1, 1, 20, 300, 4, 5, 1, 1, 1, 1]
