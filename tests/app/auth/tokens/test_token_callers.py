"""Access tokens as API keys, through a whole gateway: who is let in as whom, and who is not."""

import asyncio
import base64
import hashlib
import hmac
import json
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from app.auth.owner_store import OwnerStore
from app.auth.principal import Owner
from app.auth.tokens import UnusableClaim
from app.auth.tokens import provider as provider_module
from app.auth.tokens.verification import principal_of
from app.auth.validation import OwnerFields
from app.settings import NO_LIMITS, JwtSettings
from tests.app.console.visits import SAME_ORIGIN
from tests.fakes.identity_provider import AUDIENCE, IdentityProvider, SigningKey
from tests.fakes.vllm import Fake
from tests.gateway import ROOT, Gateway, serving_demo
from tests.waiting import wait_until


@pytest.fixture
async def provider() -> AsyncIterator[IdentityProvider]:
    async with IdentityProvider() as provider:
        yield provider


def accepting(provider: IdentityProvider, **fields: Any) -> dict[str, Any]:
    """Return the settings that accept a provider's tokens."""
    return {"jwt": [{"name": "sso", "issuer": provider.issuer, "audience": AUDIENCE, **fields}]}


@pytest.fixture
async def gateway(fake: Fake, provider: IdentityProvider, tmp_path: Path) -> AsyncIterator[Gateway]:
    claims = {
        "owner_claim": "team",
        "role_claim": "groups",
        "models": ["demo"],
        "roles": {
            "gw-admins": "admin",
            "gw-auditors": "auditor",
            "gw-operators": "operator",
            "gw-leads": "owner_manager",
        },
    }
    auth = accepting(provider, **claims, limits={"requests_per_minute": 50})
    async with serving_demo(tmp_path, fake.url, auth=auth) as gateway:
        await wait_until(lambda: "/jwks" in provider.seen)
        yield gateway


async def ask(gateway: Gateway, token: str, path: str = "/v1/models") -> httpx.Response:
    headers = {"authorization": f"Bearer {token}"}
    return await gateway.client.get(path, headers=headers)


async def chat(gateway: Gateway, token: str) -> httpx.Response:
    body = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
    headers = {"authorization": f"Bearer {token}"}
    return await gateway.client.post("/v1/chat/completions", json=body, headers=headers)


def forged(header: dict[str, Any], claims: dict[str, Any], secret: bytes | None = None) -> str:
    """Return a token whose header and claims are an attacker's, signed by HS256 or not at all."""
    parts = [
        base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=")
        for part in (header, claims)
    ]
    signed = b".".join(parts)
    mac = b"" if secret is None else hmac.digest(secret, signed, hashlib.sha256)
    return (signed + b"." + base64.urlsafe_b64encode(mac).rstrip(b"=")).decode()


async def test_subject_is_a_caller_with_owner_limits_and_usage(
    gateway: Gateway, provider: IdentityProvider, fake: Fake
) -> None:
    answer = await chat(gateway, provider.token(team="research"))
    assert answer.status_code == 200
    assert answer.headers["x-ratelimit-limit-requests"] == "50"
    await wait_until(lambda: gateway.state.ledger.pending == 0)
    usage = await gateway.client.get(
        "/admin/usage", params={"by": "key,owner", "key": "sso:alice"}, headers=ROOT
    )
    [row] = usage.json()["data"]
    assert (row["key_id"], row["owner"], row["requests"]) == ("sso:alice", "research", 1)
    own = (await ask(gateway, provider.token(team="research"), "/v1/usage")).json()
    assert (own["key_id"], own["today"]["requests"]) == ("sso:alice", 1)
    assert provider.seen.count("/jwks") == 1, "no request goes to the provider"


async def test_subjects_do_not_share_the_prefix_cache(
    gateway: Gateway, provider: IdentityProvider, fake: Fake
) -> None:
    for subject in ("alice", "bob", "alice"):
        await chat(gateway, provider.token(subject, team="research"))
    first, other, again = (seen.json["cache_salt"] for seen in fake.seen[-3:])
    assert first == again != other


async def test_limits_of_the_owners_record_hold_for_its_tokens(
    gateway: Gateway, provider: IdentityProvider
) -> None:
    owners = OwnerStore(gateway.state.database)
    token = provider.token(team="research")
    assert (await chat(gateway, token)).status_code == 200
    await owners.replace("research", OwnerFields.model_validate({"requests_per_minute": 0}))
    assert gateway.state.tokens is not None
    await gateway.state.tokens.read_owners()
    assert (await chat(gateway, token)).status_code == 429
    assert (await chat(gateway, provider.token("bob", team="research"))).status_code == 429
    assert (await chat(gateway, provider.token("bob", team="sales"))).status_code == 200


async def test_record_holds_for_a_caller_that_came_while_records_were_read(
    gateway: Gateway, provider: IdentityProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, reading, go_on = gateway.state.tokens, asyncio.Event(), asyncio.Event()
    assert tokens is not None
    read = OwnerStore.records

    async def read_slowly(store: OwnerStore, names: Collection[str]) -> Mapping[str, Owner]:
        found = await read(store, names)
        if "sales" in names:
            reading.set()
            await go_on.wait()
        return found

    token = provider.token(team="research")
    assert (await chat(gateway, provider.token("bob", team="sales"))).status_code == 200
    monkeypatch.setattr(OwnerStore, "records", read_slowly)
    round_ = asyncio.create_task(tokens.read_owners())
    await reading.wait()
    assert (await chat(gateway, token)).status_code == 200
    go_on.set()
    await round_
    owners = OwnerStore(gateway.state.database)
    await owners.replace("research", OwnerFields.model_validate({"requests_per_minute": 0}))
    other = provider.token("carol", team="research")
    assert (await chat(gateway, other)).status_code == 429
    await tokens.read_owners()
    assert (await chat(gateway, token)).status_code == 429


@pytest.mark.parametrize("budget", [{"monthly_tokens": 1}, {"daily_cost": 0.000001}])
async def test_budget_is_the_providers_template(
    fake: Fake, tmp_path: Path, budget: dict[str, float]
) -> None:
    async with IdentityProvider() as provider:
        auth, model = accepting(provider, **budget), {"price": {"prompt": 5.0, "completion": 5.0}}
        async with serving_demo(tmp_path, fake.url, auth=auth, model=model) as gateway:
            answer = await chat(gateway, provider.token())
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "insufficient_quota")


@pytest.mark.parametrize(
    ("groups", "status"),
    [
        (["gw-admins"], 200),
        (["staff", "gw-auditors"], 200),
        ("gw-admins", 200),
        (["staff"], 403),
        ([{"gw-admins": 1}, ["gw-admins"]], 403),
        (None, 403),
    ],
)
async def test_role_is_of_a_claim(
    gateway: Gateway, provider: IdentityProvider, groups: Any, status: int
) -> None:
    token = provider.token(team="research", groups=groups)
    assert (await ask(gateway, token, "/admin/models")).status_code == status
    # A client is one for models only, and the others for /admin only.
    assert (await ask(gateway, token)).status_code == (401 if status == 200 else 200)


async def test_a_role_with_a_scope_is_for_the_tokens_models_or_owner(
    gateway: Gateway, provider: IdentityProvider
) -> None:
    operator = provider.token(team="research", groups=["gw-operators"])
    listed = (await ask(gateway, operator, "/admin/models")).json()["data"]
    assert [row["name"] for row in listed] == ["demo"]
    assert (await ask(gateway, operator, "/admin/keys")).status_code == 403
    lead = provider.token(team="research", groups=["gw-leads"])
    assert (await ask(gateway, lead, "/admin/keys")).json()["data"] == []
    assert (await ask(gateway, lead, "/admin/owners/sales")).status_code == 404
    both = provider.token(team="research", groups=["gw-leads", "gw-operators", "gw-auditors"])
    assert (await ask(gateway, both, "/admin/audit")).status_code == 200  # the last of the order


async def test_console_takes_a_token_and_ends_with_it(
    gateway: Gateway, provider: IdentityProvider
) -> None:
    token = provider.token(team="research")
    url = str(gateway.client.base_url)
    async with httpx.AsyncClient(base_url=url, headers=SAME_ORIGIN, timeout=20) as browser:
        entered = await browser.post("/console/login", data={"key": token})
        assert entered.status_code == 303
        session = await browser.get("/console/api/session")
        assert session.json() == {"role": "client", "key_id": "sso:alice"}
        assert (await browser.get("/console/account")).status_code == 200
        assert gateway.state.tokens is not None
        gateway.state.tokens.drop_all()
        assert (await browser.get("/console/api/session")).status_code == 401


CLAIMS: list[Any] = [
    pytest.param({"exp": 1}, "the access token has expired", id="expired"),
    pytest.param({"exp": None}, "the access token has no exp", id="without-exp"),
    pytest.param({"nbf": 2**40}, "the access token is not valid yet", id="not-yet-valid"),
    pytest.param({"iat": 2**40}, "the access token is not valid yet", id="made-in-the-future"),
    pytest.param({"aud": "other"}, "the access token is for another audience", id="audience"),
    pytest.param({"aud": ["a", "b"]}, "the access token is for another audience", id="audiences"),
    pytest.param({"aud": [["x"]]}, "the access token is for another audience", id="audience-lists"),
    pytest.param({"aud": None}, "the access token has no aud", id="without-audience"),
    pytest.param({"iss": "http://127.0.0.1:1"}, "the API key is not valid", id="foreign-issuer"),
    pytest.param({"iss": None}, "the API key is not valid", id="without-issuer"),
    pytest.param({"sub": None}, "the access token has no usable claim sub", id="no-subject"),
    pytest.param({"sub": ""}, "the access token has no usable claim sub", id="empty-subject"),
    pytest.param({"sub": "\ud800"}, "the access token has no usable claim sub", id="half-sub"),
    pytest.param({"team": "\ud800"}, "the access token has no usable claim team", id="half-owner"),
    pytest.param({"team": None}, "the access token has no usable claim team", id="no-owner"),
    pytest.param({"team": ["a"]}, "the access token has no usable claim team", id="owner-list"),
    pytest.param({"team": "x" * 5000}, "the access token has no usable claim team", id="owner-5kB"),
    pytest.param({"team": "x" * 20_000}, "the API key is not valid", id="claim-of-20-kB"),
]  # fmt: skip


@pytest.mark.parametrize(("claims", "message"), CLAIMS)
async def test_unfit_claims_are_401(
    gateway: Gateway, provider: IdentityProvider, claims: dict[str, Any], message: str
) -> None:
    answer = await ask(gateway, provider.token(**{"team": "research", **claims}))
    assert answer.status_code == 401, answer.text
    assert answer.json()["error"]["message"] == message
    assert provider.seen.count("/jwks") == 1


@pytest.mark.parametrize("place", ["role_claim", "owner_claim", "models_claim"])
@pytest.mark.parametrize("claim", ["email", "/email"])
def test_an_email_that_is_not_verified_is_not_usable(place: str, claim: str) -> None:
    settings = JwtSettings.model_validate(
        {"name": "sso", "issuer": "https://sso.example", "audience": "a", place: claim}
    )
    claims = {"sub": "mallory", "email": "ada@example.org"}
    for verified in ({}, {"email_verified": False}, {"email_verified": "true"}):
        with pytest.raises(UnusableClaim, match="email_verified"):
            principal_of({**claims, **verified}, settings, NO_LIMITS)
    principal_of({**claims, "email_verified": True}, settings, NO_LIMITS)


@pytest.mark.parametrize(
    ("claim", "seconds", "message"),
    [
        pytest.param("exp", -31, "the access token has expired", id="past-the-leeway"),
        pytest.param("iat", 300, "the access token is not valid yet", id="5-minutes-ahead"),
        pytest.param("exp", -300, "the access token has expired", id="5-minutes-behind"),
    ],
)
async def test_tokens_of_another_time_are_401(
    gateway: Gateway, provider: IdentityProvider, claim: str, seconds: int, message: str
) -> None:
    claims: dict[str, Any] = {claim: time.time() + seconds}
    answer = await ask(gateway, provider.token(team="research", **claims))
    assert (answer.status_code, answer.json()["error"]["message"]) == (401, message)


@pytest.mark.parametrize(
    "claims_at",
    [
        pytest.param(lambda now: {"aud": [AUDIENCE, "other"]}, id="one-of-several-audiences"),
        pytest.param(lambda now: {"exp": now - 5}, id="expired-within-the-leeway"),
        pytest.param(lambda now: {"nbf": now + 5}, id="valid-within-the-leeway"),
        pytest.param(lambda now: {"padding": "x" * 4000}, id="long"),
    ],
)
async def test_fit_claims_are_let_in(
    gateway: Gateway, provider: IdentityProvider, claims_at: Callable[[int], dict[str, Any]]
) -> None:
    claims = claims_at(int(time.time()))
    assert (await ask(gateway, provider.token(team="research", **claims))).status_code == 200


async def test_claim_of_100_kb_is_refused_with_the_request_head(
    gateway: Gateway, provider: IdentityProvider
) -> None:
    token = provider.token(team="x" * 100_000)
    assert (await ask(gateway, token)).status_code == 431


async def test_forged_tokens_are_401_and_cause_no_fetch(
    gateway: Gateway, provider: IdentityProvider
) -> None:
    key = provider.keys[0]
    now = int(time.time())
    claims = {
        "iss": provider.issuer, "aud": AUDIENCE, "sub": "eve", "team": "t", "exp": now + 60,
    }  # fmt: skip
    pem = key.private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    header = {"alg": "HS256", "typ": "JWT", "kid": key.kid}
    other = SigningKey.make()
    good = provider.token(team="t")
    attacks = {
        "none": forged({**header, "alg": "none"}, claims),
        "None": forged({**header, "alg": "None"}, claims),
        "without alg": forged({"kid": key.kid}, claims),
        "alg list": forged({**header, "alg": ["ES256"]}, claims),
        "HS256 with the public key": forged(header, claims, pem),
        "HS256 with the published key": forged(header, claims, json.dumps(key.jwk).encode()),
        "ES256 with a MAC": forged({**header, "alg": "ES256"}, claims, pem),
        "another key under the same kid": jwt.encode(
            claims, other.private, "ES256", headers={"kid": key.kid}
        ),
        "its own key in the header": jwt.encode(
            claims, other.private, "ES256", headers={"kid": key.kid, "jwk": other.jwk}
        ),
        "an address of keys in the header": jwt.encode(
            claims, other.private, "ES256",
            headers={"kid": key.kid, "jku": "http://127.0.0.1:1/", "x5u": "http://127.0.0.1:1/"},
        ),
        "kid list": forged({**header, "alg": "ES256", "kid": [key.kid]}, claims, pem),
        "algorithm that is not allowed": jwt.encode(
            claims, SigningKey.make("ES384").private, "ES384", headers={"kid": key.kid}
        ),
        "critical extension": jwt.encode(
            claims, key.private, "ES256", headers={"kid": key.kid, "crit": ["x"], "x": 1}
        ),
        "cut signature": good[:-4],
        "other claims": ".".join(
            [good.split(".")[0], forged({}, claims).split(".")[1], good.split(".")[2]]
        ),
        "deep claims": f"{good.split('.')[0]}.{_deep()}.{good.split('.')[2]}",
        "infinite exp": f"{good.split('.')[0]}.{_base64(INFINITE)}.x",
        "issuer list": forged(
            {**header, "alg": "ES256"}, {**claims, "iss": [provider.issuer]}, pem
        ),
        "no JSON": f"eyJ.{_base64(b'x')}.x",
    }  # fmt: skip
    for name, token in attacks.items():
        answer = await ask(gateway, token)
        assert (answer.status_code, answer.json()["error"]["message"]) == (
            401, "the API key is not valid",
        ), name  # fmt: skip
    assert provider.seen.count("/jwks") == 1


INFINITE = b'{"exp":1e999}'


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _deep() -> str:
    return _base64(b'{"a":' * 900 + b"1" + b"}" * 900)


async def test_hostile_kids_are_no_paths_and_one_fetch_at_most(
    gateway: Gateway, provider: IdentityProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provider_module, "COOLDOWN_S", 0.0)
    stranger = SigningKey.make()
    kids = ["../../../../dev/null", "' OR 1=1 --", "http://127.0.0.1:1/", "x" * 2000, "\x00"]
    tokens = [
        provider.token(team="t", key=SigningKey(kid, "ES256", stranger.private)) for kid in kids
    ]
    before = provider.seen.count("/jwks")
    monkeypatch.setattr(provider_module, "COOLDOWN_S", 3600.0)
    assert gateway.state.tokens is not None
    answers = await asyncio.gather(*(ask(gateway, token) for token in tokens * 10))
    assert {answer.status_code for answer in answers} == {401}
    assert provider.seen.count("/jwks") == before, "within the cooldown there is no fetch"


async def test_rotation_under_load_fails_no_request(
    gateway: Gateway, provider: IdentityProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provider_module, "COOLDOWN_S", 0.0)
    statuses: list[int] = []

    async def load(number: int) -> None:
        for count in range(10):
            if number == 0 and count == 5:
                provider.rotate("RS256")
            token = provider.token(f"user-{number}-{count}", team="t")
            statuses.append((await chat(gateway, token)).status_code)

    old = provider.token(team="t")
    await asyncio.gather(*(load(number) for number in range(4)))
    assert statuses == [200] * 40
    assert (await chat(gateway, old)).status_code == 200, "its key is still published"
    assert provider.seen.count("/jwks") == 2


async def test_tokens_of_a_withdrawn_key_end_with_the_next_fetch(
    gateway: Gateway, provider: IdentityProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provider_module, "COOLDOWN_S", 0.0)
    old = provider.token(team="t")
    assert (await ask(gateway, old)).status_code == 200
    provider.rotate(withdraw=True)
    assert (await ask(gateway, old)).status_code == 200, "nothing was fetched since"
    assert (await ask(gateway, provider.token(team="t"))).status_code == 200
    assert (await ask(gateway, old)).status_code == 401


async def test_tokens_of_a_key_end_when_another_gets_its_name(
    gateway: Gateway, provider: IdentityProvider
) -> None:
    token, old = provider.token(team="t"), provider.keys[0]
    assert (await ask(gateway, token)).status_code == 200
    provider.keys = [SigningKey(old.kid, "ES256", SigningKey.make().private)]
    assert gateway.state.tokens is not None
    for one in gateway.state.tokens._providers.values():
        await one.refresh()
    assert (await ask(gateway, token)).status_code == 401
    assert (await ask(gateway, provider.token(team="t"))).status_code == 200


async def test_known_keys_go_on_while_the_provider_is_down(
    gateway: Gateway, provider: IdentityProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provider_module, "COOLDOWN_S", 0.0)
    await provider.stop()
    assert (await chat(gateway, provider.token(team="t"))).status_code == 200
    new = provider.rotate()
    unknown = await chat(gateway, provider.token(team="t", key=new))
    assert (unknown.status_code, unknown.headers["retry-after"]) == (503, "1")
    await provider.start()
    assert (await chat(gateway, provider.token(team="t", key=new))).status_code == 200


async def test_unknown_issuer_has_no_effect_on_keys_of_the_store(
    gateway: Gateway, provider: IdentityProvider
) -> None:
    assert (await gateway.chat()).status_code == 200
    both = {"authorization": f"Bearer {provider.token(team='t')}", "x-api-key": "sk-other"}
    assert (await gateway.client.get("/v1/models", headers=both)).status_code == 401


async def test_without_keys_tokens_are_503_and_then_let_in(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provider_module, "COOLDOWN_S", 0.0)
    provider = IdentityProvider()
    provider.answers["/jwks"] = lambda: ("500 Internal Server Error", b"")
    async with (
        provider,
        serving_demo(tmp_path, fake.url, auth=accepting(provider)) as gateway,
    ):
        answer = await chat(gateway, provider.token())
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        provider.answers.clear()
        assert (await chat(gateway, provider.token())).status_code == 200


async def test_service_accounts_of_kubernetes_are_callers(fake: Fake, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("pod-token\n")
    async with IdentityProvider() as provider:
        issuer = "https://kubernetes.default.svc.cluster.local"
        auth = accepting(
            provider,
            name="k8s",
            issuer=issuer,
            jwks_uri=f"{provider.issuer}/jwks",
            jwks_token_file=str(file),
            owner_claim="/kubernetes.io/namespace",
        )
        async with serving_demo(tmp_path, fake.url, auth=auth) as gateway:
            pod = {
                "namespace": "team-a",
                "pod": {"name": "worker-0", "uid": "1"},
                "serviceaccount": {"name": "worker", "uid": "2"},
            }
            claims: dict[str, Any] = {"iss": issuer, "aud": [AUDIENCE], "kubernetes.io": pod}
            token = provider.token("system:serviceaccount:team-a:worker", **claims)
            assert (await chat(gateway, token)).status_code == 200
            await wait_until(lambda: gateway.state.ledger.pending == 0)
            usage = await gateway.client.get(
                "/admin/usage", params={"by": "key,owner"}, headers=ROOT
            )
            [row] = usage.json()["data"]
    assert row["key_id"] == "k8s:system:serviceaccount:team-a:worker"
    assert row["owner"] == "team-a"
    assert provider.seen == ["/jwks"]
    assert provider.authorization == ["Bearer pod-token"]
