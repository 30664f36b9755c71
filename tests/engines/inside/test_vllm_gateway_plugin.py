"""The plugin repairs managed engines on CPUs only, and spares all others looks for garbage."""

import gc
import multiprocessing
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from importlib.metadata import entry_points
from types import ModuleType

import pytest

from engines.guard.process_tree import MARKER_VARIABLE
from engines.inside import vllm_gateway_plugin
from tests.e2e.deployment import Deployment


def test_vllm_finds_the_plugin() -> None:
    found = [e for e in entry_points(group="vllm.general_plugins") if e.name == "vllm_gateway"]
    assert [entry.load() for entry in found] == [vllm_gateway_plugin.register]


def test_other_vllm_processes_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MARKER_VARIABLE, raising=False)
    monkeypatch.setitem(sys.modules, "vllm", None)  # an import of it would fail
    vllm_gateway_plugin.register()


@pytest.mark.parametrize("started_by", [None, object()], ids=["server", "core"])
def test_engines_on_other_platforms_are_not_repaired_and_cores_set_imports_aside(
    started_by: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gpu:
        def is_cpu(self) -> bool:
            return False

    platforms = ModuleType("vllm.platforms")
    vars(platforms)["current_platform"] = Gpu()
    monkeypatch.setenv(MARKER_VARIABLE, "/run/engine")
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    monkeypatch.setitem(sys.modules, "vllm.distributed", None)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: started_by)
    frozen: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    vllm_gateway_plugin.register()
    assert len(frozen) == (started_by is not None)


def test_managed_engines_on_cpus_sleep_between_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cpu:
        def is_cpu(self) -> bool:
            return True

    monkeypatch.setenv(MARKER_VARIABLE, "/run/engine")
    modules: dict[str, dict[str, object]] = {
        "vllm": {},
        "vllm.platforms": {"current_platform": Cpu()},
        "vllm.distributed": {},
        "vllm.distributed.device_communicators": {},
        "vllm.distributed.device_communicators.shm_broadcast": {"sched_yield": os.sched_yield},
    }
    for name, members in modules.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
        package, _, last = name.rpartition(".")
        if package:
            setattr(sys.modules[package], last, module)
    vllm_gateway_plugin.register()
    assert vars(module)["sched_yield"] is vllm_gateway_plugin.pause


FORKING = """
import multiprocessing, os, sys
from types import ModuleType, SimpleNamespace

plugins = ModuleType("vllm.plugins")
plugins.plugins_loaded = True
sys.modules |= {"vllm": ModuleType("vllm"), "vllm.plugins": plugins}
from engines.inside.vllm_gateway_plugin import METHOD, heed_fork

def spawn(config):
    os.environ[METHOD] = "spawn"

def print_loaded():
    print(plugins.plugins_loaded)

platform = SimpleNamespace(check_and_update_config=spawn)
heed_fork(platform)
platform.check_and_update_config(None)
method = os.environ[METHOD]
print(method, flush=True)
process = multiprocessing.get_context(method).Process(target=print_loaded)
process.start()
process.join()
print(plugins.plugins_loaded)
"""


@pytest.mark.slow
def test_forked_processes_load_plugins_as_spawned_ones_do() -> None:
    command = [sys.executable, "-c", FORKING]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["fork", "False", "True"], done.stderr


@pytest.mark.slow
@pytest.mark.vllm
def test_core_of_real_vllm_is_forked_and_repaired(gateway: Deployment) -> None:
    """A spawned one has Python's resource tracker next to it."""
    titles = ["".join(process.cmdline()) for process in gateway.family()]
    assert sum("EngineCore" in title for title in titles) == 1
    assert not any("resource_tracker" in title for title in titles)
    log = (gateway.run_dir / "demo-0" / "engine.log").read_text()
    assert re.search(r"\(EngineCore .*keeps generators of seeds from samples", log)


@pytest.mark.slow
@pytest.mark.vllm
def test_core_of_real_vllm_sleeps_between_polls(gateway: Deployment) -> None:
    log = (gateway.run_dir / "demo-0" / "engine.log").read_text()
    assert re.search(r"\(EngineCore .*polls shared memory with sleeps instead of spinning", log)


class Buffer:
    def __init__(self, values: list[bool]) -> None:
        self.np = values


class Batch:
    def __init__(self, generators: dict[int, str]) -> None:
        self.generators = generators


class Runner:
    """The parts of vLLM's model runner that the repair touches."""

    def __init__(self, generators: dict[int, str], discarded: list[bool]) -> None:
        self.input_batch = Batch(generators)
        self.discard_request_mask = Buffer(discarded)
        self.drawn: list[str] = []

    def sample_tokens(self, grammar: object) -> object:
        self.drawn = list(self.input_batch.generators.values())
        if isinstance(grammar, Exception):
            raise grammar
        return grammar


@pytest.mark.parametrize("fails", [False, True], ids=["sampled", "failed"])
def test_a_discarded_sample_draws_nothing_from_a_seed(fails: bool) -> None:
    runner = Runner({0: "a", 2: "c"}, [False, True, True])
    generators = runner.input_batch.generators
    sample_tokens = vllm_gateway_plugin.sparing_generators(Runner.sample_tokens)
    grammar: object = ValueError("sampling failed") if fails else "grammar"
    with pytest.raises(ValueError) if fails else nullcontext():
        assert sample_tokens(runner, grammar) == "grammar"
    assert runner.drawn == ["a"]
    assert generators is runner.input_batch.generators
    assert generators == {0: "a", 2: "c"}


@pytest.mark.slow
@pytest.mark.vllm
def test_prompts_with_seeds_may_be_computed_in_parts(gateway: Deployment) -> None:
    """Without the repair, EngineCore dies: "CPU Generator does not use offset"."""

    def ask(number: int) -> int:
        body = {
            "model": "demo",
            "prompt": f"{number} " * 600,
            "max_tokens": 4,
            "temperature": 0.5,
            "seed": number,
        }
        return client.post("/v1/completions", json=body).status_code

    # No step has room for all of them.
    with gateway.client() as client, ThreadPoolExecutor(8) as threads:
        assert list(threads.map(ask, range(10, 18))) == [200] * 8
