"""GPU placement in `vllm-gateway check` and `serve`."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from app.cli import app
from engines.gpu import HostMemory
from tests.app.configuration import isolate
from tests.e2e.deployment import COMMAND, environment, write_config
from tests.fakes import nvml
from tests.fakes.nvml import Driver

NO_PERMISSION = 4
EXAMPLE = Path(__file__).parents[3] / "deploy" / "gpu.yaml"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nvml.library(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def driver(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """A machine with two GPUs, both usable by the gateway."""
    isolate(monkeypatch, tmp_path)
    nvml.load(library)
    driver = Driver(tmp_path / "nvml")
    driver.write()
    monkeypatch.setenv("FAKE_NVML", str(driver.file))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return driver


def model(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "engines": [{"kind": "process", "model": "m", **fields}]}


def check(*models: dict[str, Any], config: Path | None = None, gpus: str | None = None) -> Result:
    config = config or write_config(Path.cwd(), *models)
    others = [] if gpus is None else ["--gpus", gpus]
    return CliRunner().invoke(app, ["check", "--config", str(config), *others])


def shown(result: Result) -> dict[str, str]:
    """Return the printed line of each engine, by its name."""
    assert (result.exit_code, result.stderr) == (0, "")
    lines = [
        line.strip()
        for line in result.stdout.splitlines()
        if line.startswith("  ") and ": " in line
    ]
    return dict(line.split(": ", 1) for line in lines)


def refused(result: Result) -> list[str]:
    assert (result.exit_code, result.stdout) == (2, "")
    return result.stderr.splitlines()


def variables(*gpus: int) -> str:
    """The beginning of a command line on these GPUs."""
    return f"CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={','.join(map(str, gpus))} "


def test_check_shows_the_gpus_of_each_engine(driver: Driver) -> None:
    driver.used.append(0.5)
    driver.write()
    third = {"CUDA_VISIBLE_DEVICES": "2"}
    engines = shown(
        check(
            model("pair", gpus=[1], replicas=2, args={"gpu-memory-utilization": 0.3}),
            model("large", gpus="auto"),
            model("plain", env=third),
        )
    )
    assert engines["pair-0"].startswith(variables(1))
    assert engines["pair-1"].startswith(variables(1))
    assert engines["large-0"].startswith(variables(0))
    assert engines["plain-0"].startswith("CUDA_VISIBLE_DEVICES=2 ")
    assert "CUDA_DEVICE_ORDER" not in engines["plain-0"]


def test_gpu_example_fits_on_two_gpus(driver: Driver) -> None:
    engines = shown(check(config=EXAMPLE))
    assert engines["deepseek-r1-0"].startswith(variables(0))
    assert engines["gpt-oss-0"].startswith(variables(0))
    assert engines["gemma-0"].startswith(variables(1))


def test_engine_that_does_not_fit_is_one_line(driver: Driver) -> None:
    parallel = {"tensor_parallel_size": 3}
    assert refused(check(model("big", gpus=4), model("wide", gpus="auto", args=parallel))) == [
        "vllm-gateway: big-0: asks for 4 GPUs, there are 2",
        "vllm-gateway: wide-0: asks for 3 GPUs, there are 2",
    ]


def test_driver_error_is_part_of_the_fault(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    driver.faults = [("nvmlInit", -1, NO_PERMISSION)]
    driver.write()
    assert refused(check(model("demo", gpus=[0]))) == [
        "vllm-gateway: demo-0: asks for 1 GPU, there are none"
    ]
    assert caplog.messages[0].startswith("no GPU can be used: NVML: ")


def test_inaccessible_gpus_are_reported(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert refused(check(model("demo", gpus=[0]))) == [
        "vllm-gateway: demo-0: asks for GPU 0, there is only 1",
        "vllm-gateway: CUDA_VISIBLE_DEVICES of the gateway hides 1 of 2 GPUs",
    ]


def test_driver_is_not_loaded_without_a_gpu_setting(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    driver.faults = [("nvmlInit", -1, NO_PERMISSION)]
    driver.write()
    assert "demo-0" in shown(check(model("demo")))
    assert caplog.messages == []


class TestMachineWithoutGpus:
    @pytest.fixture(autouse=True)
    def _no_driver(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        isolate(monkeypatch, tmp_path)
        monkeypatch.setattr("app.fleet.builder.find_accelerator", HostMemory)

    def test_engines_are_placed_as_if_there_were_enough(self) -> None:
        parallel = {"tensor-parallel-size": 4}
        found = check(
            model("listed", gpus=[1], sleep_level=1), model("wide", gpus="auto", args=parallel)
        )
        assert (found.exit_code, found.stderr) == (0, "")
        assert (
            "note: this machine has no GPU, which `serve` would refuse: engines were placed as if "
            "it had 6; --gpus 8x80 places them on 8 GPUs with 80 GiB each\n"
        ) in found.stdout

    def test_faults_that_no_machine_can_satisfy_remain(self) -> None:
        share = {"gpu-memory-utilization": 0.6}
        models = [model(name, gpus=[0], args=share) for name in ("one", "two")]
        [fault] = refused(check(*models))
        assert "is 1.2 together, above 1" in fault

    @pytest.mark.parametrize(
        ("gpus", "fault"),
        [
            ("8x80", None),
            ("2x80", "wide-0: asks for 4 GPUs, there are 2"),
            ("4x8", "memory_gib is 64, 16 on each of 4 GPUs; GPU 0, 1, 2 and 3 has at most 8.0"),
            ("8", "--gpus must be like 8x80, for 8 GPUs with 80 GiB each, not '8'"),
        ],
    )
    def test_given_gpus_are_those_of_the_other_machine(
        self, monkeypatch: pytest.MonkeyPatch, gpus: str, fault: str | None
    ) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        wide = model("wide", gpus=4, args={"tensor-parallel-size": 4}, memory_gib=64)
        found = check(wide, gpus=gpus)
        assert "note: this machine" not in found.stdout
        assert found.exit_code == (0 if fault is None else 2)
        assert (fault or "") in found.stderr


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [0, 2])
def test_serve_refuses_too_many_gpus_before_anything_starts(
    library: Path, tmp_path: Path, gpus: int
) -> None:
    driver = Driver(tmp_path / "nvml")
    driver.write()
    machine = {"LD_LIBRARY_PATH": str(library.parent), "FAKE_NVML": str(driver.file)}
    if gpus == 0:
        machine = {}
        if shutil.which("nvidia-smi"):
            pytest.skip("this machine has NVIDIA's driver")
    ours = {name: value for name, value in environment().items() if not name.startswith("CUDA_")}
    ended = subprocess.run(
        [*COMMAND, "serve", "--config", str(write_config(tmp_path, model("big", gpus=4)))],
        env=ours | machine,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    there = {0: "are none", 2: "are 2"}[gpus]
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == f"vllm-gateway: big-0: asks for 4 GPUs, there {there}\n"
    assert not (tmp_path / "run" / "big-0").exists()
