"""A cut of a key ends its requests in flight: once, at every gateway."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from sqlalchemy import text

from app.auth import authenticator
from app.auth.authenticator import Authenticator
from app.auth.key_format import new_key
from app.auth.key_store import KeyStore
from app.auth.validation import KeyChanges, KeyFields
from app.database import Database
from app.head_facts import HeadFacts
from tests.app.auth.doors import LIMITS, Clock, bearer, door
from tests.waiting import wait_until


@dataclass
class Site:
    """A gateway's connection to the shared database, and the keys whose requests it has ended."""

    database: Database
    store: KeyStore
    auth: Authenticator
    cut: list[str] = field(default_factory=list)


@pytest.fixture
async def sites(tables_url: str, clock: Clock) -> AsyncIterator[list[Site]]:
    """Two gateways that share a database."""
    found = []
    for _ in range(2):
        database = Database(tables_url)
        await database.migrate()
        store = KeyStore(database, now_ms=clock.wall_ms)
        cut: list[str] = []
        auth = door(store=store, clock=clock, on_cut=cut.append)
        await auth.poll()
        found.append(Site(database, store, auth, cut))
    yield found
    for one in found:
        await one.auth.close()
        await one.database.close()


async def poll(sites: list[Site]) -> list[list[str]]:
    """Have every gateway poll; return the keys that each has cut so far."""
    for one in sites:
        await one.auth.poll()
    return [one.cut for one in sites]


async def made(store: KeyStore) -> tuple[str, str]:
    key, new = await store.create(KeyFields(name=new_key().id))
    return key.id, new.text


async def test_a_cut_reaches_every_gateway_once(sites: list[Site]) -> None:
    key_id, _ = await made(sites[0].store)
    await made(sites[0].store)
    await sites[0].store.disable(key_id, now=True)
    assert await poll(sites) == [[key_id], [key_id]]
    assert await poll(sites) == [[key_id], [key_id]]


async def test_requests_continue_without_a_cut(sites: list[Site]) -> None:
    [store, _] = [one.store for one in sites]
    for act in (store.disable, store.enable, store.delete):
        key_id, _ = await made(store)
        await act(key_id)
        assert await poll(sites) == [[], []]


async def test_deletion_cuts_requests_in_flight(sites: list[Site]) -> None:
    key_id, _ = await made(sites[0].store)
    await sites[0].store.delete(key_id, now=True)
    assert await poll(sites) == [[key_id], [key_id]]
    assert sites[0].auth._cuts == {}, "nothing is remembered of a deleted key"


async def test_further_change_of_a_cut_key_cuts_nothing(sites: list[Site]) -> None:
    store = sites[0].store
    key_id, _ = await made(store)
    await store.disable(key_id, now=True)
    await poll(sites)
    await store.change(key_id, KeyChanges(weight=2))
    await store.disable(key_id)
    assert await poll(sites) == [[key_id], [key_id]]


async def test_reenabled_key_can_be_cut_again(sites: list[Site]) -> None:
    store = sites[0].store
    key_id, key = await made(store)
    for _ in range(2):  # in the same millisecond
        await store.disable(key_id, now=True)
        await poll(sites)
        await store.enable(key_id)
        await poll(sites)
        await sites[1].auth.authenticate(bearer(key))
    assert await poll(sites) == [[key_id] * 2] * 2
    assert sites[0].auth._cuts == {}


async def test_two_cuts_of_a_key_cut_twice(sites: list[Site], clock: Clock) -> None:
    key_id, _ = await made(sites[0].store)
    for _ in range(2):
        clock.advance(1)
        await sites[0].store.disable(key_id, now=True)
        await poll(sites)
    assert await poll(sites) == [[key_id] * 2] * 2


async def test_cut_key_is_refused_once_its_requests_have_ended(sites: list[Site]) -> None:
    [_, site] = sites
    key_id, key = await made(site.store)
    await site.auth.authenticate(bearer(key))
    entered: list[Any] = []
    site.auth._on_cut = lambda _: entered.append(site.auth.recall(bearer(key), HeadFacts()))
    await site.store.disable(key_id, now=True)
    assert site.auth.recall(bearer(key), HeadFacts()) is not None
    await site.auth.poll()
    assert entered == [None], "it is not remembered any more when its requests are ended"


async def test_cut_older_than_the_gateway_cuts_nothing(sites: list[Site], clock: Clock) -> None:
    key_id, _ = await made(sites[0].store)
    await sites[0].store.disable(key_id, now=True)
    cut: list[str] = []
    later = door(store=sites[0].store, clock=clock, on_cut=cut.append)
    await later.poll()
    await later.poll()
    assert cut == []


async def test_a_reload_of_the_limits_loses_no_cut(sites: list[Site]) -> None:
    key_id, _ = await made(sites[0].store)
    await poll(sites)
    await sites[0].store.disable(key_id, now=True)
    for one in sites:
        one.auth.replace([], None, LIMITS.model_copy(update={"requests_per_minute": 1}))
    assert await poll(sites) == [[key_id], [key_id]]


async def test_concurrent_polls_cut_once_and_miss_nothing(sites: list[Site]) -> None:
    [_, site] = sites
    key_id, _ = await made(site.store)
    _, other = await made(site.store)
    await site.auth.authenticate(bearer(other))
    await site.auth.poll()
    await site.auth.authenticate(bearer(other))
    await asyncio.gather(
        site.auth.poll(),
        site.store.disable(key_id, now=True),
        *(site.auth.poll() for _ in range(5)),
    )
    await site.auth.poll()
    assert site.cut == [key_id]
    assert site.auth.recall(bearer(other), HeadFacts()) is not None


async def test_database_restored_from_a_backup_cuts_nothing(sites: list[Site]) -> None:
    key_id, _ = await made(sites[0].store)
    await sites[0].store.disable(key_id, now=True)
    await poll(sites)
    async with sites[0].database.write() as connection:  # as a backup that was put back
        await connection.execute(text("UPDATE revision SET value = 0"))
    await poll(sites)
    assert [one.auth._cuts for one in sites] == [{}, {}]
    assert await poll(sites) == [[key_id], [key_id]]


@pytest.mark.slow
async def test_background_task_applies_a_cut(
    sites: list[Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authenticator, "POLL_S", 0.001)
    tasks = [asyncio.create_task(one.auth.run()) for one in sites]
    key_id, _ = await made(sites[0].store)
    await sites[0].store.disable(key_id, now=True)
    await wait_until(lambda: [one.cut for one in sites] == [[key_id], [key_id]])
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
