"""Keys during outages of a real PostgreSQL under a running gateway."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from app.auth.key_format import new_key
from app.auth.validation import KeyFields
from tests.fakes.vllm import Fake
from tests.gateway import ROOT, Gateway, serving_demo
from tests.services import PostgresServer
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.services, pytest.mark.slow]


@pytest.fixture
async def gateway(
    own_postgres: PostgresServer, fake: Fake, tmp_path: Path
) -> AsyncIterator[Gateway]:
    state = {"database_url": own_postgres.url("postgres")}
    async with serving_demo(tmp_path, fake.url, state=state) as one:
        yield one


async def status(gateway: Gateway, key: str) -> int:
    headers = {"authorization": f"Bearer {key}"}
    body = {"model": "demo"}
    return (await gateway.client.post("/v1/completions", json=body, headers=headers)).status_code


async def until_status(gateway: Gateway, key: str, expected: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await status(gateway, key) != expected:
            await asyncio.sleep(0.05)


async def create_key(gateway: Gateway, name: str) -> tuple[str, str]:
    _, made = await gateway.state.key_store.create(KeyFields(name=name))
    return made.id, made.text


FAULTS: list[tuple[Callable[[PostgresServer], None], Callable[[PostgresServer], None]]] = [
    (PostgresServer.stop, PostgresServer.start),
    (PostgresServer.pause, PostgresServer.resume),
]


@pytest.mark.parametrize(("go", "come"), FAULTS, ids=["stopped", "hanging"])
async def test_outage_keeps_known_keys_and_answers_unknown_ones_with_503(
    gateway: Gateway,
    own_postgres: PostgresServer,
    go: Callable[[PostgresServer], None],
    come: Callable[[PostgresServer], None],
) -> None:
    known_id, known = await create_key(gateway, "known")
    _, unseen = await create_key(gateway, "unseen")
    assert await status(gateway, known) == 200

    await asyncio.to_thread(go, own_postgres)
    assert await status(gateway, unseen) == 503
    assert await status(gateway, new_key().text) == 503
    assert await status(gateway, known) == 200
    assert await status(gateway, "x" * 40) == 401, "what cannot be a key needs no database"
    listed = await gateway.client.get("/admin/keys", headers=ROOT)
    assert (listed.status_code, listed.json()["error"]["code"]) == (503, "service_unavailable")
    assert (await gateway.client.get("/health")).status_code == 200

    await asyncio.to_thread(come, own_postgres)
    await until_status(gateway, unseen, 200)
    await until_status(gateway, new_key().text, 401)
    await gateway.state.key_store.disable(known_id)
    await until_status(gateway, known, 401)
