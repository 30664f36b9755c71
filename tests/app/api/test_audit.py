"""The audit: whatever changes something leaves one record, or does not happen."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from sqlalchemy import text

from app.audit import Action
from app.auth import KeyFields, NewKey
from app.main import create_app
from app.settings import digest
from engines.base import EngineState
from tests.app.api.test_admin_engines import put
from tests.app.api.test_admin_models import Process
from tests.app.console.visits import SAME_ORIGIN, visiting
from tests.app.tenants import make_key, request_as_root
from tests.fakes.vllm import Fake
from tests.gateway import KEY, ROOT, ROOT_KEY, Gateway, remote, running, settings_for
from tests.waiting import wait_until

# What may be changed, and the action that is recorded; a new route needs a row here.
ROWS: dict[tuple[str, str], str] = {
    ("POST", "/admin/keys"): "key.create",
    ("PATCH", "/admin/keys/{key_id}"): "key.change",
    ("POST", "/admin/keys/{key_id}/rotate"): "key.rotate",
    ("POST", "/admin/keys/{key_id}/disable"): "key.disable",
    ("POST", "/admin/keys/{key_id}/enable"): "key.enable",
    ("PUT", "/admin/owners/{name:path}"): "owner.create",
    ("PATCH", "/admin/owners/{name:path}"): "owner.change",
    ("DELETE", "/admin/owners/{name:path}"): "owner.delete",
    ("POST", "/admin/reload"): "configuration.reload",
    ("PUT", "/admin/logs"): "logs.set",
    ("POST", "/admin/requests/{id}/cancel"): "request.cancel",
    ("POST", "/admin/engines/{name}/restart"): "engine.restart",
    ("POST", "/admin/models/{name:path}/load"): "model.load",
    ("POST", "/admin/models/{name:path}/unload"): "model.unload",
    ("POST", "/admin/models/{name:path}/sleep"): "model.sleep",
    ("POST", "/admin/models/{name:path}/wake"): "model.wake",
    ("POST", "/console/api/requests/{id}/cancel"): "request.cancel",
    ("POST", "/models/load"): "model.load",
    ("POST", "/models/unload"): "model.unload",
    ("POST", "/console/login"): "session.sign_in",
    ("POST", "/console/logout"): "session.sign_out",
    ("DELETE", "/admin/captures"): "capture.delete",
    ("DELETE", "/admin/keys/{key_id}"): "key.delete",
}
# What is recorded though it changes nothing: see tests/app/capture.
READS = {"capture.read"}
# They change nothing of the gateway.
NO_CHANGES = {
    ("POST", "/console/api/find"),  # searches, whose texts may be secrets
    ("POST", "/console/keys/find"),
    ("POST", "/console/theme"),  # a cookie of the browser
    ("POST", "/console/language"),  # and another
}
# The sign-in by an identity provider: see tests/app/console/test_oidc_sign_in.py.
OIDC = {
    "issuer": "http://127.0.0.1:1", "client_id": "x", "role_claim": "x", "roles": {"x": "admin"},
    "own_keys": {},
}  # fmt: skip
BY_PROVIDER = {
    ("POST", "/console/login/oidc"),  # sets a cookie; coming back is a GET
    ("POST", "/console/logout/oidc"),
    ("POST", "/console/api/own_keys"),  # test_own_keys.py
    ("DELETE", "/console/api/own_keys/{key_id}"),
}
BODIES: dict[tuple[str, str], dict[str, object]] = {
    ("POST", "/admin/keys"): {"name": "new", "models": ["demo"]},
    ("PATCH", "/admin/keys/{key_id}"): {"weight": 7},
    ("PUT", "/admin/owners/{name:path}"): {"daily_tokens": 5},
    ("PATCH", "/admin/owners/{name:path}"): {"daily_cost": 2.5},
    ("PUT", "/admin/logs"): {"levels": {"relay": "debug"}},
    ("POST", "/models/load"): {"model": "demo"},
    ("POST", "/models/unload"): {"model": "demo"},
}
Act = Callable[[], Awaitable[httpx.Response]]
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "stream": True}


@pytest.fixture
async def gateway(fake: Fake, tmp_path: Path) -> AsyncIterator[Gateway]:
    model = {"name": "demo", "engines": [remote(fake.url)]}
    make = partial(settings_for, run_dir=tmp_path)
    settings = make(model, server={"llama_cpp_models": True})
    changed = make({**model, "aliases": ["other"]}, server={"llama_cpp_models": True})
    async with running(settings, source=lambda: changed) as one:
        yield one


@pytest.fixture
async def target(gateway: Gateway) -> NewKey:
    """A client key that may load models, whose owner has a record."""
    fields = KeyFields(name="target", may_load_models=True)
    _, made = await gateway.state.key_store.create(fields)
    await request_as_root("/admin/owners", gateway, "PUT", "/team", {}, 201)
    return made


async def records(gateway: Gateway) -> list[dict[str, Any]]:
    found = await request_as_root("/admin/audit", gateway, "GET", "?limit=1000")
    return list(found["data"])


async def act(
    client: httpx.AsyncClient, target: NewKey, change: tuple[str, str], id_: str = ""
) -> httpx.Response:
    """Make a change over HTTP."""
    method, path = change
    options: dict[str, Any] = {"json": BODIES.get(change), "headers": ROOT}
    if path.startswith("/models"):
        options["headers"] = {"authorization": f"Bearer {target.text}"}
    if path.startswith("/console"):
        options = {"data": {"key": ROOT_KEY}, "headers": SAME_ORIGIN}
    name = "new team" if method == "PUT" else "team" if "owners" in path else "demo"
    if "engines" in path:
        name = "demo-0"
    address = path.replace(":path", "").format(key_id=target.id, name=name, id=id_)
    if path == "/admin/captures":
        options["params"] = {"key": target.id}
    return await client.request(method, address, **options)


@asynccontextmanager
async def prepared(gateway: Gateway, target: NewKey, change: tuple[str, str]) -> AsyncIterator[Act]:
    """Have what a change needs: an engine to load, a session, a request in flight."""
    path = change[1]
    async with AsyncExitStack() as stack:
        client = gateway.client
        if path.startswith("/console") and path != "/console/login":
            client = await stack.enter_async_context(visiting(gateway, ROOT_KEY))
        if "models" in path:
            replica = gateway.state.catalogue.models[0].replicas[0]
            stack.callback(setattr, replica, "engine", replica.engine)
            loaded = path.endswith(("unload", "sleep"))
            put(gateway, Process("demo-0", EngineState.READY if loaded else EngineState.STOPPED))
        id_ = ""
        if "cancel" in path:
            id_ = await stack.enter_async_context(in_flight(gateway))
        yield partial(act, client, target, change, id_)


@asynccontextmanager
async def in_flight(gateway: Gateway) -> AsyncIterator[str]:
    """Have a request in flight, and return its ID."""
    requests = gateway.state.requests
    body = {**CHAT, "fake": "stall:30"}
    task = asyncio.create_task(gateway.client.post("/v1/chat/completions", json=body))
    await wait_until(lambda: bool(requests.in_flight()))
    yield requests.in_flight()[0].id
    for view in requests.in_flight():
        requests.cancel(view.id, "root")
    await task


def test_every_route_that_changes_something_has_a_row(tmp_path: Path) -> None:
    model = {"name": "demo", "engines": [remote("http://127.0.0.1:1")]}
    server = {"llama_cpp_models": True}
    console = {"oidc": OIDC}
    app = create_app(settings_for(model, run_dir=tmp_path, server=server, console=console))
    found = {
        (method, route.path)
        for route in app.routes
        if isinstance(route, APIRoute)
        for method in route.methods - {"GET"}
    }
    assert found == set(ROWS) | NO_CHANGES | BY_PROVIDER
    # Models are edited by a route that is there only where the operator wants it:
    # tests/app/console/test_model_edit_page.py.
    others = {Action.CONFIGURATION_EDIT, Action.SESSION_REFUSE}
    assert {*ROWS.values(), *READS, *others} == set(Action)


@pytest.mark.slow
async def test_a_change_leaves_one_record(gateway: Gateway, target: NewKey) -> None:
    for change, action in ROWS.items():
        async with prepared(gateway, target, change) as make:
            before = await records(gateway)
            response = await make()
            assert response.status_code < 400, (change, response.text)
            newest, *others = await records(gateway)
        assert others == before, change
        by_key = change[1].startswith("/models")
        assert newest["action"] == action
        assert newest["who"] == (target.id if by_key else "root")
        assert newest["who_name"] == ("target" if by_key else None)
        assert newest["role"] == ("client" if by_key else "admin")
        assert newest["address"] == "127.0.0.1"


@pytest.mark.slow
async def test_keys_do_not_change_without_a_record_and_engines_are_operated(
    gateway: Gateway, target: NewKey, caplog: pytest.LogCaptureFixture
) -> None:
    for change, action in ROWS.items():
        stored = action.startswith(("key.", "owner.", "capture."))
        async with prepared(gateway, target, change) as make:
            await move_table(gateway, "audit_records", "away")
            revision, _ = await gateway.state.key_store.changed_since(None)
            caplog.clear()
            response = await make()
            if stored:
                assert response.status_code == 503, (change, response.text)
                assert action not in caplog.text
            else:
                assert response.status_code < 400, (change, response.text)
                assert f"{action} " in caplog.text, "the log has it"
                assert "the record above is not stored" in caplog.text
            assert (await gateway.state.key_store.changed_since(None))[0] == revision
            await move_table(gateway, "away", "audit_records")


async def move_table(gateway: Gateway, old: str, new: str) -> None:
    async with gateway.state.database.write() as connection:
        await connection.execute(text(f"ALTER TABLE {old} RENAME TO {new}"))


async def test_sessions_begin_while_nothing_can_be_recorded(
    gateway: Gateway, target: NewKey, caplog: pytest.LogCaptureFixture
) -> None:
    await move_table(gateway, "audit_records", "away")
    caplog.set_level("INFO", "app.audit")
    response = await act(gateway.client, target, ("POST", "/console/login"))
    assert response.status_code == 303
    assert "session.sign_in console by root from 127.0.0.1" in caplog.messages
    assert "not stored" in caplog.text


async def test_clients_that_sign_in_do_not_fill_the_table(gateway: Gateway, target: NewKey) -> None:
    before = await records(gateway)
    data = {"key": target.text}
    response = await gateway.client.post("/console/login", data=data, headers=SAME_ORIGIN)
    assert response.status_code == 303
    assert await records(gateway) == before


async def test_a_record_has_what_differs_and_no_secret(
    gateway: Gateway, target: NewKey, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "app.audit")
    for change in ROWS:
        if "/{id}/" not in change[1] and "models" not in change[1]:
            await act(gateway.client, target, change)
    made = await request_as_root(
        "/admin/keys", gateway, "POST", "", {"name": "last", "role": "admin"}, 201
    )
    found = await records(gateway)
    by_action = {one["action"]: one for one in reversed(found)}
    changed = by_action["key.change"]
    assert (changed["target"], changed["target_name"]) == (target.id, "target")
    assert (changed["before"], changed["after"]) == ({"weight": 1}, {"weight": 7})
    created = found[0]
    assert (created["before"], created["after"]["name"]) == (None, "last")
    assert by_action["key.delete"]["after"] is None
    assert by_action["key.delete"]["before"]["name"] == "target"
    assert by_action["key.rotate"]["after"]["grace_s"] == 86_400
    assert by_action["owner.change"]["after"] == {"daily_cost": 2.5}
    assert by_action["logs.set"]["after"] == {"relay": "debug"}
    assert by_action["configuration.reload"]["after"] == {
        "changes": ["~ model demo: aliases [] → [other]"]
    }
    stored = json.dumps(found) + caplog.text
    for secret in (ROOT_KEY, KEY, target.text, made["key"]):
        assert secret not in stored
        assert digest(secret.encode()).hex() not in stored


async def test_records_are_found_by_their_facts_and_in_pages(gateway: Gateway) -> None:
    ask = partial(request_as_root, "/admin/audit", gateway, "GET")
    admin = await make_key(gateway, "ann", role="admin")
    for name in ("a", "b"):
        body = {"name": name}
        assert (await gateway.client.post("/admin/keys", json=body, headers=admin)).is_success
    await request_as_root("/admin/owners", gateway, "PUT", "/team", {}, 201)

    async def found(query: str) -> list[tuple[str, str]]:
        return [
            (one["who_name"] or one["who"], one["target_name"] or one["target"])
            for one in (await ask(query))["data"]
        ]

    everything = [("root", "team"), ("ann", "b"), ("ann", "a"), ("root", "ann")]
    assert await found("") == everything
    assert await found("?who=ann") == everything[1:3]
    assert await found("?who=root&action=key") == everything[3:]
    assert await found("?action=owner.create") == everything[:1]
    assert await found("?action=own") == []
    assert await found("?target=a") == everything[2:3]
    assert await found("?from=2020-01-01&to=2020-01-02") == []
    assert await found("?from=2020-01-01") == everything
    first = await ask("?limit=3")
    last = await ask(f"?limit=3&cursor={first['next']}")
    assert (len(first["data"]), len(last["data"]), last["next"]) == (3, 1, None)
    ids = [one["id"] for one in (*first["data"], *last["data"])]
    assert ids == [one["id"] for one in await records(gateway)]
    for wrong in ("?cursor=x", "?from=now", "?from=2021-01-01&to=2020-01-01", "?whom=ann"):
        await ask(wrong, status=400)
