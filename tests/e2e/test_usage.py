"""Tokens are counted as vLLM counts them, whatever the client asked for and however it left."""

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.deployment import Deployment
from tests.e2e.test_cancellation import TOKENS, gauge, generation
from tests.waiting import poll_until

STORY = [{"role": "user", "content": "Tell me a story about a lighthouse."}]
CHAT: dict[str, Any] = {"model": "demo", "messages": STORY}
PROMPT: dict[str, Any] = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 9}
RESPONSE: dict[str, Any] = {"model": "demo", "input": "What is the factorial of 5?"}
ASKED = {"include_usage": True}

METERED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "stream": True}),
    ("/v1/chat/completions", {**CHAT, "stream": True, "stream_options": ASKED}),
    (
        "/v1/chat/completions",
        {**CHAT, "stream": True, "stream_options": {**ASKED, "continuous_usage_stats": True}},
    ),
    ("/v1/chat/completions", {**CHAT, "stream": True, "n": 3, "temperature": 1.0}),
    ("/v1/chat/completions", {**CHAT, "n": 3, "temperature": 1.0}),
    ("/v1/completions", PROMPT),
    ("/v1/completions", {**PROMPT, "stream": True}),
    ("/v1/completions", {**PROMPT, "prompt": ["Once upon", "a time"], "stream": True}),
    ("/v1/responses", RESPONSE),
    ("/v1/responses", {**RESPONSE, "stream": True}),
    ("/v1/messages", {**CHAT, "max_tokens": 300}),
    ("/v1/messages", {**CHAT, "max_tokens": 300, "stream": True}),
]


def counted(deployment: Deployment, name: str, **labels: str) -> float:
    """The sum of the gateway's series that have these labels."""
    with deployment.client() as client:
        text = client.get("/metrics").text
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def tokens(deployment: Deployment) -> tuple[float, float]:
    """Prompt and completion tokens by the gateway's count."""
    return (
        counted(deployment, "gateway_tokens_total", model="demo", kind="prompt"),
        counted(deployment, "gateway_tokens_total", model="demo", kind="completion"),
    )


def engine_tokens(deployment: Deployment) -> tuple[float, float]:
    """The same by vLLM's own count."""
    return (
        gauge(deployment, "vllm:prompt_tokens_total"),
        gauge(deployment, "vllm:generation_tokens_total"),
    )


@pytest.mark.parametrize(
    ("path", "body"), METERED, ids=[f"{n}-{path}" for n, (path, _) in enumerate(METERED)]
)
def test_tokens_are_those_that_vllm_counts(
    gateway: Deployment, path: str, body: dict[str, Any]
) -> None:
    ours, theirs = tokens(gateway), engine_tokens(gateway)
    with gateway.client() as client:
        assert client.post(path, json=body).status_code == 200
    computed = [
        after - before for after, before in zip(engine_tokens(gateway), theirs, strict=True)
    ]
    # The page of metrics may be a second old.
    poll_until(lambda: tokens(gateway) > ours)
    noted = [after - before for after, before in zip(tokens(gateway), ours, strict=True)]
    assert noted[1] == computed[1] > 0
    # vLLM counts a prompt once for each choice, and bills it once.
    assert noted[0] == computed[0] / (body.get("n") or 1) > 0


def test_cached_tokens_are_recorded(gateway: Deployment) -> None:
    long = {**CHAT, "messages": [{"role": "user", "content": "Once upon a time. " * 100}]}
    body = {**long, "max_tokens": 5, "stream": True}
    with gateway.client() as client:
        client.post("/v1/chat/completions", json=body)
        before = counted(gateway, "gateway_tokens_total", model="demo", kind="cached")
        client.post("/v1/chat/completions", json=body)
    # The page of metrics may be a second old.
    poll_until(
        lambda: counted(gateway, "gateway_tokens_total", model="demo", kind="cached") > before
    )


def test_tokenizing_takes_no_tokens(gateway: Deployment) -> None:
    before = tokens(gateway)
    with gateway.client() as client:
        client.post("/tokenize", json={"model": "demo", "prompt": "Hello!"})
    assert tokens(gateway) == before


def leave_after(deployment: Deployment, events: int, *, choices: int) -> tuple[int, float]:
    """Leave a stream in its middle; return the number of chunks seen, and of tokens charged."""
    before = tokens(deployment)[1]
    with generation(deployment, stream=True, choices=choices) as connection:
        seen = b""
        while seen.count(b"data: ") < events:
            seen += connection.recv(65536)
    poll_until(lambda: tokens(deployment)[1] > before, 40)
    poll_until(lambda: gauge(deployment, "vllm:num_requests_running") == 0, 40)
    return seen.count(b"data: {"), tokens(deployment)[1] - before


def test_disconnected_client_is_charged_for_received_tokens(gateway: Deployment) -> None:
    theirs = engine_tokens(gateway)
    chunks, charged = leave_after(gateway, 50, choices=1)
    assert chunks - 1 <= charged <= engine_tokens(gateway)[1] - theirs[1]  # the first opens
    assert counted(gateway, "gateway_usage_records_total", outcome="disconnected") > 0
    assert any('"estimated":true' in line for line in gateway.said().splitlines())


def test_disconnected_client_of_many_choices_is_charged_the_reservation(
    gateway: Deployment,
) -> None:
    """As vLLM merges the chunks of a slow reader, they do not show how much was generated."""
    _, charged = leave_after(gateway, 50, choices=8)
    assert charged == 8 * TOKENS


def test_refusal_by_the_engine_is_recorded(gateway: Deployment) -> None:
    before = counted(gateway, "gateway_usage_records_total", outcome="refused")
    with gateway.client() as client:
        refused = client.post("/v1/chat/completions", json={**CHAT, "temperature": 9})
    assert refused.status_code == 400
    # The page of metrics may be a second old.
    poll_until(
        lambda: counted(gateway, "gateway_usage_records_total", outcome="refused") == before + 1
    )
