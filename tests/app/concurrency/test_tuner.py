"""The tuner reads engines that work on requests, and the queue follows what it finds."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from app.admission import Admission
from app.concurrency import ConcurrencyTuner
from app.concurrency.target import LEAST_FIRST, MAX_TARGET
from app.concurrency.tuner import MAX_FAILED_LOOKS
from app.routing import Catalogue, Model, Replica
from app.settings import QueueSettings
from app.telemetry.metrics import Metrics, ScrapedValues
from engines.base import EngineFacts, EngineNotReady, EngineState
from tests.app.routing.fakes import FakeEngine
from tests.waiting import run_pending_tasks


class ReportingEngine(FakeEngine):
    """An engine with a page of metrics."""

    looks = 0
    waiting = 0
    fault: Exception | None = None
    page: bytes | None = None
    answers: asyncio.Event | None = None

    async def exposition(self) -> bytes:
        self.looks += 1
        if self.answers is not None:
            await self.answers.wait()
        if self.fault is not None:
            raise self.fault
        if self.page is not None:
            return self.page
        return (
            b"vllm:num_requests_running 8.0\nvllm:num_requests_waiting %d.0\n"
            b"vllm:num_preemptions_total 0.0\nvllm:kv_cache_usage_perc 0.1%d\n"
            % (self.waiting, self.looks)
        )


class Scenario:
    """The model "demo" with engines, its queue, and a tuner that looks when a test says so."""

    def __init__(self, *engines: ReportingEngine) -> None:
        self.metrics = Metrics()
        self.replicas = [Replica(engine, "demo") for engine in engines]
        self.catalogue = Catalogue([Model("demo", (), tuple(self.replicas))])
        self.admission = Admission(
            self.metrics,
            {"demo": QueueSettings(max_in_flight="auto", max_waiting=1000)},
            self.catalogue.count_slots,
            self.catalogue.changes,
        )
        self.tuner = ConcurrencyTuner(self.catalogue, self.admission)
        ScrapedValues(self.metrics).watch_concurrency(self.tuner.targets)
        self._end = asyncio.Event()
        self._requests: list[asyncio.Task[None]] = []

    async def ask(self, number: int) -> None:
        """Start requests, which hold their permit until the end."""
        self._requests += [asyncio.create_task(self._request()) for _ in range(number)]
        await run_pending_tasks()

    async def _request(self) -> None:
        with await self.admission.acquire("demo", "key"):
            await self._end.wait()

    async def look(self) -> None:
        self.tuner.look()
        await run_pending_tasks()

    async def close(self) -> None:
        self._end.set()
        await asyncio.gather(*self._requests)
        assert self.admission.in_flight == self.admission.waiting == 0


@pytest.fixture
def engine() -> ReportingEngine:
    return ReportingEngine()


@pytest.fixture
async def one(engine: ReportingEngine) -> AsyncIterator[Scenario]:
    scenario = Scenario(engine)
    yield scenario
    await scenario.close()


async def test_waiting_requests_get_the_slots_of_a_greater_target(one: Scenario) -> None:
    await one.ask(100)
    assert one.admission.counts("demo") == (LEAST_FIRST, 100 - LEAST_FIRST)
    for in_flight in (16, 32, 64, 100, 100):
        await one.look()
        assert one.admission.counts("demo") == (in_flight, 100 - in_flight)
    labels = {"model": "demo", "gateway_engine": "demo-0"}
    sample = one.metrics.registry.get_sample_value("gateway_engine_concurrency_target", labels)
    assert sample == 128, "nobody waited at the last look"


async def test_first_target_follows_the_facts_of_the_engine(
    one: Scenario, engine: ReportingEngine
) -> None:
    engine.facts = EngineFacts(max_concurrency=20.5)
    await one.look()
    await one.ask(100)
    assert one.admission.counts("demo") == (20, 80)


async def test_an_idle_engine_is_left_alone(one: Scenario, engine: ReportingEngine) -> None:
    await one.look()
    assert engine.looks == 0
    await one.ask(1)
    engine.state = EngineState.DRAINING
    await one.look()
    assert engine.looks == 0


async def test_a_slow_engine_is_asked_once_at_a_time(
    one: Scenario, engine: ReportingEngine
) -> None:
    engine.answers = asyncio.Event()
    await one.ask(9)
    for _ in range(3):
        await one.look()
    assert engine.looks == 1
    engine.answers.set()
    await run_pending_tasks()
    assert one.admission.counts("demo") == (9, 0)


async def test_an_engine_that_stops_reporting_keeps_its_target(
    one: Scenario, engine: ReportingEngine
) -> None:
    await one.ask(100)
    await one.look()
    engine.fault = EngineNotReady("it hangs")
    for _ in range(3 * MAX_FAILED_LOOKS):
        await one.look()
    assert one.admission.counts("demo") == (16, 84)


async def test_an_engine_without_counters_gets_no_bound(
    one: Scenario, engine: ReportingEngine
) -> None:
    engine.page = b"sglang:num_running_reqs 1.0\n"
    await one.ask(100)
    for _ in range(MAX_FAILED_LOOKS - 1):
        await one.look()
    assert one.admission.counts("demo") == (LEAST_FIRST, 100 - LEAST_FIRST)
    await one.look()
    assert one.admission.counts("demo") == (100, 0)
    assert [target for _, _, target in one.tuner.targets()] == [MAX_TARGET]


async def test_a_lower_target_takes_no_slot_away_and_holds_new_requests(
    one: Scenario, engine: ReportingEngine
) -> None:
    await one.ask(8)
    engine.waiting = 4
    await one.look()
    await one.look()
    await one.ask(1)
    assert one.admission.counts("demo") == (8, 1)


async def test_each_engine_has_its_own_target() -> None:
    free, crowded = ReportingEngine("free"), ReportingEngine("crowded", waiting=50)
    one = Scenario(free, crowded)
    await one.ask(100)
    for _ in range(2):
        await one.look()
    assert [replica.target for replica in one.replicas] == [32, 4]
    assert one.admission.counts("demo") == (40, 60), "a lower target takes no slot back"
    one.catalogue.replace([Model("demo", (), tuple(one.replicas[:1]))])
    await one.look()
    assert [name for _, name, _ in one.tuner.targets()] == ["free"]
    await one.close()


async def test_a_model_that_is_removed_or_gets_a_number_during_a_look_is_left_alone(
    engine: ReportingEngine,
) -> None:
    one = Scenario(engine)
    engine.answers = asyncio.Event()
    await one.ask(20)
    await one.look()
    one.admission.open("demo", QueueSettings(max_in_flight=30))
    engine.answers.set()
    await run_pending_tasks()
    assert one.admission.counts("demo") == (20, 0)
    assert list(one.tuner.targets()) == []
    await one.close()


async def test_run_looks_until_it_is_canceled(one: Scenario, engine: ReportingEngine) -> None:
    engine.answers = asyncio.Event()
    await one.ask(1)
    running = asyncio.create_task(one.tuner.run())
    await run_pending_tasks()
    assert engine.looks == 1
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert not one.tuner._looks, "the look under way has ended, too"
