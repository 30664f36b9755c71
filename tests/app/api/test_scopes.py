"""Operators of some models and managers of one owner: for them there is nothing else.

What is out of a scope is answered exactly as what does not exist: every route is asked for both.
"""

import json
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from fastapi.routing import APIRoute

from app.auth import Role
from app.fleet import EngineRow
from tests.app.api.test_admin_auth import BODIES
from tests.app.console.visits import visiting
from tests.app.raw import connected, request
from tests.app.tenants import make_key, request_as_root
from tests.fakes.vllm import Fake
from tests.gateway import Gateway, remote, running, settings_for

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
ROLES = (Role.OPERATOR, Role.OWNER_MANAGER)
# In no response to the operator; and in none to the manager.
VEILED, MASKED = "veiled", "masked"
# Names that are out of scope, each with one of the same form that nothing has.
MODELS = [("veiled-model", "absent-model"), ("veiled-alias", "absent-alias")]
ENGINES = [("veiled-model-0", "absent-model-0")]
OWNERS = [("masked-owner", "absent-owner")]


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A gateway with an operator of `demo` and a manager of `team`, and what is neither's."""

    gateway: Gateway
    keys: dict[Role, dict[str, str]]  # the headers of each role
    masked_key: str  # the ID of a key of another owner
    # IDs of requests that are out of the scope of a role.
    requests: dict[Role, str]

    def outside(self, path: str, role: Role) -> list[tuple[str, str]]:
        """Return names out of scope for the parameter of a route; a new route needs a line here."""
        if "{key_id}" in path:
            return [(self.masked_key, "0" * len(self.masked_key)), ("masked-key", "absent-key")]
        if "requests/{id}" in path:
            return [(self.requests[role], "0" * 24)]
        resource = re.sub(r"^/(admin|console)", "", path).partition("/{")[0]
        return {
            "/owners": OWNERS,
            "/engines": ENGINES,
            "/models": MODELS,
            "/v1/models": MODELS,
            "/api/events": [("masked", "absent")],  # a page, which is in no scope
            "/static": [("masked", "absent")],
        }[resource]


async def chat(gateway: Gateway, headers: dict[str, str], model: str, name: str) -> str:
    """Send a request; return the ID that the gateway gave it."""
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
    named = {**headers, "x-request-id": name}
    answer = await gateway.client.post("/v1/chat/completions", json=body, headers=named)
    assert answer.status_code == 200, answer.text
    path = f"?request_id={name}"
    found = await request_as_root("/admin/requests", gateway, "GET", path)
    return str(found["ended"][0]["id"])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    async with Fake() as fake:
        models = (
            {"name": "demo", "engines": [remote(fake.url)]},
            {
                "name": "veiled-model",
                "aliases": ["veiled-alias"],
                "engines": [remote(fake.url, served_model_name="demo")],
            },
        )
        run_dir: Path = tmp_path_factory.mktemp("scopes")
        async with running(settings_for(*models, run_dir=run_dir)) as gateway:
            keys = {
                Role.OPERATOR: await make_key(
                    gateway, "operator", role="operator", models=["demo"]
                ),
                Role.OWNER_MANAGER: await make_key(
                    gateway, "lead", role="owner_manager", owner="team", models=["demo"]
                ),
            }
            own = await make_key(gateway, "own", owner="team")
            other = await make_key(gateway, "masked-key", owner="masked-owner")
            await make_key(gateway, "unused-key")
            for owner in ("team", "masked-owner"):
                limits = {"requests_per_minute": 100, "daily_tokens": 1_000_000}
                await request_as_root("/admin/owners", gateway, "PUT", f"/{owner}", limits, 201)
            masked = await request_as_root("/admin/keys", gateway, "GET", "/masked-key")
            await chat(gateway, own, "demo", "both")
            requests = {
                Role.OPERATOR: await chat(gateway, own, "veiled-model", "veiled-request"),
                Role.OWNER_MANAGER: await chat(gateway, other, "demo", "masked-request"),
            }
            yield World(gateway=gateway, keys=keys, masked_key=masked["id"], requests=requests)


def routes_of(gateway: Gateway) -> Iterator[tuple[str, str]]:
    for route in gateway.state.routes:
        if isinstance(route, APIRoute):
            for method in sorted(route.methods):
                yield method, route.path


def addressed(path: str, name: str) -> str:
    return re.sub(r"{(\w+)(:path)?}", lambda found: "x" if found[1] == "version" else name, path)


async def ask(
    client: httpx.AsyncClient, world: World, role: Role, method: str, path: str, name: str
) -> tuple[int, str]:
    """Return the status and the body of a request that names something."""
    headers = {} if path.startswith("/console") else world.keys[role]
    body = BODIES.get((method, path), {})
    answer = await client.request(method, addressed(path, name), json=body, headers=headers)
    return answer.status_code, answer.text


def secret_of(role: Role) -> str:
    return VEILED if role is Role.OPERATOR else MASKED


@pytest.mark.parametrize("role", ROLES)
async def test_what_is_out_of_scope_is_as_if_it_did_not_exist(world: World, role: Role) -> None:
    gateway = world.gateway
    before = await gateway.state.key_store.get(world.masked_key)
    secret = world.keys[role]["authorization"].removeprefix("Bearer ")
    async with visiting(gateway, secret) as session:
        for method, path in routes_of(gateway):
            if "{" not in path:
                continue
            client = session if path.startswith("/console") else gateway.client
            for outside, absent in world.outside(path, role):
                status, text = await ask(client, world, role, method, path, outside)
                expected = await ask(client, world, role, method, path, absent)
                assert (status, text.replace(outside, absent)) == expected, (method, path)
                assert status in (401, 403, 404), (method, path, text)
    assert await gateway.state.key_store.get(world.masked_key) == before


@pytest.mark.parametrize("role", ROLES)
async def test_no_list_has_anything_out_of_scope(world: World, role: Role) -> None:
    gateway, secret = world.gateway, world.keys[role]["authorization"].removeprefix("Bearer ")
    seen: set[str] = set()
    async with visiting(gateway, secret) as session:
        for method, path in routes_of(gateway):
            if method != "GET" or "{" in path or path.startswith("/metrics"):
                continue
            client = session if path.startswith("/console") else gateway.client
            status, text = await ask(client, world, role, method, path, "")
            assert secret_of(role) not in text, path
            assert world.requests[role] not in text, path
            assert role is Role.OPERATOR or world.masked_key not in text, path
            if status == 200:
                seen.add(path)
    lists = {
        Role.OPERATOR: {"/admin/engines", "/admin/models", "/console/engines", "/console/models"},
        Role.OWNER_MANAGER: {
            "/admin/keys", "/admin/owners", "/admin/usage", "/console/keys", "/console/keys/owners",
            "/console/usage", "/console/usage/csv",
        },
    }  # fmt: skip
    assert lists[role] | {"/admin/requests", "/console/requests"} <= seen


FILTERS: dict[Role, list[tuple[str, str, str]]] = {
    Role.OPERATOR: [
        ("/admin/requests?model={}", *MODELS[0]),
        ("/admin/requests?request_id={}", "veiled-request", "absent-request"),
        ("/admin/requests?key={}", "unused-key", "absent-key"),  # no names of keys to guess
        ("/console/requests?order=latest&model={}", *MODELS[0]),
        ("/console/requests?order=latest&key={}", "unused-key", "absent-key"),
        ("/console/api/requests?model={}", *MODELS[0]),
        ("/console/engines?engine={}", *ENGINES[0]),
    ],
    Role.OWNER_MANAGER: [
        ("/admin/requests?key={}", "masked-key", "absent-key"),
        ("/admin/requests?request_id={}", "masked-request", "absent-request"),
        ("/admin/usage?key={}", "masked-key", "absent-key"),
        ("/admin/usage?owner={}", *OWNERS[0]),
        ("/admin/owners?after={}", *OWNERS[0]),
        ("/console/usage?owner={}", *OWNERS[0]),
        ("/console/usage?key={}", "masked-key", "absent-key"),
        ("/console/usage/csv?owner={}", *OWNERS[0]),
        ("/console/requests?order=latest&key={}", "masked-key", "absent-key"),
        ("/console/keys/owners?name={}", *OWNERS[0]),
    ],
}


@pytest.mark.parametrize("role", ROLES)
async def test_filters_tell_nothing_of_what_is_out_of_scope(world: World, role: Role) -> None:
    secret = world.keys[role]["authorization"].removeprefix("Bearer ")
    async with visiting(world.gateway, secret) as session:
        for query, outside, absent in FILTERS[role]:
            client = session if query.startswith("/console") else world.gateway.client
            headers = {} if query.startswith("/console") else world.keys[role]
            found, expected = [
                await client.get(query.format(name), headers=headers) for name in (outside, absent)
            ]
            assert found.status_code == expected.status_code, query
            texts = [
                re.sub(r'"(from|to)":"[^"]*"|\d+ s ago', "", one.text) for one in (found, expected)
            ]
            assert texts[0].replace(outside, absent) == texts[1], query
        text = {"text": "veiled" if role is Role.OPERATOR else "masked"}
        answer = await session.post("/console/api/find", json=text)
        assert answer.json() == {"data": [], "complete": True}


@pytest.mark.parametrize("after", ["masked", "absent"])
async def test_no_page_of_keys_begins_behind_a_key_of_another_owner(
    world: World, after: str
) -> None:
    key_id = world.masked_key if after == "masked" else "0" * len(world.masked_key)
    headers = world.keys[Role.OWNER_MANAGER]
    answer = await world.gateway.client.get(f"/admin/keys?after={key_id}", headers=headers)
    assert answer.status_code == 404


@pytest.mark.parametrize("page", ["models", "engines"])
async def test_live_regions_are_those_of_the_operators_models(world: World, page: str) -> None:
    secret = world.keys[Role.OPERATOR]["authorization"].removeprefix("Bearer ")
    async with (
        visiting(world.gateway, secret) as session,
        session.stream("GET", f"/console/api/events/{page}") as events,
    ):
        first = await anext(events.aiter_text())
    assert "demo" in first
    assert VEILED not in first


async def test_an_operator_cancels_requests_of_its_models_only(world: World) -> None:
    gateway, headers = world.gateway, world.keys[Role.OPERATOR]
    for model, status in (("veiled-model", 404), ("demo", 200)):
        async with connected(gateway) as client:
            body = {"model": model, "messages": [], "stream": True, "fake": "stall:3"}
            client.send(request(json.dumps(body).encode(), path=b"/v1/chat/completions"))
            await client.until(b"data: ")
            [row] = (await request_as_root("/admin/requests", gateway, "GET"))["in_flight"]
            path = f"/admin/requests/{row['id']}"
            shown = await gateway.client.get(path, headers=headers)
            canceled = await gateway.client.post(f"{path}/cancel", headers=headers)
            assert (shown.status_code, canceled.status_code) == (status, status)
            if status == 404:
                await request_as_root("/admin/requests", gateway, "POST", f"/{row['id']}/cancel")
            assert b"request_canceled" in await client.chunked()


async def test_an_operator_operates_its_models(world: World) -> None:
    gateway, headers = world.gateway, world.keys[Role.OPERATOR]
    loaded = await gateway.client.post("/admin/models/demo/load?wait=true", headers=headers)
    assert loaded.status_code == 200
    shown = await gateway.client.get("/admin/engines/demo-0", headers=headers)
    assert EngineRow.model_validate_json(shown.text).model == "demo"
    for path in ("/admin/reload", "/admin/logs"):
        answer = await gateway.client.request("POST", path, json={}, headers=headers)
        assert answer.status_code in (403, 405), path
    page = await request_as_root("/admin/audit", gateway, "GET", "?action=model.load")
    assert [(one["target"], one["role"]) for one in page["data"]] == [("demo", "operator")]


async def test_a_manager_without_an_owner_manages_nothing(world: World) -> None:
    """Keys without an owner are not those of a manager whose owner an administrator removed."""
    gateway = world.gateway
    made = await make_key(gateway, "orphan", role="owner_manager", owner="gone")
    await request_as_root("/admin/keys", gateway, "PATCH", "/orphan", {"owner": ""})
    await gateway.state.authenticator.poll()
    for path in ("keys", "owners", "usage", "requests"):
        answer = await gateway.client.get(f"/admin/{path}", headers=made)
        assert answer.status_code == 403, path


@pytest.mark.parametrize("fields", [{"role": "operator"}, {"role": "owner_manager"}])
async def test_a_role_with_a_scope_needs_one(world: World, fields: dict[str, str]) -> None:
    body = {"name": "no scope", **fields}
    answer = await request_as_root("/admin/keys", world.gateway, "POST", "", body, 400)
    assert "needs the" in answer["error"]["message"]
