"""The end of the gateway during and after a reload."""

import asyncio
import contextlib
import threading
from pathlib import Path

import pytest

from app.fleet.preflight import PreflightResult
from app.server.shutdown import hand_over
from tests.app.reload.gateways import (
    KEEP,
    ConfigFile,
    child_processes,
    longer,
    model,
    process,
    run,
    slow_start,
    stop_kept_engines,
)
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


class TestShutdown:
    async def test_shutdown_cancels_a_reload_and_stops_every_engine(self, tmp_path: Path) -> None:
        file = ConfigFile(tmp_path, model(), model("old"))
        before = child_processes()
        async with run(file) as one, one.stream("pace:5", model="old"):
            file.write(model(), model("new", process(args={"fake-start": "hang"})))
            reloading = asyncio.create_task(one.state.reloader.reload())
            await wait_until(lambda: len(one.state.catalogue.models) == 1)
        with pytest.raises(asyncio.CancelledError):
            await reloading
        assert child_processes() == before

    async def test_shutdown_ends_the_flag_check(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The process cannot exit before every thread of the executor has ended."""
        asked, report = threading.Event(), threading.Event()

        def slow(*given: object, **_: object) -> PreflightResult:
            asked.set()
            ended = given[-1]
            assert isinstance(ended, threading.Event)
            if ended.wait(20):
                report.set()
            return PreflightResult((), ())

        monkeypatch.setattr("app.reload.planner.run_preflight", slow)
        async with run(tmp_path, model()) as one:
            one.file.write(longer())
            reloading = asyncio.create_task(one.state.reloader.reload())
            await wait_until(asked.is_set)
        with pytest.raises(asyncio.CancelledError):
            await reloading
        await wait_until(report.is_set)

    async def test_shutdown_stops_a_starting_successor(self, tmp_path: Path) -> None:
        file, before = ConfigFile(tmp_path, model()), child_processes()
        async with run(file) as one:
            file.write(model("demo", process(args={"fake-start": "hang"})))
            reloading = asyncio.create_task(one.state.reloader.reload())
            await wait_until(lambda: one.pids().get("demo-1") is not None)
        with pytest.raises(asyncio.CancelledError):
            await reloading
        assert child_processes() == before

    async def test_next_gateway_adopts_the_successor(self, tmp_path: Path) -> None:
        file, before = ConfigFile(tmp_path, model(), server=KEEP), child_processes()
        async with run(file) as one:
            assert (await one.reload(longer(), server=KEEP))["ok"]
            kept = one.pids()
            assert list(kept) == ["demo-1"]
        async with run(file) as one:
            assert one.pids() == kept
            assert (await one.chat()).status_code == 200
        await stop_kept_engines(file, before)

    async def test_stream_on_a_retired_engine_ends_after_the_handover(self, tmp_path: Path) -> None:
        file, before = ConfigFile(tmp_path, model(), server=KEEP), child_processes()
        async with run(file) as one:
            async with one.stream("tokens:20:20") as stream:
                file.write(longer(), server=KEEP)
                reloading = asyncio.create_task(one.state.reloader.reload())
                await wait_until(lambda: list(one.pids()) == ["demo-1"])
                kept = one.pids()
                await hand_over(one.state, [], contextlib.ExitStack())
                data = await stream.read()
            assert data.endswith(b"data: [DONE]\n\n")
            with pytest.raises(asyncio.CancelledError):
                await reloading
        async with run(file) as one:
            assert one.pids() == kept
        await stop_kept_engines(file, before)

    async def test_next_gateway_adopts_a_starting_successor(self, tmp_path: Path) -> None:
        loaded, before = tmp_path / "loaded", child_processes()
        file = ConfigFile(tmp_path, model(), server=KEEP)
        async with run(file) as one:
            slow = slow_start(loaded)
            file.write(model("demo", slow), server=KEEP)
            reloading = asyncio.create_task(one.state.reloader.reload())
            await wait_until(lambda: one.pids().get("demo-1") is not None)
            starting = one.pids()["demo-1"]
        with pytest.raises(asyncio.CancelledError):
            await reloading
        loaded.touch()
        async with run(file) as one:
            assert one.pids() == {"demo-1": starting}
            assert (await one.chat()).status_code == 200
        await stop_kept_engines(file, before)
