"""Connections on asyncio without SQLAlchemy's asyncio package."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.pool import AsyncAdaptedQueuePool

from app.database import AsyncConnection
from app.database.async_engine import AsyncEngine, create_async_engine
from tests.waiting import wait_until


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/gateway.db")
    async with engine.begin() as connection:
        await connection.execute(text("CREATE TABLE things (id INTEGER PRIMARY KEY)"))
    yield engine
    await engine.dispose()


def in_use(engine: AsyncEngine) -> int:
    pool = engine.sync_engine.pool
    assert isinstance(pool, AsyncAdaptedQueuePool)
    return pool.checkedout()


async def count(engine: AsyncEngine) -> int:
    async with engine.connect() as connection:
        found = await connection.scalar(text("SELECT count(*) FROM things"))
    assert isinstance(found, int)
    return found


async def add(connection: AsyncConnection) -> None:
    await connection.execute(text("INSERT INTO things DEFAULT VALUES"))


async def test_transaction_is_committed_at_the_end_of_its_block(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await add(connection)
    assert (await count(engine), in_use(engine)) == (1, 0)


@pytest.mark.parametrize("kind", [ValueError, asyncio.CancelledError])
async def test_transaction_is_rolled_back_by_an_exception(
    engine: AsyncEngine, kind: type[BaseException]
) -> None:
    async def fail() -> None:
        async with engine.begin() as connection:
            await add(connection)
            raise kind

    with pytest.raises(kind):
        await fail()
    assert (await count(engine), in_use(engine)) == (0, 0)


async def test_connection_without_a_transaction_commits_nothing(engine: AsyncEngine) -> None:
    async with engine.connect() as connection:
        await add(connection)
    assert await count(engine) == 0


async def test_savepoint_undoes_what_came_after_it(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await add(connection)
        savepoint = await connection.begin_nested()
        await add(connection)
        await savepoint.rollback()
    assert await count(engine) == 1


async def test_cancellation_is_raised_once_the_connection_is_back_in_the_pool(
    engine: AsyncEngine,
) -> None:
    used, may_go_on = asyncio.Event(), threading.Event()

    async def use() -> None:
        async with engine.connect() as connection:
            await add(connection)
            driver = await connection.driver_connection()
            # Its thread is busy, so the rollback at the end of the block waits.
            busy = asyncio.create_task(driver._execute(may_go_on.wait))
            await asyncio.sleep(0)
            used.set()
        await busy

    using = asyncio.create_task(use())
    await used.wait()
    try:
        for _ in range(3):
            using.cancel()
            await asyncio.sleep(0.01)
            assert not using.done()
        assert in_use(engine) == 1
    finally:
        may_go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await using
    assert (await count(engine), in_use(engine)) == (0, 0)


async def test_interrupted_dispose_closes_every_pooled_connection(engine: AsyncEngine) -> None:
    connections = [await engine.open_connection() for _ in range(3)]
    drivers = [await connection.driver_connection() for connection in connections]
    for connection in connections:
        await connection.close()
    may_go_on = threading.Event()
    busy = asyncio.create_task(drivers[0]._execute(may_go_on.wait))
    asyncio.get_running_loop().call_later(0.05, may_go_on.set)
    await asyncio.sleep(0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await engine.dispose()
    await busy
    for driver in drivers:
        with pytest.raises(ValueError, match=r"closed|no active connection"):
            await driver.execute("SELECT 1")
    # A thread that is told to stop reports to this loop once more.
    await wait_until(lambda: not any(driver._thread.is_alive() for driver in drivers))
