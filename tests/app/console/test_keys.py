"""The pages of keys and owners: what each role sees, and that names are shown as text."""

from collections.abc import Collection
from datetime import date

import httpx
import pytest

from app.database import Database
from app.usage import key_budgets
from tests.app.console.visits import new_key, visiting
from tests.gateway import KEY, Gateway, demo_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")
MARKUP = "<img src=x onerror=\"alert(1)\"> & 'quotes'"
ACTIONS = ("data-key-form", "data-rotate", "data-disable", "data-delete", "keys.js")


gateway = demo_gateway(shared=True)


async def page(visitor: httpx.AsyncClient, path: str, status: int = 200) -> str:
    response = await visitor.get(path)
    assert response.status_code == status, response.text
    assert response.headers["content-type"].startswith("text/html")
    assert response.headers["cache-control"] == "no-store"
    return response.text


async def test_a_key_is_listed_without_its_secret(
    gateway: Gateway, admin: httpx.AsyncClient
) -> None:
    made = await new_key(gateway, admin, name="listed", owner="research", daily_tokens=1234567)
    for path in ("/console/keys", f"/console/keys/{made['id']}"):
        text = await page(admin, path)
        assert "listed" in text
        assert "research" in text
        assert "1,234,567 tokens a day" in text
        assert made["key"] not in text
        assert made["key"].rpartition("-")[2] not in text


async def test_a_new_secret_is_in_one_response_that_nothing_stores(
    admin: httpx.AsyncClient,
) -> None:
    made = await admin.post("/console/api/admin/keys", json={"name": "stored nowhere"})
    rotated = await admin.post(f"/console/api/admin/keys/{made.json()['id']}/rotate")
    for response in (made, rotated):
        assert response.headers["cache-control"] == "no-store"
        assert response.json()["key"].startswith("sk-gw-")


async def test_a_row_has_the_limits_of_its_key_and_the_defaults_stand_once(
    gateway: Gateway, admin: httpx.AsyncClient
) -> None:
    made = await new_key(gateway, admin, name="limited", requests_per_minute=41)
    row = (await page(admin, "/console/keys")).split(f'title="{made["id"]}"')[1].split("</tr>")[0]
    assert "41 requests/min" in row
    assert "tokens/min" not in row
    text = await page(admin, "/console/keys")
    assert text.count("600 requests/min · 200,000 tokens/min · 32 at once") == 1


async def test_budgets_are_read_of_the_keys_of_the_page_that_have_one(
    gateway: Gateway, admin: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def counted(database: Database, today: date, ids: Collection[str]) -> object:
        asked.extend(ids)
        return await key_budgets(database, today, ids)

    monkeypatch.setattr("app.console.keys.key_budgets", counted)
    monkeypatch.setattr("app.console.keys.PAGE", 2)
    older = await new_key(gateway, admin, name="of the next page", monthly_tokens=10)
    budgeted = await new_key(gateway, admin, name="budgeted", monthly_tokens=1000)
    await new_key(gateway, admin, name="free")
    text = await page(admin, "/console/keys")
    assert asked == [budgeted["id"]]
    assert older["id"] not in text
    assert "Budget of budgeted used this month" in text
    await new_key(gateway, admin, name="free, too")
    await page(admin, "/console/keys")
    assert asked == [budgeted["id"]]


async def test_names_are_shown_as_text(gateway: Gateway, admin: httpx.AsyncClient) -> None:
    made = await new_key(gateway, admin, name=MARKUP, owner=MARKUP, models=["x*"])
    saved = await admin.put("/console/api/admin/owners/<b>o</b>", json={"daily_tokens": 1})
    assert saved.status_code == 201
    for path in (
        "/console/keys",
        f"/console/keys/{made['id']}",
        "/console/keys/owners",
        "/console/keys/owners?name=%3Cb%3Eo%3C/b%3E",
    ):
        text = await page(admin, path)
        assert "<img" not in text
        assert "<b>" not in text
        assert "&lt;" in text


async def test_a_manager_changes_keys_of_clients_only(
    gateway: Gateway, admin: httpx.AsyncClient, manager: httpx.AsyncClient
) -> None:
    client = await new_key(gateway, admin, name="of a client")
    other = await new_key(gateway, admin, name="of an auditor", role="auditor")
    shown = await page(manager, f"/console/keys/{client['id']}")
    assert all(action in shown for action in ACTIONS)
    hidden = await page(manager, f"/console/keys/{other['id']}")
    assert not any(action in hidden for action in ACTIONS)
    form = await page(manager, "/console/keys/new")
    assert 'value="client"' in form
    assert 'value="admin"' not in form
    refused = await manager.post(f"/console/api/admin/keys/{other['id']}/disable")
    assert refused.status_code == 403


async def test_an_auditor_reads_keys_and_changes_none(
    gateway: Gateway, admin: httpx.AsyncClient, auditor: httpx.AsyncClient
) -> None:
    client = await new_key(gateway, admin, name="audited")
    assert "/console/keys/new" not in await page(auditor, "/console/keys")
    shown = await page(auditor, f"/console/keys/{client['id']}")
    assert not any(action in shown for action in ACTIONS)
    await page(auditor, "/console/keys/new", 403)
    refused = await auditor.delete(f"/console/api/admin/keys/{client['id']}")
    assert refused.status_code == 403


async def test_owners_are_changed_by_administrators_only(
    admin: httpx.AsyncClient, manager: httpx.AsyncClient
) -> None:
    assert "data-owner-form" in await page(admin, "/console/keys/owners")
    assert "data-owner-form" not in await page(manager, "/console/keys/owners")
    refused = await manager.put("/console/api/admin/owners/x", json={})
    assert refused.status_code == 403


async def test_a_client_sees_no_page_of_keys(gateway: Gateway) -> None:
    async with visiting(gateway, KEY) as client:
        for path in ("", "/new", "/owners", "/0123456789"):
            await page(client, f"/console/keys{path}", 403)
        assert (await client.post("/console/keys/find", data={"name": "x"})).status_code == 403


async def test_a_key_is_found_by_its_name_and_by_its_id(
    gateway: Gateway, admin: httpx.AsyncClient
) -> None:
    made = await new_key(gateway, admin, name="to be found")
    for sought in ("to be found", made["id"], f" {made['id']} "):
        found = await admin.post("/console/keys/find", data={"name": sought})
        assert (found.status_code, found.headers["location"]) == (
            303,
            f"/console/keys/{made['id']}",
        )
    missed = await admin.post("/console/keys/find", data={"name": "to be fuond"})
    assert missed.status_code == 404
    assert "did you mean" in missed.text
    secret = await admin.post("/console/keys/find", data={"name": made["key"]})
    assert made["key"] not in secret.text


async def test_a_search_that_another_site_sends_is_refused(admin: httpx.AsyncClient) -> None:
    headers = {"sec-fetch-site": "cross-site"}
    sent = await admin.post("/console/keys/find", data={"name": "x"}, headers=headers)
    assert sent.status_code == 403


async def test_a_key_that_is_not_there_is_explained_on_a_page(admin: httpx.AsyncClient) -> None:
    assert "there is no such key" in await page(admin, "/console/keys/0123456789", 404)
    assert "there is no such owner" in await page(admin, "/console/keys/owners?name=none", 404)
    assert "there is no such key" in await page(admin, "/console/keys?after=0123456789", 404)


async def test_states_of_a_key_are_words(gateway: Gateway, admin: httpx.AsyncClient) -> None:
    made = await new_key(gateway, admin, name="states", expires="2026-01-01T00:00:00Z")
    at = f"/console/keys/{made['id']}"
    assert ">expired<" in await page(admin, at)
    await admin.post(f"/console/api/admin/keys/{made['id']}/disable?now=true")
    text = await page(admin, at)
    assert ">disabled<" in text
    assert "data-enable" in text


async def test_keys_come_in_pages(
    gateway: Gateway, admin: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.console.keys.PAGE", 2)
    made = [await new_key(gateway, admin, name=f"paged {number}") for number in range(4)]
    first = await page(admin, "/console/keys")
    assert "paged 3" in first
    assert "paged 1" not in first
    assert f"/console/keys?after={made[2]['id']}" in first
    assert "paged 1" in await page(admin, f"/console/keys?after={made[2]['id']}")
