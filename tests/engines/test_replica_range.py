"""Engines whose number is scaled: their bounds in the configuration, and the plans that follow."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from app.fleet.engine_plan import engines_of, initial_engines, plan_engines, scaled_engines
from app.settings import ModelSettings, Settings
from tests.app.configuration import faults, isolate, load

QUEUE = {"max_in_flight": 8}
SCALED = {"kind": "ray", "model": "org/m", "replicas": {"max": 2}}
REMOTE = {"kind": "remote", "url": "http://gpu-box:8000"}


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)


def file(*replicas: Any, **fields: Any) -> str:
    """Return a file with engines of kind: ray with these replicas, beside a remote one."""
    engines = [{"kind": "ray", "model": "org/m", "replicas": one} for one in replicas]
    model = {"name": "demo", "queue": QUEUE, "engines": [*engines, REMOTE], **fields}
    return yaml.safe_dump({"models": [model]})


def model_of(*replicas: Any) -> ModelSettings:
    return load(file(*replicas)).models[0]


@pytest.mark.parametrize(
    ("replicas", "fault"),
    [
        ({"min": 3, "max": 2}, "replicas.max: must be at least min (3)"),
        ({"min": 0, "max": 2}, "replicas.min: must be at least 1, not 0"),
        ({"min": 1}, "replicas.max: is required"),
        ({"max": 2, "mx": 1}, "replicas.mx: unknown key; did you mean max?"),
        (0, "replicas: must be at least 1, not 0"),
        ("two", "replicas: must be a whole number, not 'two'"),
        ([1, 2], "replicas: must be a whole number"),
    ],
)
def test_invalid_bounds_are_refused_in_one_line(replicas: Any, fault: str) -> None:
    [line] = faults(file(replicas))
    assert line.startswith(f"model demo: engines[0].{fault}")


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"queue": {}}, "min and max need queue.max_in_flight of the model"),
        ({"load": "on_demand", "engines": [SCALED]}, "min and max need load: eager"),
    ],
)
def test_scaling_needs_engines_of_a_known_size_that_are_always_loaded(
    fields: dict[str, Any], fault: str
) -> None:
    [line] = faults(file({"max": 2}, **fields))
    assert line.startswith(f"model demo: engines[0].replicas: {fault}")


def test_one_specification_of_a_model_is_scaled() -> None:
    [line] = faults(file({"max": 2}, {"max": 3}))
    assert line.startswith("model demo: engines[0].replicas: one specification of a model")


def test_a_gateway_begins_with_the_least_engines() -> None:
    configs = initial_engines(load(file({"min": 2, "max": 4})))["demo"]
    assert [(config.name, config.spec.kind) for config in configs] == [
        ("demo-0", "ray"),
        ("demo-1", "ray"),
        ("demo-2", "remote"),
    ]


def test_engines_are_added_and_removed_without_touching_others() -> None:
    settings = load(file({"min": 1, "max": 4}))
    [model] = settings.models
    configs = initial_engines(settings)["demo"]
    more = plan_engines(configs, model, scaled=3)
    assert [config.name for config in more.added] == ["demo-2", "demo-3"]
    assert sorted(config.name for config in more.kept) == ["demo-0", "demo-1"]
    assert scaled_engines(more.after, model) == 3
    fewer = plan_engines(more.after, model, scaled=1)
    assert (len(fewer.removed), len(fewer.after), fewer.added) == (2, 2, ())
    assert {config.spec.kind for config in fewer.removed} == {"ray"}


def test_a_reload_keeps_what_scaling_has_added_within_the_new_bounds() -> None:
    settings = load(file({"min": 1, "max": 4}))
    configs = plan_engines(initial_engines(settings)["demo"], settings.models[0], scaled=3).after
    assert not plan_engines(configs, model_of({"min": 2, "max": 8, "target_wait_s": 1}))
    assert len(plan_engines(configs, model_of({"min": 1, "max": 2})).removed) == 1
    assert len(plan_engines(configs, model_of({"min": 4, "max": 4})).added) == 1
    assert len(plan_engines(configs, model_of(1)).removed) == 2


@pytest.mark.parametrize(("before", "after"), [(0, 1), (0, 3), (2, 0), (1, 1)])
def test_a_reload_that_adds_or_removes_servers_keeps_scaled_engines(
    before: int, after: int
) -> None:
    def with_servers(servers: int) -> ModelSettings:
        others = [{"kind": "remote", "url": f"http://10.0.0.{n}"} for n in range(servers)]
        ray = {"kind": "ray", "model": "/models/demo", "replicas": {"min": 1, "max": 4}}
        model = {"name": "demo", "queue": {"max_in_flight": 2}, "engines": [ray, *others]}
        return Settings.model_validate({"models": [model]}).models[0]

    old, new = with_servers(before), with_servers(after)
    configs = plan_engines(engines_of(old), old, scaled=2).after
    for scaled in (None, scaled_engines(configs, old)):
        changes = plan_engines(configs, new, scaled=scaled)
        assert [config.spec.kind for config in changes.after].count("ray") == 2
        assert [config.spec.kind for config in changes.kept].count("ray") == 2
        assert changes.replaced == ()
