"""Look-ups under attack: made-up keys crowd out each other and no key that exists."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import text

from app.auth import authenticator, lookups
from app.auth.authenticator import Authenticator
from app.auth.key_format import new_key
from app.auth.key_store import KeyStore
from app.auth.principal import Principal
from app.auth.validation import KeyFields
from app.database import Database
from app.errors import InvalidApiKey, ServiceUnavailable
from app.settings import digest
from tests.app.auth.doors import Clock, WatchedStore, bearer, door
from tests.app.usage.records import opened
from tests.waiting import run_pending_tasks, wait_until

MANY = 3000


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    async with opened(f"sqlite+aiosqlite:///{tmp_path}/gateway.db", deadline_s=20) as database:
        yield database


@pytest.fixture
def store(database: Database) -> WatchedStore:
    return WatchedStore(database, Clock())


@pytest.fixture
async def auth(store: WatchedStore) -> AsyncIterator[Authenticator]:
    one = door(store=store, clock=Clock())
    await one.poll()
    yield one
    await one.close()


async def made(store: KeyStore) -> tuple[str, str]:
    key, new = await store.create(KeyFields(name=new_key().id))
    return key.id, new.text


@contextlib.asynccontextmanager
async def attacked(
    auth: Authenticator, presented: list[str]
) -> "AsyncIterator[list[asyncio.Task[Principal]]]":
    """Have requests with these keys under way, and none after."""
    requests = [asyncio.create_task(auth.authenticate(bearer(key))) for key in presented]
    await asyncio.sleep(0)
    try:
        yield requests
    finally:
        for one in requests:
            one.cancel()
        await asyncio.gather(*requests, return_exceptions=True)


async def outcomes(requests: "list[asyncio.Task[Principal]]") -> dict[type, int]:
    """Return how many requests ended in which way."""
    return Counter(map(type, await asyncio.gather(*requests, return_exceptions=True)))


@pytest.mark.slow
async def test_valid_key_is_admitted_while_made_up_keys_fill_the_queue(
    auth: Authenticator, store: WatchedStore
) -> None:
    key_id, key = await made(store)
    await auth.poll()
    store.delay_s = 0.05
    async with attacked(auth, [new_key().text for _ in range(MANY)]):
        assert (await auth.authenticate(bearer(key))).id == key_id


@pytest.mark.slow
async def test_valid_key_is_admitted_while_made_up_secrets_of_known_ids_fill_the_queue(
    auth: Authenticator, store: WatchedStore
) -> None:
    """IDs are public: clients have their own, and logs and reports show them."""
    made_keys = [await made(store) for _ in range(3)]
    await auth.poll()
    store.delay_s = 0.05
    made_up = [new_key(made_keys[n % 2][0]).text for n in range(MANY)]
    async with attacked(auth, made_up) as attack:
        for key_id, key in made_keys:
            assert (await auth.authenticate(bearer(key))).id == key_id
        assert await outcomes(attack) == {InvalidApiKey: MANY}
    assert max(store.finds.values()) <= 3, "those who wait for one id share a look-up"


async def test_a_key_of_another_process_works_at_once(
    auth: Authenticator, store: WatchedStore
) -> None:
    """No poll has heard of it yet."""
    key_id, key = await made(store)
    assert auth._ids == set()
    assert (await auth.authenticate(bearer(key))).id == key_id


@pytest.mark.slow
async def test_concurrent_lookups_are_bounded_per_queue(
    auth: Authenticator, store: WatchedStore
) -> None:
    good = [(await made(store))[1] for _ in range(20)]
    await auth.poll()
    store.released.clear()
    async with (
        attacked(auth, [new_key().text for _ in range(20)]) as made_up,
        attacked(auth, good) as requests,
    ):
        await wait_until(lambda: store.at_once >= lookups.MAX_READS + lookups.MAX_UNKNOWN_READS)
        await run_pending_tasks()
        store.released.set()
        assert await outcomes(made_up) == {InvalidApiKey: 20}
        assert await outcomes(requests) == {Principal: 20}
    assert store.most_at_once == lookups.MAX_READS + lookups.MAX_UNKNOWN_READS == 4
    assert sum(store.finds.values()) == 40


async def test_waiting_lookups_are_bounded_per_queue(
    auth: Authenticator, store: WatchedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth._lookups._existing, "max_pending", 4)
    monkeypatch.setattr(auth._lookups._unknown, "max_pending", 3)
    good = [(await made(store))[1] for _ in range(5)]
    await auth.poll()
    store.released.clear()
    async with (
        attacked(auth, [new_key().text for _ in range(5)]) as made_up,
        attacked(auth, good) as requests,
    ):
        store.released.set()
        assert await outcomes(made_up) == {InvalidApiKey: 3, ServiceUnavailable: 2}
        assert await outcomes(requests) == {Principal: 4, ServiceUnavailable: 1}
    assert len(auth._lookups) == 0
    assert (await auth.authenticate(bearer(good[-1]))).id, "what was refused leaves room"


@pytest.mark.slow
async def test_single_queue_when_there_are_too_many_keys(
    auth: Authenticator, store: WatchedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authenticator, "MAX_IDS", 2)
    for _ in range(2):
        await made(store)
    await auth.poll()
    assert auth._ids is not None
    await made(store)
    await auth.poll()
    assert auth._ids is None
    later = door(store=store, clock=Clock())
    await later.poll()
    assert later._ids is None
    async with attacked(
        later, [new_key().text for _ in range(lookups.MAX_UNKNOWN_PENDING + 1)]
    ) as all_:
        assert await outcomes(all_) == {InvalidApiKey: len(all_)}
    await later.close()


async def test_ids_of_all_keys_are_loaded_and_updated(
    auth: Authenticator, store: WatchedStore, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.auth.key_store._PAGE", 2)
    ids = {(await made(store))[0] for _ in range(5)}
    await store.disable(min(ids))
    gone, _ = await made(store)
    await store.delete(gone)
    later = door(store=store, clock=Clock())
    assert later._ids is None
    for one in (auth, later):
        await one.poll()
        assert one._ids == ids
    new, _ = await made(store)
    await store.delete(max(ids))
    for one in (auth, later):
        await one.poll()
        assert one._ids == (ids | {new}) - {max(ids)}
    async with database.write() as connection:  # as a backup that was put back
        await connection.execute(text("UPDATE revision SET value = 0"))
        await connection.execute(text("DELETE FROM api_keys"))
    for one in (auth, later):
        await one.poll()
        assert one._ids == set()
    await later.close()


async def test_secret_newer_than_the_read_is_looked_up_again(
    auth: Authenticator, store: WatchedStore
) -> None:
    """Else a key rotated while a request waited for its lookup would be refused."""
    key_id, key = await made(store)
    await auth.poll()
    store.released.clear()
    async with attacked(auth, [key]) as first:
        await store.read.wait()
        _, second = await store.rotate(key_id, 60)
        async with attacked(auth, [second.text, new_key(key_id).text]) as others:
            store.released.set()
            assert await outcomes(first) == {Principal: 1}
            assert await outcomes(others) == {Principal: 1, InvalidApiKey: 1}
    assert store.finds[key_id] == 2


async def test_cut_key_refuses_requests_that_waited_for_its_lookup(
    auth: Authenticator, store: WatchedStore
) -> None:
    """A request admitted after the cut would not be ended by it."""
    key_id, key = await made(store)
    await auth.poll()
    store.released.clear()
    async with attacked(auth, [key]) as waiting:
        await store.read.wait()
        await store.disable(key_id)
        store.released.set()
        while auth._known.get(digest(key.encode())) is None:
            await asyncio.sleep(0)
        # The lookup has returned, and its waiter has not resumed: now a poll does this.
        auth._known.invalidate(key_id, 10**9)
        assert await outcomes(waiting) == {InvalidApiKey: 1}


async def test_error_reaches_every_waiter_and_leaves_no_state(
    auth: Authenticator, store: WatchedStore
) -> None:
    key_id, key = await made(store)
    await auth.poll()
    store.broken = True
    async with attacked(auth, [key, key, new_key(key_id).text]) as waiting:
        assert await outcomes(waiting) == {ZeroDivisionError: 3}
    assert len(auth._lookups) == 0
    store.broken = False
    assert (await auth.authenticate(bearer(key))).id == key_id


async def test_shutdown_ends_lookups(auth: Authenticator, store: WatchedStore) -> None:
    keys_ = [(await made(store))[1] for _ in range(20)]
    await auth.poll()
    store.released.clear()
    async with attacked(auth, keys_) as waiting:
        await auth.close()
        assert await outcomes(waiting) == {asyncio.CancelledError: 20}
    assert len(auth._lookups) == 0
