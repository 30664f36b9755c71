import asyncio

import msgspec

from bench.children import free_port
from bench.load import Load, Result, arguments, run
from bench.stub_engine import Connection, Stub


async def sent(**fields: object) -> Result:
    """Send a load to a stub on a free port."""
    loop = asyncio.get_running_loop()
    stub = Stub("stub", 0.0, 0.0)
    server = await loop.create_server(lambda: Connection(stub), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        load = {"url": f"http://127.0.0.1:{port}", "ramp_s": 0.0, "streams": 2, **fields}
        result = await run(msgspec.convert(load, Load))
        assert stub.running == 0
    return result


async def test_streams_are_read_to_their_end_and_counted() -> None:
    result = await sent(requests=4, tokens=3)

    assert (result.ok, result.failed) == (4, 0)
    assert result.chunks == 4 * (3 + 2)  # the tokens, the usage, the closing event
    assert result.stall_free == 4
    assert result.ttft_p50 is not None
    assert result.cpu_us_per_chunk is None  # of nobody


async def test_plain_answers_have_no_chunks() -> None:
    result = await sent(requests=4, tokens=3, stream=False)

    assert (result.ok, result.chunks, result.gap_p50) == (4, 0, None)
    assert result.tokens_per_s > 0


async def test_timed_load_lasts_its_duration() -> None:
    result = await sent(seconds=0.05, requests=1, stream=False)

    assert result.ok > 1
    assert result.wall_s >= 0.05
    assert (await sent(seconds=0.0)).ok == 0


async def test_failures_are_counted_by_name() -> None:
    result = await sent(requests=3, path="/nowhere")

    assert (result.ok, result.failures) == (0, {"Failed: HTTP 404": 3})


async def test_unreachable_address_counts_as_a_failure() -> None:
    result = await sent(requests=2, url=f"http://127.0.0.1:{free_port()}")

    assert (result.ok, result.failed) == (0, 2)


def test_load_round_trips_through_the_command_line() -> None:
    load = Load(url="http://127.0.0.1:1", stream=False, ignore_eos=True, prompt="--a b", pid=7)

    assert arguments(load)[:1] == ["--url=http://127.0.0.1:1"]
    assert "--no-stream" in arguments(load)
    assert "--ignore-eos" in arguments(load)
    assert "--prompt=--a b" in arguments(load)
    target = Load(url="http://127.0.0.1:1")
    assert not any(word.startswith("--pid") for word in arguments(target))
