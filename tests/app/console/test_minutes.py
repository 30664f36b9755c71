"""The minutes that a gateway stores, and the charts of the hours before a restart."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app.console import minutes as minutes_module
from app.console.history import INTERVAL_S, History, Load, last_hour
from app.console.minutes import MinuteRecorder, samples_of_minutes, step_of
from app.console.overview import STORED_HOURS, charts_of, stored_charts
from app.database import DatabaseUnavailable
from app.telemetry.metrics import TTFT_BUCKETS, Metrics
from app.usage import LoadMinute, LoadMinutes, load_minutes
from app.usage.load_minutes import KEPT_S
from tests.app.console.visits import visiting
from tests.app.usage.records import Faulty, opened
from tests.fakes.vllm import Fake
from tests.gateway import ROOT_KEY, serving_demo
from tests.waiting import wait_until

HOUR_S = 3600


def minute(number: int, tokens: int = 600, ttft: tuple[int, ...] = (0, 4)) -> LoadMinute:
    return LoadMinute(number, tokens, errors=1, refused=2, in_flight=3, waiting=4, ttft=ttft)


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Faulty]:
    async with opened(f"sqlite+aiosqlite:///{tmp_path}/gateway.db") as database:
        yield database


async def test_minutes_of_all_gateways_are_summed_and_old_ones_deleted(database: Faulty) -> None:
    now = 10_000 * 60.0 + KEPT_S
    first, second = (LoadMinutes(database, name, lambda: now) for name in ("one", "two"))
    for number in (9_999, 10_000, 10_001):
        await first.write(minute(number))
    await second.write(minute(10_001, ttft=(1, 2, 3)))
    await second.write(minute(10_001, tokens=7))  # the clock went back: the first stays
    assert [one.tokens for one in await first.read(10_000 * 60.0)] == [600, 1200]
    assert (await first.read(10_001 * 60.0))[0].ttft == (1, 6, 3)
    assert await first.delete_old() == 1
    assert [one.minute for one in await first.read(0)] == [10_000, 10_001]


async def test_minutes_of_many_gateways_are_read_a_few_rows_at_a_time(
    database: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    minutes = LoadMinutes(database, "one")
    for number in range(30):
        await minutes.write(minute(number))
    monkeypatch.setattr(load_minutes, "ROWS", 3)
    turns: list[int] = []
    sleep = asyncio.sleep

    async def count(delay: float) -> None:
        turns.append(1)
        await sleep(delay)

    monkeypatch.setattr(asyncio, "sleep", count)
    assert [one.minute for one in await minutes.read(0)] == list(range(30))
    assert len(turns) == 10  # other tasks run between them


async def test_recorder_stores_what_happened_in_each_minute(
    database: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(minutes_module, "MINUTE_S", 0.05)
    metrics = Metrics()
    minutes = LoadMinutes(database, "one")
    history = History(metrics, lambda: Load(5, 0))
    recorder = asyncio.create_task(MinuteRecorder(history, minutes).run())
    await asyncio.sleep(0)
    metrics.record_request("demo", "/v1/chat/completions", 503, 0.1)
    database.down = True  # a minute that cannot be stored ends nothing
    await asyncio.sleep(0.1)
    database.down = False
    metrics.record_request("demo", "/v1/chat/completions", 429, 0.1)
    found: list[LoadMinute] = []
    while not any(one.refused for one in found):
        await asyncio.sleep(0.01)
        found = list(await minutes.read(0))
    recorder.cancel()
    assert sum(one.refused for one in found) == 1
    assert {one.in_flight for one in found} == {5}


def test_samples_hold_several_minutes_where_there_are_many() -> None:
    assert [step_of(int(hours) * HOUR_S) for hours in STORED_HOURS] == [1, 4, 28]
    samples = samples_of_minutes([minute(number) for number in (8, 9, 11, 13)], step=4)
    assert [sample.at for sample in samples] == [12 * 60, 16 * 60]
    assert [sample.tokens_per_s for sample in samples] == [10.0, 10.0]
    assert samples[0].ttft_p50 is not None
    assert TTFT_BUCKETS[0] < samples[0].ttft_p50 <= TTFT_BUCKETS[1]


def test_chart_begins_at_the_left_and_has_a_gap_where_no_gateway_ran() -> None:
    numbers = [*range(100), *range(200, 360)]
    charts = stored_charts(
        samples_of_minutes([minute(number) for number in numbers], 1), 360 * 60.0, 6 * HOUR_S
    )
    (tokens,) = charts["tokens"].lines
    assert tokens.path.count("M") == 2
    assert tokens.last == 10.0


async def test_overview_shows_the_hours_before_a_restart(fake: Fake, tmp_path: Path) -> None:
    async with serving_demo(tmp_path, fake.url) as gateway:
        minutes = LoadMinutes(gateway.state.database, "earlier")
        now = int(gateway.state.requests._clock() // 60)
        for number in range(now - 100, now):
            await minutes.write(minute(number, tokens=60 * 1234))
    async with serving_demo(tmp_path, fake.url) as gateway, visiting(gateway, ROOT_KEY) as admin:
        page = (await admin.get("/console/overview?hours=24")).text
        assert "1,234" in page
        assert "in the last 24 h<" in page
        assert (await admin.get("/console/overview?hours=x")).status_code == 200
        assert "in the last 60 min" in (await admin.get("/console/overview?hours=5")).text
        assert "in the last 15 min" in (await admin.get("/console/overview?hours=0.25")).text
        told = "Before the start of this gateway: of all gateways of the database."
        async with asyncio.timeout(20):
            while told not in (await admin.get("/console/overview")).text:
                await asyncio.sleep(0.01)


async def test_the_last_hour_begins_before_the_process(database: Faulty) -> None:
    now, monotonic = 1000 * 60.0 + 30, [5000.0]
    for number in (900, 960, 961, 998, 999, 1000, 1001):
        await LoadMinutes(database, "earlier").write(minute(number))
    history = History(Metrics(), lambda: Load(0, 0), lambda: monotonic[0])
    history.read()
    recorder = asyncio.create_task(
        MinuteRecorder(history, LoadMinutes(database, "now"), lambda: now).run()
    )
    await wait_until(lambda: history.earlier)
    recorder.cancel()
    assert last_hour(history.readings(), history.earlier) == []
    monotonic[0] += INTERVAL_S
    history.read()
    samples = last_hour(history.readings(), history.earlier)
    # Minute 999 ended 30 s before the first reading; 900 is too old, 1000 is not over, 1001
    # is of a gateway whose clock is ahead.
    assert samples[-2].at == 5000.0 - 30
    assert samples[-1].at == 5000.0 + INTERVAL_S
    assert [one.tokens_per_s for one in samples[:-1]] == 24 * [10.0]
    pieces = charts_of(samples)["tokens"].lines[0].path.split("M")[1:]
    assert [piece.count(",") for piece in pieces] == [12, 12, 1]


async def test_without_the_database_the_last_hour_is_shown(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def down(*_: object) -> None:
        raise DatabaseUnavailable("the database does not answer")

    async with serving_demo(tmp_path, fake.url) as gateway, visiting(gateway, ROOT_KEY) as admin:
        monkeypatch.setattr(LoadMinutes, "read", down)
        page = (await admin.get("/console/overview?hours=24")).text
    assert "The database cannot be read now" in page
    assert "in the last 60 min" in page
