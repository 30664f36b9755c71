"""What each role may do by a session: what its key may do, from the console's own pages only."""

import re
import secrets

import httpx
import pytest

from app.auth import Role
from app.console.visitor import PAGES
from tests.app.api.test_admin_auth import BODIES, ROWS, SCOPES
from tests.app.console.visits import visiting
from tests.app.tenants import make_key
from tests.gateway import ROOT_KEY, Gateway, demo_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")
gateway = demo_gateway(shared=True)

READERS = {Role.AUDITOR, Role.MANAGER, Role.ADMIN}
OF_KEYS, OF_MODELS = {Role.OWNER_MANAGER}, {Role.OPERATOR}
# Who sees a page; a new page needs a row here.
MAY_SEE = {
    "overview": READERS,
    "models": READERS | OF_MODELS,
    "engines": READERS | OF_MODELS,
    "requests": set(Role),
    "playground": {Role.CLIENT, Role.ADMIN},
    "keys": READERS | OF_KEYS,
    "audit": {Role.AUDITOR, Role.ADMIN},
    "usage": READERS | OF_KEYS,
    "configuration": {Role.ADMIN},
    "account": {Role.CLIENT},
    "own_keys": set(),  # people who signed in at a provider (test_own_keys.py)
}
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}


async def key_of(gateway: Gateway, role: Role) -> str:
    """Make a key of a role."""
    header = await make_key(
        gateway, f"{role}'s key {secrets.token_hex(4)}", role=role, **SCOPES.get(role, {})
    )
    return header["authorization"].removeprefix("Bearer ")


async def test_every_page_has_a_row() -> None:
    assert {page.name for page in PAGES} == set(MAY_SEE)


@pytest.mark.parametrize("role", Role)
async def test_pages_of_other_roles_are_neither_shown_nor_served(
    gateway: Gateway, role: Role
) -> None:
    async with visiting(gateway, await key_of(gateway, role)) as client:
        first = await client.get("/console", follow_redirects=True)
        shown = set(re.findall(r'<li><a href="/console/([a-z-]+)"', first.text))
        assert shown == {name for name, roles in MAY_SEE.items() if role in roles}
        for page in PAGES:
            status = (await client.get(page.path)).status_code
            assert (status == 403) == (role not in MAY_SEE[page.name]), page.name
            events = f"/console/api/events/{page.name}"
            if role not in MAY_SEE[page.name]:
                assert (await client.get(events)).status_code in (403, 404)


@pytest.mark.slow
@pytest.mark.parametrize("role", Role)
async def test_a_session_may_do_what_its_key_may(gateway: Gateway, role: Role) -> None:
    async with visiting(gateway, await key_of(gateway, role)) as client:
        for (method, route), others in ROWS.items():
            # Names that do not exist: whoever may do it finds nothing to do it to.
            path = re.sub(r"{\w+(:path)?}", "none", route)
            body = BODIES.get((method, route), {})
            answer = await client.request(method, f"/console/api{path}", json=body)
            may = role is Role.ADMIN or role in others
            assert (answer.status_code == 403) != may, (method, route, answer.text)


@pytest.mark.parametrize("role", Role)
async def test_only_keys_for_models_use_them_by_a_session(gateway: Gateway, role: Role) -> None:
    async with visiting(gateway, await key_of(gateway, role)) as client:
        answer = await client.post("/console/api/v1/chat/completions", json=CHAT)
        assert answer.status_code == (200 if role in (Role.CLIENT, Role.ADMIN) else 403)


FORGERIES: dict[str, dict[str, str]] = {
    "no token": {"x-csrf-token": ""},
    "a token of another session": {"x-csrf-token": 64 * "0"},
    "another site": {"sec-fetch-site": "cross-site"},
    "another port of the host": {"sec-fetch-site": "same-site"},
    "an address that somebody typed": {"sec-fetch-site": "none"},
}


@pytest.mark.parametrize("name", FORGERIES)
@pytest.mark.parametrize("path", ["/admin/keys", "/v1/chat/completions"])
async def test_a_forged_request_is_refused(gateway: Gateway, path: str, name: str) -> None:
    async with visiting(gateway, ROOT_KEY) as client:
        body = CHAT if path.startswith("/v1") else {"name": f"forged with {name}"}
        url = f"/console/api{path}"
        answer = await client.post(url, json=body, headers=FORGERIES[name])
        assert answer.status_code == 403
        assert (await client.post(url, json=body)).status_code in (200, 201)


async def test_an_origin_is_checked_where_the_browser_says_no_site(gateway: Gateway) -> None:
    async with visiting(gateway, ROOT_KEY) as client:
        del client.headers["sec-fetch-site"]
        for origin, status in ((None, 403), ("http://elsewhere", 403), (str(client.base_url), 201)):
            headers = {} if origin is None else {"origin": origin.rstrip("/")}
            body = {"name": "made"}
            answer = await client.post("/console/api/admin/keys", json=body, headers=headers)
            assert answer.status_code == status, origin


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/admin/keys"), ("GET", "/v1/models"), ("POST", "/v1/chat/completions")],
)
async def test_the_cookie_means_nothing_outside_of_the_console(
    gateway: Gateway, method: str, path: str
) -> None:
    async with visiting(gateway, ROOT_KEY) as client:
        cookie = client.cookies.get("gateway_console", path="/console")
        headers = {"cookie": f"gateway_console={cookie}"}
        answer = await client.request(method, path, json=CHAT, headers=headers)
        assert answer.status_code == 401


async def test_a_form_of_another_site_logs_nobody_in_or_out(gateway: Gateway) -> None:
    async with visiting(gateway, ROOT_KEY) as client:
        elsewhere = {"sec-fetch-site": "cross-site"}
        assert (await client.post("/console/logout", headers=elsewhere)).status_code == 403
        login = {"key": ROOT_KEY}
        answer = await client.post("/console/login", data=login, headers=elsewhere)
        assert answer.status_code == 403
        assert "set-cookie" not in answer.headers


async def test_a_session_ends_with_its_key(gateway: Gateway) -> None:
    async with visiting(gateway, ROOT_KEY) as root:
        made = (await root.post("/console/api/admin/keys", json={"name": "a"})).json()
        async with visiting(gateway, made["key"]) as client:
            assert (await client.get("/console/api/session")).status_code == 200
            await root.post(f"/console/api/admin/keys/{made['id']}/disable")
            await gateway.state.authenticator.poll()
            assert (await client.get("/console/api/session")).status_code == 401
            answer = await client.get("/console/playground")
            assert answer.headers["location"].startswith("/console/login")


async def test_login_returns_to_no_other_site(gateway: Gateway) -> None:
    async with httpx.AsyncClient(base_url=str(gateway.client.base_url)) as client:
        for place in (
            "//evil.test",
            "https://evil.test",
            "/console//evil.test",
            "/v1/models",
            "\\",
        ):
            form = {"key": ROOT_KEY, "next": place}
            headers = {"sec-fetch-site": "same-origin"}
            answer = await client.post("/console/login", data=form, headers=headers)
            assert answer.headers["location"] == "/console"
