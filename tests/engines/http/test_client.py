"""The HTTP client of the data path against the fake engine, over real sockets."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from engines.base import (
    ConnectTimeout,
    EngineDied,
    EngineNotReady,
    EngineProtocolError,
    EngineRequest,
    FirstByteTimeout,
    StallTimeout,
)
from engines.http import Address, Http1Client
from engines.http import client as client_module
from engines.http.response import HIGH_WATER
from engines.spec import Timeouts
from tests.engines.http.exchanges import post, read_all, read_until_error
from tests.fakes.vllm import Fake
from tests.gateway import free_port


@pytest.fixture
async def hasty(fake: Fake) -> AsyncIterator[Http1Client]:
    """A client with a stall timeout of 0.2 s and a long first-byte timeout."""
    one = Http1Client(Address.from_url(fake.url), Timeouts(stall_s=0.2))
    yield one
    one.close()


async def test_plain_response_has_status_headers_and_body(client: Http1Client) -> None:
    response = await client.send(post())
    assert response.status == 200
    assert (b"content-type", b"application/json") in response.headers
    assert json.loads(await read_all(response))["object"] == "chat.completion"
    assert response.ended
    assert await response.read() == b""


async def test_request_carries_host_length_and_fixed_headers(fake: Fake) -> None:
    client = Http1Client(Address.from_url(fake.url), Timeouts(), (("authorization", "Bearer k"),))
    await read_all(await client.send(post()))
    seen = fake.seen[-1]
    assert seen.header("host") == f"127.0.0.1:{fake.port}"
    assert seen.header("authorization") == "Bearer k"
    assert seen.header("content-length") == str(len(seen.body))


async def test_path_of_the_url_prefixes_the_target(fake: Fake) -> None:
    client = Http1Client(Address.from_url(fake.url + "/team/vllm/"), Timeouts())
    await read_all(await client.send(post()))
    assert fake.seen[-1].target == "/team/vllm/v1/chat/completions"


async def test_request_over_a_unix_socket(tmp_path: Path) -> None:
    fake = await Fake().start(uds=str(tmp_path / "s"))
    client = Http1Client(Address(uds=str(tmp_path / "s")), Timeouts())
    assert (await client.send(post())).status == 200
    client.close()
    await fake.stop()


async def test_connection_is_reused_after_a_complete_response(
    client: Http1Client, fake: Fake
) -> None:
    for _ in range(5):
        await read_all(await client.send(post()))
    assert fake.connections == 1


async def test_connection_is_reused_after_a_complete_stream(
    client: Http1Client, fake: Fake
) -> None:
    for _ in range(2):
        body = await read_all(await client.send(post(stream=True)))
        assert body.endswith(b"data: [DONE]\n\n")
    assert fake.connections == 1


async def test_early_close_aborts_generation_and_the_connection(
    client: Http1Client, fake: Fake
) -> None:
    response = await client.send(post(fake="pace:5"))
    await response.read()
    response.close()
    await fake.until_idle()
    assert fake.aborted == 1
    await read_all(await client.send(post()))
    assert fake.connections == 2


async def test_cancel_while_waiting_for_headers_aborts_generation(
    client: Http1Client, fake: Fake
) -> None:
    sending = asyncio.create_task(client.send(post(fake="hang")))
    await fake.until_running()
    sending.cancel()
    await fake.until_idle()
    assert fake.aborted == 1
    assert client.in_flight == 0


async def test_stale_pooled_connection_is_replaced_once(fake: Fake) -> None:
    client = Http1Client(Address.from_url(fake.url), Timeouts())
    await read_all(await client.send(post()))
    port = fake.port
    await fake.stop()
    again = await Fake().start(port=port)
    # The client has not been notified yet that the pooled connection is closed.
    response = await client.send(post())
    assert response.status == 200
    client.close()
    await again.stop()


async def test_request_is_not_retried_if_a_new_connection_closes(
    client: Http1Client, fake: Fake
) -> None:
    with pytest.raises(EngineDied):
        await client.send(post(fake="close"))
    assert len(fake.seen) == 1


async def test_request_is_not_retried_after_the_first_byte_of_a_response(
    client: Http1Client, fake: Fake
) -> None:
    await read_all(await client.send(post()))
    response = await client.send(post(fake="truncate"))
    with pytest.raises(EngineDied):
        await read_all(response)
    assert len(fake.seen) == 2


async def test_refused_connection_is_unavailable() -> None:
    client = Http1Client(Address(host="127.0.0.1", port=free_port()), Timeouts())
    with pytest.raises(EngineNotReady, match="refused"):
        await client.send(post())


async def test_missing_unix_socket_is_unavailable(tmp_path: Path) -> None:
    client = Http1Client(Address(uds=str(tmp_path / "none")), Timeouts())
    with pytest.raises(EngineNotReady):
        await client.send(post())


async def test_unknown_host_is_unavailable() -> None:
    client = Http1Client(Address(host="nowhere.invalid"), Timeouts())
    with pytest.raises(EngineNotReady):
        await client.send(post())


async def test_full_backlog_is_a_connect_timeout() -> None:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    port = listener.getsockname()[1]
    waiting = [socket.socket() for _ in range(4)]
    for one in waiting:  # nothing accepts, so these fill the backlog
        one.setblocking(False)
        one.connect_ex(("127.0.0.1", port))
    client = Http1Client(Address(host="127.0.0.1", port=port), Timeouts(connect_s=0.1))
    with pytest.raises(ConnectTimeout):
        await client.send(post())
    for one in (*waiting, listener):
        one.close()


async def test_missing_response_is_a_first_byte_timeout(fake: Fake) -> None:
    client = Http1Client(Address.from_url(fake.url), Timeouts(first_byte_s=0.1))
    with pytest.raises(FirstByteTimeout):
        await client.send(post(fake="hang"))
    await fake.until_idle()
    client.close()


async def test_stall_timeout_is_raised_after_the_bytes_before_it(
    hasty: Http1Client, fake: Fake
) -> None:
    response = await hasty.send(post(fake="stall:3"))
    received, error = await read_until_error(response)
    assert received.count(b"\n\n") == 3
    assert isinstance(error, StallTimeout)
    await fake.until_idle()


@pytest.mark.slow
async def test_stall_timeout_applies_with_a_longer_first_byte_timeout(fake: Fake) -> None:
    patient = Http1Client(Address.from_url(fake.url), Timeouts(first_byte_s=3600, stall_s=0.2))
    response = await patient.send(post(fake="stall:1"))
    async with asyncio.timeout(20):
        _, error = await read_until_error(response)
    assert isinstance(error, StallTimeout)
    patient.close()


@pytest.mark.slow
async def test_steady_stream_outlasts_the_stall_timeout(fake: Fake) -> None:
    client = Http1Client(Address.from_url(fake.url), Timeouts(stall_s=1))
    response = await client.send(post(fake="pace:50"))
    received = b""
    async with asyncio.timeout(20):
        while received.count(b"\n\n") < 24:
            received += await response.read()
    client.close()


async def test_death_in_mid_stream_is_raised_after_the_bytes_before_it(client: Http1Client) -> None:
    response = await client.send(post(fake="die:2"))
    received, error = await read_until_error(response)
    assert received.count(b"\n\n") == 2
    assert isinstance(error, EngineDied)


@pytest.mark.parametrize("fault", ["garbage", "huge_head"])
async def test_malformed_or_oversized_headers_are_a_protocol_error(
    client: Http1Client, fault: str
) -> None:
    with pytest.raises(EngineProtocolError):
        await client.send(post(fake=fault))


async def test_malformed_chunk_is_a_protocol_error(client: Http1Client) -> None:
    response = await client.send(post(fake="bad_chunk"))
    with pytest.raises(EngineProtocolError):
        await read_all(response)


async def test_bytes_after_a_response_are_never_taken_for_the_next_one(
    client: Http1Client, fake: Fake
) -> None:
    response = await client.send(post(fake="extra"))
    with pytest.raises(EngineProtocolError):
        await read_all(response)
    assert (await client.send(post())).status == 200
    assert fake.connections == 2


async def test_body_without_framing_ends_with_the_connection(client: Http1Client) -> None:
    response = await client.send(post(fake="until_close"))
    assert await read_all(response) == b"{}"


async def test_interim_responses_are_skipped(client: Http1Client) -> None:
    response = await client.send(post(fake="hints"))
    assert response.status == 200
    assert [name for name, _ in response.headers].count(b"link") == 0
    assert await read_all(response) == b"{}"


@pytest.mark.slow
async def test_backpressure_of_a_slow_reader_pauses_the_engine(
    hasty: Http1Client, fake: Fake
) -> None:
    response = await hasty.send(post(fake="flood:64"))
    await asyncio.sleep(0.3)  # longer than the stall timeout, which does not apply while paused
    assert fake.running == 1, "64 MiB must not fit into buffers"
    size = 0
    while data := await response.read():
        # the buffer when reading paused, and at most one more read of the socket
        assert len(data) <= HIGH_WATER + 256 * 1024
        size += len(data)
    assert size > 64_000_000


async def test_split_events_arrive_as_the_same_bytes(client: Http1Client) -> None:
    whole = await read_all(await client.send(post(fake="split:1000000")))
    for size in (1, 7, 100):
        assert await read_all(await client.send(post(fake=f"split:{size}"))) == whole


async def test_idle_connections_are_closed_before_the_server_closes_them(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "MAX_IDLE_S", 0.01)
    client = Http1Client(Address.from_url(fake.url), Timeouts())
    await read_all(await client.send(post()))
    await asyncio.sleep(0.02)
    await read_all(await client.send(post()))
    assert fake.connections == 2
    client.close()


async def test_closing_the_client_fails_responses_in_flight(
    client: Http1Client, fake: Fake
) -> None:
    response = await client.send(post(fake="pace:5"))
    waiting = asyncio.create_task(client.send(post(fake="hang")))
    await fake.until_running(2)
    client.close()
    _, error = await read_until_error(response)
    assert isinstance(error, EngineDied)
    with pytest.raises(EngineDied):
        await waiting
    await fake.until_idle()
    assert client.in_flight == 0


async def test_wait_idle_returns_when_the_last_exchange_ends(client: Http1Client) -> None:
    await client.wait_idle()
    response = await client.send(post(fake="pace:5"))
    waiting = asyncio.create_task(client.wait_idle())
    await asyncio.sleep(0)
    assert not waiting.done()
    response.close()
    await waiting
    assert client.in_flight == 0


async def test_parallel_requests_get_their_own_responses(client: Http1Client, fake: Fake) -> None:
    async def one(status: int) -> int:
        response = await client.send(post(fake=f"status:{status}"))
        await read_all(response)
        return response.status

    expected = [200 + n % 3 for n in range(60)]
    assert await asyncio.gather(*map(one, expected)) == expected
    assert client.in_flight == 0


async def test_connection_serves_the_next_request_at_once(
    client: Http1Client,
) -> None:
    """The pool may reuse a connection before the task of its previous request has run again."""

    async def worker() -> None:
        for _ in range(50):
            await read_all(await client.send(post()))

    async with asyncio.timeout(20):
        await asyncio.gather(*(worker() for _ in range(8)))


async def test_late_cancel_of_a_finished_request_does_not_affect_the_next(
    client: Http1Client, fake: Fake
) -> None:
    await read_all(await client.send(post()))  # so that both below use one connection
    for turns in range(1, 30):  # in one of these the response is complete and its task has not run
        first = asyncio.create_task(client.send(post()))
        for _ in range(turns):
            await asyncio.sleep(0)
        first.cancel()
        async with asyncio.timeout(20):
            assert (await client.send(post())).status == 200
        await asyncio.gather(first, return_exceptions=True)


async def test_bytes_before_broken_framing_in_the_same_read_are_kept() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(head + b"5\r\nfirst\r\nzz\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        client = Http1Client(Address(host="127.0.0.1", port=port), Timeouts())
        response = await client.send(EngineRequest("GET", "/", (), b""))
        received, error = await read_until_error(response)
        client.close()
    assert received == b"first"
    assert isinstance(error, EngineProtocolError)


async def test_no_timeout_for_bytes_waiting_in_the_sockets_buffer(fake: Fake) -> None:
    """A loop that was blocked for longer than a timeout reads its sockets first."""
    timeouts = Timeouts(connect_s=0.1, first_byte_s=0.1, stall_s=0.1)
    client = Http1Client(Address.from_url(fake.url), timeouts)
    await read_all(await client.send(post()))
    sending = asyncio.create_task(client.send(post()))
    while len(fake.seen) < 2:
        await asyncio.sleep(0)
    # The fake shares this loop and has responded: its bytes are in the socket's buffer.
    time.sleep(0.3)
    assert (await sending).status == 200
    client.close()
