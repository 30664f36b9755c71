"""Responses in flight: how `pump` passes their bytes on."""

import asyncio

import pytest

from engines.base import EngineDied, EngineDrained, EngineError
from engines.http import Http1Client
from engines.http.response import HIGH_WATER, ResponseBody
from tests.engines.http.exchanges import post, read_all, read_until_error
from tests.fakes.vllm import Fake
from tests.waiting import wait_until


async def test_pump_passes_every_byte_to_the_sink(client: Http1Client) -> None:
    straight = await read_all(await client.send(post(stream=True)))
    response = await client.send(post(stream=True))
    pieces: list[bytes] = []
    ended: list[bool] = []

    def sink(data: bytes, last: bool) -> bool:
        pieces.append(data)
        ended.append(response.ended)
        return True

    assert await response.pump(sink)
    assert b"".join(pieces) == straight
    assert response.ended
    assert not any(ended[:-1])


async def test_pump_stops_when_the_sink_returns_false_and_can_be_resumed(
    client: Http1Client,
) -> None:
    response = await client.send(post(stream=True, fake="flood:1"))
    pieces: list[bytes] = []

    def sink(data: bytes, last: bool) -> bool:
        pieces.append(data)
        return False

    pumps = 0
    while not await response.pump(sink):
        pumps += 1
        await asyncio.sleep(0)
    assert pumps > 1
    assert sum(map(len, pieces)) > 64 * 16000


async def test_buffer_is_bounded_while_nothing_pumps(fake: Fake, client: Http1Client) -> None:
    response = await client.send(post(stream=True, fake="flood:64"))
    assert not await response.pump(lambda _, last: False)
    held = 0
    for _ in range(200):
        await asyncio.sleep(0.001)
        if response._size == held and held:
            break
        held = response._size
    # One read of the socket may exceed the limit; uvloop reads up to 256 KB.
    assert HIGH_WATER < held < 3 * HIGH_WATER
    response.close()
    await fake.until_idle()


async def test_pump_raises_an_error_after_the_bytes_before_it(client: Http1Client) -> None:
    response = await client.send(post(stream=True, fake="die:3"))
    pieces: list[bytes] = []

    def sink(data: bytes, last: bool) -> bool:
        pieces.append(data)
        return True

    with pytest.raises(EngineDied):
        await response.pump(sink)
    assert b"".join(pieces).count(b"data: ") == 3


async def test_pump_raises_the_error_of_the_sink(fake: Fake, client: Http1Client) -> None:
    response = await client.send(post(stream=True, fake="pace:1"))

    def sink(data: bytes, last: bool) -> bool:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await response.pump(sink)
    response.close()
    await fake.until_idle()


async def test_response_can_be_closed_after_a_cancelled_pump(
    fake: Fake, client: Http1Client
) -> None:
    response = await client.send(post(stream=True, fake="pace:1"))
    pieces: list[bytes] = []

    def sink(data: bytes, last: bool) -> bool:
        pieces.append(data)
        return True

    pumping = asyncio.create_task(response.pump(sink))
    await wait_until(lambda: pieces)
    pumping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pumping
    response.close()
    await fake.until_idle()


@pytest.mark.parametrize("error", [None, EngineDied("gone")])
async def test_bytes_after_the_sink_returned_false_are_kept(
    client: Http1Client, error: EngineError | None
) -> None:
    response = await client.send(post(fake="stall:0"))
    got: list[bytes] = []

    def sink(data: bytes, last: bool) -> bool:
        got.append(data)
        return False

    pumping = asyncio.create_task(response.pump(sink))
    await asyncio.sleep(0)
    response.feed(b"one", False)
    # Both before the pumping task has been resumed, as with several reads of a socket.
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


class NoSource:
    """The source of a response that a test feeds."""

    def __init__(self) -> None:
        self.aborts = 0

    def resume(self) -> None:
        pass

    def abort(self) -> None:
        self.aborts += 1


async def test_pump_raises_an_error_of_the_sink_also_if_more_arrives_in_the_same_turn() -> None:
    response = ResponseBody(NoSource(), asyncio.get_running_loop())
    pieces: list[bytes] = []

    def sink(data: bytes, last: bool) -> bool:
        if data == b"error":
            raise EngineDied("it reports its own death")
        pieces.append(data)
        return True

    pumping = asyncio.create_task(response.pump(sink))
    await asyncio.sleep(0)
    for data in (b"token", b"error", b"[DONE]"):
        response.feed(data, False)
    response.feed(b"the end", True)
    response.finish()
    with pytest.raises(EngineDied, match="its own death"):
        await pumping
    assert pieces == [b"token"]


# Interruption


@pytest.fixture
def source() -> NoSource:
    return NoSource()


@pytest.fixture
async def fed(source: NoSource) -> ResponseBody:
    """A response that the test feeds."""
    return ResponseBody(source, asyncio.get_running_loop())


DRAINED = EngineDrained("engine e is drained")


async def test_interrupt_ends_generation_and_a_waiting_pump(
    fake: Fake, client: Http1Client
) -> None:
    response = await client.send(post(stream=True, fake="pace:1"))
    pieces: list[bytes] = []

    def sink(data: bytes, last: bool) -> bool:
        pieces.append(data)
        return True

    pumping = asyncio.create_task(response.pump(sink))
    await wait_until(lambda: pieces)
    response.interrupt(DRAINED)
    assert client.in_flight == 0
    with pytest.raises(EngineDrained, match="engine e is drained"):
        await pumping
    await fake.until_idle()
    assert not response.ended


async def test_interrupt_ends_a_waiting_read(fake: Fake, client: Http1Client) -> None:
    response = await client.send(post(stream=True, fake="stall:0"))
    reading = asyncio.create_task(response.read())
    await asyncio.sleep(0)
    response.interrupt(DRAINED)
    with pytest.raises(EngineDrained):
        await reading
    await fake.until_idle()


async def test_another_response_follows_an_interrupted_one(fake: Fake, client: Http1Client) -> None:
    (await client.send(post(stream=True, fake="stall:0"))).interrupt(DRAINED)
    assert (await read_all(await client.send(post(stream=True)))).endswith(b"data: [DONE]\n\n")
    await fake.until_idle()


async def test_interrupt_comes_after_the_bytes_that_have_arrived(
    fed: ResponseBody, source: NoSource
) -> None:
    fed.feed(b"one", False)
    fed.feed(b"two", False)
    fed.interrupt(DRAINED)
    assert source.aborts == 1
    received, error = await read_until_error(fed)
    assert (received, error) == (b"onetwo", DRAINED)
    with pytest.raises(EngineDrained):
        await fed.read()


async def test_interrupt_under_backpressure_keeps_what_the_sink_has_declined(
    fed: ResponseBody,
) -> None:
    got: list[bytes] = []

    def sink(data: bytes, last: bool) -> bool:
        got.append(data)
        return False

    pumping = asyncio.create_task(fed.pump(sink))
    await asyncio.sleep(0)
    fed.feed(b"one", False)
    fed.feed(b"two", False)
    fed.interrupt(DRAINED)
    assert not await pumping
    assert not await fed.pump(sink)
    assert got == [b"one", b"two"]
    with pytest.raises(EngineDrained):
        await fed.pump(sink)


async def test_interrupt_while_the_client_of_a_paused_connection_does_not_read(
    fake: Fake, client: Http1Client
) -> None:
    response = await client.send(post(stream=True, fake="flood:64"))
    assert not await response.pump(lambda _, last: False)
    await wait_until(lambda: response._size > HIGH_WATER)
    response.interrupt(DRAINED)
    received, error = await read_until_error(response)
    assert len(received) > HIGH_WATER
    assert error is DRAINED
    await fake.until_idle()


async def test_only_the_first_interrupt_has_an_effect(fed: ResponseBody, source: NoSource) -> None:
    fed.interrupt(DRAINED)
    fed.interrupt(EngineDrained("again"))
    with pytest.raises(EngineDrained, match="engine e is drained"):
        await fed.read()
    fed.close()
    assert source.aborts == 1


async def test_interrupt_of_a_complete_response_has_no_effect(
    fed: ResponseBody, source: NoSource
) -> None:
    fed.feed(b"all", True)
    fed.interrupt(DRAINED)  # before `finish`, as from the sink of the last bytes
    fed.finish()
    fed.interrupt(DRAINED)
    assert await read_all(fed) == b"all"
    assert fed.ended
    assert source.aborts == 0


async def test_interrupt_of_a_failed_response_leaves_its_error(
    fed: ResponseBody, source: NoSource
) -> None:
    fed.feed(b"one", False)
    fed.fail(EngineDied("gone"))
    fed.interrupt(DRAINED)
    received, error = await read_until_error(fed)
    assert received == b"one"
    assert isinstance(error, EngineDied)
    assert source.aborts == 0


async def test_interrupt_after_an_error_of_the_sink_leaves_that_error(fed: ResponseBody) -> None:
    def sink(_: bytes, last: bool) -> bool:
        raise ZeroDivisionError

    pumping = asyncio.create_task(fed.pump(sink))
    await asyncio.sleep(0)
    fed.feed(b"one", False)
    fed.interrupt(DRAINED)
    with pytest.raises(ZeroDivisionError):
        await pumping


async def test_interrupt_by_the_sink_drops_what_follows(fed: ResponseBody) -> None:
    got: list[bytes] = []

    def sink(data: bytes, last: bool) -> bool:
        got.append(data)
        fed.interrupt(DRAINED)
        return True

    pumping = asyncio.create_task(fed.pump(sink))
    await asyncio.sleep(0)
    fed.feed(b"one", False)
    fed.feed(b"two", False)
    with pytest.raises(EngineDrained):
        await pumping
    assert got == [b"one"]


async def test_interrupt_after_close_has_no_effect(fed: ResponseBody, source: NoSource) -> None:
    fed.close()
    fed.interrupt(DRAINED)
    assert source.aborts == 1


async def test_pump_that_is_canceled_while_it_is_interrupted_is_canceled(
    fed: ResponseBody,
) -> None:
    pumping = asyncio.create_task(fed.pump(lambda _, last: True))
    await asyncio.sleep(0)
    fed.interrupt(DRAINED)
    pumping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pumping


async def test_interrupt_comes_after_the_bytes_that_were_put_back() -> None:
    response = ResponseBody(NoSource(), asyncio.get_running_loop())
    response.feed(b"one", False)
    response.put_back(await response.read())
    response.feed(b"two", False)
    response.interrupt(EngineDrained("engine e is drained"))
    got: list[bytes] = []

    def sink(data: bytes, last: bool) -> bool:
        got.append(data)
        return True

    with pytest.raises(EngineDrained):
        await response.pump(sink)
    assert b"".join(got) == b"onetwo"
    assert not response.ended
