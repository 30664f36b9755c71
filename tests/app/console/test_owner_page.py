"""The page of an owner: its budgets and keys, and what they used this month."""

from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from app.usage import Usage
from tests.app.console.test_usage_page import use
from tests.app.console.visits import new_key, visiting
from tests.gateway import KEY, Gateway, demo_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")
SHOP = "/console/owners/the%20shop%2F%3Cb%3E"
NAME = "the shop/<b>"


gateway = demo_gateway(shared=True, model={"price": {"prompt": 2.0}}, usage={"currency": "EUR"})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def page(gateway: Gateway, admin: httpx.AsyncClient) -> AsyncIterator[str]:
    """The page of an owner with a budget, two keys and usage."""
    fields = {"monthly_tokens": 5000, "daily_cost": 0.5}
    owner = "/console/api/admin/owners/the%20shop%2F%3Cb%3E"
    assert (await admin.put(owner, json=fields)).status_code == 201
    made = await new_key(gateway, admin, name="till", owner=NAME, monthly_tokens=2000)
    await new_key(gateway, admin, name="stock", owner=NAME)
    await new_key(gateway, admin, name="of somebody else", owner="bank")
    await use(gateway, key_id=made["id"], owner=NAME, model="demo", usage=Usage(1000, 234))
    await use(gateway, key_id="key-00000000", owner="bank", model="other", usage=Usage(77_777, 1))
    response = await admin.get(SHOP)
    assert response.status_code == 200, response.text
    yield response.text


async def test_budgets_are_bars_with_what_all_keys_used(page: str) -> None:
    assert "1,234 of 5,000 tokens" in page
    assert "EUR</span> of 0.50 EUR" in page


async def test_keys_and_usage_are_those_of_the_owner_only(page: str) -> None:
    for key in ("till", "stock"):
        assert f">{key}</a>" in page
    assert "1,234 of 2,000 tokens" in page
    for other in ("somebody else", "77,777", "other"):
        assert other not in page


async def test_a_name_is_text(page: str) -> None:
    assert "<b>" not in page
    assert "the shop/&lt;b&gt;" in page


async def test_an_owner_without_limits_has_a_page_and_an_unknown_one_has_none(
    page: str, admin: httpx.AsyncClient
) -> None:
    bank = (await admin.get("/console/owners/bank")).text
    assert "No budget of its own" in bank
    assert "of somebody else" in bank
    for unknown in ("nobody", "", "x" * 300):
        assert (await admin.get(f"/console/owners/{unknown}")).status_code == 404


async def test_a_client_sees_no_owner(gateway: Gateway) -> None:
    async with visiting(gateway, KEY) as client:
        assert (await client.get(SHOP)).status_code == 403


async def test_lists_lead_to_the_page(page: str, admin: httpx.AsyncClient) -> None:
    for path in ("/console/keys", "/console/keys/owners", "/console/usage?by=owner"):
        text = (await admin.get(path)).text
        assert 'href="/console/owners/the%20shop/%3Cb%3E"' in text, path
