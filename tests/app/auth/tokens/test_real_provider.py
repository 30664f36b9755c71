"""Access tokens of a real identity provider, sent by OpenAI's SDK: rotation, and outages."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import jwt
import pytest
from openai import AsyncOpenAI, AuthenticationError, InternalServerError

from app.auth.tokens import provider as provider_module
from tests.clients.environments import Unavailable
from tests.fakes.identity_provider import AUDIENCE, SigningKey
from tests.fakes.vllm import Fake
from tests.gateway import ROOT, Gateway, serving_demo
from tests.moved_clock import MovedClock
from tests.oidc_provider import OidcProvider
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def keys() -> list[SigningKey]:
    return [SigningKey.make("RS256"), SigningKey.make("ES256")]


@pytest.fixture
def provider(keys: list[SigningKey]) -> Iterator[OidcProvider]:
    try:
        server = OidcProvider(keys[0])
    except Unavailable as error:
        pytest.skip(str(error))
    with server:
        yield server


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> MovedClock:
    return MovedClock(monkeypatch)


@pytest.fixture
async def gateway(
    provider: OidcProvider, clock: MovedClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Gateway]:
    monkeypatch.setattr(provider_module, "COOLDOWN_S", 0.0)
    accepted = {"name": "sso", "issuer": provider.issuer, "audience": AUDIENCE}
    auth = {"jwt": [{**accepted, "owner_claim": "team"}]}
    async with Fake() as fake, serving_demo(tmp_path, fake.url, auth=auth) as gateway:
        yield gateway


async def chat(gateway: Gateway, token: str) -> str:
    """Return the text of an answer."""
    url = f"http://127.0.0.1:{gateway.port}/v1"
    async with AsyncOpenAI(base_url=url, api_key=token, max_retries=0) as client:
        answer = await client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "hi"}]
        )
    return str(answer.choices[0].message.content)


async def test_tokens_are_keys_while_the_provider_rotates_and_is_down(
    gateway: Gateway, provider: OidcProvider, keys: list[SigningKey]
) -> None:
    old = newest = await asyncio.to_thread(provider.token)
    assert await chat(gateway, old)

    answered = dict.fromkeys(("before", "during", "after"), 0)
    phase = "before"

    async def load() -> None:
        while answered["after"] < 8:
            began = phase
            await chat(gateway, newest)  # raises if it is refused
            answered[began] += 1

    async with asyncio.timeout(2 * PATIENCE_S), asyncio.TaskGroup() as tasks:
        for _ in range(4):
            tasks.create_task(load())
        await wait_until(lambda: answered["before"] >= 4)
        phase = "during"  # of the restart, in which the provider is down
        await asyncio.to_thread(provider.restart, keys[1], keys[0])
        new = newest = await asyncio.to_thread(provider.token)
        phase = "after"  # the first ones have a key that is not known yet
    assert answered["during"] > 0

    await asyncio.to_thread(provider.stop)
    assert await chat(gateway, old)
    assert await chat(gateway, new)
    with pytest.raises(AuthenticationError):
        await chat(gateway, new[:-8] + "AAAAAAAA")
    await wait_until(lambda: gateway.state.ledger.pending == 0)
    used = await gateway.client.get("/admin/usage", params={"by": "key,owner"}, headers=ROOT)
    assert [(row["key_id"], row["owner"]) for row in used.json()["data"]] == [
        ("sso:agent", "research")
    ]


def token_of(provider: OidcProvider, key: SigningKey, clock: MovedClock, life_s: int) -> str:
    """Return a token as the provider makes it, at the time of the moved clock."""
    now = int(clock.time())
    claims = {"iss": provider.issuer, "aud": AUDIENCE, "sub": "agent", "team": "research"}
    times = {"iat": now, "exp": now + life_s}
    return jwt.encode({**claims, **times}, key.private, key.algorithm, {"kid": key.kid})


async def test_an_hour_without_the_provider(
    gateway: Gateway, provider: OidcProvider, keys: list[SigningKey], clock: MovedClock
) -> None:
    """Tokens end with their life and not before, and what cannot be checked is a 503."""
    short = await asyncio.to_thread(provider.token)  # lives for ten minutes
    long, unused = (token_of(provider, keys[0], clock, 7200 + life) for life in (0, 1))
    assert await chat(gateway, short)
    assert await chat(gateway, long)
    await asyncio.to_thread(provider.stop)

    clock.by_s = 540
    assert await chat(gateway, short)
    assert await chat(gateway, long)

    clock.by_s = 3600
    assert await chat(gateway, long), "verified an hour ago"
    assert await chat(gateway, unused), "verified now, by the keys of an hour ago"
    with pytest.raises(AuthenticationError, match="the access token has expired"):
        await chat(gateway, short)
    rotated = token_of(provider, keys[1], clock, 600)
    with pytest.raises(InternalServerError, match="cannot be checked at the moment") as refused:
        await chat(gateway, rotated)
    assert (refused.value.status_code, refused.value.response.headers["retry-after"]) == (503, "1")

    await asyncio.to_thread(provider.restart, keys[1], keys[0])
    assert await chat(gateway, rotated)
    assert await chat(gateway, long)
