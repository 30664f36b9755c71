"""The parts of a gateway start in order, and are released in the reverse order in any case."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.application import Application
from app.main import create_app
from tests.gateway import remote, settings_for

# Parts that are closed, in the order of their release.
RELEASE = (
    ("loop_lag", "stop"),
    ("engine_lifecycle", "cancel_start"),
    ("engines_page", "close"),
    ("servers", "close"),
    ("reloader", "stop"),
    ("fleet", "close"),
    ("operations", "close"),
    ("loader", "close"),
    ("engine_lifecycle", "stop_engines"),
    ("limiter", "close"),
    ("ledger", "close"),
    ("budgets", "close"),
    ("authenticator", "close"),
    ("database", "close"),
    ("access", "flush"),
)
NAMES = [".".join(part) for part in RELEASE]

Release = Callable[[], Any]


@pytest.fixture
def application(tmp_path: Path) -> Application:
    model = {"name": "demo", "engines": [remote("http://127.0.0.1:1")]}
    return create_app(settings_for(model, run_dir=tmp_path))


@pytest.fixture
def released(application: Application, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The parts that were released, in order."""
    done: list[str] = []

    def recording(name: str, release: Release) -> Release:
        def record() -> Any:
            done.append(name)
            return release()

        return record

    for part, method in RELEASE:
        kind = type(getattr(application, part))
        release = getattr(application, part).__getattribute__(method)
        recorded = recording(f"{part}.{method}", release)
        monkeypatch.setattr(kind, method, lambda _self, recorded=recorded: recorded())
    return done


async def test_parts_are_released_in_the_documented_order(
    application: Application, released: list[str]
) -> None:
    async with application.run():
        await application.startup_done.wait()
        assert released == []
    assert released == NAMES


async def test_failed_start_releases_the_parts_that_were_started(
    application: Application, released: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(type(application.loader), "start", fail)
    with pytest.raises(OSError, match="no space left"):
        async with application.run():
            pytest.fail("started")
    assert released == NAMES[NAMES.index("engine_lifecycle.stop_engines") :]


@pytest.mark.parametrize(
    "place", ["reloader.stop", "engine_lifecycle.stop_engines", "ledger.close"]
)
async def test_canceled_shutdown_releases_the_rest(
    application: Application, released: list[str], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    hangs = asyncio.Event()

    async def hang(_: object) -> None:
        released.append(place)
        hangs.set()
        await asyncio.get_running_loop().create_future()

    part, method = place.split(".")
    monkeypatch.setattr(type(getattr(application, part)), method, hang)

    async def run() -> None:
        async with application.run():
            await application.startup_done.wait()

    running = asyncio.create_task(run())
    await hangs.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert released == NAMES


async def test_failed_release_does_not_keep_the_rest_from_it(
    application: Application, released: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_: object) -> None:
        released.append("limiter.close")
        raise OSError("broken pipe")

    monkeypatch.setattr(type(application.limiter), "close", fail)
    with pytest.raises(OSError, match="broken pipe"):
        async with application.run():
            pass
    assert released == NAMES


async def test_observed_values_are_counted_without_a_scrape(
    application: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = asyncio.Event()
    monkeypatch.setattr(type(application.metrics), "count_observed", lambda _: counted.set())
    async with application.run(), asyncio.timeout(20):
        await counted.wait()


async def test_background_tasks_end_with_the_gateway(application: Application) -> None:
    before = asyncio.all_tasks()
    async with application.run():
        assert {task.get_name() for task in asyncio.all_tasks() - before} >= {
            "poll the key store",
            "write usage",
            "start engines",
        }
    assert asyncio.all_tasks() == before
