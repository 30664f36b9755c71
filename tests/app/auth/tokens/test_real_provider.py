"""Access tokens of a real identity provider, sent by OpenAI's SDK: rotation, and outages."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from openai import AsyncOpenAI, AuthenticationError

from app.auth.tokens import provider as provider_module
from tests.clients.environments import Unavailable
from tests.fakes.identity_provider import AUDIENCE, SigningKey
from tests.fakes.vllm import Fake
from tests.gateway import ROOT, Gateway, serving_demo
from tests.oidc_provider import OidcProvider
from tests.waiting import wait_until

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
async def gateway(
    provider: OidcProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    old = await asyncio.to_thread(provider.token)
    assert await chat(gateway, old)

    answered = 0
    rotated = asyncio.Event()

    async def load() -> None:
        nonlocal answered
        while not rotated.is_set():
            await chat(gateway, old)
            answered += 1

    loading = asyncio.create_task(load())
    await asyncio.to_thread(provider.restart, keys[1], keys[0])
    new = await asyncio.to_thread(provider.token)
    assert await chat(gateway, new), "the first token of the new key"
    rotated.set()
    await loading
    assert answered > 0

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
