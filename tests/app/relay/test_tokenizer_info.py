"""GET /tokenizer_info: of one model, which the query names."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.app.tenants import make_key, tokens
from tests.fakes.vllm import Fake
from tests.gateway import Gateway, remote, running, settings_for

INFO = "/tokenizer_info"


@pytest.fixture
async def two(fake: Fake, tmp_path: Path) -> AsyncIterator[Gateway]:
    """A gateway with the models demo, alias gpt-4o-mini, and other."""
    async with Fake("other") as other:
        models = (
            {"name": "demo", "aliases": ["gpt-4o-mini"], "engines": [remote(fake.url)]},
            {"name": "other", "engines": [remote(other.url)]},
        )
        async with running(settings_for(*models, run_dir=tmp_path)) as gateway:
            yield gateway


async def test_the_only_model_needs_no_name(gateway: Gateway, fake: Fake) -> None:
    answer = await gateway.client.get(INFO)
    assert answer.status_code == 200
    assert answer.json()["chat_template"] == "{# demo #}"
    assert answer.headers["x-gateway-model"] == "demo"
    seen = fake.seen[-1]
    assert (seen.method, seen.target, seen.body) == ("GET", INFO, b"")


@pytest.mark.parametrize("name", ["other", "demo", "gpt-4o-mini"])
async def test_query_names_the_model(two: Gateway, fake: Fake, name: str) -> None:
    answer = await two.client.get(INFO, params={"model": name})
    model = "other" if name == "other" else "demo"
    assert answer.json()["chat_template"] == f"{{# {model} #}}"
    assert await two.metric("gateway_requests_total", model=model, endpoint=INFO, status="200") == 1
    assert await tokens(two, "prompt") == 0


@pytest.mark.parametrize("query", ["", "?model=", "?model=demo&model=other"])
async def test_several_models_need_one_name(two: Gateway, query: str) -> None:
    answer = await two.client.get(INFO + query)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "missing_model")


async def test_key_sees_its_own_models_only(two: Gateway, fake: Fake) -> None:
    headers = await make_key(two, "one", models=["other"])
    answer = await two.client.get(INFO, headers=headers)
    assert answer.json()["chat_template"] == "{# other #}"
    before = len(fake.seen)
    answer = await two.client.get(INFO, params={"model": "demo"}, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert len(fake.seen) == before


async def test_engine_without_the_flag_does_not_serve_it(gateway: Gateway, fake: Fake) -> None:
    fake.tokenizer_info = False
    answer = await gateway.client.get(INFO)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "endpoint_not_served")


async def test_it_counts_against_the_limit_of_requests(fake: Fake, tmp_path: Path) -> None:
    model = {"name": "demo", "engines": [remote(fake.url)]}
    limits = {"default": {"requests_per_minute": 3}}
    async with running(settings_for(model, run_dir=tmp_path, limits=limits)) as gateway:
        found = [(await gateway.client.get(INFO)).status_code for _ in range(4)]
        missing = await gateway.client.get(INFO, params={"model": "none"})
    assert found == [200, 200, 200, 429]
    assert missing.status_code == 429
