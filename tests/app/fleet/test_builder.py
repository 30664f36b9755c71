"""Arguments of engines that come from elsewhere than their own settings."""

from pathlib import Path
from typing import Any

import pytest

from app.fleet.builder import Builder
from app.fleet.slots import initial_slots
from app.routing import Replica
from tests.gateway import remote, settings_for

PROCESS = {"kind": "process", "model": "m"}
IN_PROCESS = {"kind": "in_process", "model": "m"}
REMOTE = remote("http://127.0.0.1:1")
BY_PRIORITY = {"args": {"scheduling-policy": "priority"}}


def build(run_dir: Path, engine: dict[str, Any], **fields: Any) -> Replica:
    """Return a model's only engine."""
    settings = settings_for({"name": "demo", "engines": [engine], **fields}, run_dir=run_dir)
    [slot] = initial_slots(settings)["demo"]
    return Builder(settings, ("python",))("demo", slot)


@pytest.mark.parametrize("engine", [PROCESS, IN_PROCESS])
def test_media_domains_of_a_model_reach_its_engines(tmp_path: Path, engine: dict[str, Any]) -> None:
    allowed = build(tmp_path, engine, media={"domains": ["a.org", "b.org"]})
    assert " --allowed-media-domains a.org b.org --" in allowed.engine.describe()
    nowhere = build(tmp_path, engine)
    assert " --allowed-media-domains media.invalid --" in nowhere.engine.describe()


@pytest.mark.parametrize(
    ("engine", "by_priority"),
    [
        (PROCESS, False),
        ({**PROCESS, **BY_PRIORITY}, True),
        (IN_PROCESS, False),
        ({**IN_PROCESS, **BY_PRIORITY}, True),
        (REMOTE, False),
    ],
)
def test_replica_knows_whether_its_engine_schedules_by_priority(
    tmp_path: Path, engine: dict[str, Any], by_priority: bool
) -> None:
    assert build(tmp_path, engine).by_priority is by_priority
