"""Failing starts of real vLLM: the line shown to the operator, and its advice."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.deployment import ENGINE, demo_model, run, write_config

# vLLM's own imports are most of what a start costs.
BARE: dict[str, Any] = {**ENGINE, "args": {"enforce-eager": True, "max-model-len": 1024}}


def engine(model: Path | str = ENGINE["model"], **flags: Any) -> dict[str, Any]:
    """Return an engine with a few more flags than it can start with."""
    args = {**BARE["args"], **{name.replace("_", "-"): value for name, value in flags.items()}}
    return {**BARE, "model": str(model), "args": args}


def copy(directory: Path, name: str, without: str | None = None) -> Path:
    """Return a copy of the demo model, without one of its files."""
    path = directory / name
    shutil.copytree(ENGINE["model"], path)
    if without is not None:
        (path / without).unlink()
    return path


def without_think(directory: Path) -> Path:
    """Return a copy of the demo model whose tokenizer has no <think> and </think>."""
    path = copy(directory, "no-think")
    for file in (*path.glob("*.json"), *path.glob("*.jinja")):
        file.write_text(file.read_text().replace("think>", "muse>"))
    return path


def corrupt(directory: Path) -> Path:
    """Return a copy of the demo model whose weights begin with no length that could be one."""
    path = copy(directory, "corrupt")
    (path / "model.safetensors").write_bytes(b"\xff" * 1000)
    return path


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The failure lines of a gateway whose engines all fail to start, by model name."""
    demo_model()
    directory = tmp_path_factory.mktemp("models")
    without_space = {k: v for k, v in BARE["env"].items() if k != "VLLM_CPU_KVCACHE_SPACE"}
    engines = {
        "flag": {**ENGINE, "args": {"no-such-flag": 3}},
        "missing": engine("/nonexistent/model"),
        "unknown": engine("nobody/no-such-model"),
        "long": engine(max_model_len=99999),
        "config": engine(copy(directory, "no-config", without="config.json")),
        "weights": engine(copy(directory, "no-weights", without="model.safetensors")),
        "corrupt": engine(corrupt(directory)),
        "parser": engine(reasoning_parser="nope"),
        "think": engine(without_think(directory), reasoning_parser="deepseek_r1"),
        # VLLM_CPU_KVCACHE_SPACE would go before the flag
        "cache": {**engine(kv_cache_memory_bytes=1_000_000), "env": without_space},
        "sleep": engine(enable_sleep_mode=True),
        "heads": engine(tensor_parallel_size=3),
    }
    models = [{"name": name, "engines": [spec]} for name, spec in engines.items()]
    file = write_config(directory, *models, parallel_starts=2)
    ended = run("serve", "--config", str(file), timeout=600)
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    lines = [line for line in ended.stderr.splitlines() if line.startswith("vllm-gateway: ")]
    assert len(lines) == len(engines), ended.stderr
    reported = {}
    for name, line in zip(engines, lines, strict=True):
        start = f"vllm-gateway: engine {name}-0: "
        assert line.startswith(start)
        reported[name] = line.removeprefix(start).replace(str(directory), "DIR")
    return reported


FILES = (
    "check model: the directory must hold config.json, the weights (*.safetensors) and the "
    "tokenizer"
)
DAMAGED = "a file of the model is damaged or cut short: fetch it again"


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("flag", "unrecognized arguments: --no-such-flag=3; remove no-such-flag from args"),
        ("missing", "model directory /nonexistent/model does not exist"),
        (
            "unknown",
            "the model is neither a directory here nor in the local Hugging Face cache, and "
            "downloads are off (HF_HUB_OFFLINE); check model, or let it be downloaded: env: "
            "{HF_HUB_OFFLINE: 0}",
        ),
        (
            "long",
            "User-specified max_model_len (99999) is greater than the derived max_model_len "
            "(max_position_embeddings=4096.0 or model_max_length=None in model's config.json); "
            "set args: {max-model-len: 4096} or less",
        ),
        (
            "config",
            f"Invalid repository ID or local directory specified: 'DIR/no-config'; {FILES}",
        ),
        ("weights", f"Cannot find any model weights with `DIR/no-weights`; {FILES}"),
        (
            "corrupt",
            "Error while deserializing a safetensors file: cannot fit 'int' into an index-sized "
            f"integer; {DAMAGED}",
        ),
        (
            "think",
            "DeepSeekR1ReasoningParser reasoning parser could not locate think start/end tokens in "
            "the tokenizer; the tokenizer of this model has no such tokens: choose another args: "
            "reasoning-parser",
        ),
        (
            "cache",
            "To serve at least one request with the model's max seq len (1024), (0.0 GiB KV cache "
            "is needed, which is larger than the available KV cache memory (0.0 GiB). Based on the "
            "available memory, the estimated maximum model length is 512; set args: "
            "{max-model-len: 512} or less, or give the KV cache more memory",
        ),
        (
            "sleep",
            "Sleep mode is not supported on current platform; remove enable-sleep-mode from args, "
            "and sleep_level",
        ),
        (
            "heads",
            "Total number of attention heads (4) must be divisible by tensor parallel size (3); "
            "set args: tensor-parallel-size to a divisor of 4: 1, 2, 4",
        ),
    ],
)
def test_failure_line_names_cause_and_remedy(said: dict[str, str], name: str, line: str) -> None:
    assert said[name] == line


def test_unknown_parser_error_lists_the_known_ones(said: dict[str, str]) -> None:
    assert said["parser"].startswith("Reasoning parser 'nope' not found. Available parsers: ")
    assert " deepseek_r1, " in said["parser"]
    assert said["parser"].endswith("…; change reasoning-parser in args")
