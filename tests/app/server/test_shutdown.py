"""A server that stops accepting serves what it has accepted, and closes every connection."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from app.application import Application
from app.main import create_app
from app.server.connection import ClientConnection, protocol
from app.server.http_server import HttpServer, gateway_server
from app.server.listen import listen
from app.server.shutdown import hand_over, stop_accepting
from tests.app.raw import Client, asking, request
from tests.fakes.vllm import Fake
from tests.gateway import remote, settings_for
from tests.waiting import wait_until


@pytest.fixture
def application(tmp_path: Path) -> Application:
    model = {"name": "demo", "engines": [remote("http://127.0.0.1:1")]}
    return create_app(settings_for(model, run_dir=tmp_path))


async def test_handover_during_the_start_waits_for_its_end(
    application: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, open_database = asyncio.Event(), application.database.open

    async def open_slowly() -> None:
        await opened.wait()
        await open_database()

    monkeypatch.setattr(application.database, "open", open_slowly)
    with ExitStack() as exclusive:
        sock = exclusive.enter_context(listen("127.0.0.1", 0))
        server = gateway_server(application)
        serving = asyncio.create_task(server.serve([sock]))
        handing_over = asyncio.create_task(hand_over(application, [server], exclusive))
        await asyncio.sleep(0.05)
        assert not handing_over.done()
        opened.set()
        async with asyncio.timeout(20):
            await handing_over
            assert sock.fileno() == -1
            server.should_exit = True
            await serving


@dataclass
class Stopping:
    """A gateway that runs, and a way to connect to it."""

    application: Application
    server: HttpServer
    port: int
    stack: AsyncExitStack

    async def connect(self) -> Client:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.stack.callback(lambda: writer.transport.abort())
        address = writer.get_extra_info("sockname")
        await wait_until(lambda: any(c.client == address for c in self.connections()))
        return Client(reader, writer)

    def connections(self) -> list[ClientConnection]:
        found = self.server.server_state.connections
        return [one for one in found if isinstance(one, ClientConnection)]

    async def stop(self) -> None:
        await stop_accepting(self.application, [self.server])


@pytest.fixture
async def stopping(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Stopping]:
    monkeypatch.setattr(protocol, "LAST_IDLE_S", 0.2)
    model = {"name": "demo", "engines": [remote(fake.url)]}
    application = create_app(settings_for(model, run_dir=tmp_path))
    async with AsyncExitStack() as stack:
        sock = stack.enter_context(listen("127.0.0.1", 0))
        server = gateway_server(application)
        port = sock.getsockname()[1]
        serving = asyncio.create_task(server.serve([sock]))
        await server.startup_ended.wait()
        await application.startup_done.wait()
        async with AsyncExitStack() as clients:
            yield Stopping(application, server, port, clients)
        server.should_exit = True
        await serving


async def test_idle_connections_are_closed_without_a_byte(stopping: Stopping) -> None:
    fresh, used = await stopping.connect(), await stopping.connect()
    used.send(request(asking()))
    assert (await used.answer()).status == 200
    await stopping.stop()
    assert await fresh.rest() == b""
    assert await used.rest() == b""
    await wait_until(lambda: stopping.server.idle)


@pytest.mark.parametrize("path", [b"/v1/completions", b"/health"])
async def test_requests_on_open_connections_are_served_and_close_them(
    stopping: Stopping, path: bytes
) -> None:
    """Requests of the data plane and others, on new connections and on used ones."""
    fresh, used = await stopping.connect(), await stopping.connect()
    data = (
        request(asking(), path=path)
        if path != b"/health"
        else request(None, method=b"GET", path=path)
    )
    used.send(data)
    assert "connection" not in (await used.answer()).headers
    await stopping.stop()
    for client in (fresh, used):
        client.send(data)
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert await client.rest() == b""
    await wait_until(lambda: stopping.server.idle)


async def test_request_under_way_announces_the_end_of_its_connection(
    stopping: Stopping, fake: Fake
) -> None:
    client = await stopping.connect()
    client.send(request(asking(fake="tokens:1:100"), path=b"/v1/chat/completions"))
    await fake.until_running()
    await stopping.stop()
    answer = await client.answer()
    assert (answer.status, answer.headers["connection"]) == (200, "close")
    assert await client.rest() == b""


async def test_connection_of_a_stream_takes_one_more_request(
    stopping: Stopping, fake: Fake
) -> None:
    """The stream's headers have promised that it stays open."""
    client = await stopping.connect()
    body = asking(stream=True, fake="tokens:3:50")
    client.send(request(body, path=b"/v1/chat/completions"))
    await client.until(b"\r\n\r\n")
    await stopping.stop()
    await client.until(b"[DONE]\n\n\r\n0\r\n\r\n")
    client.send(request(asking()))
    answer = await client.answer()
    assert (answer.status, answer.headers["connection"]) == (200, "close")


async def test_every_pipelined_request_is_served(stopping: Stopping, fake: Fake) -> None:
    client = await stopping.connect()
    slow = request(asking(fake="tokens:1:100"), path=b"/v1/chat/completions")
    client.send(slow + request(asking()) + request(asking()))
    await fake.until_running()
    await stopping.stop()
    found = [await client.answer() for _ in range(3)]
    assert [answer.status for answer in found] == [200, 200, 200]
    assert [answer.headers.get("connection") for answer in found] == [None, None, "close"]


async def test_incomplete_request_is_awaited(stopping: Stopping) -> None:
    client = await stopping.connect()
    data = request(asking())
    client.send(data[:20])
    await wait_until(lambda: any(c._head_bytes for c in stopping.connections()))
    await stopping.stop()
    await asyncio.sleep(2 * protocol.LAST_IDLE_S)
    client.send(data[20:])
    assert (await client.answer()).status == 200
