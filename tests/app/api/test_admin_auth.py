"""Every route under /admin against everybody who may knock: what is not in the table is denied."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fastapi import Request
from fastapi.routing import APIRoute

from app.api.admin_auth import MANAGED_ROLES, RIGHTS, RequireRight, Right
from app.application import Application
from app.auth import KeyFields, OwnerFields, OwnerStore, Role
from app.errors import PermissionDenied
from app.main import create_app
from tests.app.raw import connected, request
from tests.gateway import (
    KEY,
    ROOT,
    ROOT_KEY,
    Gateway,
    free_port,
    remote,
    serving_demo,
    settings_for,
)

# Who may besides the administrator and root; a new route needs a row here.
READERS = {"auditor", "manager"}
# Within their scope; what is outside of it is in test_scopes.py.
OF_KEYS, OF_MODELS = {"owner_manager"}, {"operator"}
ROWS: dict[tuple[str, str], set[str]] = {
    ("GET", "/admin/keys"): READERS | OF_KEYS,
    ("POST", "/admin/keys"): {"manager"} | OF_KEYS,
    ("GET", "/admin/keys/{key_id}"): READERS | OF_KEYS,
    ("PATCH", "/admin/keys/{key_id}"): {"manager"} | OF_KEYS,
    ("DELETE", "/admin/keys/{key_id}"): {"manager"} | OF_KEYS,
    ("POST", "/admin/keys/{key_id}/rotate"): {"manager"} | OF_KEYS,
    ("POST", "/admin/keys/{key_id}/disable"): {"manager"} | OF_KEYS,
    ("POST", "/admin/keys/{key_id}/enable"): {"manager"} | OF_KEYS,
    ("GET", "/admin/owners"): READERS | OF_KEYS,
    ("GET", "/admin/owners/{name:path}"): READERS | OF_KEYS,
    ("PUT", "/admin/owners/{name:path}"): set(),
    ("PATCH", "/admin/owners/{name:path}"): set(),
    ("DELETE", "/admin/owners/{name:path}"): set(),
    ("GET", "/admin/usage"): READERS | OF_KEYS,
    ("GET", "/admin/audit"): {"auditor"},
    ("GET", "/admin/captures"): set(),
    ("DELETE", "/admin/captures"): set(),
    ("GET", "/admin/requests/{id}/capture"): set(),
    ("POST", "/admin/reload"): set(),
    ("GET", "/admin/logs"): READERS,
    ("PUT", "/admin/logs"): set(),
    ("GET", "/admin/openapi.json"): READERS | OF_KEYS | OF_MODELS,
    ("GET", "/admin/requests"): READERS | OF_KEYS | OF_MODELS,
    ("GET", "/admin/requests/{id}"): READERS | OF_KEYS | OF_MODELS,
    ("POST", "/admin/requests/{id}/cancel"): OF_MODELS,
    ("GET", "/admin/engines"): READERS | OF_MODELS,
    ("GET", "/admin/engines/{name}"): READERS | OF_MODELS,
    ("GET", "/admin/engines/{name}/log"): READERS | OF_MODELS,
    ("POST", "/admin/engines/{name}/restart"): OF_MODELS,
    ("GET", "/admin/models"): READERS | OF_MODELS,
    ("POST", "/admin/models/{name:path}/load"): OF_MODELS,
    ("POST", "/admin/models/{name:path}/unload"): OF_MODELS,
    ("POST", "/admin/models/{name:path}/sleep"): OF_MODELS,
    ("POST", "/admin/models/{name:path}/wake"): OF_MODELS,
}
# What a route asks for in a body; the others take an empty one.
BODIES: dict[tuple[str, str], dict[str, object]] = {
    ("POST", "/admin/keys"): {"name": "new"},
    ("PUT", "/admin/logs"): {"levels": {}},
}
QUERIES = {("DELETE", "/admin/captures"): "?all=true"}
UNKNOWN = {"nobody", "garbage", "made up", "expired admin", "disabled admin", "deleted admin"}
CALLERS = [
    *sorted(UNKNOWN), "client", "static client", "owner_manager", "operator", "auditor", "manager",
    "admin", "root",
]  # fmt: skip
# What a role is for, which its keys must say.
SCOPES: dict[Role, dict[str, object]] = {
    Role.OPERATOR: {"models": ["demo"]},
    Role.OWNER_MANAGER: {"owner": "demo"},
}


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with serving_demo(tmp_path, f"http://127.0.0.1:{free_port()}", settle=False) as one:
        del one.client.headers["authorization"]
        yield one


async def key_of(state: Application, caller: str) -> str | None:
    """Return the key that a caller sends."""
    fixed = {"nobody": None, "garbage": "x" * 40, "static client": KEY, "root": ROOT_KEY}
    if caller in fixed:
        return fixed[caller]
    store = state.key_store
    role = Role(caller.split()[-1]) if caller != "made up" else Role.ADMIN
    past = {"expires": "2020-01-01T00:00:00Z"} if caller == "expired admin" else {}
    fields = KeyFields.model_validate(
        {"name": caller, "role": role, **past, **SCOPES.get(role, {})}
    )
    key, made = await store.create(fields)
    if caller == "disabled admin":
        await store.disable(key.id)
    if caller in ("deleted admin", "made up"):
        await store.delete(key.id)
    return made.text


def headers_of(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


def test_every_route_under_admin_has_a_row(tmp_path: Path) -> None:
    """CVE-2026-35029, CVE-2026-47101: an administration route that asked for no role."""
    model = {"name": "demo", "engines": [remote("http://127.0.0.1:1")]}
    app = create_app(settings_for(model, run_dir=tmp_path))
    found = {
        (method, route.path)
        for route in app.routes
        if isinstance(route, APIRoute) and route.path.startswith("/admin")
        for method in route.methods
    }
    assert found == set(ROWS)


@pytest.mark.slow
@pytest.mark.parametrize("caller", CALLERS)
async def test_routes_require_their_right(gateway: Gateway, caller: str) -> None:
    """CVE-2026-35029, CVE-2026-47101: an administration route that asked for no role."""
    store = gateway.state.key_store
    headers = headers_of(await key_of(gateway.state, caller))
    before = None
    for (method, path), others in ROWS.items():
        if before is None:
            target, _ = await store.create(KeyFields(name=f"{method} {path}", owner="demo"))
            await OwnerStore(gateway.state.database).assign("demo", OwnerFields())
            before = await store.get(target.id)
        body = BODIES.get((method, path), {})
        name = "demo-0" if path.startswith("/admin/engines") else "demo"
        address = path.replace(":path", "").format(key_id=target.id, name=name, id="0")
        address += QUERIES.get((method, path), "")
        response = await gateway.client.request(method, address, json=body, headers=headers)
        if caller in {"admin", "root", *others}:
            # 409: who asks may, but a remote engine has no log here; 404: no request has that ID.
            allowed = (404,) if "{id}" in path else (200, 201, 202, 204, 409)
            assert response.status_code in allowed, (method, path)
            if method != "GET":
                before = None  # changed, or deleted
            continue
        expected = 401 if caller in UNKNOWN else 403
        code = "invalid_api_key" if caller in UNKNOWN else "permission_denied"
        assert (response.status_code, response.json()["error"]["code"]) == (expected, code)
        assert await store.get(target.id) == before
        assert target.id not in response.text


@pytest.mark.parametrize("role", [role for role in Role if role is not Role.CLIENT])
async def test_a_manager_handles_no_key_but_a_clients(gateway: Gateway, role: Role) -> None:
    """CVE-2026-47101: a key with rights above its maker's."""
    store = gateway.state.key_store
    headers = headers_of(await key_of(gateway.state, "manager"))
    fields = {"name": "target", "role": role, **SCOPES.get(role, {})}
    target, _ = await store.create(KeyFields.model_validate(fields))
    at = f"/admin/keys/{target.id}"
    for method, path, body in (
        ("POST", "/admin/keys", {"name": "new", "role": role, **SCOPES.get(role, {})}),
        ("PATCH", at, {"weight": 2}),
        ("DELETE", at, None),
        ("POST", f"{at}/rotate", {}),
        ("POST", f"{at}/disable", None),
        ("POST", f"{at}/enable", None),
    ):
        response = await gateway.client.request(method, path, json=body, headers=headers)
        assert response.status_code == 403, (method, path)
        assert str(role) in response.json()["error"]["message"]
    assert await store.get(target.id) == target
    assert len((await store.page(10)).keys) == 2


async def test_a_manager_handles_no_key_that_may_load_models(gateway: Gateway) -> None:
    """A manager may not load models: it could make itself a secret of such a key."""
    store = gateway.state.key_store
    headers = headers_of(await key_of(gateway.state, "manager"))
    loads, _ = await store.create(KeyFields(name="loads", may_load_models=True))
    plain, _ = await store.create(KeyFields(name="plain"))
    at = f"/admin/keys/{loads.id}"
    for method, path, body in (
        ("POST", "/admin/keys", {"name": "new", "may_load_models": True}),
        ("PATCH", f"/admin/keys/{plain.id}", {"may_load_models": True}),
        ("PATCH", at, {"may_load_models": False}),
        ("DELETE", at, None),
        ("POST", f"{at}/rotate", {}),
        ("POST", f"{at}/disable", None),
        ("POST", f"{at}/enable", None),
    ):
        response = await gateway.client.request(method, path, json=body, headers=headers)
        assert response.status_code == 403, (method, path)
        assert "may not manage keys that may load models" in response.text
    assert (await store.get(loads.id), await store.get(plain.id)) == (loads, plain)
    assert len((await store.page(10)).keys) == 3


async def test_a_manager_cannot_raise_its_own_role(gateway: Gateway) -> None:
    store = gateway.state.key_store
    key = await key_of(gateway.state, "manager")
    [own] = (await store.page(1)).keys
    response = await gateway.client.patch(
        f"/admin/keys/{own.id}", json={"role": "admin"}, headers=headers_of(key)
    )
    assert response.status_code == 403
    assert (await store.get(own.id)).role is Role.MANAGER


async def test_not_even_an_administrator_changes_a_role(gateway: Gateway) -> None:
    target, _ = await gateway.state.key_store.create(KeyFields(name="a"))
    response = await gateway.client.patch(
        f"/admin/keys/{target.id}", json={"role": "admin"}, headers=ROOT
    )
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "role: unknown field"


@pytest.mark.parametrize(
    "path", ["/admin", "/admin/", "/admin/nope", "/admin/keys/a/b", "/admin//"]
)
async def test_unknown_admin_paths_require_a_key(gateway: Gateway, path: str) -> None:
    assert (await gateway.client.get(path)).status_code == 401
    assert (await gateway.client.get(path, headers=ROOT)).status_code == 404


@pytest.mark.parametrize(
    "path",
    [
        "/Admin/keys",
        "//admin/keys",
        "/x/../admin/keys",
        "/admin%2fkeys",
        "/%61dmin/keys",
        "/admin?",
    ],
)
async def test_other_spellings_of_a_path_bypass_no_check(gateway: Gateway, path: str) -> None:
    async with connected(gateway) as client:
        client.send(request(None, method=b"GET", path=path.encode()))
        assert (await client.answer()).status in (403, 404)
        client.send(request(None, method=b"GET", path=path.encode(), key=False))
        assert (await client.answer()).status in (401, 404)


@pytest.mark.parametrize(
    "host", ["/?", "/#", "x/health?", "x/health#", "x/v1/models?", "admin", ""]
)
async def test_host_header_opens_no_admin_route(gateway: Gateway, host: str) -> None:
    """CVE-2026-49468: a route was authorised on a URL that the Host header had a part in."""
    for path in ("/admin/keys", "/admin/openapi.json"):
        answer = await gateway.raw(
            b"GET %s HTTP/1.1\r\nhost: %s\r\nconnection: close\r\n\r\n"
            % (path.encode(), host.encode())
        )
        assert answer.split(b" ")[1] in (b"400", b"401")
        assert b'"data"' not in answer


async def test_request_without_a_key_is_refused_before_its_body_is_read(gateway: Gateway) -> None:
    async with connected(gateway) as client:
        length = b"content-length: 1000000000"
        client.send(request(None, length, path=b"/admin/keys", key=False))
        assert (await client.answer()).status == 401


async def test_refusals_are_counted_once(gateway: Gateway) -> None:
    name = "gateway_auth_failures_total"
    for path in ("/admin/keys", "/admin/nope", "/v1/models"):
        await gateway.client.get(path)
        await gateway.client.get(path, headers=headers_of("x" * 40))
    assert await gateway.metric(name, reason="missing") == 3
    assert await gateway.metric(name, reason="invalid") == 3


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_the_limit_is_413(gateway: Gateway, chunked: bool) -> None:
    body = b'{"name":"' + b"x" * 1_048_576 + b'"}'

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 65536):
            yield body[start : start + 65536]

    content = pieces() if chunked else body
    headers = {**ROOT, "content-type": "application/json"}
    response = await gateway.client.post("/admin/keys", content=content, headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")


@pytest.mark.parametrize("role", Role)
async def test_required_right_follows_the_table(gateway: Gateway, role: Role) -> None:
    headers = headers_of(await key_of(gateway.state, role))
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    asked = Request({"type": "http", "headers": raw})
    for right in Right:
        require = RequireRight(gateway.state.authenticator, right, scoped=True)
        if right in RIGHTS[role]:
            assert (await require(asked)).role is role
        else:
            with pytest.raises(PermissionDenied):
                await require(asked)


def test_the_table_denies_by_default() -> None:
    assert Right.CONFIGURATION_WRITE not in RIGHTS[Role.OPERATOR]
    assert set(RIGHTS) == set(MANAGED_ROLES) == set(Role)
    assert not RIGHTS[Role.CLIENT]
    assert not MANAGED_ROLES[Role.CLIENT] | MANAGED_ROLES[Role.AUDITOR]
    assert all(right.endswith(":read") for right in RIGHTS[Role.AUDITOR])
    assert RIGHTS[Role.MANAGER] - RIGHTS[Role.AUDITOR] == {Right.KEYS_WRITE}
    for role in Role:
        assert all(RIGHTS[other] <= RIGHTS[role] for other in MANAGED_ROLES[role])


async def test_a_route_that_knows_no_scopes_is_closed_to_roles_with_one(gateway: Gateway) -> None:
    for role in SCOPES:
        headers = headers_of(await key_of(gateway.state, role))
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        for right in RIGHTS[role]:
            with pytest.raises(PermissionDenied):
                await RequireRight(gateway.state.authenticator, right)(
                    Request({"type": "http", "headers": raw})
                )
