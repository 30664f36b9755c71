"""Engines that evidently cannot start are found before anything changes."""

import asyncio
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.fleet import preflight as module
from app.fleet.builder import Builder
from app.fleet.engine_plan import initial_engines
from app.fleet.preflight import PreflightResult, run_preflight
from app.settings import load_settings
from engines import interpreter
from engines.flags import check as flag_check
from engines.flags.check import ParserUnavailable
from engines.gpu import Device
from engines.interpreter import Installation, InterpreterTimeout
from engines.ray import cluster
from tests.app.configuration import isolate
from tests.fakes import vllm_flags


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)
    monkeypatch.setattr(module, "count_memory_nodes", lambda: 1)
    for name in ("VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_SIM_MULTI_NUMA", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


class Gpus:
    """Return an accelerator with this many GPUs."""

    def __init__(self, number: int) -> None:
        self.number = number

    def devices(self) -> list[Device]:
        return [Device(index, f"GPU-{index}", "H100", 80.0, 80.0) for index in range(self.number)]


def builder(gpus: int = 0, launcher: tuple[str, ...] | None = None) -> Builder:
    found = Builder(load_settings(), launcher)
    found._accelerator = Gpus(gpus)  # type: ignore[assignment]
    return found


def check(
    *engines: dict[str, Any],
    run_dir: str = "run",
    gpus: int = 0,
    launcher: tuple[str, ...] | None = None,
) -> PreflightResult:
    """Return the result for a model with these engines."""
    specs = [{"kind": "process", "model": "m", **engine} for engine in engines]
    data = {"server": {"run_dir": run_dir}, "models": [{"name": "demo", "engines": specs}]}
    Path("gateway.yaml").write_text(yaml.safe_dump(data, sort_keys=False))
    settings = load_settings()
    configs = [config for each in initial_engines(settings).values() for config in each]
    return run_preflight(settings, configs, builder(gpus, launcher))


def faults(*engines: dict[str, Any], **options: Any) -> list[str]:
    return [line.partition(": model demo: ")[2] for line in check(*engines, **options).faults]


def test_valid_engine_has_no_fault() -> None:
    assert check({}) == PreflightResult((), ())


def test_interpreter_that_cannot_be_used_is_a_fault() -> None:
    assert faults({"python": "/nowhere/python", "replicas": 2}) == [
        "engines[0].python: /nowhere/python does not exist"
    ]


def test_flags_are_judged_by_the_vllm_of_their_interpreter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Path | None] = []

    def answer(
        lines: list[list[str]], _ended: object, python: Path | None
    ) -> tuple[Any, list[str | None]]:
        asked.append(python)
        flags = vllm_flags.TABLE["flags"] | ({} if python is None else {"from-another": False})
        table = {**vllm_flags.TABLE, "flags": flags}
        return table, [None] * len(lines)

    def found(python: Path) -> Installation:
        return Installation(python, "3.12", tmp_path, "0.31.0", on_cpu=True, modelscope=False)

    monkeypatch.setattr(flag_check, "run_parser", answer)
    monkeypatch.setattr(interpreter, "probe", found)
    args = {"from-another": "x"}
    [fault] = faults({"args": args}, {"args": args, "python": "/opt/a/bin/python"})
    assert fault.startswith("engines[0].args.from-another: ")
    assert asked == [None, Path("/opt/a/bin/python")]
    faults(*({"args": args, "python": f"/opt/{one}/bin/python"} for one in "ab"))
    assert asked[2:] == [Path("/opt/b/bin/python")]  # what the first accepts is in its cache


@pytest.mark.parametrize("own", [True, False])
def test_engine_that_downloads_from_modelscope_needs_its_package(
    own: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def found(python: Path) -> Installation:
        return Installation(python, "3.12", tmp_path, "0.32.0", on_cpu=True, modelscope=not own)

    monkeypatch.setattr(interpreter, "probe", found)
    monkeypatch.setattr(module, "find_spec", lambda _: object() if own else None)
    env = {"VLLM_USE_MODELSCOPE": "true"}
    python = "/opt/a/bin/python"
    number, lacks = (1, python) if own else (0, sys.executable)
    [fault] = faults({"env": env}, {"env": env, "python": python}, {"python": python}, {})
    assert fault == (
        f"engines[{number}].env.VLLM_USE_MODELSCOPE: the engine's environment lacks the package "
        f"modelscope: uv pip install --python {lacks} modelscope"
    )


def test_faults_of_all_engines_are_reported_once_each() -> None:
    assert faults(
        {"model": "./nowhere", "replicas": 3}, {"args": {"max-modellen": 1}, "replicas": 2}
    ) == [
        "engines[0].model: model directory ./nowhere does not exist",
        f"engines[1].args.max-modellen: vLLM {vllm_flags.table().version} has no such flag; "
        "did you mean max-model-len?",
    ]


def test_socket_path_that_is_too_long() -> None:
    longest = 107 - len("/demo-0/http.sock")
    assert check({}, run_dir="/" + "x" * (longest - 1)).faults == ()
    [line] = check({}, run_dir="/" + "x" * longest).faults
    assert line.startswith("gateway.yaml:2: server.run_dir: the path of a socket, /xxx")
    assert line.endswith("has 108 bytes, at most 107 are possible: choose a shorter directory")


def test_flags_of_another_launcher_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = vllm_flags.install(monkeypatch)
    found = check({"args": {"fake-start": "x"}}, launcher=(sys.executable,))
    assert found == PreflightResult((), ())
    assert parser.asked == []


def test_unanswered_flag_check_is_a_note_not_a_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def silent(*_: object) -> None:
        raise ParserUnavailable("vLLM gave no answer in 120 s")

    monkeypatch.setattr(flag_check, "run_parser", silent)
    assert check({"args": {"max-modellen": 1}}) == PreflightResult(
        (), ("flags of engines were not checked: vLLM gave no answer in 120 s",)
    )


def test_interpreter_that_does_not_answer_in_time_is_a_note_not_a_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def silent(python: Path) -> None:
        raise InterpreterTimeout(f"{python} did not answer in 20 s")

    monkeypatch.setattr("engines.interpreter.probe", silent)
    assert check({"python": "/opt/a/bin/python"}) == PreflightResult(
        (),
        (
            "flags of engines of /opt/a/bin/python were not checked: /opt/a/bin/python did not "
            "answer in 20 s",
        ),
    )


class TestSleep:
    @pytest.mark.parametrize(
        ("engine", "place"),
        [
            ({"sleep_level": 1}, "sleep_level"),
            ({"args": {"enable-sleep-mode": True}}, "args.enable-sleep-mode"),
        ],
    )
    def test_fault_on_a_platform_without_it(
        self, engine: dict[str, Any], place: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert faults(engine) == [
            f"engines[0].{place}: vLLM has no sleep mode on this platform (cpu): leave it out"
        ]
        vllm_flags.install(monkeypatch, sleep=True, device="cuda")
        Path("run/vllm-flags.json").unlink()
        assert faults(engine) == []


def test_gpu_memory_utilization_is_between_0_and_1() -> None:
    assert faults({"args": {"gpu-memory-utilization": 90}}) == [
        "engines[0].args.gpu-memory-utilization: must be above 0 and at most 1, not 90"
    ]


class TestRanksOnACpu:
    PARALLEL = {"tensor-parallel-size": 2}  # noqa: RUF012

    def test_every_rank_needs_a_numa_node(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert faults({"args": {**self.PARALLEL, "pipeline-parallel-size": 2}}) == [
            "engines[0].args: needs 4 NUMA nodes (tensor-parallel-size 2, pipeline-parallel-size "
            "2), this machine has 1: on a CPU each rank is bound to a node of its own"
        ]
        monkeypatch.setattr(module, "count_memory_nodes", lambda: 2)
        assert faults({"args": self.PARALLEL}) == []

    @pytest.mark.parametrize(
        "env", [{"VLLM_CPU_OMP_THREADS_BIND": "0-1|2-3"}, {"VLLM_CPU_SIM_MULTI_NUMA": "1"}]
    )
    def test_no_fault_with_an_explicit_binding(self, env: dict[str, str]) -> None:
        assert faults({"args": self.PARALLEL, "env": env}) == []

    def test_no_fault_with_an_unknown_number_of_nodes(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "count_memory_nodes", lambda: None)
        assert faults({"args": self.PARALLEL}) == []


class TestRanksOnGpus:
    @pytest.fixture(autouse=True)
    def _cuda(self, monkeypatch: pytest.MonkeyPatch) -> None:
        vllm_flags.install(monkeypatch, device="cuda", sleep=True)

    def test_fault_with_too_few_visible_gpus(self) -> None:
        args = {"tensor-parallel-size": 2, "data-parallel-size": 2}
        assert faults({"args": args}, gpus=2) == [
            "engines[0].args: needs 4 GPUs (tensor-parallel-size 2, data-parallel-size 2), "
            "it sees 2"
        ]
        assert faults({"args": args}, gpus=4) == []

    def test_visible_gpus_follow_the_engines_environment(self) -> None:
        engine = {"args": {"tensor-parallel-size": 2}, "env": {"CUDA_VISIBLE_DEVICES": 0}}
        assert faults(engine, gpus=4)[0].endswith("it sees 1")

    def test_ranks_of_ray_may_run_elsewhere(self) -> None:
        args = {"tensor-parallel-size": 8, "distributed-executor-backend": "ray"}
        assert faults({"args": args}, gpus=1) == []


def test_repository_that_looks_like_a_local_directory_is_noted(tmp_path: Path) -> None:
    model = tmp_path / "var" / "demo-model"
    model.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (model / name).touch()
    found = check({"model": "var/demo-modell"}, {"model": "var/demo-model"}, {"model": "org/m"})
    assert found.faults == ()
    (note,) = found.notes
    assert note.endswith(
        "model demo: engines[0].model: there is no directory var/demo-modell here, so this is a "
        "repository of the Hugging Face hub"
    )


def test_model_directory_that_vllm_cannot_load_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "downloaded").mkdir()
    assert faults({"model": "./downloaded"}) == [
        "engines[0].model: directory ./downloaded holds no config.json, so it is not a model's"
    ]
    assert check({"model": "./downloaded"}, launcher=("another", "server")).faults == ()


async def test_check_of_a_silent_cluster_ends_with_the_gateway(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, ended = threading.Event(), threading.Event()

    class Silent:
        """A connector to a cluster that does not respond."""

        @classmethod
        async def start(cls, *_: object) -> "Silent":
            return cls()

        async def call(self, *_: object) -> None:
            asked.set()
            await asyncio.Event().wait()

        async def close(self) -> None:
            pass

    monkeypatch.setattr(cluster, "_Connection", Silent)
    models = [{"name": "demo", "engines": [{"kind": "ray", "model": "/models/demo"}]}]
    data = {"ray": {"address": "10.0.0.1:6379"}, "models": models}
    Path("gateway.yaml").write_text(yaml.safe_dump(data))
    settings = load_settings()
    configs = initial_engines(settings)["demo"]
    launched = builder(launcher=("fake",))
    checking = asyncio.create_task(
        asyncio.to_thread(run_preflight, settings, configs, launched, ended)
    )
    await asyncio.to_thread(asked.wait)
    ended.set()
    assert "the gateway is shutting down" in (await checking).notes[0]
