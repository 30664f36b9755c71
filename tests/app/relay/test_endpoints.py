"""Endpoints that a model does not serve, through the real server with fake engines."""

import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.settings import Settings
from engines.base import EngineCapabilities, EngineState
from tests.fakes.vllm import Fake
from tests.gateway import Gateway, remote, running, settings_for

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
SERVED = "/v1/chat/completions, /v1/completions, /v1/responses, /v1/messages"


def one_model(fake: Fake, tmp_path: Path) -> Settings:
    return settings_for({"name": "demo", "engines": [remote(fake.url)]}, run_dir=tmp_path)


async def post(gateway: Gateway, path: str, model: str = "demo", **body: Any) -> httpx.Response:
    return await gateway.client.post(path, json={"model": model, **body})


class TestRemote:
    """A server whose own 404 is translated."""

    async def test_unserved_endpoint_is_refused_in_the_callers_dialect(
        self, tmp_path: Path
    ) -> None:
        async with Fake(serves=("generate",)) as chat, Fake("embed", serves=("embed",)) as embed:
            settings = settings_for(
                {"name": "demo", "aliases": ["gpt"], "engines": [remote(chat.url)]},
                {"name": "embed", "engines": [remote(embed.url)]},
                run_dir=tmp_path,
            )
            async with running(settings) as gateway:
                answer = await post(gateway, "/v1/embeddings", "gpt", input="hi")
                assert answer.status_code == 404
                assert answer.json()["error"] == {
                    "message": f"the model 'gpt' does not serve /v1/embeddings; it serves {SERVED}",
                    "type": "invalid_request_error",
                    "param": "model",
                    "code": "endpoint_not_served",
                }
                assert "x-gateway-model" not in answer.headers
                answer = await post(gateway, "/v1/messages", "embed", max_tokens=1, **CHAT)
                assert answer.status_code == 404
                assert answer.json() == {
                    "type": "error",
                    "error": {
                        "type": "not_found_error",
                        "message": "the model 'embed' does not serve /v1/messages; it serves "
                        "/v1/embeddings, /v1/rerank, /v1/score, /pooling",
                    },
                }

    async def test_other_404_of_an_engine_is_forwarded(self, gateway: Gateway) -> None:
        answer = await gateway.chat(fake="status:404")
        assert (answer.status_code, answer.json()) == (404, {"detail": "as asked"})
        assert answer.headers["x-gateway-model"] == "demo"

    async def test_fallback_without_the_endpoint_is_skipped(self, tmp_path: Path) -> None:
        async with Fake() as broken, Fake("chat", serves=("generate",)) as chat:
            broken.fault = "close"
            settings = settings_for(
                {"name": "demo", "fallbacks": ["chat"], "engines": [remote(broken.url)]},
                {"name": "chat", "engines": [remote(chat.url)]},
                run_dir=tmp_path,
            )
            async with running(settings) as gateway:
                replica = gateway.state.catalogue.find_replica("chat-0")[1]
                replica.engine.capabilities = EngineCapabilities(
                    managed=True
                )  # certain of its tasks
                answer = await post(gateway, "/v1/embeddings", input="hi")
                assert answer.json()["error"]["code"] == "engine_failed"
                assert not [seen for seen in chat.seen if seen.method == "POST"]


@pytest.mark.slow
async def test_unserved_endpoint_of_a_managed_engine_is_refused_without_a_call(
    tmp_path: Path,
) -> None:
    engine = {"kind": "process", "model": "m", "args": {"fake-tasks": ["generate"]}}
    default = {"tokens_per_minute": 1000, "requests_per_minute": 5}
    settings = settings_for(
        {"name": "demo", "engines": [engine]}, run_dir=tmp_path, limits={"default": default}
    )
    async with running(settings, (sys.executable, "-m", "tests.fakes.vllm")) as gateway:
        [running_engine] = gateway.state.catalogue.engines
        assert running_engine.state is EngineState.READY
        answer = await post(gateway, "/v1/embeddings", input="hi" * 500)
        assert answer.status_code == 404
        assert SERVED in answer.json()["error"]["message"]
        assert answer.headers["x-ratelimit-remaining-requests"] == "4"
        assert answer.headers["x-ratelimit-remaining-tokens"] == "1000", "none were taken"
        assert await gateway.metric("gateway_usage_records_total", outcome="refused") == 0
        assert (await gateway.chat()).headers["x-gateway-model"] == "demo"


class TestPathsThatMissTheVersion:
    @pytest.mark.parametrize(
        ("method", "path", "meant"),
        [
            ("POST", "/chat/completions", "/v1/chat/completions"),
            ("POST", "/messages", "/v1/messages"),
            ("GET", "/models", "/v1/models"),
            ("GET", "/models/org/demo", "/v1/models/org/demo"),
            ("GET", "/responses/resp_1", "/v1/responses/resp_1"),
            ("POST", "/v1/v1/messages", "/v1/messages"),
            ("POST", "/v1/tokenize", "/tokenize"),
        ],
    )
    async def test_path_without_version_names_the_right_path(
        self, gateway: Gateway, method: str, path: str, meant: str
    ) -> None:
        answer = await gateway.client.request(method, path)
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert error["code"] == "not_found"
        assert error["message"] == f"there is no {path} here; did you mean {meant}?"

    async def test_unknown_path_gets_no_suggestion(self, gateway: Gateway) -> None:
        for path in ("/sleep", "/v1/sleep", "/v1", "/", "/v1/nothing"):
            answer = await gateway.client.post(path)
            assert answer.status_code == 404
            assert answer.json()["error"]["message"] == f"there is no {path} here"
