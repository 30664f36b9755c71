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


def test_adapters_have_the_policy_of_their_model() -> None:
    """They have the same engines, and so the same caches."""
    settings = ModelSettings.model_validate(
        {
            "name": "demo",
            "policy": "prefix",
            "engines": [{"kind": "process", "model": "m"}],
            "adapters": [{"name": "legal", "source": "/l"}, {"name": "sales", "source": "/s"}],
        }
    )
    deployment = ModelDeployment(settings, [])
    before = deployment.models()
    assert len({id(model.policy) for model in (*before, *deployment.models())}) == 1

    deployment.settings = settings.model_copy(update={"policy": "round_robin"})
    assert len({id(model.policy) for model in deployment.models()} - {id(before[0].policy)}) == 1
