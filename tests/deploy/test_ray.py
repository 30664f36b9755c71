"""The files of deploy/ray: a configuration of the gateway, and a cluster for Ray's launcher."""

import importlib.util
import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from app.settings import load_settings
from engines.spec import RaySpec

DIRECTORY = Path(__file__).parents[2] / "deploy" / "ray"


def test_configuration_is_valid_and_has_engines_on_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # no .env
    settings = load_settings(DIRECTORY / "gateway.yaml")
    assert settings.ray.address == "auto"
    assert [type(spec) for model in settings.models for spec in model.engines] == [RaySpec]


def test_cluster_follows_the_schema_of_ray_authenticates_and_has_ordinary_priority() -> None:
    found = importlib.util.find_spec("ray")
    assert found is not None
    assert found.origin is not None
    schema = json.loads((Path(found.origin).parent / "autoscaler" / "ray-schema.json").read_text())
    cluster = yaml.safe_load((DIRECTORY / "cluster.yaml").read_text())
    jsonschema.validate(cluster, schema)
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):
        [start] = [command for command in cluster[key] if "ray start" in command]
        assert start.startswith("RAY_AUTH_MODE=token RAY_worker_niceness=0 ray start ")
