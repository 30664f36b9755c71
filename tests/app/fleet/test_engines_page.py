"""The page with the metrics of all engines: scrapes, caching and failures."""

import asyncio
import logging

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from app.fleet.engines_page import FRESH_S, EnginesPage
from app.routing import Catalogue, Model, Replica
from app.telemetry.metrics import Metrics
from engines.base import SERVING, EngineDied, EngineState
from tests.app.routing.fakes import FakeEngine

PAGE = b"# TYPE vllm:x gauge\nvllm:x 1\n"


class Engine(FakeEngine):
    """An engine with a page set by the test; it responds when `gate` is open."""

    def __init__(self, name: str, page: bytes | None = PAGE) -> None:
        super().__init__(name)
        self.page = page
        self.asked = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def exposition(self) -> bytes:
        self.asked += 1
        await self.gate.wait()
        if self.page is None:
            raise EngineDied(f"engine {self.name} is gone")
        return self.page


class Scenario:
    """A page with its catalogue, metrics and clock."""

    def __init__(self, *engines: Engine) -> None:
        self.engines = engines
        self.metrics = Metrics()
        replicas = tuple(Replica(engine, "demo") for engine in engines)
        self.catalogue = Catalogue([Model("demo", (), replicas)])
        self.now = 0.0
        self.page = EnginesPage(self.catalogue, self.metrics, clock=lambda: self.now)

    async def scrape(self, after_s: float = FRESH_S) -> list[Sample]:
        """Return the page of a scrape this much later than the previous one."""
        self.now += after_s
        return samples(await self.page.exposition())

    def errors(self, engine: str) -> float | None:
        labels = {"model": "demo", "gateway_engine": engine}
        name = "gateway_engine_scrape_errors_total"
        return self.metrics.registry.get_sample_value(name, labels)


def samples(page: bytes) -> list[Sample]:
    families = text_string_to_metric_families(page.decode())
    return [sample for family in families for sample in family.samples]


def up(found: list[Sample]) -> dict[str, float]:
    return {s.labels["gateway_engine"]: s.value for s in found if s.name == "gateway_engine_up"}


def shown(found: list[Sample]) -> set[str]:
    return {s.labels["gateway_engine"] for s in found if s.name != "gateway_engine_up"}


async def test_every_serving_engine_is_on_the_page() -> None:
    scenario = Scenario(Engine("a"), Engine("b"))
    scenario.engines[1].state = EngineState.DRAINING
    found = await scenario.scrape()
    assert shown(found) == {"a", "b"}
    assert up(found) == {"a": 1, "b": 1}
    assert scenario.errors("a") == scenario.errors("b") == 0


@pytest.mark.parametrize("state", sorted(set(EngineState) - set(SERVING)))
async def test_engine_that_does_not_serve_is_not_scraped(state: EngineState) -> None:
    """A scrape must not wake a sleeping model, nor load an unloaded one."""
    scenario = Scenario(Engine("a"), Engine("b"))
    scenario.engines[1].state = state
    found = await scenario.scrape()
    assert shown(found) == {"a"}
    assert up(found) == {"a": 1, "b": 0}
    assert scenario.engines[1].asked == 0
    assert scenario.errors("b") is None


@pytest.mark.parametrize("page", [None, b"<html>\n", b"half a li", b"\xff\xfe\n"])
async def test_failing_engine_does_not_affect_the_others(page: bytes | None) -> None:
    scenario = Scenario(Engine("a", page), Engine("b"))
    found = await scenario.scrape()
    assert shown(found) == {"b"}
    assert up(found) == {"a": 0, "b": 1}
    assert (scenario.errors("a"), scenario.errors("b")) == (1, 0)


async def test_errors_of_an_engine_that_left_are_dropped() -> None:
    scenario = Scenario(Engine("a", None), Engine("b"))
    await scenario.scrape()
    scenario.catalogue.replace([Model("demo", (), (Replica(scenario.engines[1], "demo"),))])
    await scenario.scrape()
    assert (scenario.errors("a"), scenario.errors("b")) == (None, 0)


async def test_conflicting_family_is_counted_and_left_out() -> None:
    scenario = Scenario(Engine("a"), Engine("b", b"# TYPE vllm:x counter\nvllm:x 1\nvllm:y 1\n"))
    found = await scenario.scrape()
    assert {(s.name, s.labels["gateway_engine"]) for s in found[:-2]} == {
        ("vllm:x", "a"),
        ("vllm:y", "b"),
    }
    assert up(found) == {"a": 1, "b": 1}
    assert (scenario.errors("a"), scenario.errors("b")) == (0, 1)


async def test_fault_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    scenario = Scenario(Engine("a", None))
    await scenario.scrape()
    await scenario.scrape()
    warning = "metrics of engine a are incomplete on /metrics/engines: engine a is gone"
    assert [(r.levelno, r.message) for r in caplog.records] == [(logging.WARNING, warning)]
    scenario.engines[0].page = PAGE
    await scenario.scrape()
    scenario.engines[0].page = None
    await scenario.scrape()
    assert caplog.messages == [warning, warning]
    assert scenario.errors("a") == 3


async def test_concurrent_scrapers_share_one_scrape() -> None:
    scenario = Scenario(Engine("a"))
    [engine] = scenario.engines
    engine.gate.clear()
    scrapers = [asyncio.create_task(scenario.scrape(0)) for _ in range(5)]
    await asyncio.sleep(0)
    scrapers[0].cancel()  # the one whose question it was
    await asyncio.sleep(0)
    engine.gate.set()
    pages = await asyncio.gather(*scrapers[1:])
    assert all(shown(page) == {"a"} for page in pages)
    assert engine.asked == 1


async def test_page_is_cached() -> None:
    scenario = Scenario(Engine("a"))
    await scenario.scrape()
    await scenario.scrape(FRESH_S - 0.1)
    assert scenario.engines[0].asked == 1
    await scenario.scrape(0.1)
    assert scenario.engines[0].asked == 2


async def test_reload_changes_the_scraped_engines() -> None:
    scenario = Scenario(Engine("a"))
    await scenario.scrape()
    scenario.catalogue.replace([Model("demo", (), (Replica(Engine("new"), "demo"),))])
    found = await scenario.scrape()
    assert shown(found) == {"new"}
    assert up(found) == {"new": 1}


async def test_close_waits_for_no_engine() -> None:
    scenario = Scenario(Engine("a"))
    scenario.engines[0].gate.clear()
    scraper = asyncio.create_task(scenario.scrape())
    await asyncio.sleep(0)
    await scenario.page.close()
    with pytest.raises(asyncio.CancelledError):
        await scraper
