"""The data path's client against a faithful fake, over real sockets."""

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
    EngineError,
    EngineNotReady,
    EngineProtocolError,
    EngineRequest,
    FirstByteTimeout,
    StallTimeout,
)
from engines.http import client as http1
from engines.http.client import Address, Http1Client, Http1Response
from engines.http.response import HIGH_WATER
from engines.spec import Timeouts
from tests.fakes.vllm import Fake
from tests.gateway import free_port


def post(**body: object) -> EngineRequest:
    data = json.dumps({"model": "demo", **body}).encode()
    headers = ((b"content-type", b"application/json"),)
    return EngineRequest("POST", "/v1/chat/completions", headers, data)


async def drain(response: Http1Response) -> bytes:
    pieces = []
    while data := await response.read():
        pieces.append(data)
    return b"".join(pieces)


async def drain_until_error(response: Http1Response) -> tuple[bytes, EngineError]:
    received = b""
    try:
        while data := await response.read():
            received += data
    except EngineError as error:
        return received, error
    raise AssertionError("the answer was whole")


@pytest.fixture
async def fake() -> AsyncIterator[Fake]:
    async with Fake() as server:
        yield server


@pytest.fixture
async def client(fake: Fake) -> AsyncIterator[Http1Client]:
    """A client that waits long; the fake shares its loop and may be held up with it."""
    one = Http1Client(Address.from_url(fake.url), Timeouts())
    yield one
    one.close()


@pytest.fixture
async def hasty(fake: Fake) -> AsyncIterator[Http1Client]:
    """A client that waits long for a first byte and 0.2 s for the next."""
    one = Http1Client(Address.from_url(fake.url), Timeouts(stall_s=0.2))
    yield one
    one.close()


async def test_plain_answer_comes_with_status_headers_and_body(client: Http1Client) -> None:
    response = await client.send(post())
    assert response.status == 200
    assert (b"content-type", b"application/json") in response.headers
    assert json.loads(await drain(response))["object"] == "chat.completion"
    assert response.ended
    assert await response.read() == b""


async def test_request_carries_host_length_and_fixed_headers(fake: Fake) -> None:
    client = Http1Client(Address.from_url(fake.url), Timeouts(), (("authorization", "Bearer k"),))
    await drain(await client.send(post()))
    seen = fake.seen[-1]
    assert seen.header("host") == f"127.0.0.1:{fake.port}"
    assert seen.header("authorization") == "Bearer k"
    assert seen.header("content-length") == str(len(seen.body))


async def test_prefix_of_the_url_stands_before_the_path(fake: Fake) -> None:
    client = Http1Client(Address.from_url(fake.url + "/team/vllm/"), Timeouts())
    await drain(await client.send(post()))
    assert fake.seen[-1].target == "/team/vllm/v1/chat/completions"


async def test_unix_socket_serves_like_tcp(tmp_path: Path) -> None:
    fake = await Fake().start(uds=str(tmp_path / "s"))
    client = Http1Client(Address(uds=str(tmp_path / "s")), Timeouts())
    assert (await client.send(post())).status == 200
    client.close()
    await fake.stop()


async def test_connection_is_reused_after_a_whole_answer(client: Http1Client, fake: Fake) -> None:
    for _ in range(5):
        await drain(await client.send(post()))
    assert fake.connections == 1


async def test_stream_is_read_to_its_end_and_the_connection_reused(
    client: Http1Client, fake: Fake
) -> None:
    for _ in range(2):
        body = await drain(await client.send(post(stream=True)))
        assert body.endswith(b"data: [DONE]\n\n")
    assert fake.connections == 1


async def test_early_close_reaches_the_engine_and_the_connection_is_not_reused(
    client: Http1Client, fake: Fake
) -> None:
    response = await client.send(post(fake="pace:5"))
    await response.read()
    response.close()
    await fake.until_idle()
    assert fake.aborted == 1
    await drain(await client.send(post()))
    assert fake.connections == 2


async def test_cancel_while_the_head_is_awaited_reaches_the_engine(
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
    await drain(await client.send(post()))
    port = fake.port
    await fake.stop()
    again = await Fake().start(port=port)
    # The loop has not told the client yet that the pooled connection is gone.
    response = await client.send(post())
    assert response.status == 200
    client.close()
    await again.stop()


async def test_request_whose_fresh_connection_closes_is_not_repeated(
    client: Http1Client, fake: Fake
) -> None:
    with pytest.raises(EngineDied):
        await client.send(post(fake="close"))
    assert len(fake.seen) == 1


async def test_pooled_connection_that_dies_after_a_byte_is_not_retried(
    client: Http1Client, fake: Fake
) -> None:
    await drain(await client.send(post()))
    response = await client.send(post(fake="truncate"))
    with pytest.raises(EngineDied):
        await drain(response)
    assert len(fake.seen) == 2


async def test_nobody_listening_is_unavailable() -> None:
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
    for one in waiting:  # nobody accepts, so the queue of connections is full after these
        one.setblocking(False)
        one.connect_ex(("127.0.0.1", port))
    client = Http1Client(Address(host="127.0.0.1", port=port), Timeouts(connect_s=0.1))
    with pytest.raises(ConnectTimeout):
        await client.send(post())
    for one in (*waiting, listener):
        one.close()


async def test_no_answer_is_a_first_byte_timeout(fake: Fake) -> None:
    client = Http1Client(Address.from_url(fake.url), Timeouts(first_byte_s=0.1))
    with pytest.raises(FirstByteTimeout):
        await client.send(post(fake="hang"))
    await fake.until_idle()
    client.close()


async def test_stall_is_told_after_the_bytes_before_it(hasty: Http1Client, fake: Fake) -> None:
    response = await hasty.send(post(fake="stall:3"))
    received, error = await drain_until_error(response)
    assert received.count(b"\n\n") == 3
    assert isinstance(error, StallTimeout)
    await fake.until_idle()


@pytest.mark.slow
async def test_stall_is_told_in_its_time_though_a_first_byte_may_take_longer(fake: Fake) -> None:
    patient = Http1Client(Address.from_url(fake.url), Timeouts(first_byte_s=3600, stall_s=0.2))
    response = await patient.send(post(fake="stall:1"))
    async with asyncio.timeout(20):
        _, error = await drain_until_error(response)
    assert isinstance(error, StallTimeout)
    patient.close()


@pytest.mark.slow
async def test_steady_stream_longer_than_the_stall_timeout_goes_on(fake: Fake) -> None:
    client = Http1Client(Address.from_url(fake.url), Timeouts(stall_s=1))
    response = await client.send(post(fake="pace:50"))
    received = b""
    async with asyncio.timeout(20):
        while received.count(b"\n\n") < 24:
            received += await response.read()
    client.close()


async def test_death_in_mid_stream_is_told_after_the_bytes_before_it(client: Http1Client) -> None:
    response = await client.send(post(fake="die:2"))
    received, error = await drain_until_error(response)
    assert received.count(b"\n\n") == 2
    assert isinstance(error, EngineDied)


@pytest.mark.parametrize("fault", ["garbage", "huge_head"])
async def test_head_that_is_not_http_within_limits_is_a_protocol_error(
    client: Http1Client, fault: str
) -> None:
    with pytest.raises(EngineProtocolError):
        await client.send(post(fake=fault))


async def test_malformed_chunk_is_a_protocol_error(client: Http1Client) -> None:
    response = await client.send(post(fake="bad_chunk"))
    with pytest.raises(EngineProtocolError):
        await drain(response)


async def test_bytes_after_the_answer_are_never_taken_for_the_next_one(
    client: Http1Client, fake: Fake
) -> None:
    response = await client.send(post(fake="extra"))
    with pytest.raises(EngineProtocolError):
        await drain(response)
    assert (await client.send(post())).status == 200
    assert fake.connections == 2


async def test_body_without_framing_ends_with_the_connection(client: Http1Client) -> None:
    response = await client.send(post(fake="until_close"))
    assert await drain(response) == b"{}"


async def test_interim_answers_are_passed_over(client: Http1Client) -> None:
    response = await client.send(post(fake="hints"))
    assert response.status == 200
    assert [name for name, _ in response.headers].count(b"link") == 0
    assert await drain(response) == b"{}"


@pytest.mark.slow
async def test_slow_reader_pauses_the_engine_within_the_bound(
    hasty: Http1Client, fake: Fake
) -> None:
    response = await hasty.send(post(fake="flood:64"))
    await asyncio.sleep(0.3)  # longer than the stall timeout: a pause of ours is not a stall
    assert fake.running == 1, "64 MiB must not fit anywhere between"
    size = 0
    while data := await response.read():
        # what was buffered when reading paused, and at most one read of the socket more
        assert len(data) <= HIGH_WATER + 256 * 1024
        size += len(data)
    assert size > 64_000_000


async def test_split_events_arrive_as_the_same_bytes(client: Http1Client) -> None:
    whole = await drain(await client.send(post(fake="split:1000000")))
    for size in (1, 7, 100):
        assert await drain(await client.send(post(fake=f"split:{size}"))) == whole


async def test_idle_connections_are_left_before_the_server_closes_them(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http1, "IDLE_S", 0.01)
    client = Http1Client(Address.from_url(fake.url), Timeouts())
    await drain(await client.send(post()))
    await asyncio.sleep(0.02)
    await drain(await client.send(post()))
    assert fake.connections == 2
    client.close()


async def test_closed_client_ends_the_answers_under_way(client: Http1Client, fake: Fake) -> None:
    response = await client.send(post(fake="pace:5"))
    waiting = asyncio.create_task(client.send(post(fake="hang")))
    await fake.until_running(2)
    client.close()
    _, error = await drain_until_error(response)
    assert isinstance(error, EngineDied)
    with pytest.raises(EngineDied):
        await waiting
    await fake.until_idle()
    assert client.in_flight == 0


async def test_quiet_returns_when_the_last_exchange_has_ended(client: Http1Client) -> None:
    await client.quiet()
    response = await client.send(post(fake="pace:5"))
    waiting = asyncio.create_task(client.quiet())
    await asyncio.sleep(0)
    assert not waiting.done()
    response.close()
    await waiting
    assert client.in_flight == 0


async def test_parallel_requests_get_their_own_answers(client: Http1Client, fake: Fake) -> None:
    async def one(status: int) -> int:
        response = await client.send(post(fake=f"status:{status}"))
        await drain(response)
        return response.status

    wanted = [200 + n % 3 for n in range(60)]
    assert await asyncio.gather(*map(one, wanted)) == wanted
    assert client.in_flight == 0


async def test_connection_that_goes_to_the_next_request_at_once_serves_it(
    client: Http1Client,
) -> None:
    """The pool may hand a connection on before the task of the request before has run again."""

    async def worker() -> None:
        for _ in range(50):
            await drain(await client.send(post()))

    async with asyncio.timeout(20):
        await asyncio.gather(*(worker() for _ in range(8)))


async def test_late_cancel_of_a_finished_request_leaves_the_next_one_alone(
    client: Http1Client, fake: Fake
) -> None:
    await drain(await client.send(post()))  # so that both below use one connection
    for turns in range(1, 30):  # in one of these the answer is whole and its task has not run
        first = asyncio.create_task(client.send(post()))
        for _ in range(turns):
            await asyncio.sleep(0)
        first.cancel()
        async with asyncio.timeout(20):
            assert (await client.send(post())).status == 200
        await asyncio.gather(first, return_exceptions=True)


def test_address_of_a_url() -> None:
    assert Address.from_url("https://h/v").port == 443
    assert Address.from_url("http://[::1]:81").host_header == "[::1]:81"
    assert Address.from_url("http://h").host_header == "h"
    assert Address.from_url("https://h/v/").prefix == "/v"


# Pumping: the body is handed over as it comes


async def test_pump_hands_over_every_byte_as_it_comes(client: Http1Client) -> None:
    straight = await drain(await client.send(post(stream=True)))
    response = await client.send(post(stream=True))
    pieces: list[bytes] = []
    ended: list[bool] = []

    def sink(data: bytes) -> bool:
        pieces.append(data)
        ended.append(response.ended)
        return True

    assert await response.pump(sink)
    assert b"".join(pieces) == straight
    assert response.ended
    assert not any(ended[:-1])


async def test_pump_stops_when_the_sink_has_had_enough_and_goes_on_later(
    client: Http1Client,
) -> None:
    response = await client.send(post(stream=True, fake="flood:1"))
    pieces: list[bytes] = []

    def sink(data: bytes) -> bool:
        pieces.append(data)
        return False

    pumps = 0
    while not await response.pump(sink):
        pumps += 1
        await asyncio.sleep(0)
    assert pumps > 1
    assert sum(map(len, pieces)) > 64 * 16000


async def test_what_comes_while_nobody_pumps_is_bounded(fake: Fake, client: Http1Client) -> None:
    response = await client.send(post(stream=True, fake="flood:64"))
    assert not await response.pump(lambda _: False)
    held = 0
    for _ in range(200):
        await asyncio.sleep(0.001)
        if response._size == held and held:
            break
        held = response._size
    # One read of the socket may come on top of the bound; uvloop's are up to 256 KB.
    assert HIGH_WATER < held < 3 * HIGH_WATER
    response.close()
    await fake.until_idle()


async def test_pump_raises_what_broke_after_the_bytes_before(client: Http1Client) -> None:
    response = await client.send(post(stream=True, fake="die:3"))
    pieces: list[bytes] = []

    def sink(data: bytes) -> bool:
        pieces.append(data)
        return True

    with pytest.raises(EngineDied):
        await response.pump(sink)
    assert b"".join(pieces).count(b"data: ") == 3


async def test_bytes_before_broken_framing_in_the_same_read_are_not_lost() -> None:
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
        received, error = await drain_until_error(response)
        client.close()
    assert received == b"first"
    assert isinstance(error, EngineProtocolError)


async def test_what_the_sink_raises_comes_out_of_pump(fake: Fake, client: Http1Client) -> None:
    response = await client.send(post(stream=True, fake="pace:1"))

    def sink(data: bytes) -> bool:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await response.pump(sink)
    response.close()
    await fake.until_idle()


async def test_cancelled_pump_leaves_the_answer_to_be_closed(
    fake: Fake, client: Http1Client
) -> None:
    response = await client.send(post(stream=True, fake="pace:1"))
    pieces: list[bytes] = []

    def sink(data: bytes) -> bool:
        pieces.append(data)
        return True

    pumping = asyncio.create_task(response.pump(sink))
    while not pieces:
        await asyncio.sleep(0.001)
    pumping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pumping
    response.close()
    await fake.until_idle()


async def test_engine_is_not_blamed_for_what_waits_in_our_own_socket(fake: Fake) -> None:
    """A loop that was held up for longer than a timeout reads first and judges then."""
    timeouts = Timeouts(connect_s=0.1, first_byte_s=0.1, stall_s=0.1)
    client = Http1Client(Address.from_url(fake.url), timeouts)
    await drain(await client.send(post()))
    sending = asyncio.create_task(client.send(post()))
    while len(fake.seen) < 2:
        await asyncio.sleep(0)
    # The fake shares this loop and has answered: its bytes are in our socket's buffer.
    time.sleep(0.3)
    assert (await sending).status == 200
    client.close()


@pytest.mark.parametrize("error", [None, EngineDied("gone")])
async def test_pump_leaves_out_nothing_that_came_after_the_sink_said_no(
    client: Http1Client, error: EngineError | None
) -> None:
    response = await client.send(post(fake="stall:0"))
    got: list[bytes] = []

    def sink(data: bytes) -> bool:
        got.append(data)
        return False

    pumping = asyncio.create_task(response.pump(sink))
    await asyncio.sleep(0)
    response.feed(b"one", False)
    # Both before the task that pumps has been woken, as from a socket that is read several times.
    response.feed(b"two", error is None)
    if error is not None:
        response.fail(error)
    assert not await pumping
    assert not await response.pump(sink)
    assert got == [b"one", b"two"]
    if error is None:
        assert await response.pump(sink)
    else:
        with pytest.raises(EngineDied):
            await response.pump(sink)
