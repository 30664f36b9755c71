"""Marks of the charts: what happened to engines."""

from app.console.events import EventLog
from app.routing import Catalogue, Model, Replica
from engines.base import EngineState
from tests.app.routing.fakes import FakeEngine


def test_failures_starts_and_reloads_are_noted_once() -> None:
    now = [100.0]
    engine = FakeEngine("demo-0", EngineState.STARTING)
    model = Model("demo", (), (Replica(engine, "demo"),))
    catalogue = Catalogue([model])
    log = EventLog(catalogue, lambda: now[0])
    log.observe()
    for at, state in enumerate([EngineState.READY, EngineState.READY, EngineState.FAILED]):
        now[0], engine.state = 101.0 + at, state
        log.observe()
    now[0], engine.state = 104.0, EngineState.READY
    log.observe()
    now[0], engine.state, engine.restarts = 105.0, EngineState.STARTING, 1
    catalogue.replace([model])
    log.observe()
    found = [(event.at, event.text, event.kind) for event in log.since(0)]
    assert found == [
        (101.0, "engine demo-0 ready", "good"),
        (103.0, "engine demo-0 failed", "bad"),
        (104.0, "engine demo-0 ready", "good"),
        (105.0, "configuration reloaded", ""),
        (105.0, "engine demo-0 failed", "bad"),
    ]
    assert [event.engine for event in log.since(105)] == [None, "demo-0"]
