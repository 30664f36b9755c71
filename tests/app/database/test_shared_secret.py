"""Secrets that gateways share: the same in all of them, and never without a value."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import text

from app.database import Database, DatabaseUnavailable, SharedSecret
from app.database.shared_secret import LENGTH
from app.main import SALT_SECRET
from tests.gateway import serving_demo
from tests.waiting import wait_until


@pytest.fixture
async def databases(tables_url: str) -> AsyncIterator[list[Database]]:
    """Four gateways' connections to one database."""
    several = [Database(tables_url) for _ in range(4)]
    await several[0].migrate()
    for one in several[1:]:
        await one.migrate()
    yield several
    for one in several:
        await one.close()


async def test_gateways_that_start_together_share_one_secret(databases: list[Database]) -> None:
    secrets = [SharedSecret(one, "salt") for one in databases]
    own = {one.value for one in secrets}
    assert len(own) == 4
    await asyncio.gather(*(one.load() for one in secrets))
    [shared] = {one.value for one in secrets}
    assert len(shared) == LENGTH
    assert shared in own
    later = SharedSecret(databases[0], "salt")
    await later.load()
    assert later.value == shared


async def test_secrets_differ_by_name(databases: list[Database]) -> None:
    first, second = (SharedSecret(databases[0], name) for name in ("salt", "other"))
    await first.load()
    await second.load()
    assert first.value != second.value


async def test_loaded_secret_is_not_read_again(databases: list[Database]) -> None:
    secret = SharedSecret(databases[0], "salt")
    await secret.load()
    value = secret.value
    async with databases[1].write() as connection:
        await connection.execute(text("DELETE FROM secrets"))
    await secret.load()
    await secret.run()
    assert secret.value == value


async def test_repr_hides_the_secret(
    databases: list[Database], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    secret = SharedSecret(databases[0], "salt")
    shown = [repr(secret), f"{secret}"]
    await secret.load()
    shown += [repr(secret), caplog.text]
    for form in (repr(secret.value), secret.value.hex()):
        assert form not in "".join(shown)


async def test_secret_is_local_until_the_database_answers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "app.database.shared_secret")
    url = f"sqlite+aiosqlite:///{tmp_path}/gateway.db"
    database, other = Database(url), Database(url)  # the first is not open yet
    await other.migrate()
    before = SharedSecret(other, "salt")
    await before.load()

    secret = SharedSecret(database, "salt", retry_s=0.001)
    own = secret.value
    with pytest.raises(DatabaseUnavailable):
        await secret.load()
    assert (secret.value, secret.shared) == (own, False)
    running = asyncio.create_task(secret.run())
    async with asyncio.timeout(20):
        await wait_until(lambda: caplog.records)
        assert secret.value == own
        await database.migrate()
        await running
    assert secret.value == before.value
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    await database.close()
    await other.close()


async def test_wait_for_the_database_ends_at_shutdown(tmp_path: Path) -> None:
    database = Database(f"sqlite+aiosqlite:///{tmp_path}/gateway.db")  # never opened
    waiting = asyncio.create_task(SharedSecret(database, "salt").run())
    await asyncio.sleep(0)
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    assert waiting.cancelled()
    await database.close()


async def test_a_gateway_serves_with_the_shared_secret(tmp_path: Path) -> None:
    async with serving_demo(tmp_path, "http://127.0.0.1:1", settle=False) as gateway:
        secret = gateway.state.salt_secret
        assert repr(secret.value) not in repr(gateway.state)
        async with gateway.state.database.read() as connection:
            rows = (await connection.execute(text("SELECT name, value FROM secrets"))).all()
    assert (SALT_SECRET, secret.value) in [tuple(row) for row in rows]
