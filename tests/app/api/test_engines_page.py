"""GET /metrics/engines over real sockets: remote servers that misbehave, processes that die."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.fleet import engines_page as page_module
from engines.http import probe as scrape_module
from engines.process import ProcessEngine
from tests.engines.processes import AT_ONCE, LAUNCHER
from tests.fakes.vllm import Fake
from tests.gateway import Gateway, remote, running, settings_for

RUNNING = "vllm:num_requests_running"
FAULTS = (
    "failing", "html", "binary", "gzip", "not_http", "dying",
    pytest.param("endless", marks=pytest.mark.slow),
)  # fmt: skip
Series = dict[tuple[str, str], float]


@pytest.fixture(autouse=True)
def _always_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "FRESH_S", 0.0)


@asynccontextmanager
async def fleet(run_dir: Path, *fakes: Fake) -> AsyncIterator[Gateway]:
    """A gateway before one model with these remote engines: demo-0, demo-1…"""
    async with AsyncExitStack() as stack:
        engines = [remote((await stack.enter_async_context(fake)).url) for fake in fakes]
        settings = settings_for({"name": "demo", "engines": engines}, run_dir=run_dir)
        yield await stack.enter_async_context(running(settings))


async def series(gateway: Gateway) -> Series:
    """Return the page's values by name and engine."""
    answer = await gateway.client.get("/metrics/engines")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return {
        (sample.name, sample.labels["gateway_engine"]): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


async def errors(gateway: Gateway, engine: str) -> float:
    name = "gateway_engine_scrape_errors_total"
    return await gateway.metric(name, model="demo", gateway_engine=engine)


async def test_series_of_all_engines_are_on_one_page(tmp_path: Path) -> None:
    one, other = Fake(), Fake()
    async with fleet(tmp_path, one, other) as gateway:
        one.running, other.generated = 3, 7
        assert await series(gateway) == {
            (RUNNING, "demo-0"): 3,
            (RUNNING, "demo-1"): 0,
            ("vllm:generation_tokens_total", "demo-0"): 0,
            ("vllm:generation_tokens_total", "demo-1"): 7,
            ("gateway_engine_up", "demo-0"): 1,
            ("gateway_engine_up", "demo-1"): 1,
        }
        one.running = 0


async def test_scrapes_of_engines_do_not_count_as_requests(tmp_path: Path) -> None:
    async with fleet(tmp_path, Fake()) as gateway:
        await series(gateway)
        [model] = gateway.state.catalogue.models
        assert model.replicas[0].in_flight == 0
        await asyncio.wait_for(model.replicas[0].engine.drain(), 20)
        assert await gateway.metric("gateway_requests_in_flight", model="demo") == 0


@pytest.mark.parametrize("fault", FAULTS)
async def test_an_engine_with_an_invalid_page_is_left_out(tmp_path: Path, fault: str) -> None:
    async with fleet(tmp_path, Fake(metrics=fault), Fake()) as gateway:
        found = await series(gateway)
        assert {name for name, engine in found if engine == "demo-0"} == {"gateway_engine_up"}
        assert found["gateway_engine_up", "demo-0"] == 0
        assert found["gateway_engine_up", "demo-1"] == 1
        assert (RUNNING, "demo-1") in found
        assert await errors(gateway, "demo-0") == 1
        assert await errors(gateway, "demo-1") == 0
        assert (await gateway.chat()).status_code == 200


async def test_a_page_that_ends_in_a_line_loses_that_line_alone(tmp_path: Path) -> None:
    async with fleet(tmp_path, Fake(metrics="half_line"), Fake()) as gateway:
        found = await series(gateway)
        assert found[RUNNING, "demo-0"] == 0
        assert ("vllm:generation_tokens_total", "demo-0") not in found
        assert found["gateway_engine_up", "demo-0"] == 1
        assert await errors(gateway, "demo-0") == 1


async def test_an_engine_that_hangs_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrape_module, "SCRAPE_TIMEOUT_S", 0.2)
    async with fleet(tmp_path, Fake(metrics="hanging"), Fake()) as gateway:
        found = await series(gateway)
        assert found["gateway_engine_up", "demo-0"] == 0
        assert found["gateway_engine_up", "demo-1"] == 1
        assert await errors(gateway, "demo-0") == 1


async def test_another_version_that_declares_a_family_differently(tmp_path: Path) -> None:
    async with fleet(tmp_path, Fake(), Fake(metrics="retyped")) as gateway:
        found = await series(gateway)
        assert (RUNNING, "demo-0") in found
        assert (RUNNING, "demo-1") not in found
        assert found["vllm:generation_tokens_total", "demo-1"] == 0
        assert found["gateway_engine_up", "demo-1"] == 1
        assert await errors(gateway, "demo-1") == 1


@pytest.mark.slow
async def test_a_gateway_behind_a_gateway_keeps_its_label_under_another_name(
    tmp_path: Path,
) -> None:
    async with fleet(tmp_path / "inner", Fake()) as inner:
        address = remote(f"http://127.0.0.1:{inner.port}")
        settings = settings_for({"name": "demo", "engines": [address]}, run_dir=tmp_path / "outer")
        async with running(settings) as outer:
            page = (await outer.client.get("/metrics/engines")).text
            assert (await series(outer))["gateway_engine_up", "demo-0"] == 1
    state = '{gateway_engine="demo-0",exported_gateway_engine="demo-0",model="demo",state="ready"}'
    assert f"gateway_engine_state{state} 1.0" in page


@pytest.mark.slow
async def test_scrapes_while_engines_start_and_die(tmp_path: Path) -> None:
    engine = {"kind": "process", "model": "m", "replicas": 2, "restart": AT_ONCE}
    settings = settings_for({"name": "demo", "engines": [engine]}, run_dir=tmp_path)
    async with running(settings, LAUNCHER, settle=False) as gateway:
        first, second = gateway.state.catalogue.engines
        assert isinstance(first, ProcessEngine)

        async def scrape_until(condition: Callable[[set[str]], bool]) -> None:
            """Scrape until a condition holds for the engines that are up."""
            async with asyncio.timeout(60):
                while True:
                    found = await series(gateway)
                    up = {
                        name
                        for (what, name), value in found.items()
                        if what == "gateway_engine_up" and value
                    }
                    assert {name for what, name in found if what == RUNNING} == up
                    if condition(up):
                        return

        await scrape_until({"demo-0", "demo-1"}.__eq__)
        for restarts in range(1, 4):
            assert first.pid is not None
            os.kill(first.pid, signal.SIGKILL)
            await scrape_until(lambda up: first.restarts == restarts and "demo-0" in up)  # noqa: B023
        await asyncio.gather(first.stop(1.0), second.stop(1.0))
        await scrape_until(set().__eq__)
