"""A model that real vLLM downloads from ModelScope, which is a server of this machine here."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.deployment import ADMIN_KEY, ENGINE, Deployment, demo_model, deployed, until_ready
from tests.fakes.hub import FakeHub, serving_hub
from tests.fakes.modelscope import ModelScopeHandler
from tests.waiting import poll_until

pytestmark = [pytest.mark.slow, pytest.mark.vllm]
WEIGHTS = "model.safetensors"


def phase(deployment: Deployment) -> str:
    with deployment.client(ADMIN_KEY) as client:
        [engine] = client.get("/admin/engines").json()["data"]
    progress: dict[str, Any] = engine["progress"] or {}
    return str(progress.get("phase"))


def test_engine_downloads_its_model_and_says_how_far_it_is(tmp_path: Path) -> None:
    hub = FakeHub(pause_after=1_000_000)
    hub.add_directory(demo_model())
    with serving_hub(hub, ModelScopeHandler):
        env = {
            **ENGINE["env"],
            "HF_HUB_OFFLINE": "0",
            "VLLM_USE_MODELSCOPE": True,
            "MODELSCOPE_ENDPOINT": hub.url,
            "MODELSCOPE_CACHE": str(tmp_path / "cache"),
        }
        engine = {**ENGINE, "model": "org/demo", "env": env}
        try:
            with deployed(tmp_path, {"name": "demo", "engines": [engine]}) as running:
                downloading = re.compile(r"downloading \d\.\d of 1\.3 MiB")
                poll_until(lambda: downloading.fullmatch(phase(running)), 300)
                hub.go_on.set()
                until_ready(running)
                asked = {"model": "demo", "messages": [{"role": "user", "content": "Hello!"}]}
                with running.client() as client:
                    answer = client.post("/v1/chat/completions", json=asked).json()
        finally:
            hub.go_on.set()
    assert answer["choices"][0]["message"]["content"].startswith("Hello!")
    assert hub.downloads(WEIGHTS) == [""]
