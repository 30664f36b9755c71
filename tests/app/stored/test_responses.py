"""Owners of stored responses, on both databases: one key each, and a bounded number of them."""

import asyncio
from typing import Any

import pytest
from sqlalchemy import text

from app.database import Database, DatabaseUnavailable
from app.stored import ResponseIdTaken, StoredResponse, StoredResponses, responses

ALICE, BOB = "alice00000", "bob0000000"
DEMO = StoredResponse("demo", "demo-0")
DAY_S = 86_400


class Clock:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def stored(database: Database, clock: Clock) -> StoredResponses:
    return StoredResponses(database, clock=clock)


@pytest.fixture
def another(database: Database, clock: Clock) -> StoredResponses:
    """The owners of responses at another gateway, with an empty cache."""
    return StoredResponses(database, clock=clock)


async def rows(database: Database) -> list[str]:
    async with database.read() as connection:
        result = await connection.execute(text("SELECT id FROM stored_responses ORDER BY at_ms"))
        return list(result.scalars())


async def test_a_key_finds_its_response_at_every_gateway(
    stored: StoredResponses, another: StoredResponses
) -> None:
    await stored.claim("resp_1", ALICE, "demo", "demo-0")
    for gateway in (stored, another, another):
        assert await gateway.find("resp_1", ALICE) == DEMO


async def test_response_of_another_key_is_not_found(
    stored: StoredResponses, another: StoredResponses
) -> None:
    await stored.claim("resp_1", ALICE, "demo", "demo-0")
    for gateway in (stored, another):
        assert await gateway.find("resp_1", BOB) is None
        assert await gateway.find("resp_2", BOB) is None
    # Not remembered as the wrong one's either.
    assert await another.find("resp_1", ALICE) == DEMO
    assert await another.find("resp_1", BOB) is None


async def test_an_id_of_another_key_cannot_be_claimed(
    stored: StoredResponses, another: StoredResponses
) -> None:
    await stored.claim("resp_1", ALICE, "demo", "demo-0")
    for gateway in (stored, another):
        with pytest.raises(ResponseIdTaken):
            await gateway.claim("resp_1", BOB, "other", "other-0")
        assert await gateway.find("resp_1", ALICE) == DEMO
        assert await gateway.find("resp_1", BOB) is None


async def test_concurrent_claims_of_an_id_succeed_once(
    stored: StoredResponses, another: StoredResponses
) -> None:
    outcomes = await asyncio.gather(
        *(g.claim("resp_1", k, "m", "e") for g in (stored, another) for k in (ALICE, BOB)),
        return_exceptions=True,
    )
    assert sum(isinstance(one, ResponseIdTaken) for one in outcomes) == 2
    owners = [await stored.find("resp_1", key) is not None for key in (ALICE, BOB)]
    assert sorted(owners) == [False, True]


async def test_a_key_claims_its_own_id_again(
    stored: StoredResponses, another: StoredResponses, database: Database
) -> None:
    await stored.claim("resp_1", ALICE, "demo", "demo-0")
    await stored.claim("resp_1", ALICE, "demo", "demo-1")
    for gateway in (stored, another):
        assert await gateway.find("resp_1", ALICE) == StoredResponse("demo", "demo-1")
    assert await rows(database) == ["resp_1"]


@pytest.mark.parametrize(
    "response_id", ["", "\x00", "resp_1\n", "é", "\ud800", "a" * 129, "' OR 1=1 --", "a/b"]
)
async def test_invalid_id_is_not_found(stored: StoredResponses, response_id: str) -> None:
    await stored.claim("a" * 128, ALICE, "demo", "demo-0")
    assert await stored.find(response_id, ALICE) is None
    with pytest.raises(ValueError, match="invalid response ID"):
        await stored.claim(response_id, ALICE, "demo", "demo-0")


async def test_oldest_responses_of_a_key_are_evicted_and_no_others(
    stored: StoredResponses, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses, "MAX_PER_KEY", 3)
    await stored.claim("bobs", BOB, "demo", "demo-0")
    for number in range(6):
        await stored.claim(f"resp_{number}", ALICE, "demo", "demo-0")
    assert await rows(database) == ["bobs", "resp_3", "resp_4", "resp_5"]


async def test_concurrent_deletes_do_not_deadlock(
    stored: StoredResponses,
    another: StoredResponses,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for number in range(20):
        await stored.claim(f"resp_{number}", ALICE, "demo", "demo-0")
    monkeypatch.setattr(responses, "MAX_PER_KEY", 2)
    await asyncio.gather(
        *(
            one.claim(f"new_{n}_{id(one)}", ALICE, "m", "e")
            for n in (1, 2)
            for one in (stored, another)
        )
    )
    await stored.claim("last", ALICE, "demo", "demo-0")
    assert len(await rows(database)) == 2


async def test_expired_responses_are_deleted_in_batches(
    stored: StoredResponses, database: Database, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.database.retention.CHUNK", 2)
    monkeypatch.setattr("app.database.retention.PAUSE_S", 0)
    for number in range(5):
        await stored.claim(f"old_{number}", ALICE, "demo", "demo-0")
    clock.now += 30 * DAY_S - 1
    await stored.claim("new", ALICE, "demo", "demo-0")
    assert await stored.delete_old() == 0
    clock.now += 2
    assert await stored.delete_old() == 5
    assert await rows(database) == ["new"]


async def test_cleanup_task_continues_after_an_error_until_canceled(
    stored: StoredResponses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses, "RETENTION_EVERY_S", 0)
    swept = 0

    async def sweep() -> int:
        nonlocal swept
        swept += 1
        raise DatabaseUnavailable("the database does not answer: it is a test")

    monkeypatch.setattr(stored, "delete_old", sweep)
    running = asyncio.create_task(stored.run())
    async with asyncio.timeout(20):
        while swept < 3:
            await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert running.cancelled()


class TestMemory:
    @pytest.fixture
    def without_database(self, database: Database, monkeypatch: pytest.MonkeyPatch) -> Any:
        """Have every use of the database fail."""

        def cut() -> None:
            monkeypatch.setattr(database, "_migrated", False)

        return cut

    async def test_a_follow_up_needs_no_query(
        self, stored: StoredResponses, another: StoredResponses, without_database: Any
    ) -> None:
        await stored.claim("resp_1", ALICE, "demo", "demo-0")
        await another.find("resp_1", ALICE)
        without_database()
        for gateway in (stored, another):
            assert await gateway.find("resp_1", ALICE) == DEMO
            assert await gateway.find("resp_1", BOB) is None
            with pytest.raises(DatabaseUnavailable):
                await gateway.find("resp_2", ALICE)

    async def test_failed_claim_is_not_cached(
        self, stored: StoredResponses, without_database: Any
    ) -> None:
        without_database()
        with pytest.raises(DatabaseUnavailable):
            await stored.claim("resp_1", ALICE, "demo", "demo-0")
        with pytest.raises(DatabaseUnavailable):
            await stored.find("resp_1", ALICE)

    async def test_cache_is_bounded_and_keeps_the_most_recently_used(
        self, stored: StoredResponses, without_database: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(responses, "CACHE_SIZE", 2)
        for number in range(2):
            await stored.claim(f"resp_{number}", ALICE, "demo", "demo-0")
        await stored.find("resp_0", ALICE)
        await stored.claim("resp_2", ALICE, "demo", "demo-0")
        without_database()
        for number in (0, 2):
            assert await stored.find(f"resp_{number}", ALICE) == DEMO
        with pytest.raises(DatabaseUnavailable):
            await stored.find("resp_1", ALICE)
