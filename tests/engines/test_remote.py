"""A remote server that has to say that it serves the model."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from engines.base import EngineNotReady, EngineRequest, EngineState
from engines.remote import RemoteEngine
from engines.spec import RemoteSpec
from tests.fakes.vllm import Fake, Seen
from tests.waiting import wait_until

REQUEST = EngineRequest("GET", "/version", (), b"")


class Server(Fake):
    """A server that may be unable to list its models."""

    lists = True

    async def _answer(
        self, request: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        if request.target == "/v1/models" and not self.lists:
            return self.plain(writer, b"busy", 503)
        return await super()._answer(request, reader, writer)


@pytest.fixture(autouse=True)
def quick_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engines.remote.CHECK_INTERVAL_S", 0.01)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with Server() as server:
        yield server


@pytest.fixture
async def engine(server: Server) -> AsyncIterator[RemoteEngine]:
    engine = RemoteEngine("e", RemoteSpec(kind="remote", url=server.url), serves="demo")
    yield engine
    await engine.stop(0.0)


async def start(engine: RemoteEngine) -> None:
    await engine.ensure_ready(asyncio.get_running_loop().time() + 20)


async def checked(server: Server) -> None:
    """Return after a whole check from now on."""
    before = len(server.seen)
    await wait_until(lambda: len(server.seen) > before + 4)


async def test_server_that_lists_the_model_is_ready(engine: RemoteEngine) -> None:
    await start(engine)
    assert engine.facts.version == "0.32.0+fake"
    (await engine.send(REQUEST)).close()


async def test_server_that_lists_no_models_is_not_ready(
    server: Server, engine: RemoteEngine
) -> None:
    server.lists = False
    with pytest.raises(EngineNotReady, match="does not list its models at /v1/models"):
        await start(engine)
    server.lists = True
    await wait_until(lambda: engine.state is EngineState.READY)


async def test_server_that_refuses_the_key_is_reported_as_that(
    server: Server, engine: RemoteEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = Fake._answer

    async def refuse(
        self: Fake, request: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        if request.target == "/v1/models":
            return self.plain(writer, b'{"error": "Unauthorized"}', 401)
        return await answer(self, request, reader, writer)

    monkeypatch.setattr(Fake, "_answer", refuse)
    with pytest.raises(EngineNotReady, match=r"refuses the key at /v1/models \(401\): check"):
        await start(engine)


async def test_ready_server_that_is_too_busy_to_list_stays_ready(
    server: Server, engine: RemoteEngine
) -> None:
    await start(engine)
    server.lists = False
    await checked(server)
    assert engine.state is EngineState.READY


async def test_server_of_another_model_gets_no_request(
    server: Server, engine: RemoteEngine, caplog: pytest.LogCaptureFixture
) -> None:
    server.model = "other"
    with pytest.raises(EngineNotReady, match="it does not serve the model 'demo'"):
        await start(engine)
    with pytest.raises(EngineNotReady):
        await engine.send(REQUEST)
    await checked(server)
    assert caplog.messages == ["engine e is not used: it does not serve the model 'demo'"]
    server.model = "demo"
    await wait_until(lambda: engine.state is EngineState.READY)
    (await engine.send(REQUEST)).close()


async def test_another_kind_of_failure_is_logged_too(
    server: Server, engine: RemoteEngine, caplog: pytest.LogCaptureFixture
) -> None:
    server.model = "other"
    with pytest.raises(EngineNotReady):
        await start(engine)
    server.kill()
    await wait_until(lambda: len(caplog.messages) == 2)
    assert caplog.messages[1].startswith("engine e does not respond: ")
    assert engine.last_error is not None
    assert "connect" in engine.last_error
    # It is still the server of another model, for all that is known.
    with pytest.raises(EngineNotReady):
        await engine.send(REQUEST)
