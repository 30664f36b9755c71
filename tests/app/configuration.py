"""Configuration files for tests, and their faults."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.settings import ConfigError, Settings, load_settings
from engines.spec import ProcessSpec
from tests.fakes import vllm_flags

CANARY = "sk-canary-0123456789abcdef"
OTHER = "sk-other-0123456789abcdef"
GOOD = "models: [{name: demo, engines: [{kind: process, model: m}]}]\n"


def isolate(patch: pytest.MonkeyPatch, directory: Path) -> None:
    """Isolate a test from the machine: an empty directory, one key, no other GATEWAY_ variable.

    A fake replaces vLLM's argument parser, which takes seconds to import.
    """
    vllm_flags.install(patch)
    for name in list(os.environ):
        if name.upper().startswith("GATEWAY_"):
            patch.delenv(name)
    patch.chdir(directory)
    patch.setenv("GATEWAY_API_KEYS", CANARY)


def load(text: str) -> Settings:
    """Load a text as the file gateway.yaml of the working directory."""
    Path("gateway.yaml").write_text(text, encoding="utf-8")
    return load_settings()


def faults(text: str) -> list[str]:
    """Return the faults of a text, each without the file's name and line."""
    with pytest.raises(ConfigError) as caught:
        load(text)
    lines = caught.value.faults
    assert lines
    assert str(caught.value) == "\n".join(lines)
    for line in lines:
        assert line == line.strip()
        assert len(line.splitlines()) == 1
    return [re.sub(r"^gateway\.yaml(:\d+)*: ", "", line) for line in lines]


def with_engine(**fields: Any) -> str:
    """Return a file whose only engine is a process with these fields."""
    return dump([{"kind": "process", "model": "m", **fields}])


def with_remote(**fields: Any) -> str:
    """Return a file whose only engine is a remote one with these fields."""
    return dump([{"kind": "remote", "url": "http://gpu-box:8000", **fields}])


def dump(engines: list[dict[str, Any]]) -> str:
    return yaml.safe_dump({"models": [{"name": "demo", "engines": engines}]})


def process(args: Mapping[str, Any]) -> ProcessSpec:
    return ProcessSpec.model_validate({"kind": "process", "model": "m", "args": args})
