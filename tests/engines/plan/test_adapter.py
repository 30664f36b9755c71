"""Adapters that cannot work with a model are found by the files of both."""

from pathlib import Path
from typing import Any

import pytest

from engines.plan.adapter import ADAPTER_CONFIG, WEIGHTS, find_adapter_fault
from engines.plan.model_files import MAX_CONFIG_BYTES
from engines.spec import ContainerSpec, LocalSpec, ProcessSpec
from tests.engines.plan.checkpoints import write_config, write_weights
from tests.fakes.adapter_routes import write_adapter

Q = "model.layers.{}.self_attn.q_proj"
DOWN = "model.layers.{}.mlp.down_proj"
CONFIG = {"hidden_size": 64, "num_hidden_layers": 2, "architectures": ["Qwen2ForCausalLM"]}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A model with a hidden size of 64, and layers whose inside is 256 wide."""
    directory = tmp_path / "base"
    directory.mkdir()
    write_config(directory, CONFIG)
    shapes = {f"{Q.format(n)}.weight": ("BF16", (64, 64)) for n in range(2)}
    shapes |= {f"{DOWN.format(n)}.weight": ("BF16", (64, 256)) for n in range(2)}
    write_weights(directory / "model.safetensors", shapes)
    return directory


def adapter(
    directory: Path,
    *,
    module: str = Q,
    layer: int = 1,
    width: tuple[int, int] = (64, 64),
    rank: int = 8,
    **config: Any,
) -> str:
    """Write an adapter of one module, whose input and output are this wide."""
    name = f"base_model.model.{module.format(layer)}"
    shapes = {
        f"{name}.lora_A.weight": ("BF16", (rank, width[0])),
        f"{name}.lora_B.weight": ("BF16", (width[1], rank)),
    }
    return str(write_adapter(directory / "adapter", rank=rank, shapes=shapes, **config))


def spec(model: Path | str, **args: Any) -> LocalSpec:
    return ProcessSpec(kind="process", model=str(model), args=args)


def test_adapter_of_the_model_has_no_fault(base: Path, tmp_path: Path) -> None:
    assert find_adapter_fault(spec(base), adapter(tmp_path)) is None
    assert find_adapter_fault(spec(base), adapter(tmp_path, module=DOWN, width=(256, 64))) is None


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"width": (128, 64)}, "its hidden size is 128, that of BASE is 64"),
        ({"layer": 2}, "it has a layer 2, BASE has 2 layers"),
        ({"width": (64, 32)}, f"the output of {Q.format(1)} is 32 wide, in BASE it is 64"),
        (
            {"module": DOWN, "width": (128, 64)},
            f"the input of {DOWN.format(1)} is 128 wide, in BASE it is 256",
        ),
    ],
)
def test_adapter_of_another_model(
    base: Path, tmp_path: Path, other: dict[str, Any], reason: str
) -> None:
    source = adapter(tmp_path, **other)
    reason = reason.replace("BASE", str(base))
    assert find_adapter_fault(spec(base), source) == (
        f"adapter {source} is for another base model: {reason}"
    )


def test_packed_weights_are_not_compared(base: Path, tmp_path: Path) -> None:
    write_weights(base / "model.safetensors", {f"{Q.format(1)}.weight": ("U8", (64, 32))})
    assert find_adapter_fault(spec(base), adapter(tmp_path)) is None


def test_rank_is_at_most_that_of_the_engine(base: Path, tmp_path: Path) -> None:
    source = adapter(tmp_path, rank=32)
    assert find_adapter_fault(spec(base, **{"max-lora-rank": 32}), source) is None
    assert find_adapter_fault(spec(base), source) == (
        f"{source}/{ADAPTER_CONFIG}: its rank is 32, and max-lora-rank is 16: set max-lora-rank in "
        "args"
    )
    some = adapter(tmp_path, rank_pattern={"q_proj": 64})
    fault = find_adapter_fault(spec(base), some)
    assert fault is not None
    assert "its rank is 64" in fault


class TestUnreadable:
    def test_missing_directory(self, base: Path) -> None:
        assert find_adapter_fault(spec(base), "/no/such") == (
            "adapter directory /no/such does not exist"
        )

    def test_repository_that_is_not_here_is_not_looked_at(self, base: Path) -> None:
        assert find_adapter_fault(spec(base), "owner/adapter") is None

    def test_directory_without_weights(self, base: Path, tmp_path: Path) -> None:
        source = adapter(tmp_path)
        (Path(source) / WEIGHTS).unlink()
        fault = find_adapter_fault(spec(base), source)
        assert fault == f"directory {source} holds no adapter_model.safetensors"
        (Path(source) / "adapter_model.bin").touch()  # vLLM reads it
        assert find_adapter_fault(spec(base), source) is None

    def test_huge_configuration_is_not_read(self, base: Path, tmp_path: Path) -> None:
        source = adapter(tmp_path)
        with (Path(source) / ADAPTER_CONFIG).open("wb") as file:
            file.truncate(100_000_000)
        fault = find_adapter_fault(spec(base), source)
        assert fault is not None
        assert f"{MAX_CONFIG_BYTES:,}" in fault

    @pytest.mark.parametrize("rank", ["8", None, 0, True, [8]])
    def test_no_rank(self, base: Path, tmp_path: Path, rank: object) -> None:
        source = str(write_adapter(tmp_path / "adapter", rank=rank))  # type: ignore[arg-type]
        fault = find_adapter_fault(spec(base), source)
        assert fault is not None
        assert fault.endswith("r is not a rank, so this is no LoRA adapter in PEFT's format")

    def test_weights_cut_short(self, base: Path, tmp_path: Path) -> None:
        source = adapter(tmp_path)
        weights = Path(source) / WEIGHTS
        weights.write_bytes(weights.read_bytes()[:-1])
        fault = find_adapter_fault(spec(base), source)
        assert fault is not None
        assert "the download is not complete" in fault

    def test_model_that_is_not_here_leaves_the_rank(self, tmp_path: Path) -> None:
        other = spec("owner/model")
        assert find_adapter_fault(other, adapter(tmp_path, width=(128, 64))) is None
        assert find_adapter_fault(other, adapter(tmp_path, rank=32)) is not None


def test_paths_in_a_container_are_found_by_its_volumes(base: Path, tmp_path: Path) -> None:
    source = adapter(tmp_path, width=(128, 64))
    contained = ContainerSpec(
        kind="container",
        image="vllm",
        model="/models/base",
        volumes=["cache:/cache", f"{tmp_path}:/models:ro"],
    )
    fault = find_adapter_fault(contained, "/models/adapter")
    assert fault == (
        "adapter /models/adapter is for another base model: its hidden size is 128, that of "
        "/models/base is 64"
    )
    assert find_adapter_fault(contained, "/models/none") == (
        "adapter directory /models/none does not exist"
    )
    assert source
    for elsewhere in ("/cache/adapter", "/modelsx/adapter", "owner/adapter"):
        assert find_adapter_fault(contained, elsewhere) is None
