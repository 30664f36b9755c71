"""Sign-in by an identity provider, as a browser makes it: who gets a session, and who does not."""

import asyncio
import base64
import html
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from app.api import act_limits
from app.api.act_limits import BURST_S
from app.auth.oidc import relying_party
from app.auth.tokens import provider as provider_module
from app.auth.tokens import provider_fetch
from app.auth.validation import OwnerFields
from app.console import oidc_sign_in
from app.settings import LimitSettings
from tests.app.console.visits import SAME_ORIGIN
from tests.fakes.identity_provider import SigningKey
from tests.fakes.openid_provider import CLIENT_ID, SECRET, OpenIdProvider
from tests.fakes.vllm import Fake
from tests.gateway import ROOT, ROOT_KEY, Gateway, serving_demo
from tests.moved_clock import MovedClock

SECRET_ENV = "CONSOLE_OIDC_SECRET"
CALLBACK = "/console/login/oidc/callback"
_LED_TO = re.compile(r'http-equiv="refresh" content="0;url=([^"]+)"')
_FAULT = re.compile(r'role="alert">([^<]+)<')


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SECRET_ENV, SECRET)
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def only_provider() -> AsyncIterator[OpenIdProvider]:
    async with OpenIdProvider() as provider:
        yield provider


@pytest.fixture
def provider(only_provider: OpenIdProvider) -> OpenIdProvider:
    """The provider, as if it had just been started."""
    only_provider.answers.clear()
    only_provider.discovery.clear()
    only_provider.grants.clear()
    only_provider.seen.clear()
    return only_provider


def oidc(provider: OpenIdProvider, **fields: Any) -> dict[str, Any]:
    usual = {
        "issuer": provider.issuer,
        "client_id": CLIENT_ID,
        "client_secret_env": SECRET_ENV,
        "role_claim": "groups",
        "roles": {"ops": "admin", "audit": "auditor", "users": "client"},
    }
    return {**usual, **fields}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(
    only_provider: OpenIdProvider, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Gateway]:
    console = {"oidc": oidc(only_provider)}
    async with (
        Fake() as fake,
        serving_demo(tmp_path_factory.mktemp("gateway"), fake.url, console=console) as gateway,
    ):
        yield gateway


@dataclass
class Visit:
    """A browser, as far as it matters here."""

    client: httpx.AsyncClient
    cookies: dict[str, str] = field(default_factory=dict)

    async def begin(self, next_path: str = "") -> str:
        """Return the address at the provider to which the browser is led."""
        response = await self.client.post(
            "/console/login/oidc", data={"next": next_path}, headers=SAME_ORIGIN
        )
        assert response.status_code == 200, response.text
        return led_to(response)

    async def finish(self, answer: dict[str, str]) -> httpx.Response:
        """Come back from the provider."""
        return await self.client.get(CALLBACK, params=answer)

    async def sign_in(self, provider: OpenIdProvider, **claims: Any) -> httpx.Response:
        """Sign in; return the last response."""
        return await self.finish(provider.grant(await self.begin(), **claims))

    async def session(self) -> dict[str, str] | int:
        """Return the role and the ID of who has signed in; a status if no one has."""
        response = await self.client.get("/console/api/session")
        if response.status_code != 200:
            return response.status_code
        found: dict[str, str] = response.json()
        return found


def led_to(response: httpx.Response) -> str:
    found = _LED_TO.search(response.text)
    assert found, response.text
    return html.unescape(found[1])


def fault(response: httpx.Response) -> str:
    found = _FAULT.search(response.text)
    assert found, response.text
    return html.unescape(found[1])


@asynccontextmanager
async def visiting(gateway: Gateway, path: str = "") -> AsyncIterator[Visit]:
    url = f"http://127.0.0.1:{gateway.port}{path}"
    async with httpx.AsyncClient(base_url=url, timeout=20) as client:
        yield Visit(client)


@pytest_asyncio.fixture(loop_scope="module")
async def visit(gateway: Gateway) -> AsyncIterator[Visit]:
    async with visiting(gateway) as one:
        yield one


async def actions(gateway: Gateway) -> list[tuple[str, str, Any]]:
    """Return what the audit has, the latest first: who, the action, and the facts."""
    found = await gateway.client.get("/admin/audit", headers=ROOT)
    return [(one["who"], one["action"], one["after"]) for one in found.json()["data"]]


# Who gets a session


async def test_codes_without_an_account_open_no_flood_of_connections(
    gateway: Gateway, visit: Visit, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, free = 0, asyncio.Event()

    async def wait(*_: object, **__: object) -> tuple[int, bytes]:
        nonlocal asked
        asked += 1
        await free.wait()
        return 400, b"{}"

    state = httpx.URL(await visit.begin()).params["state"]
    monkeypatch.setattr(relying_party, "send", wait)
    cookies = dict(visit.client.cookies)
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        for _ in range(relying_party.MAX_EXCHANGES):
            tasks.create_task(visit.finish({"state": state, "code": "any"}))
        while asked < relying_party.MAX_EXCHANGES:
            await asyncio.sleep(0.01)
        async with visiting(gateway) as another:
            another.client.cookies.update(cookies)
            response = await another.finish({"state": state, "code": "any"})
        free.set()
    assert fault(response).startswith("Too many people")
    assert asked == relying_party.MAX_EXCHANGES


@pytest.mark.parametrize(("groups", "action"), [("others", "refuse"), ("users", "sign_in")])
async def test_no_account_floods_the_audit(
    gateway: Gateway,
    visit: Visit,
    provider: OpenIdProvider,
    monkeypatch: pytest.MonkeyPatch,
    groups: str,
    action: str,
) -> None:
    monkeypatch.setattr(act_limits, "_LIMIT", LimitSettings(requests_per_minute=1))
    allowed, subject = int(BURST_S / 60), f"flood-{action}"
    for number in range(allowed + 2):
        response = await visit.sign_in(provider, groups=groups, subject=subject)
        assert (response.status_code == 429) is (number >= allowed), response.text
    assert "try again in" in fault(response)
    found = [one for one in await actions(gateway) if one[0] == f"sso:{subject}"]
    assert [one[1] for one in found] == [f"session.{action}"] * allowed


@pytest.mark.parametrize(
    ("groups", "role"),
    [("ops", "admin"), (["users", "audit"], "auditor"), (["others", "users"], "client")],
)
async def test_a_claim_gives_the_role(
    visit: Visit, provider: OpenIdProvider, groups: Any, role: str
) -> None:
    response = await visit.sign_in(provider, groups=groups)
    assert led_to(response) == "/console"
    assert await visit.session() == {"role": role, "key_id": "sso:alice"}


async def test_the_request_has_pkce_state_nonce_and_only_the_configured_scopes(
    visit: Visit, provider: OpenIdProvider
) -> None:
    query = httpx.URL(await visit.begin()).params
    assert query["response_type"] == "code"
    assert query["code_challenge_method"] == "S256"
    assert query["scope"] == "openid profile"
    assert len({query["state"], query["nonce"], query["code_challenge"]}) == 3
    assert query["redirect_uri"].endswith(CALLBACK)


@pytest.mark.parametrize(
    ("groups", "claim"), [(None, "groups"), (["others"], "groups"), ({"ops": 1}, "groups")]
)
async def test_a_person_without_a_role_is_refused_in_one_line_and_recorded(
    gateway: Gateway, visit: Visit, provider: OpenIdProvider, groups: Any, claim: str
) -> None:
    response = await visit.sign_in(provider, groups=groups)
    assert response.status_code == 403
    assert fault(response) == f"No access: {claim} of your account has no role."
    assert await visit.session() == 401
    assert (await actions(gateway))[0] == ("sso:alice", "session.refuse", {"claim": claim})


@pytest.mark.slow
async def test_the_owner_is_that_of_the_claim_and_must_be_there(
    fake: Fake, provider: OpenIdProvider, tmp_path: Path
) -> None:
    console = {"oidc": oidc(provider, owner_claim="/org/team", limits={"requests_per_minute": 7})}
    async with (
        serving_demo(tmp_path, fake.url, console=console) as gateway,
        visiting(gateway) as visit,
    ):
        refused = await visit.sign_in(provider, groups="users", org={"team": ["a"]})
        assert fault(refused) == "No access: your account has no usable /org/team."
        await visit.sign_in(provider, groups="users", org={"team": "research"})
        page = (await visit.client.get("/console/account")).text
        assert "sso:alice" in page
        assert "Requests per minute" in page
        owners = gateway.state.owner_store
        await owners.replace("research", OwnerFields.model_validate({"daily_tokens": 5}))


@pytest.mark.slow
async def test_an_email_counts_only_if_the_provider_has_verified_it(
    fake: Fake, provider: OpenIdProvider, tmp_path: Path
) -> None:
    claims = {"role_claim": "email", "roles": {"a@example.org": "admin"}}
    console = {"oidc": oidc(provider, **claims)}
    async with (
        serving_demo(tmp_path, fake.url, console=console) as gateway,
        visiting(gateway) as visit,
    ):
        for verified in (None, False, "true"):
            refused = await visit.sign_in(provider, email="a@example.org", email_verified=verified)
            assert fault(refused) == "No access: your account has no usable email_verified."
        await visit.sign_in(provider, email="a@example.org", email_verified=True)
        assert await visit.session() == {"role": "admin", "key_id": "sso:alice"}


async def test_two_people_with_one_name_are_two(gateway: Gateway, provider: OpenIdProvider) -> None:
    found = []
    for subject in ("alice", "mallory"):
        async with visiting(gateway) as visit:
            same = {"name": "Alice", "email": "alice@example.org"}
            await visit.sign_in(provider, subject=subject, groups="users", **same)
            found.append(await visit.session())
    assert found == [
        {"role": "client", "key_id": "sso:alice"},
        {"role": "client", "key_id": "sso:mallory"},
    ]


async def test_claims_that_are_given_only_on_request_are_asked_for(
    visit: Visit, provider: OpenIdProvider
) -> None:
    await visit.sign_in(provider, userinfo={"groups": ["ops"]})
    assert await visit.session() == {"role": "admin", "key_id": "sso:alice"}
    other = await visit.sign_in(provider, userinfo={"sub": "bob", "groups": ["ops"]})
    assert fault(other) == "The identity provider gave no claims of your account."


# The session


async def test_session_cookie_is_strict_and_new_at_every_sign_in(
    visit: Visit, provider: OpenIdProvider
) -> None:
    visit.client.cookies.set("gateway_console", "fixed", path="/console")
    first = await visit.sign_in(provider, groups="ops")
    second = await visit.sign_in(provider, groups="ops")
    values = []
    for response in (first, second):
        (cookie,) = [
            one for one in response.headers.get_list("set-cookie")
            if one.startswith("gateway_console=")
        ]  # fmt: skip
        assert "HttpOnly" in cookie
        assert "Path=/console" in cookie
        assert "SameSite=strict" in cookie
        values.append(cookie.partition(";")[0])
    assert values[0] != values[1]
    assert "fixed" not in values[0]


async def test_sign_out_ends_the_session_everywhere_and_leads_to_the_provider(
    gateway: Gateway, visit: Visit, provider: OpenIdProvider
) -> None:
    await visit.sign_in(provider, groups="ops")
    stolen = visit.client.cookies.get("gateway_console")
    response = await visit.client.post("/console/logout", headers=SAME_ORIGIN)
    url = httpx.URL(led_to(response))
    assert url.path == "/end_session"
    assert url.params["post_logout_redirect_uri"].endswith("/console/login")
    assert provider.grants["code-0"].id_token is None
    assert url.params["id_token_hint"].count(".") == 2
    async with visiting(gateway) as thief:
        thief.client.cookies.set("gateway_console", str(stolen), path="/console")
        assert await thief.session() == 401
    assert [one[:2] for one in (await actions(gateway))[:2]] == [
        ("sso:alice", "session.sign_out"), ("sso:alice", "session.sign_in"),
    ]  # fmt: skip


@pytest.mark.slow
async def test_session_ends_after_its_time(
    fake: Fake, provider: OpenIdProvider, tmp_path: Path
) -> None:
    console = {"oidc": oidc(provider, session_hours=1e-7)}
    async with (
        serving_demo(tmp_path, fake.url, console=console) as gateway,
        visiting(gateway) as visit,
    ):
        response = await visit.sign_in(provider, groups="ops")
        assert "Max-Age=0" in str(response.headers.get_list("set-cookie"))
        assert await visit.session() == 401


@pytest.mark.slow
async def test_session_outlives_a_restart_but_no_change_of_the_settings(
    fake: Fake, provider: OpenIdProvider, tmp_path: Path
) -> None:
    async def begun(**fields: Any) -> list[Any]:
        console = {"oidc": oidc(provider, **fields)}
        async with (
            serving_demo(tmp_path, fake.url, console=console) as gateway,
            visiting(gateway) as visit,
        ):
            if not cookies:
                await visit.sign_in(provider, groups="ops")
                cookies.update(visit.client.cookies)
            visit.client.cookies.update(cookies)
            return [await visit.session()]

    cookies: dict[str, str] = {}
    admin = [{"role": "admin", "key_id": "sso:alice"}]
    assert await begun() == admin
    assert await begun() == admin
    assert await begun(roles={"ops": "auditor"}) == [401]


@pytest.mark.slow
async def test_a_replica_finishes_what_another_has_begun_and_knows_the_session(
    fake: Fake, provider: OpenIdProvider, tmp_path: Path
) -> None:
    console = {"oidc": oidc(provider)}
    async with (
        serving_demo(tmp_path, fake.url, console=console) as first,
        serving_demo(tmp_path, fake.url, console=console) as second,
        visiting(first) as visit,
    ):
        url = await visit.begin()
        answer = provider.grant(url, groups="ops")
        async with visiting(second) as other:
            other.client.cookies = visit.client.cookies
            await other.finish(answer)
            assert await other.session() == {"role": "admin", "key_id": "sso:alice"}
        visit.client.cookies = other.client.cookies
        assert await visit.session() == {"role": "admin", "key_id": "sso:alice"}


@pytest.mark.slow
async def test_below_a_path_cookies_and_addresses_have_it(
    fake: Fake, provider: OpenIdProvider, tmp_path: Path
) -> None:
    server = {"root_path": "/llm", "trusted_proxies": ["127.0.0.1"]}
    console = {"oidc": oidc(provider)}
    async with (
        serving_demo(tmp_path, fake.url, console=console, server=server) as gateway,
        visiting(gateway, "/llm") as visit,
    ):
        visit.client.headers["x-forwarded-proto"] = "https"
        visit.client.headers["host"] = "tools.example"
        begun = await visit.client.post("console/login/oidc", headers=SAME_ORIGIN)
        url = led_to(begun)
        redirect = httpx.URL(url).params["redirect_uri"]
        assert redirect == f"https://tools.example/llm{CALLBACK}"
        (cookie,) = begun.headers.get_list("set-cookie")
        assert "Path=/llm/console/login/oidc;" in cookie
        assert "Secure" in cookie
        assert "SameSite=lax" in cookie
        headers = {"cookie": cookie.partition(";")[0]}
        answer = provider.grant(url, groups="ops")
        done = await visit.client.get(CALLBACK[1:], params=answer, headers=headers)
        assert led_to(done) == "/llm/console"
        session = done.headers.get_list("set-cookie")[0]
        assert "Path=/llm/console;" in session
        assert "Secure" in session


# Attacks


async def test_answer_without_the_cookie_of_its_attempt_is_refused(
    gateway: Gateway, visit: Visit, provider: OpenIdProvider
) -> None:
    """Login CSRF: a victim's browser is led to the answer for the attacker."""
    answer = provider.grant(await visit.begin(), groups="ops")
    async with visiting(gateway) as victim:
        message = "This sign-in was not begun in this browser, or too long ago. Start again."
        assert fault(await victim.finish(answer)) == message
        await victim.begin()
        other = "This sign-in has begun in another window or browser. Start again."
        assert fault(await victim.finish(answer)) == other
        assert await victim.session() == 401
    assert "/token" not in provider.seen


WINDOW = "This sign-in has begun in another window or browser. Start again."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"state": "x"}, WINDOW),
        ({"state": None}, WINDOW),
        ({"state": "\u00e4"}, WINDOW),
        ({"iss": "https://evil.example"}, "The answer is of another identity provider."),
        ({"code": None}, "The identity provider refused."),
        (
            {"code": None, "error": "access_denied"},
            "The identity provider refused (access_denied).",
        ),
        ({"error": "<b>Call 555-0100</b>"}, "The identity provider refused."),
        ({"code": "guessed"}, "The identity provider refused (invalid_grant)."),
    ],
)
async def test_answer_that_was_changed_is_refused(
    visit: Visit, provider: OpenIdProvider, change: dict[str, Any], message: str
) -> None:
    answer = {**provider.grant(await visit.begin(), groups="ops"), **change}
    response = await visit.finish({k: v for k, v in answer.items() if v is not None})
    assert fault(response).startswith(message)
    assert await visit.session() == 401


async def test_why_a_sign_in_failed_is_said_in_chinese(
    visit: Visit, provider: OpenIdProvider, caplog: pytest.LogCaptureFixture
) -> None:
    visit.client.headers["accept-language"] = "zh-CN"
    answer = {**provider.grant(await visit.begin(), groups="ops"), "error": "access_denied"}
    with caplog.at_level(logging.INFO, oidc_sign_in.__name__):
        response = await visit.finish(answer)
    assert fault(response) == "身份提供方拒绝了登录 (access_denied)。"
    assert "The identity provider refused (access_denied)." in caplog.text
    assert fault(await visit.sign_in(provider)) == "无权访问：您账户的 groups 没有对应的角色。"


async def test_provider_that_says_so_always_names_itself(
    visit: Visit, provider: OpenIdProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RFC 9207, against the mix-up of two providers."""
    monkeypatch.setattr(provider_module, "COOLDOWN_S", 0.0)
    provider.discovery["authorization_response_iss_parameter_supported"] = True
    answer = provider.grant(await visit.begin(), groups="ops")
    del answer["iss"]
    assert fault(await visit.finish(answer)).startswith("The answer is of another identity")


async def test_answer_is_used_once(visit: Visit, provider: OpenIdProvider) -> None:
    url = await visit.begin()
    answer = provider.grant(url, groups="ops")
    cookies = dict(visit.client.cookies)
    assert (await visit.finish(answer)).status_code == 200
    assert "gateway_console_attempt" not in visit.client.cookies
    visit.client.cookies.update(cookies)
    assert fault(await visit.finish(answer)).startswith("The identity provider refused (invalid_g")


async def test_attempt_is_over_after_ten_minutes(
    visit: Visit, provider: OpenIdProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.console.oidc_sign_in.ATTEMPT_S", 0)
    answer = provider.grant(await visit.begin(), groups="ops")
    visit.client.cookies.clear()
    assert "too long ago" in fault(await visit.finish(answer))


PROVIDERS = "The provider's ID token"
NOT_VALID = f"{PROVIDERS} is not valid: "
FIT = f"{NOT_VALID}its form, its key or its signature does not fit."


@pytest.mark.parametrize(
    ("claims", "message"),
    [
        pytest.param({"nonce": "replayed"}, f"{NOT_VALID}it is of another sign-in", id="nonce"),
        pytest.param({"nonce": None}, f"{NOT_VALID}it is of another sign-in", id="no-nonce"),
        pytest.param({"nonce": "\ud800"}, f"{NOT_VALID}it is of another sign-in", id="half-nonce"),
        pytest.param({"aud": "other"}, f"{NOT_VALID}it is for another audience", id="audience"),
        pytest.param(
            {"aud": [CLIENT_ID, "x"]}, f"{NOT_VALID}it is for several clients", id="without-azp"
        ),
        pytest.param({"azp": "other"}, f"{NOT_VALID}it is for another client", id="azp"),
        pytest.param({"exp": 1}, f"{NOT_VALID}it has expired", id="expired"),
        pytest.param({"exp": None}, f"{NOT_VALID}it has no exp", id="without-exp"),
        pytest.param({"iat": None}, f"{NOT_VALID}it has no iat", id="without-iat"),
        pytest.param({"iss": "https://evil.example"}, FIT, id="issuer"),
        pytest.param({"sub": None}, f"{NOT_VALID}it has no sub", id="without-subject"),
        pytest.param(
            {"sid": ["x"]}, "The provider's ID token has no usable sid", id="session-list"
        ),
        pytest.param({"x": "y" * 100_000}, f"{NOT_VALID}it is over 65,536", id="of-100-kb"),
        pytest.param({"id_token": "no token"}, FIT, id="no-token"),
        pytest.param({"id_token": "\u20ac.\u20ac.\u20ac"}, FIT, id="no-ascii"),
        pytest.param({"key": SigningKey.make()}, FIT, id="key"),
    ],
)
async def test_id_token_that_does_not_fit_is_refused(
    visit: Visit, provider: OpenIdProvider, claims: dict[str, Any], message: str
) -> None:
    response = await visit.sign_in(provider, groups="ops", **claims)
    assert fault(response).startswith(message)
    assert response.status_code == 401
    assert await visit.session() == 401


@pytest.mark.parametrize(
    ("claim", "seconds", "reason"),
    [
        pytest.param("iat", 86400, "it is not valid yet", id="a-day-ahead"),
        pytest.param("iat", 300, "it is not valid yet", id="5-minutes-ahead"),
        pytest.param("exp", -300, "it has expired", id="5-minutes-behind"),
    ],
)
async def test_id_token_of_another_time_is_refused(
    visit: Visit, provider: OpenIdProvider, claim: str, seconds: int, reason: str
) -> None:
    response = await visit.sign_in(provider, groups="ops", **{claim: time.time() + seconds})
    assert fault(response).startswith(f"{NOT_VALID}{reason}")
    assert response.status_code == 401


@pytest.mark.parametrize("algorithm", ["none", "HS256"])
async def test_id_token_of_an_algorithm_without_a_private_key_is_refused(
    visit: Visit, provider: OpenIdProvider, algorithm: str
) -> None:
    import jwt

    url = await visit.begin()
    key = provider.keys[0]
    claims = jwt.decode(provider.token(aud=CLIENT_ID), options={"verify_signature": False})
    claims |= {"nonce": httpx.URL(url).params["nonce"], "groups": "ops"}
    header = base64.urlsafe_b64encode(
        json.dumps({"alg": algorithm, "kid": key.kid, "typ": "JWT"}).encode()
    )
    payload = base64.urlsafe_b64encode(json.dumps(claims).encode())
    forged = b".".join(part.rstrip(b"=") for part in (header, payload, b"AAAA")).decode()
    assert fault(await visit.finish(provider.grant(url, id_token=forged))) == FIT


@pytest.mark.parametrize(
    "elsewhere", ["https://evil.example/console/", "//evil.example/console/", "/console//evil"]
)
async def test_next_leads_to_no_other_site(
    visit: Visit, provider: OpenIdProvider, elsewhere: str
) -> None:
    url = await visit.begin(elsewhere)
    assert led_to(await visit.finish(provider.grant(url, groups="ops"))) == "/console"
    url = await visit.begin("/console/engines")
    assert led_to(await visit.finish(provider.grant(url, groups="ops"))) == "/console/engines"


async def test_another_site_cannot_begin_a_sign_in(visit: Visit) -> None:
    response = await visit.client.post(
        "/console/login/oidc", headers={"sec-fetch-site": "cross-site"}
    )
    assert response.status_code == 403
    assert "set-cookie" not in response.headers or "Max-Age=0" in response.headers["set-cookie"]


async def test_host_that_is_no_host_begins_no_sign_in(visit: Visit) -> None:
    response = await visit.client.post(
        "/console/login/oidc", headers={**SAME_ORIGIN, "host": "evil.example/x?"}
    )
    assert response.status_code == 400


async def test_cookies_cannot_be_exchanged(visit: Visit, provider: OpenIdProvider) -> None:
    await visit.begin()
    attempt = visit.client.cookies["gateway_console_attempt"]
    visit.client.cookies.set("gateway_console", attempt, path="/console")
    assert await visit.session() == 401


# The provider


async def test_provider_that_is_down_is_said_in_one_line_and_keys_still_work(
    gateway: Gateway, visit: Visit, provider: OpenIdProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provider_module, "COOLDOWN_S", 0.0)
    await visit.sign_in(provider, groups="ops")
    await provider.stop()
    response = await visit.client.post("/console/login/oidc", headers=SAME_ORIGIN)
    assert response.status_code == 503
    assert fault(response) == "The identity provider does not answer now. Try again later."
    assert await visit.session() == {"role": "admin", "key_id": "sso:alice"}
    by_key = await visit.client.post("/console/login", data={"key": ROOT_KEY}, headers=SAME_ORIGIN)
    assert by_key.status_code == 303
    await provider.start()
    assert await visit.begin()


@pytest.mark.slow
async def test_an_hour_without_the_provider(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sessions go on to their end; who has to sign in waits for the provider, or has a key."""
    monkeypatch.setattr(provider_module, "COOLDOWN_S", 0.0)
    clock = MovedClock(monkeypatch)
    alice = {"role": "admin", "key_id": "sso:alice"}
    down = "The identity provider does not answer now. Try again later."
    async with (
        OpenIdProvider() as provider,
        serving_demo(tmp_path, fake.url, console={"oidc": oidc(provider)}) as gateway,
        visiting(gateway) as visit,
        visiting(gateway) as bob,
    ):
        await visit.sign_in(provider, groups="ops")
        begun = provider.grant(await bob.begin(), subject="bob", groups="users")
        await provider.stop()
        assert "does not answer" in fault(await bob.finish(begun))
        for clock.by_s in (60, 3600):
            assert await visit.session() == alice
            response = await bob.client.post("/console/login/oidc", headers=SAME_ORIGIN)
            assert (response.status_code, fault(response)) == (503, down)
        by_key = {"key": ROOT_KEY}
        entered = await bob.client.post("/console/login", data=by_key, headers=SAME_ORIGIN)
        assert entered.status_code == 303
        await provider.start()
        now = clock.time()
        await bob.sign_in(provider, subject="bob", groups="users", iat=now, exp=now + 600)
        assert await bob.session() == {"role": "client", "key_id": "sso:bob"}
        clock.by_s = 8 * 3600 - 60
        assert await visit.session() == alice
        clock.by_s = 8 * 3600
        assert await visit.session() == 401


async def test_provider_that_fails_between_the_steps_is_said(
    visit: Visit, provider: OpenIdProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = provider.grant(await visit.begin(), groups="ops")
    provider.answers["/token"] = lambda: ("302 Found\r\nlocation: http://127.0.0.1:1/", b"{}")
    assert fault(await visit.finish(answer)) == "The identity provider refused. Start again."
    answer = provider.grant(await visit.begin(), groups="ops")
    provider.answers["/token"] = lambda: ("200 OK", b"x" * 2_000_000)
    assert "is over 1048576 bytes" in fault(await visit.finish(answer))
    monkeypatch.setattr(provider_fetch, "FETCH_S", 1.0)
    answer = provider.grant(await visit.begin(), groups="ops")
    provider.answers["/token"] = lambda: ("200 OK", b"[" * 100_000)
    assert fault(await visit.finish(answer)).endswith("/token is not JSON.")


async def test_keys_rotate_at_any_time(
    visit: Visit, provider: OpenIdProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provider_module, "COOLDOWN_S", 0.0)
    url = await visit.begin()
    key = provider.rotate(withdraw=True)
    await visit.finish(provider.grant(url, key=key, groups="ops"))
    assert await visit.session() == {"role": "admin", "key_id": "sso:alice"}


# Sign-outs by the provider


async def tell(visit: Visit, token: str) -> httpx.Response:
    return await visit.client.post("/console/logout/oidc", data={"logout_token": token})


@pytest.mark.parametrize(
    "claims",
    [{}, {"subject": None}, {"sid": None}],
    ids=["both", "only-the-session", "only-the-subject"],
)
async def test_the_provider_ends_a_session(
    gateway: Gateway, visit: Visit, provider: OpenIdProvider, claims: dict[str, Any]
) -> None:
    session = f"session-{len(claims)}-{'sid' in claims}"
    await visit.sign_in(provider, sid=session, groups="ops")
    async with visiting(gateway) as bob:
        await bob.sign_in(provider, subject="bob", sid="other", groups="users")
        told = await tell(bob, provider.logout_token(**{"sid": session, **claims}))
        assert told.status_code == 200
        assert told.headers["cache-control"] == "no-store"
        assert await visit.session() == 401
        assert await bob.session() == {"role": "client", "key_id": "sso:bob"}
    assert (await actions(gateway))[0][:2] == ("sso:alice", "session.sign_out")


@pytest.mark.parametrize(
    "claims",
    [
        pytest.param({"events": None}, id="an-id-token"),
        pytest.param({"events": {}}, id="other-events"),
        pytest.param({"nonce": "x"}, id="nonce"),
        pytest.param({"aud": "other"}, id="audience"),
        pytest.param({"exp": 1}, id="expired"),
        pytest.param({"iat": 1}, id="old"),
        pytest.param({"jti": None}, id="without-jti"),
        pytest.param({"subject": None, "sid": None}, id="of-no-session"),
        pytest.param({"sid": "\ud800"}, id="half-session"),
        pytest.param({"key": SigningKey.make()}, id="key"),
    ],
)
async def test_sign_out_that_the_provider_has_not_sent_is_refused(
    visit: Visit, provider: OpenIdProvider, claims: dict[str, Any]
) -> None:
    await visit.sign_in(provider, groups="ops")
    assert (await tell(visit, provider.logout_token(**claims))).status_code == 400
    assert await visit.session() == {"role": "admin", "key_id": "sso:alice"}


async def test_an_old_sign_out_ends_no_newer_session(
    visit: Visit, provider: OpenIdProvider
) -> None:
    old = provider.logout_token(iat=time.time() - 60)
    await visit.sign_in(provider, groups="ops")
    assert (await tell(visit, old)).status_code == 200
    assert await visit.session() == {"role": "admin", "key_id": "sso:alice"}


# Without keys


@pytest.mark.slow
async def test_keys_can_be_left_out(fake: Fake, provider: OpenIdProvider, tmp_path: Path) -> None:
    async with serving_demo(tmp_path, fake.url) as gateway, visiting(gateway) as visit:
        await visit.client.post("/console/login", data={"key": ROOT_KEY}, headers=SAME_ORIGIN)
        cookies = dict(visit.client.cookies)
        assert await visit.session() == {"role": "admin", "key_id": "root"}
    console = {"oidc": oidc(provider), "key_sign_in": False}
    async with (
        serving_demo(tmp_path, fake.url, console=console) as gateway,
        visiting(gateway) as visit,
    ):
        page = (await visit.client.get("/console/login")).text
        assert "API key" not in page
        assert f"Sign in with 127.0.0.1:{provider.port}" in page
        refused = await visit.client.post(
            "/console/login", data={"key": ROOT_KEY}, headers=SAME_ORIGIN
        )
        assert refused.status_code == 403
        visit.client.cookies.update(cookies)
        assert await visit.session() == 401, "the session of a key"
        visit.client.cookies.clear()
        await visit.sign_in(provider, groups="ops")
        assert await visit.session() == {"role": "admin", "key_id": "sso:alice"}
