"""Budgets in money, and what requests reserve, through the real server with fake engines."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.app.tenants import make_key
from tests.fakes.vllm import Fake
from tests.gateway import ROOT, Gateway, free_port, remote, running, settings_for
from tests.waiting import PATIENCE_S

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
# A token of output costs 0.01.
PRICE = {"completion": 10_000.0}


def unused() -> str:
    return f"http://127.0.0.1:{free_port()}"


async def ask(gateway: Gateway, key: dict[str, str], **fields: Any) -> httpx.Response:
    return await gateway.client.post("/v1/chat/completions", json={**CHAT, **fields}, headers=key)


async def test_a_budget_in_money_is_reserved_settled_and_reported(tmp_path: Path) -> None:
    async with Fake(max_model_len=100_000) as fake:
        model = {"name": "demo", "engines": [remote(fake.url)], "price": PRICE}
        settings = settings_for(model, run_dir=tmp_path, usage={"currency": "EUR"})
        async with running(settings) as gateway:
            key = await make_key(gateway, "small", daily_cost=2.5)
            assert (await ask(gateway, key, max_tokens=200, fake="tokens:50")).status_code == 200
            refused = await ask(gateway, key, max_tokens=201)
            assert refused.status_code == 429
            error = refused.json()["error"]
            assert error["code"] == "insufficient_quota"
            assert error["message"].startswith(
                "the daily cost budget of 2.50 EUR has 2.00 EUR left until "
            )
            assert await gateway.metric("gateway_rate_limited_total", limit="budget") == 1
            assert (await ask(gateway, key, max_tokens=200, fake="tokens:1")).status_code == 200
            # Without max_tokens: as many tokens as the rest pays, which is less than is usual.
            assert (await ask(gateway, key, fake="tokens:1")).status_code == 200
            assert fake.seen[-1].json["max_tokens"] == 199
            async with asyncio.timeout(PATIENCE_S):
                while True:  # until the records are written
                    own = (await gateway.client.get("/v1/usage", headers=key)).json()
                    if own["today"]["requests"] == 3:
                        break
                    await asyncio.sleep(0.05)
    assert own["currency"] == "EUR"
    assert own["daily_budget"] is None
    budget = own["daily_cost_budget"]
    assert (budget["cost"], budget["used"], budget["left"]) == (2.5, 0.52, 1.98)


async def test_an_engine_that_ignores_its_bound_passes_no_budget(tmp_path: Path) -> None:
    async with Fake(max_model_len=100_000) as fake:
        model = {"name": "demo", "engines": [remote(fake.url)], "price": PRICE}
        async with running(settings_for(model, run_dir=tmp_path)) as gateway:
            for budget in ({"daily_cost": 0.5}, {"daily_tokens": 60}):
                key = await make_key(gateway, str(budget), **budget)
                answer = await ask(gateway, key, fake="tokens:300")
                assert answer.status_code == 200
                own: dict[str, Any] = {"today": {"requests": 0}}
                async with asyncio.timeout(PATIENCE_S):
                    while not own["today"]["requests"]:  # until the record is written
                        own = (await gateway.client.get("/v1/usage", headers=key)).json()
                used = own["daily_cost_budget"] or own["daily_budget"]
                assert used["used"] <= next(iter(budget.values()))


async def test_a_body_that_looks_like_a_long_prompt_reserves_its_whole_output(
    tmp_path: Path,
) -> None:
    # By its size the prompt leaves no room for an answer; its tokens are few.
    padded = {"metadata": {"note": " " * 4000}, "max_tokens": 900, "fake": "tokens:900"}
    async with Fake(max_model_len=1000) as fake:
        model = {"name": "demo", "engines": [remote(fake.url)], "price": PRICE}
        spare = {"name": "spare", "fallbacks": ["demo"], "engines": [remote(unused())],
                 "load_wait_s": 0}  # fmt: skip
        async with running(settings_for(model, spare, run_dir=tmp_path)) as gateway:
            key = await make_key(gateway, "small", daily_cost=8.99)
            refused = await ask(gateway, key, **padded)
            assert refused.status_code == 429
            assert "this request may cost 9.00" in refused.json()["error"]["message"]
            assert (await ask(gateway, key, model="spare", **padded)).status_code == 503
            assert (await ask(gateway, key, **{**padded, "max_tokens": 899})).status_code == 200


async def test_blanks_in_a_body_leave_no_less_room_for_its_answer(tmp_path: Path) -> None:
    body = {**CHAT, "max_tokens": 900, "fake": "tokens:900"}
    padded = json.dumps(body).replace('"demo",', '"demo",' + " " * 4000)
    async with Fake(max_model_len=1000) as fake:
        model = {"name": "demo", "engines": [remote(fake.url)]}
        async with running(settings_for(model, run_dir=tmp_path)) as gateway:
            key = await make_key(gateway, "small", daily_tokens=899)
            headers = {**key, "content-type": "application/json"}
            path = "/v1/chat/completions"
            answer = await gateway.client.post(path, content=padded, headers=headers)
            assert answer.status_code == 429


async def test_a_fallback_that_the_budget_cannot_pay_is_skipped(tmp_path: Path) -> None:
    async with Fake("dear") as dear, Fake("cheap") as cheap:
        down = remote(unused())
        models: list[dict[str, Any]] = [
            {"name": "demo", "fallbacks": ["dear", "cheap"], "engines": [down], "load_wait_s": 0},
            {"name": "dear", "engines": [remote(dear.url)], "price": PRICE},
            {"name": "cheap", "engines": [remote(cheap.url)], "price": {"completion": 1.0}},
        ]
        async with running(settings_for(*models, run_dir=tmp_path)) as gateway:
            key = await make_key(gateway, "small", monthly_cost=1)
            first = await ask(gateway, key, max_tokens=101, fake="tokens:5")
            assert first.headers["x-gateway-model"] == "cheap"
            second = await ask(gateway, key, max_tokens=90, fake="tokens:90")
            assert second.headers["x-gateway-model"] == "dear"
            third = await ask(gateway, key, max_tokens=11)
            assert third.headers["x-gateway-model"] == "cheap"


@pytest.mark.parametrize(
    ("amount", "fault"),
    [
        (-1, "from 0 to"),
        (1.0000001, "6 decimal places"),
        ("5", "must be a number"),
        (True, "must be a number"),
        (1e10, "from 0 to"),
    ],
)
async def test_amounts_that_are_none_are_refused(
    gateway: Gateway, amount: object, fault: str
) -> None:
    body = {"name": "x", "daily_cost": amount}
    refused = await gateway.client.post("/admin/keys", json=body, headers=ROOT)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("daily_cost: must")
    assert fault in refused.json()["error"]["message"]
