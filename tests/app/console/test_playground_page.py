"""The playground over HTTP: its page, its models and its requests."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.app.console.fleet import engine_of, fleet
from tests.app.console.visits import new_key, visiting
from tests.fakes.vllm import Fake
from tests.gateway import KEY, ROOT_KEY, Gateway, remote, running, settings_for

PRICE = {"prompt": 0.5, "cached": 0.1, "completion": 1.5}


async def test_it_offers_the_models_that_the_key_may_use(fake: Fake, tmp_path: Path) -> None:
    models = (
        {"name": "demo", "aliases": ["short"], "price": PRICE, "engines": [remote(fake.url)]},
        {"name": "other", "engines": [remote(fake.url)]},
    )
    async with (
        running(settings_for(*models, run_dir=tmp_path)) as gateway,
        visiting(gateway, ROOT_KEY) as admin,
    ):
        rows = (await admin.get("/console/api/playground/models")).json()["models"]
        assert [row["name"] for row in rows] == ["demo", "short", "other"]
        assert rows[1]["alias_of"] == "demo"
        assert rows[1]["price"] == {
            "prompt": 500_000_000,
            "cached": 100_000_000,
            "completion": 1_500_000_000,
        }
        assert rows[2]["price"] is None
        assert rows[0]["forms"] == ["chat", "embeddings", "rerank", "score"]
        key = await new_key(gateway, admin, name="one", models=["other"])
        async with visiting(gateway, key["key"]) as client:
            rows = (await client.get("/console/api/playground/models")).json()["models"]
            assert [row["name"] for row in rows] == ["other"]


@pytest.mark.parametrize("role", ["auditor", "manager"])
async def test_who_may_not_use_models_has_no_playground(gateway: Gateway, role: str) -> None:
    async with visiting(gateway, ROOT_KEY) as admin:
        key = await new_key(gateway, admin, name=role, role=role)
    async with visiting(gateway, key["key"]) as client:
        chat = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
        responses = [
            await client.get("/console/playground"),
            await client.get("/console/api/playground/models"),
            await client.post("/console/api/v1/chat/completions", json=chat),
        ]
    assert [response.status_code for response in responses] == [403] * 3


async def test_a_chat_takes_the_way_of_all_requests(gateway: Gateway, fake: Fake) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with visiting(gateway, KEY) as client:
        response = await client.post("/console/api/v1/chat/completions", json=body)
    assert response.status_code == 200
    assert response.text.endswith("data: [DONE]\n\n")
    assert response.headers["x-gateway-model"] == "demo"
    assert "cookie" not in {name.lower() for name, _ in fake.seen[-1].headers}


async def test_pages_say_that_captures_keep_prompts_and_answers(gateway: Gateway) -> None:
    chat = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
    async with visiting(gateway, KEY) as client:
        await client.post("/console/api/v1/chat/completions", json=chat)
        for page in ("playground", "requests"):
            text = (await client.get(f"/console/{page}")).text
            assert "configuration captures them" in text, page


async def test_it_knows_defaults_tools_and_starts_of_our_engines(tmp_path: Path) -> None:
    async with fleet(tmp_path) as gateway, visiting(gateway, ROOT_KEY) as admin:
        ready = engine_of(gateway, "ready")
        ready.facts = replace(ready.facts, sampling_defaults={"temperature": 0.6})
        ready.runs += " --enable-auto-tool-choice"
        found = (await admin.get("/console/api/playground/models")).json()["models"]
    rows = {row["name"]: row for row in found}
    assert (rows["ready"]["defaults"]["temperature"], rows["ready"]["defaults"]["top_p"]) == (
        0.6,
        1,
    )
    assert (rows["ready"]["tools"], rows["ready"]["starting"]) == (True, None)
    assert rows["starting"]["tools"] is False
    assert rows["starting"]["starting"]["step"] == "shard 2 of 5"
    assert (rows["far"]["defaults"], rows["far"]["tools"]) == (None, True)
