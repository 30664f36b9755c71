"""The page of the audit: filters in its address, pages by cursor, and what differs."""

import re

import httpx
import pytest

from app.audit import Action, Actor, AuditRecord
from app.console import audit_page
from tests.app.console.visits import new_key, visiting
from tests.gateway import KEY, Gateway, demo_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")
gateway = demo_gateway(shared=True)
PAGE = "/console/audit"


async def read(admin: httpx.AsyncClient, **query: str) -> str:
    response = await admin.get(PAGE, params=query)
    assert response.status_code == 200, response.text
    return response.text


async def test_a_record_has_who_when_where_and_what_differs(
    gateway: Gateway, admin: httpx.AsyncClient
) -> None:
    key = await new_key(gateway, admin, name="shop <1>", requests_per_minute=60)
    changes = {"requests_per_minute": 5000, "owner": "web"}
    assert (await admin.patch(f"/console/api/admin/keys/{key['id']}", json=changes)).is_success
    page = await read(admin, target="shop <1>", action="key.change")
    assert "shop &lt;1&gt;" in page
    assert "<del>60</del>" in page
    assert "<ins>5,000</ins>" in page
    assert "127.0.0.1" in page
    assert re.search(r'<time datetime="[^"]+" title="[^"]+ UTC">\d+ s ago</time>', page)
    assert key["key"] not in page


async def test_every_kind_of_action_is_a_filter(admin: httpx.AsyncClient) -> None:
    page = await read(admin)
    for kind in {action.partition(".")[0] for action in Action}:
        assert re.search(rf'action={kind}[&"]', page), kind


async def test_filters_are_chips_that_keep_each_other(admin: httpx.AsyncClient) -> None:
    page = await read(admin, who="root", action="session", **{"from": "24h"})
    assert "session sign in" in page
    assert "<strong>Sessions</strong>" in page
    assert "<strong>Last 24 hours</strong>" in page
    assert "?who=root&amp;from=24h&amp;action=key.rotate" not in page  # the order of the address
    assert "?who=root&amp;action=key.rotate&amp;from=24h" in page
    assert "No record fits." in await read(admin, who="somebody else")


@pytest.mark.parametrize(
    "query",
    [
        {"cursor": "1.a"},
        {"from": "yesterday"},
        {"from": "2026-11-27", "to": "2026-11-26"},
        {"who": "a\0b"},
    ],
)
async def test_a_filter_that_cannot_be_read_says_so(
    admin: httpx.AsyncClient, query: dict[str, str]
) -> None:
    page = await read(admin, **query)
    assert 'role="alert"' in page


async def test_pages_follow_each_other_without_a_gap(
    gateway: Gateway, admin: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_page, "ROWS", 3)
    for number in range(7):
        record = AuditRecord(actor=Actor("pages"), action="model.load", target=f"model-{number}")
        await gateway.state.audit.record(record)
    found, path = list[str](), f"{PAGE}?who=pages"
    while path:
        text = (await admin.get(path)).text
        found += re.findall(r'title="(model-\d)"', text)
        following = re.search(r'rel="next" href="([^"]+)"', text)
        path = "" if following is None else following[1].replace("&amp;", "&")
    assert found == [f"model-{number}" for number in reversed(range(7))]
    assert ">The latest</a>" in text


async def test_only_administrators_and_auditors_see_it(
    gateway: Gateway, auditor: httpx.AsyncClient, manager: httpx.AsyncClient
) -> None:
    assert (await auditor.get(PAGE)).status_code == 200
    assert (await manager.get(PAGE)).status_code == 403
    async with visiting(gateway, KEY) as client:
        assert (await client.get(PAGE)).status_code == 403
