"""Arguments of engines that come from elsewhere than their own settings."""

from pathlib import Path
from typing import Any

import pytest

from app.fleet import builder
from app.fleet.builder import Builder
from app.fleet.deployment import memory_gib
from app.fleet.engine_plan import initial_engines
from app.routing import Replica
from engines.process import LauncherMissing
from tests.gateway import remote, settings_for

PROCESS = {"kind": "process", "model": "m"}
IN_PROCESS = {"kind": "in_process", "model": "m"}
RAY = {"kind": "ray", "model": "m"}
REMOTE = remote("http://127.0.0.1:1")
BY_PRIORITY = {"args": {"scheduling-policy": "priority"}}


def build(run_dir: Path, engine: dict[str, Any], **fields: Any) -> Replica:
    """Return a model's only engine."""
    settings = settings_for({"name": "demo", "engines": [engine], **fields}, run_dir=run_dir)
    [config] = initial_engines(settings)["demo"]
    return Builder(settings, ("python",))("demo", config)


@pytest.mark.parametrize("engine", [PROCESS, IN_PROCESS, RAY])
def test_media_domains_of_a_model_reach_its_engines(tmp_path: Path, engine: dict[str, Any]) -> None:
    allowed = build(tmp_path, engine, media={"domains": ["a.org", "b.org"]})
    assert " --allowed-media-domains a.org b.org --" in allowed.engine.describe()
    nowhere = build(tmp_path, engine)
    assert " --allowed-media-domains media.invalid --" in nowhere.engine.describe()


@pytest.mark.parametrize(
    ("engine", "by_priority"),
    [
        (PROCESS, False),
        ({**PROCESS, **BY_PRIORITY}, True),
        (IN_PROCESS, False),
        ({**IN_PROCESS, **BY_PRIORITY}, True),
        ({**RAY, **BY_PRIORITY}, True),
        (REMOTE, False),
    ],
)
def test_replica_knows_whether_its_engine_schedules_by_priority(
    tmp_path: Path, engine: dict[str, Any], by_priority: bool
) -> None:
    assert build(tmp_path, engine).by_priority is by_priority


def test_gateway_without_vllm_runs_that_of_another_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    here, there = PROCESS, {**PROCESS, "python": "/opt/vllm/bin/python"}
    settings = settings_for({"name": "demo", "engines": [there, here]}, run_dir=tmp_path)
    other, own = initial_engines(settings)["demo"]
    build_engine = Builder(settings)
    runs = build_engine("demo", other).engine.describe()
    assert runs.startswith("/opt/vllm/bin/python ")
    assert "/vllm_gateway_serve.py --model=m " in runs
    with pytest.raises(LauncherMissing, match="name another environment by `python`"):
        build_engine("demo", own)


def test_engine_on_ray_needs_ray_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "ray_is_installed", lambda: False)
    with pytest.raises(LauncherMissing, match="run `make setup-ray`"):
        build(tmp_path, RAY)


def test_engine_on_ray_gets_no_gpu_of_this_machine_and_none_of_its_memory(tmp_path: Path) -> None:
    engine = {**RAY, "gpus": 8, "replicas": 2, "memory_gib": 500}
    settings = settings_for({"name": "demo", "engines": [engine]}, run_dir=tmp_path)
    configs = initial_engines(settings)["demo"]
    made = Builder(settings, ("python",))
    assert len(configs) == 2
    assert made.place([(settings.models[0], configs)]) == ()
    assert memory_gib(made("demo", configs[0]).engine) == 0.0
