"""`vllm-gateway plan`: what it prints, and its exit codes."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from app.cli import app
from engines.gpu import AssumedGpus
from tests.engines.plan.checkpoints import published


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return published("qwen3-4b", tmp_path)


def plan(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def test_model_that_fits_ends_with_its_capacity(model: Path) -> None:
    result = plan(model, "--gpu-memory", 24, "--max-model-len", "8k")
    assert result.exit_code == 0, result.output
    first, *_, last = result.stdout.splitlines()
    assert first == "Qwen3ForCausalLM: 36 layers, context length 40,960 tokens"
    assert last.startswith("capacity: ")
    assert last.endswith("requests of 8,000 tokens at once")


def test_model_that_does_not_fit_exits_with_1_and_the_changes(model: Path) -> None:
    result = plan(model, "--gpu-memory", 12, "--kv-cache-dtype", "fp8")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1].startswith("change one: --max-model-len ")


def test_type_of_cache_whose_size_is_not_known_is_a_fault(model: Path) -> None:
    result = plan(model, "--gpu-memory", 24, "--kv-cache-dtype", "fp9")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == (
        "vllm-gateway: --kv-cache-dtype must be one of auto, bfloat16, float16, fp8, fp8_e4m3, "
        "fp8_e5m2, fp8_inc, fp8_ds_mla, not 'fp9'\n"
    )


def test_memory_is_that_of_the_machines_gpu(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engines.gpu.find_accelerator", lambda: AssumedGpus(1, 48.0))
    assert "memory: 48 GiB × 0.92" in plan(model).stdout
    monkeypatch.setattr("engines.gpu.find_accelerator", lambda: AssumedGpus(0))
    assert plan(model).stdout.splitlines()[-1] == (
        "this machine has no GPU: --gpu-memory 80 plans for GPUs with 80 GiB"
    )


def test_model_that_is_nowhere_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    result = plan("org/name", "--gpu-memory", 24)
    assert result.exit_code == 2
    assert result.stderr.startswith("vllm-gateway: org/name is neither a directory nor a ")
