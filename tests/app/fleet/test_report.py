"""Rows of engines and models."""

from types import SimpleNamespace
from typing import Any

import pytest

from app.fleet.report import Activity, EngineRow, ModelRow, engine_figures, engine_rows
from app.routing import Catalogue, Model, Replica
from engines.base import EngineFacts, EngineState, Progress
from tests.app.routing.fakes import FakeEngine

CANARY = "hf_canary0123456789"


class Process(FakeEngine):
    pid: int | None = 42
    since: float = 1795227950.5
    memory_gib: float | None = 2.5
    command: str = f"vllm --hf-token={CANARY} --model=m"

    def describe(self) -> str:
        return self.command


def shown(engine: FakeEngine, in_flight: int = 0) -> dict[str, Any]:
    replica = Replica(engine, "demo", in_flight)
    return EngineRow.of(Model("demo", (), (replica,)), replica).model_dump(mode="json")


def test_engine_row_with_all_fields() -> None:
    facts = EngineFacts(version="0.32.0", max_model_len=1024, sampling_defaults={"top_p": 0.9})
    engine = Process("demo-0", EngineState.READY, facts=facts, restarts=2, load_s=21.5)
    assert shown(engine, in_flight=3) == {
        "name": "demo-0",
        "model": "demo",
        "kind": "process",
        "state": "ready",
        "since": "2026-11-21T02:25:50Z",
        "progress": None,
        "facts": {
            "version": "0.32.0",
            "max_model_len": 1024,
            "sampling_defaults": {"top_p": 0.9},
        },
        "last_error": None,
        "restarts": 2,
        "load_s": 21.5,
        "in_flight": 3,
        "in_flight_elsewhere": 0,
        "ejected": False,
        "pid": 42,
        "memory_gib": 2.5,
        "runs": "vllm '--hf-token=***' --model=m",
        "adapters": [],
    }


def test_engine_row_with_nothing_known() -> None:
    row = shown(FakeEngine(kind="remote"))
    assert row["kind"] == "remote"
    assert row["facts"] == {}
    for name in ("progress", "last_error", "load_s", "pid", "memory_gib"):
        assert row[name] is None


def test_progress_only_while_starting() -> None:
    engine = FakeEngine(state=EngineState.STARTING, progress=Progress("loading weights", 1, 4))
    assert shown(engine)["progress"] == {"phase": "loading weights", "done": 1, "total": 4}
    engine.state = EngineState.READY
    assert shown(engine)["progress"] is None


def test_error_has_no_secret() -> None:
    engine = FakeEngine(last_error=f"unrecognized arguments: --hf-token={CANARY}")
    assert shown(engine)["last_error"] == "unrecognized arguments: --hf-token=***"


def test_model_row() -> None:
    engines = (FakeEngine(), FakeEngine("demo-1", EngineState.FAILED))
    model = Model("demo", ("gpt",), tuple(Replica(one, "demo") for one in engines))
    row = ModelRow.of(model, Activity(in_flight=3, waiting=4, under_way="load"))
    assert row.model_dump() == {
        "name": "demo",
        "aliases": ["gpt"],
        "load": "eager",
        "state": "ready",
        "engines": 2,
        "ready": 1,
        "in_flight": 3,
        "waiting": 4,
        "under_way": "load",
        "loading": None,
        "last_error": None,
        "parent": None,
        "split": [],
    }


def test_loading_model_has_start_and_remaining_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(time=lambda: 1795227950.5)
    monkeypatch.setattr("app.fleet.report.time", clock)
    model = Model("demo", (), (Replica(FakeEngine(state=EngineState.STARTING), "demo"),))
    row = ModelRow.of(model, Activity(waiting=2, loading_s=12.34, expected_s=9.87))
    assert (row.state, row.waiting) == (EngineState.STARTING, 2)
    assert row.loading is not None
    assert row.loading.model_dump() == {
        "since": "2026-11-21T02:25:38Z",
        "elapsed_s": 12.3,
        "expected_s": 9.9,
    }


@pytest.mark.parametrize(
    ("states", "shown_state", "reason"),
    [
        (["failed", "stopped"], "failed", "no room: --hf-token=***"),
        (["failed", "starting"], "starting", None),
        (["failed", "ready"], "ready", None),
        (["stopped", "asleep"], "asleep", None),
    ],
)
def test_model_state_is_that_of_its_best_engine_and_only_a_failure_has_an_error(
    states: list[str], shown_state: str, reason: str | None
) -> None:
    engines = [
        FakeEngine(state=EngineState(state), last_error=f"no room: --hf-token={CANARY}")
        for state in states
    ]
    model = Model("demo", (), tuple(Replica(engine, "demo") for engine in engines))
    row = ModelRow.of(model, Activity())
    assert (row.state, row.last_error) == (shown_state, reason)


def test_engines_are_in_the_order_of_the_configuration() -> None:
    names = ("b-0", "b-1", "a-0")
    catalogue = Catalogue(
        [
            Model("b", (), tuple(Replica(FakeEngine(name), "b") for name in names[:2])),
            Model("a", (), (Replica(Process(names[2]), "a"),)),
        ]
    )
    assert tuple(row.name for row in engine_rows(catalogue, lambda name: True)) == names
    figures = list(engine_figures(catalogue))
    assert [(one.model, one.engine, one.memory_gib) for one in figures] == [
        ("b", "b-0", None),
        ("b", "b-1", None),
        ("a", "a-0", 2.5),
    ]
