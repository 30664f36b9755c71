"""A model's only engine restarts: for its requests that is a pause, not an outage."""

import asyncio
import json
import os
import signal
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from app.sse import COMMENT
from engines.base import EngineFacts, EngineState
from engines.process.launch import FACTS
from tests.app.raw import answers, asking, connected, request
from tests.app.relay.test_waiting import at_rest, process, serving, state, until_is, until_waiting
from tests.fakes.vllm import Fake
from tests.gateway import ROOT, Gateway, remote
from tests.waiting import wait_until

PATH = b"/v1/chat/completions"

pytestmark = pytest.mark.slow


def alone(*engines: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A model without fallbacks."""
    return {"name": "demo", "engines": [*engines] or [process()], **fields}


def kill(gateway: Gateway, engine: str = "demo-0") -> None:
    pid = gateway.state.catalogue.find_replica(engine)[1].engine.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


async def test_new_requests_wait_for_a_killed_engine(tmp_path: Path) -> None:
    up = tmp_path / "up"
    up.touch()
    model = alone(process(**{"fake-load-until": str(up)}))
    async with serving(model, tmp_path=tmp_path) as gateway:
        await until_is(gateway, "demo-0", EngineState.READY)
        up.unlink()
        kill(gateway)
        await wait_until(lambda: state(gateway, "demo-0") is not EngineState.READY)
        tasks = [asyncio.create_task(gateway.chat()) for _ in range(4)]
        await until_waiting(gateway, 4)
        assert gateway.state.admission.in_flight == 0, "who waits holds no engine's slot"
        up.touch()
        assert [answer.status_code for answer in await asyncio.gather(*tasks)] == [200] * 4
        await at_rest_alone(gateway)


async def at_rest_alone(gateway: Gateway) -> None:
    await until_waiting(gateway, 0)
    await gateway.state.admission.wait_until_idle()
    assert await gateway.metric("gateway_queue_depth", model="demo") == 0
    assert await gateway.metric("gateway_requests_in_flight", model="demo") == 0


async def test_new_requests_wait_for_the_first_start(tmp_path: Path) -> None:
    up = tmp_path / "up"
    async with serving(
        alone(process(**{"fake-load-until": str(up)})), tmp_path=tmp_path
    ) as gateway:
        await until_is(gateway, "demo-0", EngineState.STARTING)
        task = asyncio.create_task(gateway.chat())
        await until_waiting(gateway, 1)
        up.touch()
        assert (await task).status_code == 200


async def test_waiting_stream_is_kept_alive(tmp_path: Path) -> None:
    up = tmp_path / "up"
    model = alone(process(**{"fake-load-until": str(up)}))
    async with serving(model, tmp_path=tmp_path, sse_keepalive_s=0.02) as gateway:
        await until_is(gateway, "demo-0", EngineState.STARTING)
        async with connected(gateway) as client:
            client.send(request(asking(stream=True), path=PATH))
            raw = await client.until(COMMENT)
            up.touch()
            raw += await client.until(b"0\r\n\r\n")
        [answer] = await answers(raw)
        assert answer.body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [False, True])
async def test_request_whose_engine_dies_before_it_answers_is_sent_again(
    tmp_path: Path, stream: bool
) -> None:
    async with serving(alone(), tmp_path=tmp_path) as gateway:
        await until_is(gateway, "demo-0", EngineState.READY)
        answer = await gateway.chat(fake=f"exit:{tmp_path / 'dead'}", stream=stream)
        assert answer.status_code == 200
        assert gateway.state.catalogue.find_replica("demo-0")[1].engine.restarts == 1
        await at_rest_alone(gateway)


async def test_request_that_kills_its_engine_twice_gets_no_third(tmp_path: Path) -> None:
    async with serving(alone(), tmp_path=tmp_path) as gateway:
        await until_is(gateway, "demo-0", EngineState.READY)
        answer = await gateway.chat(fake="exit")
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine_failed")
        engine = gateway.state.catalogue.find_replica("demo-0")[1].engine
        await wait_until(lambda: engine.restarts == 2)
        await at_rest_alone(gateway)


async def test_request_that_killed_both_engines_waits_for_neither(tmp_path: Path) -> None:
    async with serving(alone(process(), process()), tmp_path=tmp_path) as gateway:
        await until_is(gateway, "demo-0", EngineState.READY)
        await until_is(gateway, "demo-1", EngineState.READY)
        answer = await gateway.chat(fake="exit")
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine_failed")
        engines = [r.engine for r in gateway.state.catalogue.find("demo", bool).replicas]
        await wait_until(lambda: all(engine.restarts == 1 for engine in engines))


async def test_engine_that_answers_nonsense_is_no_dead_one(tmp_path: Path) -> None:
    async with serving(alone(), tmp_path=tmp_path) as gateway:
        await until_is(gateway, "demo-0", EngineState.READY)
        answer = await gateway.chat(fake="garbage")
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine_failed")


async def test_living_engine_that_broke_a_connection_gets_no_second_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.relay.lost_engine.NOTICE_S", 0.3)
    async with serving(alone(), tmp_path=tmp_path) as gateway:
        await until_is(gateway, "demo-0", EngineState.READY)
        answer = await gateway.chat(fake="close")
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine_failed")
        assert await gateway.metric("gateway_queue_wait_seconds_count", model="demo") == 1
        await at_rest_alone(gateway)


async def test_remote_engine_is_not_waited_for(tmp_path: Path) -> None:
    async with (
        Fake("demo") as fake,
        serving(alone(remote(fake.url)), tmp_path=tmp_path) as gateway,
    ):
        await until_is(gateway, "demo-0", EngineState.READY)
        answer = await gateway.chat(fake="close")
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine_failed")


async def test_on_demand_model_answers_a_request_whose_engine_died(tmp_path: Path) -> None:
    async with serving(alone(load="on_demand"), tmp_path=tmp_path) as gateway:
        answer = await gateway.chat(fake=f"exit:{tmp_path / 'dead'}")
        assert answer.status_code == 200
        await at_rest_alone(gateway)


async def test_operators_restart_is_a_pause(tmp_path: Path) -> None:
    async with serving(alone(), tmp_path=tmp_path) as gateway:
        await until_is(gateway, "demo-0", EngineState.READY)
        running = asyncio.create_task(gateway.chat(fake=f"hang_once:{tmp_path / 'asked'}"))
        await wait_until((tmp_path / "asked").exists)
        answer = await gateway.client.post("/admin/engines/demo-0/restart", headers=ROOT)
        assert answer.status_code == 202
        new = [asyncio.create_task(gateway.chat()) for _ in range(3)]
        got = await asyncio.gather(running, *new)
        assert [one.status_code for one in got] == [200] * 4
        await at_rest_alone(gateway)


async def test_start_that_cannot_end_in_time_is_not_waited_for(tmp_path: Path) -> None:
    model = alone(process(**{"fake-start": "hang"}), load_wait_s=300)
    async with serving(model, tmp_path=tmp_path) as gateway:
        await until_is(gateway, "demo-0", EngineState.STARTING)
        await wait_until((tmp_path / "demo-0").exists)
    measured = {"facts": asdict(EngineFacts()), "load_s": 1000.0}
    (tmp_path / "demo-0" / FACTS).write_text(json.dumps(measured))
    async with serving(model, tmp_path=tmp_path) as gateway:
        await until_is(gateway, "demo-0", EngineState.STARTING)
        answer = await gateway.chat()
        assert answer.status_code == 503
        assert 900 <= int(answer.headers["retry-after"]) <= 1000


async def test_wait_without_fallbacks_is_bounded_by_load_wait_s(tmp_path: Path) -> None:
    model = alone(process(**{"fake-start": "hang"}), load_wait_s=0.3)
    async with serving(model, tmp_path=tmp_path) as gateway:
        await until_is(gateway, "demo-0", EngineState.STARTING)
        answer = await gateway.chat()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
        assert await gateway.metric("gateway_queue_wait_seconds_count", model="demo") == 1


def failing_while(failing: Path, *, budget: int) -> dict[str, Any]:
    """An engine each of whose starts fails while there is such a file."""
    restart = {"backoff_s": 0.05, "max_backoff_s": 0.05, "budget": budget}
    return process(**{"fake-crash-while": str(failing)}) | {"restart": restart}


async def test_restart_that_fails_is_waited_for_while_another_follows(tmp_path: Path) -> None:
    failing = tmp_path / "failing"
    model = alone(failing_while(failing, budget=50))
    async with serving(model, tmp_path=tmp_path) as gateway:
        await until_is(gateway, "demo-0", EngineState.READY)
        failing.touch()
        kill(gateway)
        await wait_until(lambda: state(gateway, "demo-0") is not EngineState.READY)
        before = asyncio.create_task(gateway.chat())
        engine = gateway.state.catalogue.find_replica("demo-0")[1].engine
        await wait_until(lambda: engine.restarts >= 2)
        after = asyncio.create_task(gateway.chat())
        await until_waiting(gateway, 2)
        failing.unlink()
        assert [answer.status_code for answer in (await before, await after)] == [200, 200]
        await at_rest_alone(gateway)


async def test_end_of_the_restarts_ends_the_wait(tmp_path: Path) -> None:
    failing = tmp_path / "failing"
    model = alone(failing_while(failing, budget=2))
    async with serving(model, tmp_path=tmp_path) as gateway:
        await until_is(gateway, "demo-0", EngineState.READY)
        failing.touch()
        kill(gateway)
        await wait_until(lambda: state(gateway, "demo-0") is not EngineState.READY)
        answer = await gateway.chat()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
        engine = gateway.state.catalogue.find_replica("demo-0")[1].engine
        assert engine.given_up


async def test_first_start_that_fails_ends_the_wait(tmp_path: Path) -> None:
    never = process(**{"fake-start": "hang"})
    restart = {"backoff_s": 0.05, "max_backoff_s": 0.05, "budget": 50}
    model = alone(never | {"start_timeout_s": 0.7, "restart": restart})
    async with serving(model, tmp_path=tmp_path) as gateway:
        await until_is(gateway, "demo-0", EngineState.STARTING)
        answer = await gateway.chat()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")


async def test_requests_beyond_the_queue_are_refused(tmp_path: Path) -> None:
    model = alone(process(**{"fake-start": "hang"}), queue={"max_waiting": 1})
    async with serving(model, tmp_path=tmp_path) as gateway:
        await until_is(gateway, "demo-0", EngineState.STARTING)
        async with connected(gateway) as first:
            first.send(request(asking(), path=PATH))
            await until_waiting(gateway, 1)
            answer = await gateway.chat()
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "engine_overloaded"
        await at_rest_alone(gateway)


async def test_drain_ends_the_wait_without_fallbacks(tmp_path: Path) -> None:
    async with serving(alone(process(**{"fake-start": "hang"})), tmp_path=tmp_path) as gateway:
        await until_is(gateway, "demo-0", EngineState.STARTING)
        task = asyncio.create_task(gateway.chat())
        await until_waiting(gateway, 1)
        gateway.state.admission.drain()
        assert (await task).status_code == 503


async def test_request_waits_for_an_engine_whose_end_is_not_noticed_yet(tmp_path: Path) -> None:
    async with serving(alone(), tmp_path=tmp_path) as gateway:
        await until_is(gateway, "demo-0", EngineState.READY)
        (tmp_path / "demo-0" / "http.sock").unlink()
        tasks = [asyncio.create_task(gateway.chat()) for _ in range(3)]
        await until_waiting(gateway, 3)
        assert state(gateway, "demo-0") is EngineState.READY
        kill(gateway)
        assert [answer.status_code for answer in await asyncio.gather(*tasks)] == [200] * 3
        await at_rest_alone(gateway)


async def test_fallback_serves_at_once_when_an_engine_died(tmp_path: Path) -> None:
    async with Fake("spare") as fake:
        spare = {"name": "spare", "engines": [remote(fake.url)]}
        model = alone(fallbacks=["spare"])
        async with serving(model, spare, tmp_path=tmp_path) as gateway:
            await until_is(gateway, "demo-0", EngineState.READY)
            await until_is(gateway, "spare-0", EngineState.READY)
            answer = await gateway.chat(fake=f"exit:{tmp_path / 'dead'}")
            assert (answer.status_code, answer.headers["x-gateway-model"]) == (200, "spare")
            await at_rest(gateway)
