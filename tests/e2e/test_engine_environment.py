"""Real vLLM serves without inheriting the secrets of its gateway."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

from tests.e2e.deployment import ADMIN_KEY, CANARY, Deployment
from tests.e2e.test_usage import counted

PROMPT: dict[str, Any] = {"role": "user", "content": "Once upon a time. " * 100}
CHAT: dict[str, Any] = {"model": "demo", "messages": [PROMPT], "max_tokens": 5}


def assert_serves_without_secrets(
    deployment: Deployment, processes: Iterable[psutil.Process]
) -> None:
    """See that an engine reports cached tokens, and that nothing of it has a secret."""
    with deployment.client() as client:
        for _ in range(2):
            answer = client.post("/v1/chat/completions", json=CHAT)
            assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert counted(deployment, "gateway_tokens_total", model="demo", kind="cached") > 0
    seen = [Path(f"/proc/{one.pid}/environ").read_bytes() for one in processes]
    assert len(seen) >= 2
    for environment in seen:
        assert CANARY.encode() not in environment
    assert any(b"VLLM_MEDIA_URL_ALLOW_REDIRECTS=0" in environment for environment in seen)
    with deployment.client(ADMIN_KEY) as admin:
        listing = admin.get("/admin/engines").text
    assert "--allowed-media-domains media.invalid --enable-prompt-tokens-details" in listing
    assert CANARY not in (deployment.run_dir / "demo-0" / "engine.log").read_text()


def test_engine_serves_without_the_secrets_of_its_gateway(gateway: Deployment) -> None:
    assert_serves_without_secrets(gateway, gateway.family())
