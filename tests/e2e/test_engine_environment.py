"""Real vLLM serves without inheriting the secrets of its gateway."""

from pathlib import Path
from typing import Any

import psutil
import pytest

from engines.guard.marked_processes import find_marked
from tests.e2e.deployment import ADMIN_KEY, ENGINE, Deployment, demo_model, deployed, until_ready
from tests.e2e.test_usage import counted

CANARY = "sk-canary-0123456789abcdef"
# The last is a token that engines inherit, unless it is the key of a remote engine.
SECRETS = (
    "VLLM_API_KEY", "PGPASSWORD", "AWS_SECRET_ACCESS_KEY", "OTEL_EXPORTER_OTLP_HEADERS",
    "NVIDIA_API_KEY", "HF_TOKEN",
)  # fmt: skip
REMOTE = {"kind": "remote", "url": "http://127.0.0.1:9", "api_key_env": "HF_TOKEN"}
PROMPT: dict[str, Any] = {"role": "user", "content": "Once upon a time. " * 100}
CHAT: dict[str, Any] = {"model": "demo", "messages": [PROMPT], "max_tokens": 5}


def processes(deployment: Deployment, kind: str) -> list[psutil.Process]:
    """Every process of the engine, without the gateway's own."""
    if kind == "process":
        return deployment.family()
    return [psutil.Process(pid) for pid in find_marked(str(deployment.run_dir / "demo-0"))]


@pytest.mark.parametrize("kind", ["process", "in_process"])
def test_engine_serves_without_the_secrets_of_its_gateway(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    demo_model()
    for name in SECRETS:
        monkeypatch.setenv(name, CANARY)
    models = (
        {"name": "demo", "engines": [{**ENGINE, "kind": kind}]},
        {"name": "elsewhere", "engines": [REMOTE]},
    )
    with deployed(tmp_path, *models) as deployment:
        until_ready(deployment)
        with deployment.client() as client:
            for _ in range(2):
                answer = client.post("/v1/chat/completions", json=CHAT)
                assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert counted(deployment, "gateway_tokens_total", model="demo", kind="cached") > 0
        seen = [
            Path(f"/proc/{one.pid}/environ").read_bytes() for one in processes(deployment, kind)
        ]
        assert len(seen) >= 2
        for environment in seen:
            assert CANARY.encode() not in environment
        assert any(b"VLLM_MEDIA_URL_ALLOW_REDIRECTS=0" in environment for environment in seen)
        with deployment.client(ADMIN_KEY) as admin:
            listing = admin.get("/admin/engines").text
        assert "--allowed-media-domains media.invalid --enable-prompt-tokens-details" in listing
        assert CANARY not in (deployment.run_dir / "demo-0" / "engine.log").read_text()
