"""What a deployment tells the catalogue of its model."""

import json
from pathlib import Path
from typing import Any

import pytest

from app.fleet import ModelDeployment
from app.fleet.deployment import DeployedEngine
from app.fleet.engine_plan import EngineConfig
from app.routing import Replica
from app.settings import ModelSettings
from tests.app.routing.fakes import FakeEngine


@pytest.mark.parametrize(
    ("engine", "taken"),
    [
        ({"kind": "process"}, frozenset()),
        ({"kind": "container", "image": "vllm/vllm-openai:v0.32.0"}, None),
    ],
)
def test_media_are_read_of_a_model_that_is_here(
    engine: dict[str, Any], taken: frozenset[str] | None, tmp_path: Path
) -> None:
    """The path of a model in a container may be that of another model here."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    settings = ModelSettings.model_validate(
        {"name": "demo", "engines": [{**engine, "model": str(tmp_path)}]}
    )
    config = EngineConfig("demo-0", settings.engines[0])
    deployed = DeployedEngine(config, Replica(FakeEngine("demo-0"), "demo"))

    assert ModelDeployment(settings, [deployed]).models()[0].read_media() == taken
