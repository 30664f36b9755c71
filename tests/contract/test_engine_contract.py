"""The engine interface, tested for every implementation: on fakes and on real vLLM."""

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
import yaml
from prometheus_client.parser import text_string_to_metric_families

from engines.base import (
    Engine,
    EngineDrained,
    EngineNotReady,
    EngineRequest,
    EngineResponse,
    EngineState,
)
from engines.guard import containers
from engines.guard.marked_processes import find_marked
from engines.http import Address, Http1Client
from engines.inprocess import InProcessEngine
from engines.interpreter import launcher
from engines.process import ProcessEngine, vllm_launcher
from engines.ray import Cluster, RayEngine
from engines.remote import RemoteEngine
from engines.setup import EngineSetup
from engines.spec import InProcessSpec, ProcessSpec, RemoteSpec, Timeouts
from tests.bare_image import machine
from tests.e2e.deployment import ENGINE, KEY, Deployment, demo_model
from tests.engines.container.build import build
from tests.engines.processes import AT_ONCE, gone, read
from tests.engines.ray import clusters
from tests.fakes.vllm import Fake
from tests.podman import podman

# Shorter than `send_long` takes on vLLM, longer than a busy machine delays a process.
PATIENCE_S = 40.0
FAKE_LAUNCHER = (sys.executable, "-m", "tests.fakes.vllm")


@dataclass
class Subject:
    """A READY engine, and the address of its server, where it has one."""

    engine: Engine
    server: Address | None
    # Headers with the key that the server asks for.
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def state(self) -> EngineState:
        return self.engine.state

    async def send(self, **fields: Any) -> EngineResponse:
        """Send a chat completion request."""
        body = {"model": "demo", "messages": [{"role": "user", "content": "Hello!"}], **fields}
        headers = ((b"content-type", b"application/json"),)
        data = json.dumps(body).encode()
        return await self.engine.send(EngineRequest("POST", "/v1/chat/completions", headers, data))

    async def send_long(self, *, stream: bool) -> EngineResponse:
        """Send a request that takes long: a fake is instructed to, vLLM generates many tokens."""
        if "fake" in (self.engine.facts.version or ""):
            return await self.send(stream=stream, fake="pace:5" if stream else "hang")
        work = {"n": 512, "temperature": 1.0, "max_tokens": 1900, "ignore_eos": True}
        return await self.send(stream=stream, **work)

    async def running(self) -> float:
        """Return the number of running and waiting requests, from the server's metrics."""
        request = EngineRequest("GET", "/metrics", (), b"")
        if self.server is None:
            text = (await read(await self.engine.send(request))).decode()
        else:
            client = Http1Client(self.server, Timeouts(connect_s=PATIENCE_S), self.headers)
            text = (await read(await client.send(request))).decode()
            client.close()
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        families = text_string_to_metric_families(text)
        return sum(s.value for family in families for s in family.samples if s.name in names)

    async def until_busy(self, busy: bool) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while bool(await self.running()) != busy:
                await asyncio.sleep(0.01)


async def ready(engine: Engine, seconds: float = 300) -> None:
    await engine.ensure_ready(asyncio.get_running_loop().time() + seconds)


class EngineContract:
    """The tests that leave the engine running; subclasses define the fixture `subject`."""

    one_of_its_series = "vllm:num_requests_running"

    async def test_capabilities_are_those_of_its_kind(self, subject: Subject) -> None:
        engine, has = subject.engine, subject.engine.capabilities
        assert (engine.pid is not None) == has.has_log
        assert engine.since <= time.time()
        assert not engine.given_up
        if not has.unloadable:
            with pytest.raises(EngineNotReady, match="cannot be unloaded"):
                await engine.unload()
            with pytest.raises(EngineNotReady, match="cannot be unloaded"):
                await engine.clear_failed()
        if not has.can_sleep:
            with pytest.raises(EngineNotReady, match="has no sleep mode"):
                await engine.sleep(1)
        if not has.managed or engine.kind == "in_process":
            await engine.release()  # nothing to leave behind
            assert engine.state is EngineState.READY

    async def test_ready_engine_reports_its_facts(self, subject: Subject) -> None:
        await ready(subject.engine)  # a second time: no effect
        assert subject.engine.state is EngineState.READY
        assert subject.engine.facts.max_model_len == 2048
        assert subject.engine.last_error is None
        assert subject.engine.describe()

    async def test_exposition_has_its_own_series(self, subject: Subject) -> None:
        page = (await subject.engine.exposition()).decode()
        names = {family.name for family in text_string_to_metric_families(page)}
        assert self.one_of_its_series in names
        assert page.endswith("\n")

    async def test_plain_response_is_complete(self, subject: Subject) -> None:
        response = await subject.send()
        assert response.status == 200
        assert dict(response.headers)[b"content-type"].startswith(b"application/json")
        assert json.loads(await read(response))["object"] == "chat.completion"
        assert response.ended
        assert await response.read() == b""

    async def test_stream_ends_with_done(self, subject: Subject) -> None:
        response = await subject.send(stream=True)
        assert response.status == 200
        assert dict(response.headers)[b"content-type"].startswith(b"text/event-stream")
        *events, done, rest = (await read(response)).split(b"\n\n")
        assert (done, rest) == (b"data: [DONE]", b"")
        # Their number varies: vLLM puts tokens that it generates while it is busy into one chunk.
        chunks = [json.loads(event.removeprefix(b"data: ")) for event in events]
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        assert len(deltas) >= 2
        plain = json.loads(await read(await subject.send()))["choices"][0]["message"]
        assert "".join(delta.get("content") or "" for delta in deltas) == plain["content"]

    async def test_refusal_is_a_response_and_no_failure(self, subject: Subject) -> None:
        response = await subject.send(max_tokens=-1)
        assert response.status == 400
        assert b"max_tokens" in await read(response)
        assert subject.engine.state is EngineState.READY

    async def test_concurrent_requests_get_their_own_responses(self, subject: Subject) -> None:
        async def one(stream: bool) -> str:
            response = await subject.send(stream=stream)
            await read(response)
            return dict(response.headers)[b"content-type"].decode()

        asked = [n % 3 == 0 for n in range(24)]
        kinds = await asyncio.gather(*map(one, asked))
        assert [kind.startswith("text/event-stream") for kind in kinds] == asked
        await subject.until_busy(False)

    async def test_early_close_aborts_generation(self, subject: Subject) -> None:
        response = await subject.send_long(stream=True)
        assert await response.read()
        await subject.until_busy(True)
        response.close()
        await subject.until_busy(False)

    async def test_interrupt_aborts_generation_and_reports_its_error(
        self, subject: Subject
    ) -> None:
        response = await subject.send_long(stream=True)
        assert await response.read()
        await subject.until_busy(True)
        response.interrupt(EngineDrained("interrupted"))
        with pytest.raises(EngineDrained, match="interrupted"):
            await read(response)
        await subject.until_busy(False)
        assert subject.state is EngineState.READY

    async def test_canceled_send_aborts_generation(self, subject: Subject) -> None:
        sending = asyncio.create_task(subject.send_long(stream=False))
        await subject.until_busy(True)
        sending.cancel()
        await subject.until_busy(False)
        with pytest.raises(asyncio.CancelledError):
            await sending

    async def test_close_after_the_end_has_no_effect(self, subject: Subject) -> None:
        response = await subject.send()
        await read(response)
        response.close()
        response.close()
        response = await subject.send()
        assert response.status == 200
        await read(response)


class EndingContract(EngineContract):
    """The tests that stop the engine."""

    async def test_waiters_are_woken_by_each_change_of_state(self, subject: Subject) -> None:
        async def observe() -> None:
            while subject.state is not EngineState.STOPPED:
                await subject.engine.changes.next()
                seen.append(subject.state)

        seen: list[EngineState] = []
        canceled, watching = (asyncio.create_task(observe()) for _ in range(2))
        await asyncio.sleep(0)
        canceled.cancel()
        await subject.engine.stop(5.0)
        async with asyncio.timeout(20):
            await watching
        assert seen[-1] is EngineState.STOPPED
        await ready(subject.engine)
        assert subject.state is EngineState.READY

    async def test_drain_lets_requests_end_and_refuses_new_ones(self, subject: Subject) -> None:
        response = await subject.send_long(stream=True)
        draining = asyncio.create_task(subject.engine.drain())
        async with asyncio.timeout(20):
            await subject.engine.changes.wait_for(lambda: subject.state is EngineState.DRAINING)
        with pytest.raises(EngineNotReady):
            await subject.send()
        assert not draining.done()
        response.close()
        async with asyncio.timeout(20):
            await draining

    async def test_stopped_engine_refuses(self, subject: Subject) -> None:
        await subject.engine.stop(5.0)
        assert subject.engine.state is EngineState.STOPPED
        with pytest.raises(EngineNotReady):
            await subject.send()
        with pytest.raises(EngineNotReady):
            await subject.engine.exposition()
        await subject.engine.stop(5.0)  # a second time: no effect


async def ready_again(engine: Engine) -> None:
    """Have an engine serve that a test may have stopped or drained."""
    if engine.state is EngineState.DRAINING:
        await engine.stop(0.0)
    await ready(engine)


def setup(run_dir: Path, name: str = "e") -> EngineSetup:
    return EngineSetup(name=name, served_name="demo", run_dir=run_dir)


@pytest_asyncio.fixture(scope="class", loop_scope="class")
async def fake_process(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Subject]:
    run_dir = tmp_path_factory.mktemp("run")
    spec = ProcessSpec(kind="process", model="m")
    engine = ProcessEngine(setup(run_dir), spec, FAKE_LAUNCHER)
    yield Subject(engine, Address(uds=str(run_dir / "e" / "http.sock")))
    await engine.stop(0.0)


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="class")
class TestProcessOnAFake(EndingContract):
    @pytest_asyncio.fixture(loop_scope="class")
    async def subject(self, fake_process: Subject) -> Subject:
        await ready_again(fake_process.engine)
        return fake_process


@pytest_asyncio.fixture(scope="class", loop_scope="class")
async def fake_in_a_container(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Subject]:
    run_dir = tmp_path_factory.mktemp("run")
    with podman() as service:
        engine = build(run_dir, service.socket)
        yield Subject(engine, Address(uds=str(run_dir / "demo-0" / "http.sock")))
        await engine.stop(0.0)


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="class")
class TestContainerOnAFake(EndingContract):
    @pytest_asyncio.fixture(loop_scope="class")
    async def subject(self, fake_in_a_container: Subject) -> Subject:
        await ready_again(fake_in_a_container.engine)
        return fake_in_a_container


@pytest.fixture(scope="class")
def ray_nodes() -> Iterator[clusters.Nodes]:
    with clusters.ray_nodes() as nodes:
        nodes.add()
        yield nodes


def ray_subject(engine: RayEngine) -> Subject:
    """Return an engine with the address and the key of its server."""
    assert engine.pid is not None
    server = psutil.Process(engine.pid)
    host, port = (
        next(word.partition("=")[2] for word in server.cmdline() if word.startswith(flag))
        for flag in ("--host=", "--port=")
    )
    key = ("authorization", f"Bearer {server.environ()['VLLM_API_KEY']}")
    return Subject(engine, Address(host, int(port)), (key,))


@pytest_asyncio.fixture(scope="class", loop_scope="class")
async def fake_on_ray(
    ray_nodes: clusters.Nodes, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RayEngine]:
    run_dir = tmp_path_factory.mktemp("run")
    engine = clusters.build(Cluster(ray_nodes.address, "contract", run_dir), run_dir, name="e")
    yield engine
    await engine.stop(0.0)


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="class")
class TestRayOnAFake(EndingContract):
    @pytest_asyncio.fixture(loop_scope="class")
    async def subject(self, fake_on_ray: RayEngine) -> Subject:
        await ready_again(fake_on_ray)
        return ray_subject(fake_on_ray)


class TestRemoteOnAFake(EndingContract):
    @pytest.fixture
    async def subject(self) -> AsyncIterator[Subject]:
        async with Fake() as fake:
            engine = RemoteEngine("e", RemoteSpec(kind="remote", url=fake.url))
            await ready(engine)
            yield Subject(engine, Address.from_url(fake.url))
            await engine.stop(0.0)


class TestDiscoveredOnAFake(EndingContract):
    @pytest.fixture
    async def subject(self) -> AsyncIterator[Subject]:
        async with Fake() as fake:
            engine = RemoteEngine("e", RemoteSpec(kind="remote", url=fake.url), serves="demo")
            await ready(engine)
            yield Subject(engine, Address.from_url(fake.url))
            await engine.stop(0.0)


@pytest_asyncio.fixture(scope="class", loop_scope="class")
async def vllm_process(gateway: Deployment) -> AsyncIterator[Subject]:
    """The engine of the shared gateway, adopted as by the next gateway and left as it was."""
    settings = yaml.safe_load((gateway.run_dir.parent / "gateway.yaml").read_text())
    spec = ProcessSpec.model_validate(settings["models"][0]["engines"][0])
    command = launcher(spec.python) if spec.python else vllm_launcher()
    engine = ProcessEngine(setup(gateway.run_dir, "demo-0"), spec, command)
    await ready(engine)
    assert engine.pid in {process.pid for process in gateway.family()}
    yield Subject(engine, Address(uds=str(gateway.run_dir / "demo-0" / "http.sock")))
    await engine.release()
    engine._client.close()  # a gateway ends here


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="class")
class TestProcessOnVllm(EngineContract):
    @pytest.fixture
    def subject(self, vllm_process: Subject) -> Subject:
        return vllm_process


def in_a_container(model: Path) -> dict[str, Any]:
    """Return the fields of an engine that runs this machine's vLLM in its container."""
    known = Path("~/.cache/vllm").expanduser()
    known.mkdir(parents=True, exist_ok=True)
    return {
        **ENGINE,
        # What vLLM knows of models: without it, another process imports vLLM to look at this one.
        "env": {**ENGINE["env"], "VLLM_CACHE_ROOT": str(known)},
        "volumes": [*machine(), f"{known}:{known}:ro"],
        "kind": "container",
        "entrypoint": vllm_launcher(),
        "model": str(model.absolute()),
        "restart": AT_ONCE,
    }


@pytest_asyncio.fixture(scope="class", loop_scope="class")
async def vllm_in_a_container(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Subject]:
    run_dir = tmp_path_factory.mktemp("run")
    with podman() as service:
        engine = build(run_dir, service.socket, **in_a_container(demo_model()))
        await ready(engine)
        yield Subject(engine, Address(uds=str(run_dir / "demo-0" / "http.sock")))
        await engine.stop(5.0)
        assert engine.state is EngineState.STOPPED
        assert service.containers() == []


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="class")
class TestContainerOnVllm(EngineContract):
    @pytest_asyncio.fixture(loop_scope="class")
    async def subject(self, vllm_in_a_container: Subject) -> Subject:
        await ready(vllm_in_a_container.engine)
        return vllm_in_a_container

    async def test_killed_core_fails_the_engine_and_leaves_nothing(self, subject: Subject) -> None:
        """The last test of the class, so that the engine need not start again."""
        assert subject.server is not None
        assert subject.server.uds is not None
        inside = [*map(psutil.Process, containers.processes(Path(subject.server.uds).parent))]
        [core] = [process for process in inside if "EngineCore" in "".join(process.cmdline())]
        core.kill()
        async with asyncio.timeout(PATIENCE_S):
            await subject.engine.changes.wait_for(lambda: subject.state is EngineState.FAILED)
        # Its API server says so, or has ended already.
        found = ("its server reports a dead engine", "it died while serving")
        assert (subject.engine.last_error or "").startswith(found)
        await subject.engine.stop(0.0)
        assert gone(inside)


@pytest_asyncio.fixture(scope="class", loop_scope="class")
async def vllm_in_process(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Subject]:
    demo_model()
    run_dir = tmp_path_factory.mktemp("run")
    spec = InProcessSpec.model_validate({**ENGINE, "kind": "in_process"})
    engine = InProcessEngine(setup(run_dir), spec)
    before = dict(os.environ)  # vLLM sets variables in this process
    await ready(engine)
    yield Subject(engine, None)
    await engine.stop(5.0)
    os.environ.clear()
    os.environ.update(before)
    assert engine.state is EngineState.STOPPED
    assert find_marked(str(run_dir / "e")) == []


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="class")
@pytest.mark.filterwarnings("ignore")  # vLLM's imports emit many warnings
class TestInProcessOnVllm(EngineContract):
    @pytest.fixture
    def subject(self, vllm_in_process: Subject) -> Subject:
        return vllm_in_process


@pytest.mark.vllm
@pytest.mark.slow
class TestRemoteOnVllm(EngineContract):
    """The remote server is a gateway, so this needs no further engine."""

    one_of_its_series = "gateway_requests_in_flight"

    @pytest.fixture
    async def subject(
        self, gateway: Deployment, monkeypatch: pytest.MonkeyPatch
    ) -> AsyncIterator[Subject]:
        monkeypatch.setenv("CONTRACT_KEY", KEY)
        spec = RemoteSpec(kind="remote", url=gateway.url, api_key_env="CONTRACT_KEY")
        engine = RemoteEngine("e", spec)
        await ready(engine)
        yield Subject(engine, Address(uds=str(gateway.run_dir / "demo-0" / "http.sock")))
        await engine.stop(0.0)
