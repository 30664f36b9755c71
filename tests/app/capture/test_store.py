"""The table of captures: whose captures replace whose, and until when they are kept."""

import os
from unittest.mock import Mock

import pytest

from app.audit import Actor
from app.capture import CaptureFilter, CaptureReader, CaptureStore, Sealer
from app.capture.store import CaptureRow
from app.database import Database

NOW_S = 1_790_000_000.0
ALL = CaptureFilter()
ROOT = Actor("root", "admin")
SEALER = Sealer([os.urandom(32)])
SIZE = 1000


class Clock:
    now_s = NOW_S

    def __call__(self) -> float:
        return self.now_s


def row(number: int, tenant: str = "key a", kept_s: float = 100.0, size: int = SIZE) -> CaptureRow:
    at_ms = int(NOW_S * 1000) + number
    return CaptureRow(
        id=f"{number:024x}",
        at_ms=at_ms,
        expires_ms=at_ms + int(kept_s * 1000),
        key_id=tenant.removeprefix("key "),
        tenant=tenant,
        model="demo",
        sealed=bytes(size),
    )


async def ids(database: Database, clock: Clock) -> list[int]:
    reader = CaptureReader(CaptureStore(database, clock), lambda: None)
    page = await reader.page(ALL, 100, ROOT)
    return [int(one.id, 16) for one in page.captures]


async def test_tenant_replaces_its_own_oldest_only(database: Database) -> None:
    clock = Clock()
    store = CaptureStore(database, clock)
    await store.add([row(1, "key b")], 3 * SIZE, 10 * SIZE)
    for number in range(2, 8):
        assert await store.add([row(number)], 3 * SIZE, 10 * SIZE) == 1
    assert await ids(database, clock) == [1, 5, 6, 7]


async def test_full_table_keeps_what_others_have(database: Database) -> None:
    clock = Clock()
    store = CaptureStore(database, clock)
    await store.add([row(number, "key b") for number in range(4)], 9 * SIZE, 5 * SIZE)
    # One place is left: each new capture of `a` takes it from its last.
    assert await store.add([row(5), row(6)], 9 * SIZE, 5 * SIZE) == 2
    assert await ids(database, clock) == [0, 1, 2, 3, 6]
    assert await store.add([row(7, "key c"), row(8, size=3 * SIZE)], 9 * SIZE, 5 * SIZE) == 0
    assert await ids(database, clock) == [0, 1, 2, 3, 6]


async def test_row_that_is_written_twice(database: Database) -> None:
    clock = Clock()
    store = CaptureStore(database, clock)
    for _ in range(2):
        await store.add([row(1)], 3 * SIZE, 10 * SIZE)
    assert await ids(database, clock) == [1]


async def test_nothing_survives_its_retention(database: Database) -> None:
    clock = Clock()
    store = CaptureStore(database, clock)
    await store.add([row(1, kept_s=10), row(2, kept_s=20)], 9 * SIZE, 9 * SIZE)
    clock.now_s += 10.001
    assert await ids(database, clock) == [2], "before it is deleted"
    assert await CaptureStore(database, clock).delete_expired() == 1, "after a restart"
    reader = CaptureReader(store, lambda: None)
    assert not await reader.exists(row(1).id)
    assert await reader.read(row(1).id, ROOT) is None
    clock.now_s += 20
    assert await store.add([row(3, kept_s=10)], 9 * SIZE, 9 * SIZE) == 0, "it waited for too long"
    assert await store.delete_expired() == 1


async def test_retention_takes_few_of_the_largest_at_once(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.capture.store.DELETED_AT_ONCE", 2)
    transactions = Mock(wraps=database.transact)
    monkeypatch.setattr(database, "transact", transactions)
    clock = Clock()
    store = CaptureStore(database, clock)
    await store.add([row(number) for number in range(5)], 9 * SIZE, 9 * SIZE)
    clock.now_s += 101
    assert await store.delete_expired() == 5
    assert transactions.call_count == 3


async def test_row_of_another_is_not_shown_as_one_s_own(database: Database) -> None:
    """Whoever writes to the database cannot give one key the capture of another."""
    clock = Clock()
    store, reader = (
        CaptureStore(database, clock),
        CaptureReader(CaptureStore(database, clock), lambda: SEALER),
    )
    victim, own = row(1, "key victim"), row(2, "key mallory")
    sealed = SEALER.seal(b'"secret"', victim.facts)
    moved = CaptureRow(
        id=own.id, at_ms=own.at_ms, expires_ms=own.expires_ms, key_id=own.key_id,
        tenant=own.tenant, model=own.model, sealed=sealed,
    )  # fmt: skip
    await store.add([moved], 9 * SIZE, 9 * SIZE)
    found = await reader.read(own.id, Actor("mallory"), "mallory")
    assert found is not None
    assert (found.document, bool(found.fault)) == (None, True)


async def test_only_key(database: Database) -> None:
    clock = Clock()
    store = CaptureStore(database, clock)
    await store.add([row(1, "key b")], 9 * SIZE, 9 * SIZE)
    reader = CaptureReader(store, lambda: None)
    assert await reader.read(row(1).id, Actor("a"), "a") is None
    assert not await reader.exists(row(1).id, "a")
    assert await reader.exists(row(1).id, "b")
