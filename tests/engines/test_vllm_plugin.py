"""The plugin replaces spinning by sleeping, in managed engines on CPUs only."""

import os
import subprocess
import sys
from importlib.metadata import entry_points
from types import ModuleType

import pytest

from engines import vllm_plugin
from engines.guard.process_tree import MARKER_VARIABLE
from tests.e2e.deployment import Deployment

POLLING_PROGRAM = """
import engines.vllm_plugin
engines.vllm_plugin.register()
from vllm.distributed.device_communicators import shm_broadcast
print(shm_broadcast.sched_yield.__module__)
"""


def test_vllm_finds_the_plugin() -> None:
    found = [e for e in entry_points(group="vllm.general_plugins") if e.name == "vllm_gateway"]
    assert [entry.load() for entry in found] == [vllm_plugin.register]


def test_other_vllm_processes_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MARKER_VARIABLE, raising=False)
    monkeypatch.setitem(sys.modules, "vllm", None)  # an import of it would fail
    vllm_plugin.register()


def test_engines_on_other_platforms_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gpu:
        def is_cpu(self) -> bool:
            return False

    platforms = ModuleType("vllm.platforms")
    vars(platforms)["current_platform"] = Gpu()
    monkeypatch.setenv(MARKER_VARIABLE, "/run/engine")
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    monkeypatch.setitem(sys.modules, "vllm.distributed", None)
    vllm_plugin.register()


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize(
    ("marks", "who"),
    [({MARKER_VARIABLE: "/run/engine"}, "engines.vllm_plugin"), ({}, "vllm.distributed.utils")],
    ids=["an engine of a gateway", "another process"],
)
def test_polling_sleeps_in_managed_engines_only(marks: dict[str, str], who: str) -> None:
    env = {name: value for name, value in os.environ.items() if name != MARKER_VARIABLE}
    command = [sys.executable, "-c", POLLING_PROGRAM]
    done = subprocess.run(
        command, env={**env, **marks}, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.splitlines()[-1] == who


@pytest.mark.slow
@pytest.mark.vllm
def test_engine_core_and_worker_use_the_plugin(gateway: Deployment) -> None:
    lines = (gateway.run_dir / "demo-0" / "engine.log").read_text().splitlines()
    sleeping = {line.split(" ")[0] for line in lines if line.endswith("instead of spinning")}
    assert {"(EngineCore", "(VllmWorker-0"} <= sleeping
