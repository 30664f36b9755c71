"""Requests for a starting model with fallbacks, with a fake vLLM."""

import asyncio
import json
import sys
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from app.sse import COMMENT
from engines.base import EngineFacts, EngineState
from engines.process.launch import FACTS
from tests.app.raw import answers, asking, connected, request
from tests.fakes.vllm import Fake
from tests.gateway import ROOT, Gateway, remote, running, settings_for
from tests.waiting import PATIENCE_S, wait_until

LAUNCHER = (sys.executable, "-m", "tests.fakes.vllm")
PATH = b"/v1/chat/completions"

pytestmark = pytest.mark.slow


def process(**args: Any) -> dict[str, Any]:
    """An engine that takes 1 GiB, and is started again at once."""
    restart = {"backoff_s": 0.05, "max_backoff_s": 0.05}
    return {"kind": "process", "model": "m", "memory_gib": 1.0, "args": args, "restart": restart}


def demo(*engines: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"name": "demo", "fallbacks": ["spare"], "engines": list(engines), **fields}


def spare(*engines: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A fallback that only a request loads."""
    return {"name": "spare", "load": "on_demand", "engines": [*engines] or [process()], **fields}


def serving(
    *models: dict[str, Any], tmp_path: Path, **server: Any
) -> AbstractAsyncContextManager[Gateway]:
    """A gateway whose engines may be starting still."""
    settings = settings_for(*models, run_dir=tmp_path, server={"parallel_starts": 4, **server})
    return running(settings, LAUNCHER, settle=False)


def state(gateway: Gateway, engine: str) -> EngineState:
    return gateway.state.catalogue.find_replica(engine)[1].engine.state


async def until_is(gateway: Gateway, engine: str, expected: EngineState) -> None:
    await wait_until(lambda: state(gateway, engine) is expected)


async def row(gateway: Gateway, name: str = "demo") -> Any:
    rows = (await gateway.client.get("/admin/models", headers=ROOT)).json()["data"]
    return next(one for one in rows if one["name"] == name)


async def until_waiting(gateway: Gateway, count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while (await row(gateway))["waiting"] != count:
            await asyncio.sleep(0.01)


async def at_rest(gateway: Gateway) -> None:
    """Return when nothing is under way or waits; nothing may be held by then."""
    await until_waiting(gateway, 0)
    await asyncio.wait_for(gateway.state.admission.wait_until_idle(), PATIENCE_S)
    for name in ("demo", "spare"):
        assert await gateway.metric("gateway_queue_depth", model=name) == 0
        assert await gateway.metric("gateway_requests_in_flight", model=name) == 0


async def test_starting_model_is_waited_for_instead_of_loading_its_fallback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    up = tmp_path / "up"
    model = demo(process(**{"fake-load-until": str(up)}), queue={"max_in_flight": 1})
    async with serving(model, spare(), tmp_path=tmp_path) as gateway:
        await until_is(gateway, "demo-0", EngineState.STARTING)
        tasks = [asyncio.create_task(gateway.chat()) for _ in range(3)]
        await until_waiting(gateway, 3)
        assert await gateway.metric("gateway_queue_depth", model="demo") == 3
        assert gateway.state.admission.in_flight == 0, "who waits holds no engine's slot"
        shown = await row(gateway)
        assert (shown["state"], shown["loading"]["expected_s"]) == ("starting", None)
        up.touch()
        for answer in await asyncio.gather(*tasks):
            assert (answer.status_code, answer.headers["x-gateway-model"]) == (200, "demo")
        assert state(gateway, "spare-0") is EngineState.STOPPED
        assert await gateway.metric("gateway_fallbacks_total", model="demo", fallback="spare") == 0
        await at_rest(gateway)
        gateway.state.access.flush()
        lines = [line for line in capsys.readouterr().err.splitlines() if '"status":200' in line]
        served = [line for line in lines if "chat/completions" in line]
        assert len(served) == 3
        assert not any('"queue_ms":null' in line for line in served)


@pytest.mark.parametrize("models", [[demo(process()), spare()], [demo(process(), fallbacks=[])]])
async def test_model_is_waited_for_while_a_previous_gateways_engines_are_ended(
    models: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = asyncio.Event()
    monkeypatch.setattr("app.fleet.startup.stop_unconfigured", lambda *_: ended.wait())
    async with serving(*models, tmp_path=tmp_path) as gateway:
        task = asyncio.create_task(gateway.chat())
        await until_waiting(gateway, 1)
        assert state(gateway, "demo-0") is EngineState.STOPPED
        ended.set()
        answer = await task
        assert (answer.status_code, answer.headers["x-gateway-model"]) == (200, "demo")
        assert await gateway.metric("gateway_queue_depth", model="demo") == 0


async def test_restarting_model_is_waited_for(tmp_path: Path) -> None:
    dies = tmp_path / "dies"
    model = demo(process(**{"fake-die-when": str(dies)}))
    async with serving(model, spare(), tmp_path=tmp_path) as gateway:
        assert (await gateway.chat()).headers["x-gateway-model"] == "demo"
        dies.touch()
        await wait_until(lambda: state(gateway, "demo-0") is not EngineState.READY)
        dies.unlink()
        answer = await gateway.chat()
        assert (answer.status_code, answer.headers["x-gateway-model"]) == (200, "demo")
        assert state(gateway, "spare-0") is EngineState.STOPPED
        await at_rest(gateway)


async def test_ready_fallback_serves_while_the_model_starts(tmp_path: Path) -> None:
    async with Fake("spare") as fake:
        model = demo(process(**{"fake-start": "hang"}))
        second = {"name": "spare", "engines": [remote(fake.url)]}
        async with serving(model, second, tmp_path=tmp_path) as gateway:
            await until_is(gateway, "spare-0", EngineState.READY)
            answer = await gateway.chat()
            assert (answer.status_code, answer.headers["x-gateway-model"]) == (200, "spare")
            await at_rest(gateway)


async def test_first_ready_fallback_serves_waiting_requests(tmp_path: Path) -> None:
    up = tmp_path / "up"
    model = demo(process(**{"fake-start": "hang"}))
    second = {"name": "spare", "engines": [process(**{"fake-load-until": str(up)})]}
    async with serving(model, second, tmp_path=tmp_path) as gateway:
        await until_is(gateway, "spare-0", EngineState.STARTING)
        task = asyncio.create_task(gateway.chat())
        await until_waiting(gateway, 1)
        up.touch()
        assert (await task).headers["x-gateway-model"] == "spare"
        await at_rest(gateway)


async def test_wait_is_bounded_by_load_wait_s(tmp_path: Path) -> None:
    model = demo(process(**{"fake-start": "hang"}), load_wait_s=0.4)
    async with serving(model, spare(), tmp_path=tmp_path) as gateway:
        await until_is(gateway, "demo-0", EngineState.STARTING)
        task = asyncio.create_task(gateway.chat())
        await until_waiting(gateway, 1)
        assert (await task).headers["x-gateway-model"] == "spare"
        await at_rest(gateway)


async def test_model_whose_start_failed_is_not_waited_for(tmp_path: Path) -> None:
    model = demo(process(**{"fake-start": "crash"}))
    async with serving(model, spare(), tmp_path=tmp_path) as gateway:
        await until_is(gateway, "demo-0", EngineState.FAILED)
        answer = await gateway.chat()
        assert (answer.status_code, answer.headers["x-gateway-model"]) == (200, "spare")
        await at_rest(gateway)


async def test_waiting_requests_are_bounded_by_the_queue(tmp_path: Path) -> None:
    model = demo(process(**{"fake-start": "hang"}), queue={"max_waiting": 1})
    async with serving(model, spare(), tmp_path=tmp_path) as gateway:
        await until_is(gateway, "demo-0", EngineState.STARTING)
        async with connected(gateway) as first:
            first.send(request(asking(), path=PATH))
            await until_waiting(gateway, 1)
            assert (await gateway.chat()).headers["x-gateway-model"] == "spare"
        await at_rest(gateway)


@pytest.mark.parametrize("stream", [False, True])
async def test_disconnect_while_waiting_for_a_start_leaks_nothing(
    tmp_path: Path, stream: bool
) -> None:
    default = {"concurrent_requests": 1}
    model = demo(process(**{"fake-start": "hang"}))
    settings = settings_for(
        *(model, spare()),
        run_dir=tmp_path,
        server={"parallel_starts": 2},
        limits={"default": default},
    )
    async with running(settings, LAUNCHER, settle=False) as gateway:
        await until_is(gateway, "demo-0", EngineState.STARTING)
        async with connected(gateway) as client:
            client.send(request(asking(stream=stream), path=PATH))
            await until_waiting(gateway, 1)
        await at_rest(gateway)
        counted = {"model": "demo", "endpoint": PATH.decode(), "status": "499"}
        assert await gateway.metric("gateway_requests_total", **counted) == 1
        assert (await gateway.chat("spare")).status_code == 200, "its slot is free again"


async def test_drain_refuses_requests_that_wait_for_a_start(tmp_path: Path) -> None:
    model = demo(process(**{"fake-start": "hang"}))
    async with serving(model, spare(), tmp_path=tmp_path) as gateway:
        await until_is(gateway, "demo-0", EngineState.STARTING)
        task = asyncio.create_task(gateway.chat())
        await until_waiting(gateway, 1)
        gateway.state.admission.drain()
        answer = await task
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_unavailable"
        assert "x-gateway-model" not in answer.headers
        await at_rest(gateway)


async def test_stream_is_kept_alive_while_it_waits_and_names_no_model_in_its_head(
    tmp_path: Path,
) -> None:
    up = tmp_path / "up"
    model = demo(process(**{"fake-load-until": str(up)}))
    async with serving(model, spare(), tmp_path=tmp_path, sse_keepalive_s=0.02) as gateway:
        await until_is(gateway, "demo-0", EngineState.STARTING)
        async with connected(gateway) as client:
            client.send(request(asking(stream=True), path=PATH))
            raw = await client.until(COMMENT)
            up.touch()
            raw += await client.until(b"0\r\n\r\n")
        [answer] = await answers(raw)
        assert answer.body.endswith(b"data: [DONE]\n\n")
        assert b'"model":"demo"' in answer.body
        assert b"x-gateway-model" not in raw
        await at_rest(gateway)


async def test_without_fallbacks_a_starting_model_is_503_with_retry_after(
    tmp_path: Path,
) -> None:
    alone = {"name": "demo", "engines": [process(**{"fake-start": "hang"})], "load_wait_s": 0}
    async with serving(alone, tmp_path=tmp_path) as gateway:
        await until_is(gateway, "demo-0", EngineState.STARTING)
        answer = await gateway.chat()
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        assert "(starting)" in answer.json()["error"]["message"]
        assert "x-gateway-model" not in answer.headers


async def test_start_forecast_uses_the_previous_gateways_measurement(tmp_path: Path) -> None:
    alone = {"name": "demo", "engines": [process(**{"fake-start": "hang"})]}
    async with serving(alone, tmp_path=tmp_path) as gateway:
        await until_is(gateway, "demo-0", EngineState.STARTING)
        await wait_until(lambda: (tmp_path / "demo-0").exists())
    measured = {"facts": asdict(EngineFacts()), "load_s": 1000.0}
    (tmp_path / "demo-0" / FACTS).write_text(json.dumps(measured))
    async with serving(alone, tmp_path=tmp_path) as gateway:
        async with asyncio.timeout(PATIENCE_S):
            while (shown := (await row(gateway))["loading"]) is None or not shown["elapsed_s"]:
                await asyncio.sleep(0.01)
        assert 900 <= shown["expected_s"] <= 1000
        assert 900 <= int((await gateway.chat()).headers["retry-after"]) <= 1000


class TestOnDemand:
    async def test_ready_fallback_serves_while_the_model_loads(self, tmp_path: Path) -> None:
        async with Fake("spare") as fake:
            up = tmp_path / "up"
            model = demo(process(**{"fake-load-until": str(up)}), load="on_demand")
            second = {"name": "spare", "engines": [remote(fake.url)]}
            async with serving(model, second, tmp_path=tmp_path) as gateway:
                await until_is(gateway, "spare-0", EngineState.READY)
                answer = await gateway.chat()
                assert (answer.status_code, answer.headers["x-gateway-model"]) == (200, "spare")
                shown = await row(gateway)
                assert (shown["under_way"], shown["waiting"]) == ("load", 0)
                up.touch()
                await until_is(gateway, "demo-0", EngineState.READY)
                assert (await gateway.chat()).headers["x-gateway-model"] == "demo"
                await at_rest(gateway)

    async def test_request_leaves_a_load_for_the_first_ready_fallback(self, tmp_path: Path) -> None:
        up = tmp_path / "up"
        model = demo(process(**{"fake-start": "hang"}), load="on_demand")
        second = {"name": "spare", "engines": [process(**{"fake-load-until": str(up)})]}
        async with serving(model, second, tmp_path=tmp_path) as gateway:
            await until_is(gateway, "spare-0", EngineState.STARTING)
            task = asyncio.create_task(gateway.chat())
            await until_waiting(gateway, 1)
            up.touch()
            assert (await task).headers["x-gateway-model"] == "spare"
            assert (await row(gateway))["loading"] is not None, "it stays wanted"
            await at_rest(gateway)

    async def test_model_is_waited_for_when_its_ready_fallback_fails(self, tmp_path: Path) -> None:
        async with Fake("spare") as fake:
            up = tmp_path / "up"
            model = demo(process(**{"fake-load-until": str(up)}), load="on_demand")
            limits = {"requests_per_minute": 0}
            second = {"name": "spare", "engines": [remote(fake.url)], "limits": limits}
            async with serving(model, second, tmp_path=tmp_path) as gateway:
                await until_is(gateway, "spare-0", EngineState.READY)
                task = asyncio.create_task(gateway.chat())
                await until_waiting(gateway, 1)
                up.touch()
                answer = await task
                assert (answer.status_code, answer.headers["x-gateway-model"]) == (200, "demo")
                await at_rest(gateway)

    async def test_drain_refuses_a_request_that_waits_after_its_fallbacks(
        self, tmp_path: Path
    ) -> None:
        async with Fake("spare") as fake:
            model = demo(process(**{"fake-start": "hang"}), load="on_demand")
            limits = {"requests_per_minute": 0}
            second = {"name": "spare", "engines": [remote(fake.url)], "limits": limits}
            async with serving(model, second, tmp_path=tmp_path) as gateway:
                await until_is(gateway, "spare-0", EngineState.READY)
                task = asyncio.create_task(gateway.chat())
                await until_waiting(gateway, 1)
                gateway.state.admission.drain()
                gateway.state.loader.drain()
                assert (await task).status_code == 503
                await at_rest(gateway)

    async def test_load_is_shown_with_what_waits_for_it_and_what_is_left(
        self, tmp_path: Path
    ) -> None:
        up = tmp_path / "up"
        up.touch()
        model = demo(process(**{"fake-load-until": str(up)}), load="on_demand", fallbacks=[])
        async with serving(model, tmp_path=tmp_path) as gateway:
            assert (await row(gateway))["loading"] is None
            assert (await gateway.chat()).status_code == 200
            await gateway.state.loader.unload("demo")
            assert (await row(gateway))["state"] == "stopped"
            up.unlink()
            tasks = [asyncio.create_task(gateway.chat()) for _ in range(2)]
            await until_waiting(gateway, 2)
            shown = await row(gateway)
            assert (shown["state"], shown["under_way"]) == ("starting", "load")
            assert shown["loading"]["expected_s"] > 0
            up.touch()
            assert {(await task).status_code for task in tasks} == {200}
            await at_rest(gateway)
