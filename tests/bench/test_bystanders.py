import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from bench import bystanders
from bench.bystanders import Seen, watch
from bench.children import free_port
from bench.stub_engine import Connection, Stub


@pytest.fixture(autouse=True)
def without_ramp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bystanders, "RAMP_S", 0.0)


@asynccontextmanager
async def stub(itl_s: float = 0.001) -> AsyncIterator[tuple[asyncio.Server, str]]:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(Stub("stub", 0.0, itl_s)), "127.0.0.1", 0)
    async with server:
        yield server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def rounds_of_the_loop() -> None:
    """Let the server and its clients, which share the loop, each come up some 50 times."""
    for _ in range(50):
        await asyncio.sleep(0.001)


async def test_the_chunks_of_each_stream_have_their_times() -> None:
    async with stub() as (_, url):
        seen = await watch(url, rounds_of_the_loop(), streams=3)

    assert len(seen.times) == 3
    assert all(len(times) > 2 and times == sorted(times) for times in seen.times)
    assert (seen.cpu_s, seen.lost) == ([], 0)


async def test_each_probe_has_its_request_its_response_and_the_cpu_time_between() -> None:
    async with stub() as (_, url):
        seen = await watch(url, rounds_of_the_loop(), pid=os.getpid())

    assert len(seen.times) > 1
    assert all(len(times) == 2 for times in seen.times)
    assert len(seen.cpu_s) == len(seen.times)
    assert min(seen.cpu_s) >= 0 < sum(seen.cpu_s)


async def test_without_a_process_a_probe_has_no_cpu_time() -> None:
    async with stub() as (_, url):
        seen = await watch(url, rounds_of_the_loop())

    assert seen.times
    assert seen.cpu_s == []


async def lost_with(streams: int) -> Seen:
    """Watch a server whose connections end while they are watched."""
    transports: list[asyncio.BaseTransport] = []

    class Ending(Connection):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            transports.append(transport)

    async def end() -> None:
        await rounds_of_the_loop()
        for transport in transports:
            transport.close()
        await rounds_of_the_loop()

    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Ending(Stub("stub", 0.0, 0.001)), "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return await watch(url, end(), streams=streams)


async def test_connections_that_end_early_are_counted() -> None:
    assert (await lost_with(streams=2)).lost == 2
    probed = await lost_with(streams=0)
    assert probed.lost == 1
    assert all(len(times) == 2 for times in probed.times)  # the last one ends with the connection


async def test_missing_target_yields_no_measurement() -> None:
    stop = asyncio.get_running_loop().create_future()
    with pytest.raises(ConnectionError):
        await watch(f"http://127.0.0.1:{free_port()}", stop, streams=1)


async def test_refused_stream_yields_no_measurement() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        stop = asyncio.get_running_loop().create_future()
        with pytest.raises(ConnectionError, match="status was not 200"):
            await watch(url, stop, streams=1)
