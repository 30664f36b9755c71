"""Fallbacks, through the real server with fake engines."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.auth import Allowed, Authenticator, Principal
from app.settings import LimitSettings
from app.sse import COMMENT
from app.telemetry import EndedRequest
from engines.base import EngineState
from tests.app.raw import answers, asking, connected, request
from tests.fakes.vllm import Fake
from tests.gateway import Gateway, free_port, remote, running, settings_for
from tests.waiting import PATIENCE_S, wait_until

FAULTS = ["close", "reset", "garbage", "truncate", "dead", "text:500", "redirect"]


class Setup:
    """The model `demo`, its fallbacks `small` and `tiny`, and the engine behind each."""

    def __init__(self, stack: AsyncExitStack, tmp_path: Path) -> None:
        self._stack = stack
        self._tmp_path = tmp_path

    async def start(
        self,
        *,
        demo: dict[str, Any] | None = None,
        small: dict[str, Any] | None = None,
        replicas: int = 1,
        small_length: int = 2048,
        timeouts: dict[str, float] | None = None,
        **sections: Any,
    ) -> Gateway:
        """Run a gateway; the arguments are fields of the models and sections of the settings.

        `timeouts` are those of demo's engine, which has all the time otherwise.
        """
        self.demo = await self._stack.enter_async_context(Fake("demo"))
        self.small = await self._stack.enter_async_context(Fake("small", small_length))
        self.tiny = await self._stack.enter_async_context(Fake("tiny"))
        models = [
            {
                "name": "demo",
                "fallbacks": ["small", "tiny"],
                "engines": [remote(self.demo.url, timeouts=timeouts or {})] * replicas,
                **(demo or {}),
            },
            {"name": "small", "engines": [remote(self.small.url)], **(small or {})},
            {"name": "tiny", "engines": [remote(self.tiny.url)], "fallbacks": ["far"]},
            {"name": "far", "engines": [remote(self.tiny.url, served_model_name="tiny")]},
        ]
        settings = settings_for(*models, run_dir=self._tmp_path, **sections)
        return await self._stack.enter_async_context(running(settings))

    def asked(self) -> list[str]:
        """Return what of the three was asked for an answer, and how often, in letters."""
        fakes = (self.demo, self.small, self.tiny)
        return [f.model for f in fakes for seen in f.seen if seen.method == "POST"]


@pytest.fixture
async def setup(tmp_path: Path) -> AsyncIterator[Setup]:
    async with AsyncExitStack() as stack:
        yield Setup(stack, tmp_path)


async def handed_on(gateway: Gateway, fallback: str = "small") -> float:
    return await gateway.metric("gateway_fallbacks_total", model="demo", fallback=fallback)


async def at_rest(gateway: Gateway) -> None:
    """Return when nothing is under way; nothing may be held by then."""
    await asyncio.wait_for(gateway.state.admission.wait_until_idle(), PATIENCE_S)
    for model in gateway.state.catalogue.models:
        assert [replica.in_flight for replica in model.replicas] == [0] * len(model.replicas)
        assert await gateway.metric("gateway_requests_in_flight", model=model.name) == 0
        assert await gateway.metric("gateway_queue_depth", model=model.name) == 0


def line(gateway: Gateway, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return the access line of the last request."""
    gateway.state.access.flush()
    lines = [json.loads(one) for one in capsys.readouterr().err.splitlines() if '"access"' in one]
    return lines[-1]


def error_of(response: httpx.Response) -> Any:
    return response.json()["error"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
async def test_failed_engine_falls_back(
    setup: Setup, fault: str, stream: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway = await setup.start()
    setup.demo.fault = fault
    answer = await gateway.chat(stream=stream, temperature=0.5)
    assert answer.status_code == 200
    assert answer.headers.get_list("x-gateway-model") == ["small"]
    assert answer.content.endswith(b"[DONE]\n\n") == stream
    [seen] = [one for one in setup.small.seen if one.method == "POST"]
    assert seen.json["model"] == "small"
    assert seen.json["temperature"] == 0.5
    assert await handed_on(gateway) == 1
    assert await handed_on(gateway, "tiny") == 0
    await at_rest(gateway)
    for name, times in (("demo", 1), ("small", 0)):
        assert await gateway.metric("gateway_overhead_seconds_count", model=name) == times
    path = "/v1/chat/completions"
    count = "gateway_requests_total"
    assert await gateway.metric(count, model="small", endpoint=path, status="200") == 1
    assert await gateway.metric(count, model="demo", endpoint=path, status="200") == 0
    for name, tokens in (("small", 2), ("demo", 0)):
        counted = await gateway.metric("gateway_tokens_total", model=name, kind="completion")
        assert counted == tokens
    reported = line(gateway, capsys)
    assert (reported["model"], reported["engine"]) == ("small", "small-0")


async def test_unreachable_engine_falls_back(setup: Setup) -> None:
    gone = remote(f"http://127.0.0.1:{free_port()}")
    gateway = await setup.start(demo={"engines": [gone]})
    assert (await gateway.chat()).status_code == 200
    assert setup.asked() == ["small"]
    await at_rest(gateway)


@pytest.mark.slow
async def test_engine_timeout_falls_back(setup: Setup) -> None:
    gateway = await setup.start(timeouts={"first_byte_s": 0.2})
    setup.demo.fault = "hang"
    assert (await gateway.chat()).status_code == 200
    await setup.demo.until_idle()
    assert setup.demo.aborted == 1, "the first engine's response is no longer needed"
    await at_rest(gateway)


@pytest.mark.parametrize("queue", [{"max_waiting": 0}, {"timeout_s": 0.05}])
async def test_full_or_slow_queue_falls_back(
    setup: Setup, queue: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    gateway = await setup.start(demo={"queue": {"max_in_flight": 1, **queue}})
    async with connected(gateway) as holder:
        holder.send(request(asking(fake="hang")))
        await setup.demo.until_running(timeout=PATIENCE_S)
        assert (await gateway.chat()).status_code == 200
        assert setup.asked() == ["demo", "small"]
        reported = line(gateway, capsys)
        assert reported["model"] == "small"
        waited = reported["queue_ms"] is not None
        assert waited, "the wait for the first model is part of the request's"
    await at_rest(gateway)


async def test_other_replicas_are_tried_before_a_fallback(setup: Setup) -> None:
    gateway = await setup.start(replicas=3)
    setup.demo.fault = "dead"
    assert (await gateway.chat()).json()["model"] == "small"
    assert setup.asked() == ["demo", "demo", "small"]


async def test_fallbacks_are_tried_in_order_once_and_not_transitively(
    setup: Setup,
) -> None:
    gateway = await setup.start()
    setup.demo.fault = setup.small.fault = setup.tiny.fault = "dead"
    answer = await gateway.chat()
    assert answer.status_code == 502
    assert error_of(answer)["code"] == "engine_failed"
    assert "'demo'" in error_of(answer)["message"], "the client hears of what it asked for"
    assert "x-gateway-model" not in answer.headers, "none of them did"
    assert setup.asked() == ["demo", "small", "tiny"]
    assert [await handed_on(gateway, name) for name in ("small", "tiny", "far")] == [1, 1, 0]
    counted = {"model": "demo", "endpoint": "/v1/chat/completions", "status": "502"}
    assert await gateway.metric("gateway_requests_total", **counted) == 1
    assert await gateway.metric("gateway_usage_records_total", outcome="failed") == 1
    await at_rest(gateway)


async def test_the_second_fallback_serves_when_the_first_cannot(setup: Setup) -> None:
    gateway = await setup.start()
    setup.demo.fault = setup.small.fault = "dead"
    answer = await gateway.chat()
    assert answer.json()["model"] == "tiny"
    assert await gateway.metric("gateway_tokens_total", model="tiny", kind="completion") == 2


@pytest.mark.parametrize("fault", ["status:400", "status:404", "status:429", "status:500"])
async def test_error_response_of_an_engine_does_not_fall_back(setup: Setup, fault: str) -> None:
    gateway = await setup.start()
    setup.demo.fault = fault
    assert (await gateway.chat()).status_code == int(fault.removeprefix("status:"))
    assert setup.asked() == ["demo"]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["die:0", "die:2", "dead_stream:0", "stall:1"])
async def test_no_fallback_after_the_first_byte(setup: Setup, fault: str) -> None:
    gateway = await setup.start(timeouts={"stall_s": 0.2})
    setup.demo.fault = fault
    async with connected(gateway) as client:
        client.send(request(asking(stream=True), path=b"/v1/chat/completions"))
        answer = await client.answer()
    assert b'"error"' in answer.body
    assert b"[DONE]" not in answer.body
    assert setup.asked() == ["demo"]
    assert await handed_on(gateway) == 0
    await at_rest(gateway)


async def test_keep_alive_comment_does_not_prevent_a_fallback(setup: Setup) -> None:
    gateway = await setup.start(
        demo={"queue": {"max_in_flight": 1, "timeout_s": 0.2}}, server={"sse_keepalive_s": 0.02}
    )
    async with connected(gateway) as holder, connected(gateway) as client:
        holder.send(request(asking(fake="hang")))
        await setup.demo.until_running(timeout=PATIENCE_S)
        client.send(request(asking(stream=True), path=b"/v1/chat/completions"))
        raw = await client.until(COMMENT)
        raw += await client.until(b"0\r\n\r\n")
    [answer] = await answers(raw)
    assert answer.whole
    assert answer.body.endswith(b"data: [DONE]\n\n")
    assert b'"model":"small"' in answer.body
    await at_rest(gateway)


async def test_fallback_that_the_key_may_not_use_is_skipped(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await setup.start()
    known = gateway.state.authenticator.recall

    def with_fewer_models(self: Authenticator, headers: Any, facts: Any) -> Principal:
        principal = known(headers, facts)
        assert principal is not None
        fewer = Allowed.of(["demo", "tiny"])
        return Principal(principal.id, principal.role, principal.limits, models=fewer)

    monkeypatch.setattr(Authenticator, "recall", with_fewer_models)
    setup.demo.fault = "dead"
    assert (await gateway.chat()).json()["model"] == "tiny"
    assert setup.asked() == ["demo", "tiny"]


async def test_draining_gateway_does_not_fall_back(setup: Setup) -> None:
    gateway = await setup.start()
    gateway.state.admission.drain()
    answer = await gateway.chat()
    assert answer.status_code == 503
    assert "shutting down" in error_of(answer)["message"]
    assert await handed_on(gateway) == await handed_on(gateway, "tiny") == 0
    assert setup.asked() == []
    await at_rest(gateway)


async def test_bounds_of_the_fallback_apply(setup: Setup) -> None:
    gateway = await setup.start(demo={"max_output_tokens": 50}, small={"max_output_tokens": 7})
    setup.demo.fault = "dead"
    await gateway.chat(max_tokens=1000)
    assert [seen.json["max_tokens"] for seen in setup.demo.seen if seen.method == "POST"] == [50]
    assert [seen.json["max_tokens"] for seen in setup.small.seen if seen.method == "POST"] == [7]


async def test_prompt_too_long_for_the_fallback_gets_its_error(setup: Setup) -> None:
    gateway = await setup.start()
    setup.demo.fault, setup.small.fault = "dead", "status:400"
    assert (await gateway.chat()).status_code == 400
    assert setup.asked() == ["demo", "small"]


class TestLimits:
    async def test_fallback_reserves_at_most_its_own_length(self, setup: Setup) -> None:
        limits = {"limits": {"tokens_per_minute": 100}}
        gateway = await setup.start(small=limits, small_length=50)
        setup.demo.fault = "dead"
        assert (await gateway.chat(max_tokens=1000)).json()["model"] == "small"

    async def test_fallback_counts_one_request_and_settles_real_usage(self, setup: Setup) -> None:
        default = {**dict.fromkeys(LimitSettings.model_fields), "tokens_per_minute": 10_000}
        # Of so few requests a minute none comes back within ten seconds.
        default |= {"requests_per_minute": 5, "concurrent_requests": 1}
        gateway = await setup.start(limits={"default": default})
        setup.demo.fault = "dead"
        for left in (4, 3):  # one slot is enough, and free again
            answer = await gateway.chat(max_tokens=10)
            assert answer.status_code == 200
            assert answer.headers["x-ratelimit-remaining-requests"] == str(left)
        setup.demo.fault = None
        answer = await gateway.chat(max_tokens=1, messages=[])
        # Three times 3 + 2 tokens were used at the most, and the reservation of the last is small.
        assert int(answer.headers["x-ratelimit-remaining-tokens"]) > 10_000 - 60

    @pytest.mark.parametrize("limit", LimitSettings.model_fields)
    async def test_limits_of_the_fallback_apply(self, setup: Setup, limit: str) -> None:
        gateway = await setup.start(small={"limits": {limit: 0}})
        setup.demo.fault = "dead"
        assert (await gateway.chat()).json()["model"] == "tiny"
        assert setup.asked() == ["demo", "tiny"]

    async def test_usage_of_a_fallback_counts_against_its_limits(self, setup: Setup) -> None:
        gateway = await setup.start(small={"limits": {"requests_per_minute": 2}})
        setup.demo.fault = "dead"
        served = [(await gateway.chat()).json()["model"] for _ in range(3)]
        assert served == ["small", "small", "tiny"]
        direct = await gateway.chat("small")
        assert direct.status_code == 429
        setup.demo.fault = None
        assert (await gateway.chat()).json()["model"] == "demo"

    async def test_rate_limit_of_the_requested_model_does_not_fall_back(self, setup: Setup) -> None:
        gateway = await setup.start(demo={"limits": {"requests_per_minute": 0}})
        assert (await gateway.chat()).status_code == 429
        assert setup.asked() == []


class TestDisconnect:
    async def test_disconnect_while_the_fallback_generates_aborts_it(self, setup: Setup) -> None:
        gateway = await setup.start()
        setup.demo.fault, setup.small.fault = "dead", "hang"
        async with connected(gateway) as client:
            client.send(request(asking()))
            await setup.small.until_running(timeout=PATIENCE_S)
        await setup.small.until_idle()
        assert setup.small.aborted == 1
        await at_rest(gateway)
        assert await gateway.metric("gateway_client_disconnects_total") == 1
        counted = {"model": "small", "endpoint": "/v1/completions", "status": "499"}
        assert await gateway.metric("gateway_requests_total", **counted) == 1

    async def test_disconnect_while_queued_for_the_fallback_frees_the_slot(
        self, setup: Setup
    ) -> None:
        gateway = await setup.start(small={"queue": {"max_in_flight": 1}})
        setup.demo.fault, setup.small.fault = "dead", "hang"
        async with connected(gateway) as first, connected(gateway) as second:
            first.send(request(asking()))
            await setup.small.until_running(timeout=PATIENCE_S)
            second.send(request(asking()))
            await wait_until(lambda: gateway.state.admission.waiting)
        await at_rest(gateway)
        assert gateway.state.admission.waiting == 0
        assert setup.asked().count("small") == 1


async def test_ledger_names_the_fallback(setup: Setup) -> None:
    gateway = await setup.start()
    reported: list[tuple[str, str | None, int]] = []

    def note(_batch: int, ended: EndedRequest) -> None:
        record = ended.record
        if record.engine is not None:
            reported.append((record.model, record.engine, record.status))

    gateway.state.ledger.watch(note)
    setup.demo.fault = "dead"
    await gateway.chat()
    await at_rest(gateway)
    assert reported == [("small", "small-0", 200)]
    setup.small.fault = setup.tiny.fault = "dead"
    await gateway.chat()
    await at_rest(gateway)
    assert reported[1:] == [("demo", "tiny-0", 502)]


@pytest.mark.slow
async def test_on_demand_fallback_is_loaded(tmp_path: Path) -> None:
    gone = remote(f"http://127.0.0.1:{free_port()}")
    process = {"kind": "process", "model": "m", "memory_gib": 1.0}
    settings = settings_for(
        {"name": "demo", "fallbacks": ["spare"], "engines": [gone]},
        {"name": "spare", "load": "on_demand", "engines": [process]},
        run_dir=tmp_path,
    )
    async with running(settings, (sys.executable, "-m", "tests.fakes.vllm")) as gateway:
        assert [one.state for one in gateway.state.catalogue.engines][1] is EngineState.STOPPED
        assert (await gateway.chat()).json()["model"] == "spare"
        assert [snapshot.leases for snapshot in gateway.state.loader.snapshots()] == [0]
        await at_rest(gateway)


@pytest.mark.slow
async def test_failed_load_falls_back(tmp_path: Path) -> None:
    crash = {"kind": "process", "model": "m", "args": {"fake-start": "crash"}}
    async with Fake("small") as small:
        settings = settings_for(
            {"name": "demo", "load": "on_demand", "fallbacks": ["small"], "engines": [crash]},
            {"name": "small", "engines": [remote(small.url)]},
            run_dir=tmp_path,
        )
        async with running(settings, (sys.executable, "-m", "tests.fakes.vllm")) as gateway:
            assert (await gateway.chat()).json()["model"] == "small"
            await at_rest(gateway)
