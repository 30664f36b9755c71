"""A remote server that has to say that it serves the model."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping

import pytest

from engines.base import EngineNotReady, EngineRequest, EngineState
from engines.http import Address, EngineProbe, Http1Client
from engines.remote import RemoteEngine
from engines.spec import PlacedError, RemoteSpec, Timeouts, check_url
from tests.fakes.adapter_routes import AdapterRoutes
from tests.fakes.vllm import Fake, Seen
from tests.waiting import wait_until

REQUEST = EngineRequest("GET", "/version", (), b"")


class Server(Fake):
    """A server that may be unable to list its models, or answer with anything."""

    lists = True
    # Bodies in place of its own, by target.
    bodies: Mapping[str, bytes] = {}

    async def _answer(
        self, request: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        if request.target == "/v1/models" and not self.lists:
            return self.plain(writer, b"busy", 503)
        if request.target in self.bodies:
            return self.plain(writer, self.bodies[request.target])
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


async def test_adapters_are_those_that_the_server_lists(
    server: Server, engine: RemoteEngine
) -> None:
    server.adapters = AdapterRoutes("demo")
    server.adapters.paths["legal"] = "/there/legal"
    engine.want_adapters({"legal": None, "pirate": None})
    await start(engine)
    assert (engine.has_adapter("legal", None), engine.has_adapter("pirate", None)) == (True, False)
    assert engine.adapters["pirate"].reason == "its server does not list it"
    server.lists = False  # busy
    await checked(server)
    assert engine.has_adapter("legal", None)
    server.lists = True
    server.adapters.paths = {"pirate": "/there/pirate"}
    await wait_until(lambda: engine.has_adapter("pirate", None))
    assert not engine.has_adapter("legal", None)
    engine.want_adapters({})
    await wait_until(lambda: not engine.adapters)


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


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 500_000,
        b'{"data":' * 100_000,
        b"9" * 100_000,
        b"\xff\xfe",
        b'{"data":[[],null,{"id":7}]}',
        b"x" * 2**21,
    ],
    ids=["nested list", "nested object", "long number", "no text", "no cards", "too long"],
)
async def test_server_that_answers_nonsense_is_checked_again_and_again(
    server: Server, engine: RemoteEngine, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    server.bodies = dict.fromkeys(("/v1/models", "/version", "/openapi.json"), body)
    with pytest.raises(EngineNotReady, match=r"/v1/models|does not serve"):
        await start(engine)
    server.bodies = {}
    await wait_until(lambda: engine.state is EngineState.READY)
    server.bodies = dict.fromkeys(("/v1/models", "/version", "/openapi.json"), body)
    await checked(server)
    server.kill()
    await wait_until(lambda: engine.state is EngineState.FAILED)
    assert "unhandled" not in caplog.text


async def test_failed_server_that_recovers_while_it_drains_gets_no_requests(
    server: Server, engine: RemoteEngine
) -> None:
    server.model = "other"
    with pytest.raises(EngineNotReady):
        await start(engine)
    await engine.drain()
    server.model = "demo"
    seen = len(server.seen)
    await asyncio.sleep(0.1)  # several checks
    assert engine.state is EngineState.FAILED
    assert len(server.seen) <= seen + 1


@pytest.mark.parametrize("length", [-5, 0, True, 2.5, "8192", 10**400])
async def test_implausible_facts_are_not_believed(
    server: Server, engine: RemoteEngine, length: object
) -> None:
    card = {"id": "demo", "max_model_len": length}
    server.bodies = {
        "/v1/models": json.dumps({"data": [card]}).encode(),
        "/version": json.dumps({"version": "0.32\x1b[2J" + "9" * 500_000}).encode(),
    }
    await start(engine)
    assert engine.facts.max_model_len is None
    assert engine.facts.version is None


def cache_config(blocks: object, size: object = 16, rank: int = 0) -> bytes:
    """Return the line of vLLM 0.32, without most of its labels."""
    return (
        f'vllm:cache_config_info{{block_size="{size}",cache_dtype="auto",engine="{rank}",'
        f'num_gpu_blocks="{blocks}",num_gpu_blocks_override="None"}} 1.0\n'
    ).encode()


@pytest.mark.parametrize(
    ("page", "tokens"),
    [
        (cache_config(2048), 32768),
        (cache_config(2048) + cache_config(1024, rank=1), 49152),
        (cache_config("None"), None),
        (cache_config(-1), None),
        (cache_config(10**12), None),
        (cache_config(10**9 - 1, 10**6 - 1), None),
        (b"<!doctype html>", None),
    ],
)
async def test_size_of_the_kv_cache_is_read_from_the_metrics(
    server: Server, engine: RemoteEngine, page: bytes, tokens: int | None
) -> None:
    server.bodies = {"/metrics": page}
    await start(engine)
    assert engine.facts.kv_cache_tokens == tokens


async def test_check_with_an_unhandled_exception_is_a_failed_check(
    engine: RemoteEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await start(engine)

    async def fail(probe: EngineProbe) -> None:
        raise RuntimeError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(EngineProbe, "check_reachable", fail)
        await wait_until(lambda: engine.state is EngineState.FAILED)
        assert "engine e: unhandled exception during its check" in caplog.text
    await wait_until(lambda: engine.state is EngineState.READY)


async def test_name_that_cannot_be_looked_up_does_not_respond() -> None:
    for url in ("http://a..b:1", f"http://{'a' * 64}.test:1"):
        with pytest.raises(PlacedError):
            check_url(url)
        client = Http1Client(Address.from_url(url), Timeouts())
        with pytest.raises(EngineNotReady, match="cannot connect to"):
            await client.send(REQUEST)


async def test_failed_server_that_answers_a_request_is_checked_at_once(
    server: Server, engine: RemoteEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engines.remote.CHECK_INTERVAL_S", 3600.0)
    monkeypatch.setattr("engines.remote.RECHECK_S", 0.0)
    server.lists = False
    with pytest.raises(EngineNotReady):
        await start(engine)
    server.lists = True
    (await engine.send(REQUEST)).close()
    await wait_until(lambda: engine.state is EngineState.READY)


async def test_facts_of_a_busy_server_are_asked_for_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Busy(Server):
        answering = asyncio.Event()

        async def _answer(
            self, request: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> bool:
            await self.answering.wait()
            return await super()._answer(request, reader, writer)

    async with Busy() as server:
        client = Http1Client(Address.from_url(server.url), Timeouts())
        facts = asyncio.create_task(EngineProbe(client).fetch_facts())
        await wait_until(lambda: {s.target for s in server.seen} == {"/version", "/v1/models"})
        server.answering.set()
        assert (await facts).version == server.version
        client.close()
