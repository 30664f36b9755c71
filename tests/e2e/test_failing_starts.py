"""Failing starts of real vLLM: the line shown to the operator, and its advice.

One of each place in which a start fails: tests/engines/output has the logs of all others.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.deployment import (
    BARE,
    ENGINE,
    demo_model,
    keep_known_flags,
    run,
    use_known_flags,
    write_config,
)

# vLLM's own imports are most of what a start costs.
PLAIN: dict[str, Any] = {**ENGINE, "args": BARE}


def engine(model: Path | str) -> dict[str, Any]:
    """Return an engine with this model."""
    return {**PLAIN, "model": str(model)}


def cut_short() -> Path:
    """Return a copy of the demo model of whose weights half are missing."""
    # Always the same path, so that the gateway knows its command line.
    path = Path(ENGINE["model"]).with_name("cut-short-model")
    shutil.copytree(ENGINE["model"], path, dirs_exist_ok=True)
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    return path


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The failure lines of a gateway whose engines all fail to start, by model name."""
    demo_model()
    directory = tmp_path_factory.mktemp("models")
    # Refused by the gateway, by vLLM's API server, and in the start of its core.
    engines = {
        "flag": {**ENGINE, "args": {"no-such-flag": 3}},
        "missing": engine("/nonexistent/model"),
        "short": engine(cut_short()),
    }
    models = [{"name": name, "engines": [spec]} for name, spec in engines.items()]
    file = write_config(directory, *models, parallel_starts=2)
    use_known_flags(directory / "run")
    ended = run("serve", "--config", str(file), timeout=600)
    keep_known_flags(directory / "run")
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    lines = [line for line in ended.stderr.splitlines() if line.startswith("vllm-gateway: ")]
    assert len(lines) == len(engines), ended.stderr
    reported = {}
    for name, line in zip(engines, lines, strict=True):
        start = f"vllm-gateway: engine {name}-0: "
        assert line.startswith(start)
        reported[name] = line.removeprefix(start)
    return reported


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("flag", "unrecognized arguments: --no-such-flag=3; remove no-such-flag from args"),
        ("missing", "model directory /nonexistent/model does not exist"),
        (
            "short",
            "Error while deserializing header: incomplete metadata, file not fully covered; "
            "a file of the model is damaged or cut short: fetch it again",
        ),
    ],
)
def test_failure_line_names_cause_and_remedy(said: dict[str, str], name: str, line: str) -> None:
    assert said[name] == line
