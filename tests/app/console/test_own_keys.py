"""Keys that people make for themselves: their bounds, and whose they are."""

import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from app.api import act_limits
from app.api.act_limits import BURST_S
from app.auth import KeyFields
from app.settings import LimitSettings
from tests.app.console.test_oidc_sign_in import (
    Visit,
    actions,
    environment,
    oidc,
    only_provider,
    provider,
    visiting,
)
from tests.app.console.visits import SAME_ORIGIN
from tests.fakes.openid_provider import OpenIdProvider
from tests.fakes.vllm import Fake
from tests.gateway import ROOT, Gateway, serving_demo

pytestmark = pytest.mark.asyncio(loop_scope="module")
__all__ = ("environment", "only_provider", "provider")

API = "/console/api/own_keys"
BOUNDS = {
    "max_keys": 2,
    "max_days": 30,
    "limits": {"requests_per_minute": 5},
    "monthly_tokens": 1000,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(
    only_provider: OpenIdProvider, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Gateway]:
    console = {"oidc": oidc(only_provider, owner_claim="team", own_keys=BOUNDS)}
    async with (
        Fake() as fake,
        serving_demo(tmp_path_factory.mktemp("gateway"), fake.url, console=console) as gateway,
    ):
        yield gateway


async def enter(
    visit: Visit, provider: OpenIdProvider, subject: str, groups: str, **claims: Any
) -> None:
    """Sign in, and take the token of the pages."""
    await visit.sign_in(
        provider, **{"subject": subject, "groups": groups, "team": "research", **claims}
    )
    page = await visit.client.get("/console", follow_redirects=True)
    found = re.search(r'name="csrf-token" content="([0-9a-f]+)"', page.text)
    assert found
    visit.client.headers.update({**SAME_ORIGIN, "x-csrf-token": found[1]})


async def make(visit: Visit, **fields: object) -> httpx.Response:
    return await visit.client.post(API, json={"name": "laptop", "days": 7, **fields})


async def test_person_makes_uses_and_revokes_a_key_within_the_bounds(
    gateway: Gateway, provider: OpenIdProvider
) -> None:
    async with visiting(gateway) as visit:
        await enter(visit, provider, "ann", "users")
        response = await make(visit)
        assert response.status_code == 201, response.text
        assert response.headers["cache-control"] == "no-store"
        made = response.json()
        assert (made["name"], made["owner"], made["role"]) == (
            "laptop (sso:ann)", "research", "client",
        )  # fmt: skip
        assert (made["requests_per_minute"], made["monthly_tokens"]) == (5, 1000)
        assert made["expires"] is not None
        page = (await visit.client.get("/console/own_keys")).text
        assert "laptop (sso:ann)" in page
        assert made["key"] not in page
        headers = {"authorization": f"Bearer {made['key']}"}
        answer = await gateway.client.get("/v1/models", headers=headers)
        assert answer.status_code == 200
        assert (await visit.client.delete(f"{API}/{made['id']}")).status_code == 204
        assert (await gateway.client.get("/v1/models", headers=headers)).status_code == 401
        found = (await actions(gateway))[:2]
        assert [one[:2] for one in found] == [("sso:ann", "key.delete"), ("sso:ann", "key.create")]


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"days": 31}, 403),
        ({"days": 0}, 400),
        ({"days": "7"}, 400),
        ({"name": ""}, 400),
        ({"name": "a\nb"}, 400),
        ({"role": "admin"}, 400),
        ({"owner": "sales"}, 400),
        ({"models": ["*"]}, 400),
        ({"requests_per_minute": 10**6}, 400),
    ],
)
async def test_no_key_is_made_beyond_the_bounds(
    gateway: Gateway, provider: OpenIdProvider, fields: dict[str, object], status: int
) -> None:
    async with visiting(gateway) as visit:
        await enter(visit, provider, "bob", "users")
        assert (await make(visit, **fields)).status_code == status
        assert "You have no key yet." in (await visit.client.get("/console/own_keys")).text


async def test_budget_is_the_smaller_one_and_keys_are_counted(
    gateway: Gateway, provider: OpenIdProvider
) -> None:
    async with visiting(gateway) as visit:
        await enter(visit, provider, "cleo", "users")
        more = (await make(visit, monthly_tokens=10**9)).json()
        fewer = (await make(visit, name="server", monthly_tokens=10)).json()
        assert (more["monthly_tokens"], fewer["monthly_tokens"]) == (1000, 10)
        third = await make(visit, name="third")
        assert third.status_code == 400
        assert "as many keys as there may be" in third.text


async def test_a_person_makes_no_flood_of_keys(
    gateway: Gateway, provider: OpenIdProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with visiting(gateway) as visit:
        await enter(visit, provider, "gus", "users")
        monkeypatch.setattr(act_limits, "_LIMIT", LimitSettings(requests_per_minute=1))
        statuses: list[int] = []
        while len(statuses) < 30 and 429 not in statuses:
            made = await make(visit)
            deleted = await visit.client.delete(f"{API}/{made.json().get('id')}")
            statuses += [made.status_code, deleted.status_code]
        assert 429 in statuses
        assert statuses.index(429) < BURST_S / 60


async def test_only_keys_of_the_person_are_seen_and_deleted(
    gateway: Gateway, provider: OpenIdProvider
) -> None:
    other, _ = await gateway.state.key_store.create(KeyFields(name="other", owner="research"))
    async with visiting(gateway) as eve, visiting(gateway) as dan:
        await enter(eve, provider, "eve", "users")
        await enter(dan, provider, "dan", "ops")
        of_eve = (await make(eve)).json()["id"]
        for key_id in (other.id, of_eve, "x"):
            assert (await dan.client.delete(f"{API}/{key_id}")).status_code == 404
        page = (await dan.client.get("/console/own_keys")).text
        assert "sso:eve" not in page
        assert "You have no key yet." in page


@pytest.mark.parametrize("team", [None, "research"], ids=["owners-of-their-own", "one-owner"])
async def test_two_people_with_one_email_are_two(
    gateway: Gateway, provider: OpenIdProvider, team: str | None
) -> None:
    """An account with the address of another, in all that is shown of it, gets nothing of it."""
    same = {"email": "kim@example.org", "email_verified": True, "name": "Kim"}
    first, second = (f"{name}-{team}" for name in ("kim", "mallory"))
    async with visiting(gateway) as one, visiting(gateway) as other:
        await enter(one, provider, first, "ops", sid="1", **same, team=team or first)
        await enter(other, provider, second, "users", sid="2", **same, team=team or second)
        assert await one.session() == {"role": "admin", "key_id": f"sso:{first}"}
        assert await other.session() == {"role": "client", "key_id": f"sso:{second}"}
        made = (await make(one)).json()
        assert (made["name"], made["owner"]) == (f"laptop (sso:{first})", team or first)
        assert "You have no key yet." in (await other.client.get("/console/own_keys")).text
        assert (await other.client.delete(f"{API}/{made['id']}")).status_code == 404
        assert (await make(other)).json()["owner"] == (team or second)
        token = provider.logout_token(subject=first, sid="1")
        told = await one.client.post("/console/logout/oidc", data={"logout_token": token})
        assert told.status_code == 200
        assert await one.session() == 401
        assert await other.session() == {"role": "client", "key_id": f"sso:{second}"}
        headers = {"authorization": f"Bearer {made['key']}"}
        assert (await gateway.client.get("/v1/models", headers=headers)).status_code == 200
    acts = [(who, action) for who, action, _ in (await actions(gateway))[:5]]
    assert acts == [
        (f"sso:{first}", "session.sign_out"),
        (f"sso:{second}", "key.create"),
        (f"sso:{first}", "key.create"),
        (f"sso:{second}", "session.sign_in"),
        (f"sso:{first}", "session.sign_in"),
    ]


async def test_forged_requests_and_keys_make_no_key(
    gateway: Gateway, provider: OpenIdProvider
) -> None:
    async with visiting(gateway) as visit:
        await enter(visit, provider, "fay", "users")
        visit.client.headers["x-csrf-token"] = "0" * 64
        assert (await make(visit)).status_code == 403
    by_key = await gateway.client.post(API, json={"name": "x", "days": 1}, headers=ROOT)
    assert by_key.status_code == 401
    async with visiting(gateway) as visit:
        await visit.client.post(
            "/console/login", data={"key": ROOT["authorization"][7:]}, headers=SAME_ORIGIN
        )
        assert (await visit.client.get("/console/own_keys")).status_code == 403
