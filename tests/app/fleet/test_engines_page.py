"""The page of all engines: who is asked, how often, and what becomes of one that is not well."""

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
    """An engine whose page a test says; it answers when `gate` is open."""

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


class Room:
    """A page, and what is behind it."""

    def __init__(self, *engines: Engine) -> None:
        self.engines = engines
        self.metrics = Metrics()
        replicas = tuple(Replica(engine, "demo") for engine in engines)
        self.catalogue = Catalogue([Model("demo", (), replicas)])
        self.now = 0.0
        self.page = EnginesPage(self.catalogue, self.metrics, clock=lambda: self.now)

    async def scrape(self, after_s: float = FRESH_S) -> list[Sample]:
        """Return what a scrape shows so much later than the one before."""
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


async def test_every_engine_that_serves_is_on_the_page() -> None:
    room = Room(Engine("a"), Engine("b"))
    room.engines[1].state = EngineState.DRAINING
    found = await room.scrape()
    assert shown(found) == {"a", "b"}
    assert up(found) == {"a": 1, "b": 1}
    assert room.errors("a") == room.errors("b") == 0


@pytest.mark.parametrize("state", sorted(set(EngineState) - set(SERVING)))
async def test_an_engine_that_does_not_serve_is_not_asked(state: EngineState) -> None:
    """A question must not wake a model that sleeps, nor load one that is unloaded."""
    room = Room(Engine("a"), Engine("b"))
    room.engines[1].state = state
    found = await room.scrape()
    assert shown(found) == {"a"}
    assert up(found) == {"a": 1, "b": 0}
    assert room.engines[1].asked == 0
    assert room.errors("b") is None


@pytest.mark.parametrize("page", [None, b"<html>\n", b"half a li", b"\xff\xfe\n"])
async def test_an_engine_that_is_not_well_fails_nobody_else(page: bytes | None) -> None:
    room = Room(Engine("a", page), Engine("b"))
    found = await room.scrape()
    assert shown(found) == {"b"}
    assert up(found) == {"a": 0, "b": 1}
    assert (room.errors("a"), room.errors("b")) == (1, 0)


async def test_a_family_that_is_declared_differently_is_counted_and_the_rest_shown() -> None:
    room = Room(Engine("a"), Engine("b", b"# TYPE vllm:x counter\nvllm:x 1\nvllm:y 1\n"))
    found = await room.scrape()
    assert {(s.name, s.labels["gateway_engine"]) for s in found[:-2]} == {
        ("vllm:x", "a"),
        ("vllm:y", "b"),
    }
    assert up(found) == {"a": 1, "b": 1}
    assert (room.errors("a"), room.errors("b")) == (0, 1)


async def test_a_fault_is_logged_when_it_begins(caplog: pytest.LogCaptureFixture) -> None:
    room = Room(Engine("a", None))
    await room.scrape()
    await room.scrape()
    told = "engine a: its metrics are not all on our page: engine a is gone"
    assert [(r.levelno, r.message) for r in caplog.records] == [(logging.WARNING, told)]
    room.engines[0].page = PAGE
    await room.scrape()
    room.engines[0].page = None
    await room.scrape()
    assert caplog.messages == [told, told]
    assert room.errors("a") == 3


async def test_scrapers_at_the_same_time_share_one_question() -> None:
    room = Room(Engine("a"))
    [engine] = room.engines
    engine.gate.clear()
    scrapers = [asyncio.create_task(room.scrape(0)) for _ in range(5)]
    await asyncio.sleep(0)
    scrapers[0].cancel()  # the one whose question it was
    await asyncio.sleep(0)
    engine.gate.set()
    pages = await asyncio.gather(*scrapers[1:])
    assert all(shown(page) == {"a"} for page in pages)
    assert engine.asked == 1


async def test_a_page_is_kept_for_a_moment() -> None:
    room = Room(Engine("a"))
    await room.scrape()
    await room.scrape(FRESH_S - 0.1)
    assert room.engines[0].asked == 1
    await room.scrape(0.1)
    assert room.engines[0].asked == 2


async def test_a_reload_changes_who_is_asked() -> None:
    room = Room(Engine("a"))
    await room.scrape()
    room.catalogue.replace([Model("demo", (), (Replica(Engine("new"), "demo"),))])
    found = await room.scrape()
    assert shown(found) == {"new"}
    assert up(found) == {"new": 1}


async def test_the_end_waits_for_no_engine() -> None:
    room = Room(Engine("a"))
    room.engines[0].gate.clear()
    scraper = asyncio.create_task(room.scrape())
    await asyncio.sleep(0)
    await room.page.close()
    with pytest.raises(asyncio.CancelledError):
        await scraper
