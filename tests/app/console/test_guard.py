"""The guard of the console: who reaches what, by which proof."""

import asyncio
import re
from collections.abc import AsyncIterator
from urllib.parse import unquote

import httpx
import pytest
import pytest_asyncio

from tests.app.console.visits import SAME_ORIGIN, new_key, visiting
from tests.fakes.vllm import Fake
from tests.gateway import AUTH, KEY, ROOT_KEY, Gateway, demo_gateway, serving_demo

pytestmark = pytest.mark.asyncio(loop_scope="module")
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
CHAT_PATH = "/console/api/v1/chat/completions"


gateway = demo_gateway(shared=True)


@pytest_asyncio.fixture(loop_scope="module")
async def stranger(gateway: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    """A browser that has not logged in."""
    url = str(gateway.client.base_url)
    async with httpx.AsyncClient(base_url=url, headers=SAME_ORIGIN, timeout=20) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module")
async def client(gateway: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    async with visiting(gateway, KEY) as one:
        yield one


@pytest_asyncio.fixture(loop_scope="module")
async def admin(gateway: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    async with visiting(gateway, ROOT_KEY) as one:
        yield one


async def test_a_page_without_a_session_leads_to_the_login(stranger: httpx.AsyncClient) -> None:
    response = await stranger.get("/console/overview")
    assert (response.status_code, response.headers["location"]) == (
        303,
        "/console/login?next=/console/overview",
    )
    response = await stranger.get("/console/engines/a b?tab=log&x=1")
    back = response.headers["location"].removeprefix("/console/login?next=")
    assert unquote(back) == "/console/engines/a%20b?tab=log&x=1"


@pytest.mark.parametrize(
    ("accept", "status"), [("text/html,*/*;q=0.8", 303), ("*/*", 404), ("application/json", 404)]
)
async def test_a_browser_is_led_from_the_root_to_the_console(
    stranger: httpx.AsyncClient, accept: str, status: int
) -> None:
    response = await stranger.get("/", headers={"accept": accept})
    assert response.status_code == status
    assert response.headers.get("location") == ("/console" if status == 303 else None)
    assert (await stranger.post("/", headers={"accept": accept})).status_code == 404


@pytest.mark.parametrize(
    ("asked", "target"),
    [
        ("/console/overview", "/console/overview"),
        ("https://evil.example/", "/console"),
        ("//evil.example/", "/console"),
        ("/console//evil.example", "/console"),
        ("/console/\\evil.example", "/console"),
        ("/console/../evil", "/console"),
        ("/console/.%2E/%2e%2e/evil", "/console"),
        ("/console/owners/a..b?x=/../", "/console/owners/a..b?x=/../"),
        ("/console/a\r\nset-cookie: x=y", "/console"),
        ("/v1/models", "/console"),
    ],
)
async def test_the_login_returns_to_a_page_of_the_console_only(
    stranger: httpx.AsyncClient, asked: str, target: str
) -> None:
    response = await stranger.post("/console/login", data={"key": KEY, "next": asked})
    assert (response.status_code, response.headers["location"]) == (303, target)


async def test_the_cookie_is_for_the_console_and_no_script(stranger: httpx.AsyncClient) -> None:
    response = await stranger.post("/console/login", data={"key": KEY})
    parts = response.headers["set-cookie"].lower().split("; ")[1:]
    assert {"httponly", "samesite=strict", "path=/console", "max-age=43200"} == set(parts)
    assert KEY not in response.headers["set-cookie"]


@pytest.mark.parametrize(
    ("headers", "secure"),
    [
        ({"origin": "https://gateway.example"}, True),
        ({"origin": "http://gateway.example"}, False),
        ({"origin": "null"}, False),
        ({"x-forwarded-proto": "https"}, False),  # not from a trusted proxy
    ],
)
async def test_the_cookie_is_secure_behind_a_proxy_that_ends_tls(
    stranger: httpx.AsyncClient, headers: dict[str, str], secure: bool
) -> None:
    response = await stranger.post("/console/login", data={"key": KEY}, headers=headers)
    assert ("; secure" in response.headers["set-cookie"].lower()) is secure


async def failures(gateway: Gateway) -> float:
    """Return how many keys were refused."""
    found = [
        await gateway.metric("gateway_auth_failures_total", reason=reason)
        for reason in ("missing", "invalid")
    ]
    return sum(found)


@pytest.mark.parametrize("key", ["", "sk-wrong-0123456789", "a b", "x" * 1025, "käse"])
async def test_a_wrong_key_is_refused_in_words_and_counted(
    gateway: Gateway, stranger: httpx.AsyncClient, key: str
) -> None:
    before = await failures(gateway)
    response = await stranger.post("/console/login", data={"key": key})
    assert response.status_code == 401
    assert "This key is not valid here" in response.text
    assert await failures(gateway) == before + 1
    assert "set-cookie" not in response.headers


async def test_a_login_that_another_site_sends_is_refused(stranger: httpx.AsyncClient) -> None:
    for site in ("cross-site", "same-site", "none"):
        response = await stranger.post(
            "/console/login", data={"key": KEY}, headers={"sec-fetch-site": site}
        )
        assert response.status_code == 403
        assert "set-cookie" not in response.headers


async def test_a_browser_without_fetch_metadata_is_known_by_its_origin(gateway: Gateway) -> None:
    async with httpx.AsyncClient(base_url=gateway.client.base_url, timeout=20) as old:
        own = {"origin": f"http://127.0.0.1:{gateway.port}"}
        for headers, status in ((own, 303), ({"origin": "http://evil.example"}, 403), ({}, 403)):
            sent = await old.post("/console/login", data={"key": KEY}, headers=headers)
            assert sent.status_code == status


async def test_a_form_of_any_size_is_not_read(stranger: httpx.AsyncClient) -> None:
    response = await stranger.post("/console/login", data={"key": "x" * 100_000})
    assert response.status_code == 413


async def test_pages_have_a_strict_policy_and_are_not_stored(admin: httpx.AsyncClient) -> None:
    response = await admin.get("/console/overview")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert response.headers["cache-control"] == "no-store"
    assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|\sstyle=|<style", response.text)


async def test_static_files_are_compressed_for_who_takes_that(gateway: Gateway) -> None:
    async with visiting(gateway, ROOT_KEY) as client:
        plain, compressed = [
            await client.get("/console/static/0/console.css", headers={"accept-encoding": coding})
            for coding in ("identity", "gzip, br")
        ]
    assert plain.content == compressed.content
    assert "content-encoding" not in plain.headers
    assert int(compressed.headers["content-length"]) < int(plain.headers["content-length"]) / 2


async def test_static_files_are_kept_by_the_browser_for_as_long_as_they_are_the_same(
    admin: httpx.AsyncClient,
) -> None:
    page = await admin.get("/console/overview")
    found = re.search(r'href="(/console/static/[0-9a-f]+/console\.css)"', page.text)
    assert found is not None
    response = await admin.get(found[1])
    assert "immutable" in response.headers["cache-control"]
    assert response.headers["content-type"].startswith("text/css")
    other = await admin.get("/console/static/0/console.css")
    assert "immutable" not in other.headers.get("cache-control", "")
    for name in (
        "../rendering.py",
        "..%2Frendering.py",
        "none.css",
        "vendor",
        "vendor/marked.LICENSE",
    ):
        assert (await admin.get(f"/console/static/0/{name}")).status_code == 404


async def test_the_playground_takes_the_way_of_all_requests(client: httpx.AsyncClient) -> None:
    response = await client.post(CHAT_PATH, json=CHAT)
    assert response.status_code == 200
    assert "x-ratelimit-limit-requests" in response.headers
    assert response.json()["choices"]
    models = await client.get("/console/api/v1/models")
    assert [one["id"] for one in models.json()["data"]] == ["demo"]


async def test_a_request_without_the_token_is_refused(client: httpx.AsyncClient) -> None:
    for headers in (
        {"x-csrf-token": ""},
        {"x-csrf-token": "0" * 64},
        {"sec-fetch-site": "cross-site"},
    ):
        response = await client.post(CHAT_PATH, json=CHAT, headers=headers)
        assert (response.status_code, response.json()["error"]["code"]) == (
            403,
            "permission_denied",
        )


async def test_the_cookie_opens_nothing_outside_of_the_console(
    gateway: Gateway, admin: httpx.AsyncClient
) -> None:
    cookie = "; ".join(f"{name}={value}" for name, value in admin.cookies.items())
    async with httpx.AsyncClient(base_url=gateway.client.base_url, timeout=20) as bare:
        headers = {"cookie": cookie, "x-csrf-token": admin.headers["x-csrf-token"], **SAME_ORIGIN}
        for method, path in (
            ("GET", "/v1/models"),
            ("POST", "/v1/chat/completions"),
            ("GET", "/admin/keys"),
            ("POST", "/admin/reload"),
        ):
            response = await bare.request(method, path, json=CHAT, headers=headers)
            assert response.status_code == 401, path


async def test_a_key_opens_no_page(gateway: Gateway, stranger: httpx.AsyncClient) -> None:
    assert (await stranger.get("/console/overview", headers=AUTH)).status_code == 303
    response = await stranger.get("/console/api/v1/models", headers=AUTH)
    assert response.status_code == 401


async def test_a_client_sees_and_reaches_nothing_of_the_administration(
    client: httpx.AsyncClient,
) -> None:
    page = await client.get("/console/playground", follow_redirects=True)
    assert "/console/overview" not in page.text
    assert (await client.get("/console/overview")).status_code == 403
    for path in ("/admin/keys", "/admin/engines", "/events/overview"):
        assert (await client.get(f"/console/api{path}")).status_code == 403
    assert (await client.post("/console/api/admin/reload", json={})).status_code == 403


@pytest.mark.parametrize("role", ["auditor", "manager"])
async def test_roles_of_the_administration_may_not_use_models(
    gateway: Gateway, admin: httpx.AsyncClient, role: str
) -> None:
    made = await new_key(gateway, admin, name=f"only {role}", role=role)
    async with visiting(gateway, made["key"]) as visitor:
        assert (await visitor.post(CHAT_PATH, json=CHAT)).status_code == 403
        assert (await visitor.get("/console/api/v1/models")).status_code == 403
        assert (await visitor.get("/console/playground")).status_code == 403
        assert (await visitor.get("/console/api/admin/keys")).status_code == 200
        assert (await visitor.post("/console/api/admin/reload", json={})).status_code == 403


async def test_a_session_ends_with_its_key(gateway: Gateway, admin: httpx.AsyncClient) -> None:
    made = await new_key(gateway, admin, name="short-lived")
    async with visiting(gateway, made["key"]) as visitor:
        assert (await visitor.post(CHAT_PATH, json=CHAT)).status_code == 200
        changed = await admin.post(f"/console/api/admin/keys/{made['id']}/disable")
        assert changed.status_code == 200, changed.text
        await gateway.state.authenticator.poll()
        assert (await visitor.post(CHAT_PATH, json=CHAT)).status_code == 401
        assert (await visitor.get("/console/playground")).status_code == 303
        assert (await visitor.get("/console/api/session")).status_code == 401


async def test_logging_out_ends_the_session_in_the_browser(gateway: Gateway) -> None:
    async with visiting(gateway, KEY) as visitor:
        refused = await visitor.post("/console/logout", headers={"sec-fetch-site": "cross-site"})
        assert refused.status_code == 403
        response = await visitor.post("/console/logout")
        assert response.headers["location"] == "/console/login"
        assert (await visitor.get("/console/playground")).status_code == 303


async def test_without_authentication_the_playground_is_open_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, gateway: Gateway
) -> None:
    run_dir = tmp_path_factory.mktemp("open")
    async with (
        Fake() as engine,
        serving_demo(run_dir, engine.url, auth={"enabled": False}) as one,
        visiting(one, None) as visitor,
    ):
        assert (await visitor.post(CHAT_PATH, json=CHAT)).status_code == 200
        assert (await visitor.get("/console/overview")).status_code == 403
        assert (await visitor.get("/console/api/admin/keys")).status_code == 403
        async with visiting(one, ROOT_KEY) as administrator:
            assert (await administrator.get("/console/overview")).status_code == 200


async def test_a_session_outlives_a_restart_of_the_gateway(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    run_dir = tmp_path_factory.mktemp("restart")
    async with Fake() as engine:
        async with serving_demo(run_dir, engine.url) as one, visiting(one, KEY) as visitor:
            cookies, token = dict(visitor.cookies), visitor.headers["x-csrf-token"]
        async with serving_demo(run_dir, engine.url) as one:
            headers = {"x-csrf-token": token, **SAME_ORIGIN}
            async with httpx.AsyncClient(
                base_url=one.client.base_url, cookies=cookies, headers=headers, timeout=20
            ) as visitor:
                assert (await visitor.post(CHAT_PATH, json=CHAT)).status_code == 200


async def test_a_disabled_console_leaves_nothing_at_its_paths(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    run_dir = tmp_path_factory.mktemp("disabled")
    async with (
        Fake() as engine,
        serving_demo(run_dir, engine.url, console={"enabled": False}) as one,
        httpx.AsyncClient(base_url=one.client.base_url, headers=SAME_ORIGIN, timeout=20) as visitor,
    ):
        for path in ("/console", "/console/login", "/console/overview", "/console/api/session"):
            assert (await visitor.get(path)).status_code == 404
        assert (await visitor.post("/console/login", data={"key": KEY})).status_code == 404
        assert (await visitor.post(CHAT_PATH, json=CHAT)).status_code == 404


@pytest.mark.parametrize(
    "others",
    ['prefs={"a": [1, 2]}', "x", "a=b c", "=", "\x85=1", '"', "a=1; path=/", "__Host-a=1,b"],
)
async def test_cookies_of_other_programs_of_the_host_do_not_hide_the_session(
    gateway: Gateway, client: httpx.AsyncClient, others: str
) -> None:
    cookie = client.cookies.get("gateway_console", path="/console")
    for header in (f"{others}; gateway_console={cookie}", f"gateway_console={cookie}; {others}"):
        async with httpx.AsyncClient(base_url=gateway.client.base_url, timeout=20) as bare:
            headers = [(b"cookie", header.encode("latin-1"))]
            assert (await bare.get("/console/api/session", headers=headers)).status_code == 200


async def test_a_session_that_has_ended_can_be_logged_out(stranger: httpx.AsyncClient) -> None:
    stranger.cookies.set("gateway_console", "ended", path="/console")
    response = await stranger.post("/console/logout")
    assert (response.status_code, response.headers["location"]) == (303, "/console/login")
    assert "max-age=0" in response.headers["set-cookie"].lower()


async def test_the_login_leads_back_to_no_form_that_was_sent(stranger: httpx.AsyncClient) -> None:
    response = await stranger.post("/console/keys/find", data={"name": "a"})
    assert (response.status_code, response.headers["location"]) == (303, "/console/login")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/console/login"),
        ("POST", "/console/login"),
        ("PUT", "/console/login"),
        ("GET", "/console/nowhere"),
        ("GET", "/console/static/0/none.css"),
        ("GET", "/console/requests?status=4444444444&key=" + 300 * "k"),
        ("GET", "/console/api/session"),
        ("GET", "/console/api/admin/keys"),
        ("GET", "/console/api/nowhere"),
        ("POST", "/console/api/admin/keys"),
        ("OPTIONS", "/console/api/admin/keys"),
    ],
)
async def test_every_response_has_the_headers_of_a_page(
    admin: httpx.AsyncClient, method: str, path: str
) -> None:
    response = await admin.request(method, path)
    policy = response.headers["content-security-policy"]
    assert "frame-ancestors 'none'" in policy
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["cache-control"] == "no-store"
    assert response.headers["cross-origin-resource-policy"] == "same-origin"


TRICKS = (
    "/console/api/admin/keys",
    "/console/api/admin/..%2fkeys",
    "/console/api/admin/../admin/keys",
    "/console/api//admin/keys",
    "/console//api/admin/keys",
    "//console/api/admin/keys",
    "/console/%61pi/admin/keys",
    "/console/api/%61dmin/keys",
    "/console/api/ADMIN/keys",
    "/CONSOLE/api/admin/keys",
    "/console/api/admin./keys",
    "/console/api/admin%00/keys",
    "/console/api/admin;x/keys",
    "/console/static/..%2fapi/admin/keys",
    "/console/static/0/..%2f..%2fapi/admin/keys",
    "/console/login/..%2fapi/admin/keys",
    "/console/login%2f..%2fapi%2fadmin%2fkeys",
    "/console/api/console/api/admin/keys",
    "/console/api/v1/models/..%2f..%2fadmin/keys",
    "/console/api/v1/usage%2f..%2f..%2fadmin%2fkeys",
    "/admin/keys?/console/api",
    "/console/api?/admin/keys",
)


@pytest.mark.parametrize("path", TRICKS)
async def test_no_spelling_of_a_path_leads_to_the_administration(
    gateway: Gateway, client: httpx.AsyncClient, path: str
) -> None:
    """Neither for nobody nor for a client's session: not one of them is ever answered with keys."""
    cookie = f"gateway_console={client.cookies.get('gateway_console', path='/console')}"
    token = client.headers["x-csrf-token"]
    for method in ("GET", "HEAD", "POST", "PUT", "OPTIONS"):
        for session in (b"", f"cookie: {cookie}\r\nx-csrf-token: {token}\r\n".encode()):
            answer = await gateway.raw(
                f"{method} {path} HTTP/1.1\r\nhost: a\r\nsec-fetch-site: same-origin\r\n".encode()
                + session
                + b"content-length: 0\r\nconnection: close\r\n\r\n"
            )
            status = int(answer.split(b" ", 2)[1])
            assert status not in (200, 201, 202), (method, answer)


@pytest.mark.parametrize("name", ["gateway.session_caller", "gateway.visitor", "x-session-caller"])
async def test_no_header_makes_a_caller(stranger: httpx.AsyncClient, name: str) -> None:
    for path in ("/admin/keys", "/console/api/admin/keys", "/v1/models"):
        assert (await stranger.get(path, headers={name: "root"})).status_code == 401


@pytest.mark.parametrize("origin", ["null", "", "http://127.0.0.1:1", "https://127.0.0.1", "x://"])
async def test_only_the_own_origin_logs_in(gateway: Gateway, origin: str) -> None:
    async with httpx.AsyncClient(base_url=gateway.client.base_url, timeout=20) as old:
        sent = await old.post("/console/login", data={"key": KEY}, headers={"origin": origin})
        assert sent.status_code == 403


async def test_a_rotated_key_ends_its_sessions_when_its_grace_ends(
    gateway: Gateway, admin: httpx.AsyncClient
) -> None:
    made = await new_key(gateway, admin, name="rotated")
    async with visiting(gateway, made["key"]) as visitor:
        path = f"/console/api/admin/keys/{made['id']}/rotate"
        for grace_s, status in ((3600, 200), (0, 401)):
            rotated = await admin.post(path, json={"grace_s": grace_s})
            assert rotated.status_code == 200
            await gateway.state.authenticator.poll()
            assert (await visitor.get("/console/api/session")).status_code == status


async def test_requests_of_one_key_are_limited_whatever_its_own_limits(
    gateway: Gateway, admin: httpx.AsyncClient
) -> None:
    made = await new_key(gateway, admin, name="reloads", requests_per_minute=1)
    async with visiting(gateway, made["key"]) as visitor:
        for _ in range(20):  # faster than the limit, which grows again meanwhile
            asked = (visitor.get("/console/api/session") for _ in range(100))
            responses = await asyncio.gather(*asked)
            if responses[-1].status_code == 429:
                break
        assert responses[-1].status_code == 429
        assert int(responses[-1].headers["retry-after"]) >= 1
    assert (await admin.get("/console/keys")).status_code == 200, "others are not limited by it"


async def test_pages_of_one_key_are_bounded_and_leave_the_database_to_requests(
    gateway: Gateway, admin: httpx.AsyncClient
) -> None:
    made = await new_key(gateway, admin, name="many tabs")
    others = [
        await new_key(gateway, admin, name=f"first {number}", daily_tokens=1000)
        for number in range(5)
    ]
    async with visiting(gateway, made["key"]) as visitor:
        pages = [asyncio.create_task(visitor.get("/console/account")) for _ in range(100)]
        for other in others:
            headers = {"authorization": f"Bearer {other['key']}"}
            chat = await gateway.client.post("/v1/chat/completions", json=CHAT, headers=headers)
            assert chat.status_code == 200
        responses = await asyncio.gather(*pages)
    assert {response.status_code for response in responses} == {200, 503}
    refused = [response for response in responses if response.status_code == 503]
    assert all(response.headers["retry-after"] == "1" for response in refused)
