"""What other gateways report, as routing and admission see it."""

import asyncio
from dataclasses import replace

from app.admission import Admission
from app.routing import Catalogue, Model, Replica
from app.settings import QueueSettings
from app.sharing.gateways import Gateways
from app.sharing.report import MAX_ENGINES, LoadReport, State
from app.sharing.shared_engines import SharedEngines
from app.telemetry.metrics import Metrics
from tests.app.routing.fakes import FakeEngine
from tests.waiting import run_pending_tasks

OWN, OTHER = "1" * 16, "2" * 16


def replica(name: str, shared_id: str | None, in_flight: int = 0) -> Replica:
    return Replica(FakeEngine(name, shared_id=shared_id), "served", in_flight=in_flight)


def model(name: str, *replicas: Replica) -> Model:
    return Model(name, (), replicas)


def shared(*models: Model) -> SharedEngines:
    found = SharedEngines(Catalogue(list(models)))
    found.refresh()
    return found


def test_engines_of_two_gateways_have_the_same_keys() -> None:
    first = shared(model("demo", replica("a", "http://a"), replica("b", "http://b")))
    second = shared(model("demo", replica("other-name", "http://b"), replica("x", "http://c")))
    assert len(set(first.keys()) & set(second.keys())) == 1


def test_requests_of_each_model_are_counted_apart() -> None:
    found = shared(
        model("x", replica("x-0", "http://a", 3)), model("y", replica("y-0", "http://a", 4))
    )
    assert sorted(found.counts().values()) == [3, 4]


def test_an_adapter_has_the_engines_of_its_model() -> None:
    demo = model("x", replica("x-0", "http://a", 3))
    found = shared(demo, replace(demo, name="legal", parent="x"))
    assert list(found.counts().values()) == [3]


def test_an_engine_that_is_listed_twice_has_two_keys() -> None:
    found = shared(model("x", replica("x-0", "http://a", 3), replica("x-1", "http://a", 4)))
    assert sorted(found.counts().values()) == [3, 4]


def test_own_engines_are_not_reported() -> None:
    found = shared(model("demo", replica("a", None, 5)))
    assert not found
    assert found.counts() == {}
    assert list(found.elsewhere()) == []


def test_engines_are_bounded() -> None:
    found = shared(model("demo", *(replica(str(n), f"http://{n}") for n in range(MAX_ENGINES + 9))))
    assert len(found) == MAX_ENGINES


async def test_waiting_request_has_its_slot_when_a_gateway_leaves() -> None:
    only = replica("a", "http://a")
    catalogue = Catalogue([model("demo", only)])
    engines, gateways = SharedEngines(catalogue), Gateways(OWN)
    engines.refresh()
    gateways.set_own_engines(engines.keys())
    queues = {"demo": QueueSettings(max_in_flight=4)}
    admission = Admission(Metrics(), queues, catalogue.count_slots, catalogue.changes)
    (key,) = engines.keys()

    def receive(state: State) -> None:
        gateways.receive(LoadReport(1, OTHER, state, 1, {key: 0}), 0, engines.counts())
        engines.apply_divisions(gateways)

    receive(State.SERVING)
    assert all(admission.try_acquire("demo") for _ in range(2))
    third = asyncio.create_task(admission.acquire("demo", "key"))
    fourth = asyncio.create_task(admission.acquire("demo", "key"))
    await run_pending_tasks()
    assert not third.done()
    receive(State.LEFT)
    await run_pending_tasks()
    assert third.done()
    assert fourth.done()


async def test_suspended_stream_has_room_when_a_gateway_leaves() -> None:
    only = replica("a", "http://a")
    catalogue = Catalogue([model("demo", only)])
    queues = {"demo": QueueSettings(max_in_flight=2)}
    admission = Admission(Metrics(), queues, catalogue.count_slots, catalogue.changes)
    permits = [admission.try_acquire("demo") for _ in range(2)]
    suspended = permits[0]
    assert suspended is not None
    suspended.suspend()
    only.division = (2, 0)  # another gateway came: one slot is left, and it is taken
    resumed = asyncio.create_task(suspended.resume())
    await run_pending_tasks()
    assert not resumed.done()
    only.division = (1, 0)
    catalogue.changes.notify()
    await asyncio.wait_for(resumed, 5)


def test_engine_beyond_the_bound_is_routed_by_its_own_requests_again() -> None:
    """Nothing updates what others reported of it last."""
    ones = [replica(str(n), f"http://{n}") for n in range(MAX_ENGINES)]
    catalogue = Catalogue([model("demo", *ones)])
    engines, gateways = SharedEngines(catalogue), Gateways(OWN)
    engines.refresh()
    gateways.set_own_engines(engines.keys())
    counts = dict.fromkeys(engines.keys(), 100_000)
    gateways.receive(LoadReport(1, OTHER, State.SERVING, 1, counts), 0, engines.counts())
    engines.apply_loads(gateways)
    engines.apply_divisions(gateways)
    last = ones[-1]
    assert (last.weight, last.elsewhere, last.division) == (2, 100_000, (2, 0))
    catalogue.replace([model("demo", replica("new", "http://new"), *ones)])
    assert engines.refresh()
    assert (last.weight, last.offset, last.elsewhere) == (1, 0, 0)
    assert last.division == (1, 0)
    assert ones[0].division == (2, 0)


async def test_division_that_is_as_it_was_wakes_no_request() -> None:
    only = replica("a", "http://a")
    catalogue = Catalogue([model("demo", only)])
    engines, gateways = SharedEngines(catalogue), Gateways(OWN)
    engines.refresh()
    gateways.set_own_engines(engines.keys())
    engines.apply_divisions(gateways)
    (key,) = engines.keys()
    change = catalogue.changes.next()
    for sequence, state in enumerate([State.SERVING, State.DRAINING, State.SERVING, State.LEFT]):
        gateways.receive(LoadReport(1, OTHER, state, sequence, {key: 0}), 0, {})
    engines.apply_divisions(gateways)
    await run_pending_tasks()
    assert not change.done()
    change.cancel()
