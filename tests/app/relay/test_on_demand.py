"""On-demand models, through the real server with a fake vLLM."""

import asyncio
import json
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from app.errors import OPERATOR_S
from app.residency import Residency
from app.server.banner import banner
from app.sse import COMMENT
from engines.base import EngineState
from tests.app.raw import answers, asking, connected, request
from tests.gateway import ROOT, Gateway, running, settings_for
from tests.waiting import PATIENCE_S, wait_until

LAUNCHER = (sys.executable, "-m", "tests.fakes.vllm")
PATHS = ["/v1/chat/completions", "/v1/messages"]

pytestmark = pytest.mark.slow


def model(name: str = "demo", *, args: dict[str, Any] | None = None, **fields: Any) -> Any:
    """A model on demand, whose engine takes 1 GiB."""
    engine = {"kind": "process", "model": "m", "memory_gib": 1.0, "args": args or {}}
    return {"name": name, "load": "on_demand", "engines": [engine], **fields}


def serving(
    *models: dict[str, Any], tmp_path: Path, **server: Any
) -> AbstractAsyncContextManager[Gateway]:
    return running(settings_for(*models, run_dir=tmp_path, server=server), LAUNCHER)


def residency(gateway: Gateway, name: str = "demo") -> Residency:
    return next(r.residency for r in gateway.state.loader.snapshots() if r.name == name)


async def until_waiting(gateway: Gateway, count: int) -> None:
    await wait_until(lambda: gateway.state.loader.waiting == count)


async def until_is(gateway: Gateway, wanted: Residency, name: str = "demo") -> None:
    await wait_until(lambda: residency(gateway, name) is wanted)


async def at_rest(gateway: Gateway) -> None:
    """Return when nothing is under way; nothing waits or is held then."""
    await asyncio.wait_for(gateway.state.admission.wait_until_idle(), PATIENCE_S)
    await until_waiting(gateway, 0)
    await wait_until(lambda: not any(r.leases for r in gateway.state.loader.snapshots()))
    assert await gateway.metric("gateway_queue_depth", model="demo") == 0
    assert await gateway.metric("gateway_requests_in_flight", model="demo") == 0


def starts(tmp_path: Path, engine: str = "demo-0") -> int:
    """Return how often an engine was started, as far as its logs are kept."""
    logs = (tmp_path / engine).glob("engine.log*")
    return sum(log.read_text().count("vLLM API server version") for log in logs)


async def test_on_demand_gateway_is_ready_without_any_engine(tmp_path: Path) -> None:
    async with serving(model(), tmp_path=tmp_path) as gateway:
        assert (await gateway.client.get("/ready")).status_code == 200
        listed = (await gateway.client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in listed] == ["demo"]
        assert "model  demo (loads at the first request)" in banner(gateway.state, 1, None)
        [engine] = gateway.state.catalogue.engines
        assert engine.state is EngineState.STOPPED
        assert starts(tmp_path) == 0


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize(
    ("architecture", "loads"),
    [("LlamaForCausalLM", False), ("Gemma3ForConditionalGeneration", True), ("Unknown", True)],
)
async def test_an_image_for_a_text_model_is_refused_before_the_load(
    architecture: str, loads: bool, tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    demo = model()
    demo["engines"][0]["model"] = str(directory)
    async with serving(demo, tmp_path=tmp_path) as gateway:
        body = {"model": "demo", "messages": [{"role": "user", "content": [IMAGE]}]}
        response = await gateway.client.post("/v1/chat/completions", json=body)
        assert (response.status_code == 200) is loads, response.text
        assert starts(tmp_path) == loads
        if not loads:
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (400, "media_not_supported")
            assert "demo takes text only, and the request holds images" in error["message"]
            await at_rest(gateway)


async def test_cold_requests_share_one_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(model(), tmp_path=tmp_path) as gateway:
        cold = await asyncio.gather(*(gateway.chat() for _ in range(5)))
        assert {answer.status_code for answer in cold} == {200}
        assert (await gateway.chat()).status_code == 200
        assert starts(tmp_path) == 1
        assert await gateway.metric("gateway_engine_load_seconds_count", model="demo") == 1
        await at_rest(gateway)
        gateway.state.access.flush()
        lines = [line for line in capsys.readouterr().err.splitlines() if '"status":200' in line]
        assert ['"queue_ms":null' in line for line in lines] == [False] * 5 + [True]
        assert await gateway.metric("gateway_overhead_seconds_sum", model="demo") < (
            await gateway.metric("gateway_queue_wait_seconds_sum", model="demo")
        )


async def test_stream_is_kept_alive_during_a_load(tmp_path: Path) -> None:
    loaded = tmp_path / "loaded"
    slow = model(args={"fake-load-until": str(loaded)})
    async with serving(slow, tmp_path=tmp_path, sse_keepalive_s=0.02) as gateway:
        async with connected(gateway) as client:
            client.send(request(asking(stream=True), path=b"/v1/chat/completions"))
            raw = await client.until(b"\r\n\r\n")
            assert raw.startswith(b"HTTP/1.1 200 ")
            for _ in range(3):
                raw += await client.until(COMMENT)
            assert residency(gateway) is Residency.LOADING
            loaded.touch()
            raw += await client.until(b"0\r\n\r\n")
        [answer] = await answers(raw)
        assert answer.whole
        assert answer.body.endswith(b"data: [DONE]\n\n")
        await at_rest(gateway)


@pytest.mark.parametrize("stream", [False, True])
async def test_disconnect_during_a_load_frees_its_slot(tmp_path: Path, stream: bool) -> None:
    loaded = tmp_path / "loaded"
    slow = model(args={"fake-load-until": str(loaded)}, queue={"max_waiting": 1})
    async with serving(slow, tmp_path=tmp_path) as gateway:
        async with connected(gateway) as client:
            client.send(request(asking(stream=stream), path=b"/v1/chat/completions"))
            await until_waiting(gateway, 1)
        await until_waiting(gateway, 0)
        assert residency(gateway) is Residency.LOADING
        loaded.touch()
        assert (await gateway.chat()).status_code == 200
        assert starts(tmp_path) == 1
        counted = {"model": "demo", "endpoint": PATHS[0], "status": "499"}
        assert await gateway.metric("gateway_requests_total", **counted) == 1
        await at_rest(gateway)


@pytest.mark.parametrize("path", PATHS)
async def test_failed_load_is_503_and_logs_its_reason(
    tmp_path: Path, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    broken = model(args={"fake-start": "crash"})
    broken["engines"][0]["restart"] = {"budget": 0, "backoff_s": 60}
    async with serving(broken, tmp_path=tmp_path) as gateway:
        for _ in range(2):
            answer = await gateway.client.post(path, json={"model": "demo"})
            assert answer.status_code == 503
            assert 1 <= int(answer.headers["retry-after"]) <= 60
            error = answer.json()["error"]
            assert error.get("code", "engine_unavailable") == "engine_unavailable"
            assert "could not be loaded; try again later" in error["message"]
            assert "KV cache" not in answer.text
        assert starts(tmp_path) == 1
        assert "no room for KV cache" in caplog.text
        await at_rest(gateway)


async def rows(gateway: Gateway, what: str) -> list[Any]:
    answer = await gateway.client.get(f"/admin/{what}", headers=ROOT)
    found: list[Any] = answer.json()["data"]
    return found


@pytest.mark.parametrize("load", ["on_demand", "eager"])
@pytest.mark.parametrize("path", PATHS)
async def test_unstartable_model_is_503_and_admin_shows_the_cause(
    tmp_path: Path, path: str, load: str
) -> None:
    broken = {**model(args={"fake-start": "refuse"}), "load": load}
    settings = settings_for(broken, run_dir=tmp_path)
    async with running(settings, LAUNCHER) as gateway:
        for _ in range(2):
            answer = await gateway.client.post(path, json={"model": "demo"})
            assert (answer.status_code, answer.headers["retry-after"]) == (503, str(OPERATOR_S))
            error = answer.json()["error"]
            assert error.get("code", "engine_unavailable") == "engine_unavailable"
            assert error["message"] == (
                "the model 'demo' cannot be started (unknown flag); an operator must act, retrying "
                "does not help"
            )
        assert starts(tmp_path) == 1
        assert (await gateway.client.get("/ready")).status_code == 503
        reason = "unrecognized arguments: --no-such-flag=3; remove no-such-flag from args"
        [shown] = await rows(gateway, "models")
        assert (shown["state"], shown["last_error"], shown["loading"]) == ("failed", reason, None)
        [shown] = await rows(gateway, "engines")
        assert (shown["state"], shown["last_error"]) == ("failed", reason)
        await at_rest(gateway)


async def test_gateway_is_ready_again_after_the_backoff_of_a_failed_load(
    tmp_path: Path,
) -> None:
    broken = model(args={"fake-start": "crash"})
    broken["engines"][0]["restart"] = {"backoff_s": 1, "max_backoff_s": 1}
    async with serving(broken, tmp_path=tmp_path) as gateway:
        assert (await gateway.chat()).status_code == 503
        assert (await gateway.client.get("/ready")).status_code == 503
        [shown] = await rows(gateway, "models")
        assert shown["state"] == "failed"
        assert "no room for KV cache" in shown["last_error"]
        async with asyncio.timeout(PATIENCE_S):
            while (await gateway.client.get("/ready")).status_code != 200:
                await asyncio.sleep(0.01)


async def test_answer_longer_than_the_context_is_refused_before_a_load(tmp_path: Path) -> None:
    async with serving(model(args={"max-model-len": 512}), tmp_path=tmp_path) as gateway:
        assert (await gateway.chat()).status_code == 200  # the context is known from now on
        await gateway.state.loader.unload("demo")
        answer = await gateway.chat(max_tokens=100_000)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
        assert residency(gateway) is Residency.UNLOADED
        assert starts(tmp_path) == 1


@pytest.mark.parametrize("path", PATHS)
async def test_slow_load_is_503_with_retry_after(tmp_path: Path, path: str) -> None:
    stuck = model(args={"fake-start": "hang"}, load_wait_s=0.05)
    async with serving(stuck, tmp_path=tmp_path) as gateway:
        answer = await gateway.client.post(path, json={"model": "demo"})
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "5"
        error = answer.json()["error"]
        assert "was not loaded within 0.05 s; try again in 5 s" in error["message"]
        if path == "/v1/messages":
            assert error["type"] == "overloaded_error"
        else:
            assert error["code"] == "engine_overloaded"
        await at_rest(gateway)


async def test_kept_alive_stream_of_a_failed_load_ends_in_an_error_event(
    tmp_path: Path,
) -> None:
    stuck = model(args={"fake-start": "hang"}, load_wait_s=0.1)
    async with serving(stuck, tmp_path=tmp_path, sse_keepalive_s=0.02) as gateway:
        async with connected(gateway) as client:
            client.send(request(asking(stream=True), path=b"/v1/chat/completions"))
            [answer] = await answers(await client.chunked())
        assert (answer.status, answer.whole) == (200, True)
        data = answer.body.replace(COMMENT, b"").split(b"data: ")[1]
        assert json.loads(data)["error"]["code"] == "engine_overloaded"
        await at_rest(gateway)


async def test_on_demand_models_share_the_memory_that_eager_models_leave(tmp_path: Path) -> None:
    eager = {**model("eager"), "load": "eager"}
    models = (eager, model("one"), model("two"))
    async with serving(*models, tmp_path=tmp_path, memory_budget_gib=2.5) as gateway:
        async with asyncio.timeout(PATIENCE_S):
            for name in ("one", "two", "eager", "one"):
                assert (await gateway.chat(name)).status_code == 200
                others = {"one": "two", "two": "one"}
                if name in others:
                    assert residency(gateway, others[name]) is Residency.UNLOADED
                    assert not (tmp_path / f"{others[name]}-0" / "http.sock").exists() or (
                        gateway.state.catalogue.resolve(others[name]).ready == 0
                    )
        for name, count in (("one", 1), ("two", 1)):
            labels = {"model": name, "reason": "room"}
            assert await gateway.metric("gateway_model_evictions_total", **labels) == count
        assert starts(tmp_path, "eager-0") == 1


async def test_stream_ends_before_its_model_is_evicted(tmp_path: Path) -> None:
    models = (model(), model("two"))
    async with serving(*models, tmp_path=tmp_path, memory_budget_gib=1.5) as gateway:
        async with connected(gateway) as client:
            client.send(request(asking(fake="pace:5", stream=True), path=PATHS[0].encode()))
            await client.until(b"data: ")
            other = asyncio.create_task(gateway.chat("two"))
            await until_waiting(gateway, 1)
            for _ in range(20):
                await client.until(b"data: ")
            assert (residency(gateway), residency(gateway, "two")) == (
                Residency.LOADED,
                Residency.UNLOADED,
            )
        assert (await other).status_code == 200
        assert residency(gateway) is Residency.UNLOADED
        await at_rest(gateway)


async def test_idle_model_is_unloaded_and_loaded_again(tmp_path: Path) -> None:
    async with serving(model(idle_unload_s=0.05), tmp_path=tmp_path) as gateway:
        assert (await gateway.chat()).status_code == 200
        await until_is(gateway, Residency.UNLOADED)
        [engine] = gateway.state.catalogue.engines
        assert engine.state is EngineState.STOPPED
        assert (await gateway.client.get("/ready")).status_code == 200
        assert (await gateway.chat()).status_code == 200


async def test_model_loaded_by_the_previous_gateway_is_adopted(tmp_path: Path) -> None:
    async with serving(model(), model("cold"), tmp_path=tmp_path, keep_engines=True) as gateway:
        assert (await gateway.chat()).status_code == 200
        pid = gateway.state.catalogue.engines[0].pid
    async with serving(model(), model("cold"), tmp_path=tmp_path, keep_engines=True) as gateway:
        [engine, cold] = gateway.state.catalogue.engines
        try:
            assert residency(gateway) is Residency.LOADED
            assert engine.pid == pid
            assert cold.state is EngineState.STOPPED
            assert (await gateway.chat()).status_code == 200
        finally:
            await engine.stop(0.0)
    assert starts(tmp_path) == 1


async def test_drain_refuses_requests_that_wait_for_a_load(tmp_path: Path) -> None:
    stuck = model(args={"fake-start": "hang"})
    async with serving(stuck, tmp_path=tmp_path) as gateway:
        task = asyncio.create_task(gateway.chat())
        await until_waiting(gateway, 1)
        gateway.state.admission.drain()
        gateway.state.loader.drain()
        answer = await task
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_unavailable"
        await at_rest(gateway)
