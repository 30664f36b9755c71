"""/admin/owners over HTTP, and what an owner's limits and budgets do to its keys."""

import asyncio
from functools import partial
from typing import Any

import httpx
import pytest

from tests.app.tenants import make_key, request_as_root
from tests.fakes.vllm import Fake
from tests.gateway import ROOT, Gateway, demo_gateway
from tests.waiting import PATIENCE_S

Key = dict[str, str]


gateway = demo_gateway(anonymous=True)


admin = partial(request_as_root, "/admin/owners")


async def chat(gateway: Gateway, key: Key, **fields: Any) -> httpx.Response:
    body = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], **fields}
    return await gateway.client.post("/v1/chat/completions", json=body, headers=key)


async def until_status(gateway: Gateway, key: Key, status: int) -> httpx.Response:
    """Ask until the gateway has heard of a change; return the first answer with that status."""
    async with asyncio.timeout(PATIENCE_S):
        while (response := await chat(gateway, key)).status_code != status:
            await asyncio.sleep(0.02)
    return response


def message(response: httpx.Response) -> str:
    error_message: str = response.json()["error"]["message"]
    return error_message


async def test_an_owner_is_put_shown_changed_listed_and_deleted(gateway: Gateway) -> None:
    put = await admin(gateway, "PUT", "/team/a%20b", {"requests_per_minute": 5}, 201)
    assert (put["name"], put["requests_per_minute"], put["keys"]) == ("team/a b", 5, 0)
    assert await admin(gateway, "GET", "/team/a%20b") == put
    changed = await admin(gateway, "PATCH", "/team/a%20b", {"daily_tokens": 7})
    assert changed == {**put, "daily_tokens": 7}
    replaced = await admin(gateway, "PUT", "/team/a%20b", {"monthly_tokens": 0})
    assert replaced == {**put, "requests_per_minute": None, "monthly_tokens": 0}
    assert await admin(gateway, "GET") == {"data": [replaced], "has_more": False}
    assert await admin(gateway, "GET", "?limit=1&after=team/a%20b") == {
        "data": [], "has_more": False,
    }  # fmt: skip
    assert await admin(gateway, "DELETE", "/team/a%20b", status=204) is None
    for method in ("GET", "PATCH", "DELETE"):
        error_message = await admin(gateway, method, "/team/a%20b", {}, 404)
        assert error_message["error"]["message"] == "there is no such owner"


@pytest.mark.parametrize(
    ("path", "body", "error_message"),
    [
        ("/a", {"requests_per_minute": -1}, "requests_per_minute: "),
        ("/a", {"daily_tokens": "7"}, "daily_tokens: "),
        ("/a", {"name": "b"}, "name: unknown field"),
        ("/%20a", {}, "name: begins or ends with a space"),
        ("/a%07b", {}, "name: contains a non-printable character"),
        (f"/{'a' * 201}", {}, "name: "),
    ],
)
async def test_invalid_field_is_named_in_one_line(
    gateway: Gateway, path: str, body: dict[str, Any], error_message: str
) -> None:
    answer = await admin(gateway, "PUT", path, body, 400)
    assert answer["error"]["message"].startswith(error_message)
    assert (await admin(gateway, "GET"))["data"] == []


async def test_keys_share_the_requests_of_their_owner(gateway: Gateway) -> None:
    await admin(gateway, "PUT", "/research", {"requests_per_minute": 3}, 201)
    one = await make_key(gateway, "one", owner="research")
    other = await make_key(gateway, "other", owner="research")
    stranger = await make_key(gateway, "stranger", owner="ops")
    first = await chat(gateway, one)
    assert first.status_code == 200
    assert first.headers["x-ratelimit-limit-requests"] == "3"
    assert first.headers["x-ratelimit-remaining-requests"] == "2"
    assert [(await chat(gateway, key)).status_code for key in (other, one)] == [200, 200]
    refused = await chat(gateway, other)
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert message(refused).startswith(
        "the owner of this key may make 3 requests per minute with all its keys together; "
    )
    assert "research" not in refused.text
    assert int(refused.headers["retry-after"]) in range(10, 21)
    assert (await chat(gateway, stranger)).status_code == 200


async def test_a_large_body_is_refused_by_the_owners_limit_before_it_is_read(
    gateway: Gateway, fake: Fake
) -> None:
    await admin(gateway, "PUT", "/research", {"requests_per_minute": 1}, 201)
    key = await make_key(gateway, "one", owner="research")
    large = [{"role": "user", "content": "x" * 100_000}]
    assert (await chat(gateway, key, messages=large)).status_code == 200
    refused = await chat(gateway, key, messages=large)
    assert refused.status_code == 429
    assert "the owner of this key" in message(refused)
    assert len([one for one in fake.seen if one.target == "/v1/chat/completions"]) == 1


async def test_keys_share_the_budget_of_their_owner_and_see_it(gateway: Gateway) -> None:
    await admin(gateway, "PUT", "/research", {"daily_tokens": 1000}, 201)
    one = await make_key(gateway, "one", owner="research")
    other = await make_key(gateway, "other", owner="research", daily_tokens=10**6)
    assert (await chat(gateway, one, max_tokens=10)).status_code == 200
    own = (await gateway.client.get("/v1/usage", headers=other)).json()
    assert own["month"]["requests"] == 0
    async with asyncio.timeout(PATIENCE_S):
        while not own["owner"]["daily_budget"]["used"]:  # until the record is written
            await asyncio.sleep(0.05)
            own = (await gateway.client.get("/v1/usage", headers=other)).json()
    budget = own["owner"]["daily_budget"]
    assert (budget["tokens"], budget["left"]) == (1000, 1000 - budget["used"])
    assert own["owner"]["monthly_budget"] is None
    refused = await chat(gateway, other, max_tokens=999)
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "insufficient_quota"
    assert message(refused).startswith(
        "the daily budget of 1,000 tokens, which all keys of this key's owner share, "
    )
    report = await gateway.client.get("/admin/usage", params={"by": "owner"}, headers=ROOT)
    assert [(row["owner"], row["requests"]) for row in report.json()["data"]] == [("research", 1)]


async def test_a_running_gateway_applies_every_change(gateway: Gateway) -> None:
    key = await make_key(gateway, "one", owner="research")
    assert (await chat(gateway, key)).status_code == 200
    await admin(gateway, "PUT", "/research", {"requests_per_minute": 0}, 201)
    refused = await until_status(gateway, key, 429)
    assert message(refused) == "the owner of this key may make no requests: its limit is 0"
    assert "retry-after" not in refused.headers
    await admin(gateway, "PATCH", "/research", {"requests_per_minute": None})
    await until_status(gateway, key, 200)
    await admin(gateway, "PATCH", "/research", {"monthly_tokens": 0})
    refused = await until_status(gateway, key, 429)
    assert message(refused) == "the monthly budget of the owner of this key is 0 tokens"
    await admin(gateway, "DELETE", "/research", status=204)
    await until_status(gateway, key, 200)
