"""The page of an account: a client's own key, its limits, budgets and usage, and nobody else's."""

import asyncio

import httpx
import pytest

from app.usage import Usage
from tests.app.console.test_usage_page import use
from tests.app.console.visits import new_key, visiting
from tests.gateway import KEY, KEY_ID, Gateway, demo_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")
PAGE = "/console/account"
MARKUP = "<img src=x onerror=\"alert(1)\"> & 'quotes'"


gateway = demo_gateway(shared=True)


async def account(gateway: Gateway, key: str) -> str:
    """Return the page that a key sees."""
    async with visiting(gateway, key) as visitor:
        response = await visitor.get(PAGE)
    assert response.status_code == 200, response.text
    return response.text


async def test_the_key_and_its_usage(gateway: Gateway, admin: httpx.AsyncClient) -> None:
    made = await new_key(gateway, admin, name="mine", expires="2099-01-02T03:04:00Z")
    other = await new_key(gateway, admin, name="of another")
    await use(gateway, key_id=made["id"], usage=Usage(7654, 321))
    await use(gateway, key_id=other["id"], usage=Usage(999_111, 1))
    text = await account(gateway, made["key"])
    for shown in ("mine", made["id"], "2099-01-02 03:04", "demo", "7,654", "321"):
        assert shown in text
    for hidden in ("of another", "999,111", other["id"], made["key"]):
        assert hidden not in text


async def test_limits_show_what_is_in_use_now(gateway: Gateway, admin: httpx.AsyncClient) -> None:
    made = await new_key(
        gateway, admin, name="limited", requests_per_minute=10, tokens_per_minute=100_000,
        concurrent_requests=4,
    )  # fmt: skip
    text = await account(gateway, made["key"])
    assert "0 of 10 requests" in text
    assert "0 of 4 requests" in text
    headers = {"authorization": f"Bearer {made['key']}"}
    body = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
    await gateway.client.post("/v1/chat/completions", json=body, headers=headers)
    text = await account(gateway, made["key"])
    assert "1 of 10 requests, 10 %" in text
    assert "free again in" in text


async def test_a_look_at_the_page_takes_nothing_from_the_limits(
    gateway: Gateway, admin: httpx.AsyncClient
) -> None:
    made = await new_key(gateway, admin, name="looks", requests_per_minute=5, concurrent_requests=1)
    async with visiting(gateway, made["key"]) as visitor:
        pages = await asyncio.gather(*(visitor.get(PAGE) for _ in range(10)))
    assert all("0 of 5 requests" in page.text for page in pages)
    assert all("0 of 1 requests" in page.text for page in pages)


async def test_budgets_of_the_key_and_of_its_owner(
    gateway: Gateway, admin: httpx.AsyncClient
) -> None:
    saved = await admin.put("/console/api/admin/owners/shared", json={"daily_tokens": 400})
    assert saved.status_code == 201
    made = await new_key(
        gateway, admin, name="has budgets", owner="shared", daily_tokens=200, monthly_tokens=50
    )
    await use(gateway, key_id=made["id"], owner="shared", usage=Usage(60, 40))
    await use(gateway, key_id="key-of-a-colleague", owner="shared", usage=Usage(100, 0))
    text = await account(gateway, made["key"])
    assert "100 of 200 tokens, 50 %" in text
    assert "100 of 50 tokens, 200 %" in text
    assert "used up" in text
    assert "200 of 400 tokens, 50 %" in text
    assert "All keys of shared" in text
    assert "00:00 UTC" in text


async def test_names_are_shown_as_text(gateway: Gateway, admin: httpx.AsyncClient) -> None:
    limits = {"requests_per_minute": 5, "daily_tokens": 9}
    saved = await admin.put("/console/api/admin/owners/<b>o</b>", json=limits)
    assert saved.status_code == 201
    made = await new_key(gateway, admin, name=MARKUP, owner="<b>o</b>")
    await use(gateway, key_id=made["id"], model="<b>m</b>", usage=Usage(1, 1))
    text = await account(gateway, made["key"])
    assert "<img" not in text
    assert "<b>" not in text
    assert "&lt;b&gt;m&lt;/b&gt;" in text


async def test_a_key_of_the_configuration_has_an_account(gateway: Gateway) -> None:
    text = await account(gateway, KEY)
    assert KEY_ID in text
    assert "A key of the configuration" in text
    assert KEY not in text


@pytest.mark.parametrize("role", ["auditor", "manager", "admin"])
async def test_only_clients_have_an_account(
    gateway: Gateway, admin: httpx.AsyncClient, role: str
) -> None:
    made = await new_key(gateway, admin, name=f"not of a client: {role}", role=role)
    async with visiting(gateway, made["key"]) as visitor:
        assert (await visitor.get(PAGE)).status_code == 403
