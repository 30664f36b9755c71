"""What Ctrl+K finds: for each role only what its pages show."""

from typing import Any

import httpx
import pytest

from app.auth import Role
from app.database import DatabaseUnavailable
from tests.app.console.test_requests_page import end
from tests.app.console.visits import new_key, visiting
from tests.gateway import KEY, KEY_ID, Gateway, demo_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")
FIND = "/console/api/find"


gateway = demo_gateway(shared=True)


async def find(visitor: httpx.AsyncClient, text: str) -> list[tuple[str, str, str]]:
    response = await visitor.post(FIND, json={"text": text})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    assert found["complete"]
    return [(one["kind"], one["title"], one["path"]) for one in found["data"]]


async def test_a_part_of_a_name_finds_models_engines_and_keys(
    gateway: Gateway, admin: httpx.AsyncClient
) -> None:
    made = await new_key(gateway, admin, name="Demonstration 50%")
    assert await find(admin, " DEMO ") == [
        ("Model", "demo", "/console/models/demo"),
        ("Engine", "demo-0", "/console/engines/demo-0"),
        ("Key", "Demonstration 50%", f"/console/keys/{made['id']}"),
    ]
    assert [title for _, title, _ in await find(admin, "50%")] == ["Demonstration 50%"]
    assert [title for _, title, _ in await find(admin, made["id"])] == ["Demonstration 50%"]
    assert await find(admin, "d%m") == []


async def test_each_page_that_is_found_is_there(gateway: Gateway, admin: httpx.AsyncClient) -> None:
    id_ = end(gateway)
    for text in ("demo", id_, "r"):
        for _, _, path in await find(admin, text):
            assert (await admin.get(path)).status_code == 200, path


async def test_a_request_is_found_by_both_of_its_ids(
    gateway: Gateway, admin: httpx.AsyncClient
) -> None:
    id_ = end(gateway)
    assert await find(admin, id_) == [("Request", id_, f"/console/requests/{id_}")]
    assert ("x-request-id", "r", "/console/requests?request_id=r") in await find(admin, "r")


async def test_a_client_finds_its_models_and_its_own_requests_only(
    gateway: Gateway, admin: httpx.AsyncClient
) -> None:
    await new_key(gateway, admin, name="demo of another tenant")
    own, others = end(gateway, KEY_ID), end(gateway, "key-00000000")
    async with visiting(gateway, KEY) as client:
        assert await find(client, "demo") == [("Model", "demo", "/console/playground?model=demo")]
        assert await find(client, own) == [("Request", own, f"/console/requests/{own}")]
        assert await find(client, others) == []
    narrow = await new_key(gateway, admin, name="narrow", models=[])
    async with visiting(gateway, narrow["key"]) as client:
        assert await find(client, "demo") == []


@pytest.mark.parametrize("text", ["", " ", "x" * 129, 5, None])
async def test_a_text_that_is_none_is_refused(admin: httpx.AsyncClient, text: object) -> None:
    assert (await admin.post(FIND, json={"text": text})).status_code == 400


async def test_a_secret_is_in_no_query(
    gateway: Gateway, admin: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await new_key(gateway, admin, name="with a secret", role=Role.CLIENT)
    monkeypatch.setattr(type(gateway.state.database), "read", None)
    assert await find(admin, made["key"]) == []
    assert await find(admin, f" {made['key'][:12]}") == []


async def test_without_a_database_models_and_engines_are_found(
    gateway: Gateway, admin: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: object) -> None:
        raise DatabaseUnavailable("down")

    monkeypatch.setattr(type(gateway.state.database), "read", read)
    found = (await admin.post(FIND, json={"text": "demo"})).json()
    assert not found["complete"]
    assert [one["kind"] for one in found["data"]] == ["Model", "Engine"]
