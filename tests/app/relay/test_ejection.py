"""Engines that fail each request while their health check is good, with fake engines."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from app.routing.answer_health import FIRST_OUT_S
from tests.fakes.vllm import Fake
from tests.gateway import ROOT_KEY, Gateway, remote, running, settings_for

BODY = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
ENGINE = {"model": "demo", "gateway_engine": "demo-0"}


@asynccontextmanager
async def serving(
    tmp_path: Path, count: int = 3, **fields: Any
) -> AsyncIterator[tuple[Gateway, list[Fake]]]:
    async with AsyncExitStack() as stack:
        fakes = [await stack.enter_async_context(Fake()) for _ in range(count)]
        model = {"name": "demo", "engines": [remote(fake.url) for fake in fakes], **fields}
        settings = settings_for(model, run_dir=tmp_path)
        yield await stack.enter_async_context(running(settings)), fakes


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds by which replicas are taken out, in a list of one."""
    now = [1000.0]
    for module in ("app.routing.ejection", "app.relay.attempts"):
        monkeypatch.setattr(f"{module}.monotonic", lambda: now[0])
    return now


async def ask(gateway: Gateway, times: int, **fields: Any) -> list[int]:
    """Return the statuses of some requests, one after the other."""
    client = gateway.client
    return [
        (await client.post("/v1/chat/completions", json={**BODY, **fields})).status_code
        for _ in range(times)
    ]


async def ejected(gateway: Gateway) -> list[bool]:
    """Return of each engine whether it is taken out."""
    headers = {"authorization": f"Bearer {ROOT_KEY}"}
    answer = await gateway.client.get("/admin/engines", headers=headers)
    return [row["ejected"] for row in answer.json()["data"]]


def posts(fake: Fake) -> int:
    return sum(seen.method == "POST" for seen in fake.seen)


async def test_an_engine_whose_answers_fail_gets_no_more_than_five(
    tmp_path: Path, clock: list[float]
) -> None:
    async with serving(tmp_path) as (gateway, fakes):
        fakes[0].fault = "status:500"
        statuses = await ask(gateway, 30)
        assert statuses.count(500) == 5
        assert set(statuses[15:]) == {200}
        assert await ejected(gateway) == [True, False, False]
        value, labels = gateway.state.metrics.registry.get_sample_value, ENGINE
        assert value("gateway_engine_ejected", labels) == 1
        assert value("gateway_engine_ejections_total", labels) == 1


async def test_it_comes_back_after_a_good_trial(tmp_path: Path, clock: list[float]) -> None:
    async with serving(tmp_path) as (gateway, fakes):
        fakes[0].fault = "status:500"
        await ask(gateway, 20)
        seen = posts(fakes[0])
        clock[0] += FIRST_OUT_S
        assert (await ask(gateway, 20)).count(500) == 1  # the trial
        assert posts(fakes[0]) == seen + 1
        fakes[0].fault = None
        clock[0] += 2 * FIRST_OUT_S
        assert set(await ask(gateway, 30)) == {200}
        assert posts(fakes[0]) >= seen + 9  # its part again
        assert not any(await ejected(gateway))


@pytest.mark.parametrize("continuation", ["exact", "off"])
async def test_broken_streams_count_as_failures(
    tmp_path: Path, clock: list[float], continuation: str
) -> None:
    async with serving(tmp_path, continuation=continuation) as (gateway, fakes):
        fakes[0].fault = "die:2"
        for _ in range(30):
            await gateway.client.post("/v1/chat/completions", json={**BODY, "stream": True})
        assert posts(fakes[0]) == 5


async def test_streams_with_an_error_of_the_engine_count_as_failures(
    tmp_path: Path, clock: list[float]
) -> None:
    """vLLM has sent status 200 when a stream fails, even before its first token."""
    async with serving(tmp_path) as (gateway, fakes):
        fakes[0].fault = "error_event"
        assert set(await ask(gateway, 30, stream=True)) == {200}
        assert posts(fakes[0]) == 5
        assert await ejected(gateway) == [True, False, False]


async def test_faults_of_requests_take_no_engine_out(tmp_path: Path, clock: list[float]) -> None:
    async with serving(tmp_path) as (gateway, fakes):
        assert set(await ask(gateway, 30, fake="status:400")) == {400}
        assert set(await ask(gateway, 30, fake="status:503")) == {503}
        assert all(posts(fake) == 20 for fake in fakes)


async def test_pages_of_a_proxy_that_tell_of_load_take_no_engine_out(
    tmp_path: Path, clock: list[float]
) -> None:
    async with serving(tmp_path) as (gateway, _):
        assert set(await ask(gateway, 30, fake="text:503")) == {502}
        assert not any(await ejected(gateway))
        assert set(await ask(gateway, 30, fake="text:502")) == {502}
        assert sum(await ejected(gateway)) == 1


async def test_an_engine_that_serves_others_stays_in(tmp_path: Path, clock: list[float]) -> None:
    async with serving(tmp_path, count=2) as (gateway, fakes):
        for _ in range(20):
            await ask(gateway, 2)
            await ask(gateway, 2, fake="status:500")
        assert [posts(fake) for fake in fakes] == [40, 40]


async def test_half_of_the_engines_stay_in(tmp_path: Path, clock: list[float]) -> None:
    async with serving(tmp_path, count=2) as (gateway, fakes):
        for fake in fakes:
            fake.fault = "status:500"
        assert set(await ask(gateway, 30)) == {500}
        assert sum(await ejected(gateway)) == 1


async def test_a_model_may_have_no_ejection(tmp_path: Path, clock: list[float]) -> None:
    async with serving(tmp_path, eject_after=0) as (gateway, fakes):
        fakes[0].fault = "status:500"
        assert (await ask(gateway, 30)).count(500) == 10
