"""Backups by a schedule: when one is due, which stay, and what a failure leaves."""

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from app.database import BackupSchedule
from app.database.backup import check
from tests.gateway import free_port, make_tables, remote, running, settings_for
from tests.waiting import wait_until

HOUR = 3600.0
# 2026-11-27, 12:00 UTC.
NOON = 1_795_780_800.0


class Clock:
    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def counted() -> Counter[str]:
    return Counter()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    directory = tmp_path / "backups"
    directory.mkdir()
    return directory


@pytest.fixture
def schedule(directory: Path, clock: Clock, counted: Counter[str]) -> BackupSchedule:
    database = directory.parent / "gateway.db"
    make_tables(database)
    return BackupSchedule(
        f"sqlite+aiosqlite:///{database}",
        directory,
        every_s=6 * HOUR,
        keep=2,
        count=lambda outcome: counted.update([outcome]),
        clock=clock,
        spread_s=0,
        retry_s=0.05,
    )


def names(directory: Path) -> list[str]:
    return sorted(file.name for file in directory.iterdir())


class TestDue:
    def test_first_backup_is_due_at_once(self, schedule: BackupSchedule) -> None:
        assert schedule.due_in_s() == 0

    def test_next_backup_is_due_after_the_newest_of_all_gateways(
        self, schedule: BackupSchedule, directory: Path, clock: Clock
    ) -> None:
        for time in ("20261127T060000Z", "20261127T110000Z"):
            (directory / f"gateway-{time}.db").touch()
        assert schedule.due_in_s() == 5 * HOUR
        clock.now += 5 * HOUR
        assert schedule.due_in_s() == 0

    def test_clock_that_went_back_puts_off_no_backup_for_longer_than_usual(
        self, schedule: BackupSchedule, directory: Path
    ) -> None:
        (directory / "gateway-20270101T000000Z.db").touch()
        assert schedule.due_in_s() == 6 * HOUR

    @pytest.mark.parametrize("name", ["gateway-monday.db", "other-20261127T110000Z.db", "a.db"])
    def test_files_of_others_do_not_count(
        self, schedule: BackupSchedule, directory: Path, name: str
    ) -> None:
        (directory / name).touch()
        assert schedule.due_in_s() == 0


@pytest.mark.slow
async def test_the_newest_backups_stay_and_every_other_file(
    schedule: BackupSchedule, directory: Path, clock: Clock, counted: Counter[str]
) -> None:
    for name in ("gateway-monday.db", "notes.txt", "gateway-20261126T120000Z.db"):
        (directory / name).touch()
    for made in (1, 2):
        running = asyncio.create_task(schedule.run())
        await wait_until(lambda: counted["made"] >= made)  # noqa: B023 - awaited at once
        clock.now += 6 * HOUR
        running.cancel()
        await asyncio.wait((running,))
    assert names(directory) == [
        "gateway-20261127T120000Z.db",
        "gateway-20261127T180000Z.db",
        "gateway-monday.db",
        "notes.txt",
    ]
    newest = directory / "gateway-20261127T180000Z.db"
    assert newest.stat().st_mode & 0o777 == 0o600
    assert await check(f"sqlite+aiosqlite:///{newest}")


@pytest.mark.slow
async def test_failed_backup_is_said_and_tried_again(
    schedule: BackupSchedule,
    directory: Path,
    counted: Counter[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    database = directory.parent / "gateway.db"
    moved = database.rename(directory.parent / "moved.db")
    running = asyncio.create_task(schedule.run())
    await wait_until(lambda: counted["failed"] > 0)
    assert names(directory) == []
    assert "gateway.db: no such file" in caplog.text
    moved.rename(database)
    await wait_until(lambda: counted["made"] == 1)
    running.cancel()
    await asyncio.wait((running,))


@pytest.mark.slow
async def test_canceled_backup_leaves_nothing(
    schedule: BackupSchedule, directory: Path, counted: Counter[str]
) -> None:
    for pause_s in (0.0, 0.2, 0.4, 0.6):
        running = asyncio.create_task(schedule.run())
        await asyncio.sleep(pause_s)
        running.cancel()
        await asyncio.wait((running,))
        assert not [name for name in names(directory) if not name.endswith("Z.db")]


@pytest.mark.slow
async def test_gateway_makes_the_backups_that_its_settings_ask_for(
    tmp_path: Path, show: Callable[[str], None]
) -> None:
    backup = {"directory": str(tmp_path / "new" / "backups"), "every_h": 1, "keep": 3}
    demo = {"name": "demo", "engines": [remote(f"http://127.0.0.1:{free_port()}")]}
    settings = settings_for(demo, run_dir=tmp_path, state={"backup": backup})
    async with running(settings, settle=False) as gateway:
        registry = gateway.state.metrics.registry
        made_here = ("gateway_backups_total", {"outcome": "made"})
        await wait_until(lambda: registry.get_sample_value(*made_here) == 1)
    [made] = (tmp_path / "new" / "backups").iterdir()
    counts = await check(f"sqlite+aiosqlite:///{made}")
    show(f"{made.name}: {counts}")
