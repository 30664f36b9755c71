"""Restart, watchdog, sleep mode and adoption of engines, with real processes."""

import asyncio
import errno
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from engines.base import EngineDied, EngineNotReady, EngineState, Start
from engines.guard import directories, guardian_client
from engines.guard.guardian_client import GuardianClient
from engines.process import local_host, watchdog
from engines.process.engine import ProcessEngine
from engines.restarts import GIVEN_UP
from tests.engines.processes import AT_ONCE, Make, ask, build, chat, family, gone, read, ready
from tests.waiting import wait_until

pytestmark = pytest.mark.slow
S = EngineState


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    made: list[ProcessEngine] = []

    def one(**fields: Any) -> ProcessEngine:
        made.append(build(tmp_path, **fields))
        return made[-1]

    yield one
    for engine in reversed(made):
        await engine.stop(0.0)
    await guardian_client.stop_unconfigured(tmp_path, set())


@pytest.fixture
def fast_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the intervals of the watchdog."""
    monkeypatch.setattr(watchdog, "FROZEN_S", 0.3)
    monkeypatch.setattr(watchdog, "SAMPLE_S", 0.05)


class TestRestart:
    @pytest.mark.parametrize("victim", [0, 1, 2, 3])
    async def test_sigkill_of_any_process_leaves_no_orphan_and_a_restarted_engine(
        self, make: Make, victim: int, fast_watchdog: None
    ) -> None:
        engine = make(args={"fake-children": True}, restart=AT_ONCE)
        await ready(engine)
        before = family(engine)
        if victim > 1:  # vLLM's server exits when its core is gone; the fake's does not
            before[1].suspend()
        before[victim].kill()
        await wait_until(lambda: engine.restarts == 1 and engine.state is S.READY)
        assert gone(before)
        assert engine.last_error is not None
        assert await ask(engine) == 200

    async def test_sigkill_while_it_loads_is_a_failed_start_and_the_next_one_serves(
        self, make: Make, tmp_path: Path
    ) -> None:
        loaded = tmp_path / "loaded"
        engine = make(args={"fake-load-until": str(loaded)}, restart=AT_ONCE)
        starting = asyncio.create_task(ready(engine))
        await wait_until(lambda: engine.pid is not None)
        before = family(engine)
        os.kill(engine.pid or 0, signal.SIGKILL)
        with pytest.raises(EngineNotReady, match=r"ended while starting \(killed"):
            await starting
        loaded.touch()
        await wait_until(lambda: engine.state is S.READY)
        assert gone(before)

    async def test_stream_ends_in_engine_died_when_the_server_dies(self, make: Make) -> None:
        engine = make(restart=AT_ONCE)
        await ready(engine)
        response = await engine.send(chat(fake="pace:5"))
        os.kill(engine.pid or 0, signal.SIGKILL)
        with pytest.raises(EngineDied):
            await read(response)
        await wait_until(lambda: engine.restarts == 1 and engine.state is S.READY)

    async def test_crashing_engine_is_given_up_after_its_budget(self, make: Make) -> None:
        engine = make(args={"fake-start": "crash"}, restart=AT_ONCE)
        with pytest.raises(EngineNotReady, match="no room for KV cache"):
            await ready(engine)
        await wait_until(lambda: engine.given_up)
        assert engine.restarts == AT_ONCE["budget"]
        assert engine.last_error == "no room for KV cache"

    async def test_engine_starts_by_itself_once_its_disk_has_room(
        self, make: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        faults: list[OSError] = [full, full]
        make_private = directories.make_private

        def make_on_full_disk(directory: Path) -> None:
            if faults:
                raise faults.pop()
            make_private(directory)

        monkeypatch.setattr(directories, "make_private", make_on_full_disk)
        engine = make(restart=AT_ONCE)
        with pytest.raises(EngineNotReady, match="demo-0: No space left on device"):
            await ready(engine)
        await wait_until(lambda: engine.state is S.READY)
        assert engine.restarts == 2

    async def test_files_of_an_earlier_run_that_cannot_be_removed_are_a_failed_start(
        self, make: Make, tmp_path: Path
    ) -> None:
        """As on a disk that has become read-only."""
        engine = make(restart=AT_ONCE)
        obstacle = tmp_path / "demo-0" / guardian_client.RECORD_FILE
        obstacle.mkdir(parents=True)
        with pytest.raises(EngineNotReady, match=r"Is a directory: .*/demo-0/engine.json"):
            await ready(engine)
        obstacle.rmdir()

    async def test_full_disk_does_not_use_up_the_budget_of_an_engine_that_has_served(
        self, make: Make, tmp_path: Path
    ) -> None:
        full = tmp_path / "full"
        engine = make(args={"fake-full-while": str(full)}, restart=AT_ONCE)
        await ready(engine)
        full.touch()
        family(engine)[0].kill()
        await wait_until(lambda: engine.restarts > AT_ONCE["budget"] + 1)
        assert engine.last_error == "[Errno 28] No space left on device"
        assert not engine.given_up
        full.unlink()
        await wait_until(lambda: engine.state is S.READY)

    async def test_load_time_does_not_count_as_service(self, make: Make) -> None:
        shorter_than_a_load = {**AT_ONCE, "window_s": 0.001}
        engine = make(args={"fake-start": "crash"}, restart=shorter_than_a_load)
        with pytest.raises(EngineNotReady, match="no room for KV cache"):
            await ready(engine)
        await wait_until(lambda: engine.given_up)
        assert engine.restarts == AT_ONCE["budget"]

    async def test_given_up_engine_is_not_started_by_the_next_request(self, make: Make) -> None:
        engine = make(args={"fake-start": "crash"}, restart={"budget": 0, "max_backoff_s": 60})
        for _ in range(2):
            with pytest.raises(EngineNotReady, match="no room for KV cache"):
                await ready(engine)
        assert sum("version fake" in line for line in engine.recent_log()) == 1

    async def test_stop_renews_the_budget_of_a_given_up_engine(
        self, make: Make, tmp_path: Path
    ) -> None:
        dies = tmp_path / "dies"
        engine = make(args={"fake-die-when": str(dies)})
        await ready(engine)
        dies.touch()
        await wait_until(lambda: engine.given_up)
        await engine.stop(0.0)
        assert engine.state is S.STOPPED
        dies.unlink()
        await ready(engine)

    async def test_stop_during_the_backoff_ends_it(self, make: Make) -> None:
        engine = make(args={"fake-start": "crash"}, restart={"backoff_s": 60, "max_backoff_s": 60})
        with pytest.raises(EngineNotReady):
            await ready(engine)
        await wait_until(lambda: engine.state is S.FAILED)
        await engine.stop(0.0)
        assert engine.state is S.STOPPED

    async def test_resting_engine_stays_failed_until_it_is_started(
        self, make: Make, tmp_path: Path
    ) -> None:
        dies = tmp_path / "dies"
        engine = make(
            args={"fake-die-when": str(dies)}, restart={"backoff_s": 60, "max_backoff_s": 60}
        )
        await ready(engine)
        dies.touch()
        await wait_until(lambda: engine.state is S.FAILED)
        dies.unlink()
        await engine.clear_failed()
        assert (engine.state, engine.given_up) == (S.FAILED, True)
        assert engine.starting is None
        await ready(engine)
        assert await ask(engine) == 200

    async def test_caller_during_the_backoff_gets_the_reason_at_once(self, make: Make) -> None:
        engine = make(args={"fake-start": "crash"}, restart={"backoff_s": 60, "max_backoff_s": 60})
        for _ in range(2):
            with pytest.raises(EngineNotReady, match="no room"):
                await ready(engine)

    async def test_stopped_process_can_be_started_again(self, make: Make) -> None:
        engine = make()
        for _ in range(2):
            await ready(engine)
            assert await ask(engine) == 200
            await engine.stop(5.0)
            assert engine.state is S.STOPPED

    async def test_engines_load_one_at_a_time_with_one_turn(
        self, make: Make, tmp_path: Path
    ) -> None:
        turn, loaded = asyncio.Semaphore(1), tmp_path / "loaded"
        engines = [make(name=n, args={"fake-load-until": str(loaded)}, turn=turn) for n in "ab"]
        both = asyncio.gather(*map(ready, engines))
        await wait_until(lambda: any(engine.pid for engine in engines))
        [second] = [engine for engine in engines if engine.pid is None]
        assert second.state is S.STARTING
        assert second.progress is not None
        assert second.progress.phase == "waiting for its turn"
        loaded.touch()
        await both
        assert not turn.locked()

    async def test_engines_load_in_the_order_in_which_they_are_started(
        self, make: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        loads: list[str] = []

        async def find_slowly(directory: Path) -> GuardianClient | None:
            await asyncio.sleep(0.05 if directory.name == "first" else 0)
            return await guardian_client.find_guardian(directory)

        async def record_load(directory: Path, *args: Any, **fields: Any) -> GuardianClient:
            loads.append(directory.name)
            return await guardian_client.start_guardian(directory, *args, **fields)

        monkeypatch.setattr(local_host, "find_guardian", find_slowly)
        monkeypatch.setattr(local_host, "start_guardian", record_load)
        turn = asyncio.Semaphore(1)
        await asyncio.gather(*(ready(make(name=name, turn=turn)) for name in ("first", "second")))
        assert loads == ["first", "second"]
        assert not turn.locked()

    async def test_stop_while_waiting_for_the_turn_takes_none(self, make: Make) -> None:
        turn = asyncio.Semaphore(1)
        await turn.acquire()
        engine = make(turn=turn)
        waiting = asyncio.create_task(ready(engine))
        await wait_until(lambda: engine.state is S.STARTING)
        await engine.stop(0.0)
        with pytest.raises(EngineNotReady):
            await waiting
        turn.release()
        assert not turn.locked()

    async def test_model_directory_deleted_while_loaded_fails_the_restart(
        self, make: Make, tmp_path: Path
    ) -> None:
        model = tmp_path / "model"
        model.mkdir()
        engine = make(model=str(model), restart={**AT_ONCE, "max_backoff_s": 0.3})
        await ready(engine)
        model.rmdir()
        assert await ask(engine) == 200  # the loaded model still serves
        os.kill(engine.pid or 0, signal.SIGKILL)
        told = f"model directory {model} does not exist"
        await wait_until(lambda: engine.last_error == told)
        model.mkdir()  # the disk is mounted again
        await wait_until(lambda: engine.state is S.READY)


class TestWatch:
    @pytest.mark.parametrize("victim", [0, 1, 2, 3])
    async def test_frozen_process_is_replaced(
        self, make: Make, victim: int, fast_watchdog: None
    ) -> None:
        engine = make(args={"fake-children": True}, restart=AT_ONCE)
        await ready(engine)
        before = family(engine)
        before[victim].suspend()
        await wait_until(lambda: engine.restarts == 1 and engine.state is S.READY)
        assert f"its process {before[victim].pid} has been stopped" in (engine.last_error or "")
        assert gone(before)

    async def test_frozen_process_is_replaced_while_loading(
        self, make: Make, tmp_path: Path, fast_watchdog: None
    ) -> None:
        loaded = tmp_path / "loaded"
        engine = make(args={"fake-load-until": str(loaded)}, restart=AT_ONCE)
        starting = asyncio.create_task(ready(engine))
        await wait_until(lambda: engine.pid is not None)
        before = family(engine)
        before[1].suspend()
        with pytest.raises(EngineNotReady, match="has been stopped"):
            await starting
        loaded.touch()
        await wait_until(lambda: engine.state is S.READY)
        assert gone(before)

    async def test_engine_without_progress_is_replaced(
        self, make: Make, fast_watchdog: None
    ) -> None:
        engine = make(restart=AT_ONCE, progress_timeout_s=0.5)
        await ready(engine)
        response = await engine.send(chat(fake="stall:1"))
        assert await response.read()
        with pytest.raises(EngineDied):
            await read(response)
        await wait_until(lambda: engine.restarts == 1 and engine.state is S.READY)
        assert "no progress for 0.5 s" in (engine.last_error or "")

    async def test_silent_request_next_to_one_with_progress_does_not_fail_the_engine(
        self, make: Make, fast_watchdog: None
    ) -> None:
        engine = make(restart=AT_ONCE, progress_timeout_s=0.5)
        await ready(engine)
        silent = await engine.send(chat(fake="stall:1"))
        moving = await engine.send(chat(fake="pace:5"))
        for _ in range(200):
            assert await moving.read()
        assert engine.restarts == 0
        assert engine.state is S.READY
        silent.close()
        moving.close()


class TestSleep:
    async def test_unloaded_engine_sleeps_and_wakes(self, make: Make) -> None:
        engine = make(sleep_level=1)
        await ready(engine)
        pid = engine.pid
        await engine.unload()
        assert engine.state is S.ASLEEP
        with pytest.raises(EngineNotReady, match="asleep"):
            await ask(engine)  # not sent: a request crashes a sleeping vLLM
        await ready(engine)
        assert engine.pid == pid
        assert await ask(engine) == 200

    async def test_sleep_level_2_reloads_the_weights(self, make: Make) -> None:
        engine = make(sleep_level=2)
        await ready(engine)
        await engine.unload()
        await ready(engine)
        assert await ask(engine) == 200

    async def test_requests_in_flight_end_before_sleep(self, make: Make) -> None:
        engine = make(sleep_level=1)
        await ready(engine)
        response = await engine.send(chat(fake="pace:5"))
        asleep = asyncio.create_task(engine.unload())
        await wait_until(lambda: engine.state is S.DRAINING)
        assert await response.read()
        assert not asleep.done()
        response.close()
        await asleep
        assert engine.state is S.ASLEEP

    @pytest.mark.parametrize("fault", ["refuse", "insomnia", "hoard"])
    async def test_engine_that_fails_to_sleep_is_stopped(self, make: Make, fault: str) -> None:
        engine = make(sleep_level=1, args={"fake-sleep": fault})
        await ready(engine)
        processes = family(engine)
        await engine.unload()
        assert engine.state is S.STOPPED
        assert gone(processes)
        assert "did not fall asleep" in (engine.last_error or "")

    @pytest.mark.parametrize("fault", ["coma", "sleepwalk"])
    async def test_engine_that_fails_to_wake_is_restarted(self, make: Make, fault: str) -> None:
        engine = make(sleep_level=1, args={"fake-sleep": fault}, restart=AT_ONCE)
        await ready(engine)
        before = family(engine)
        await engine.unload()
        with pytest.raises(EngineNotReady, match="did not wake"):
            await ready(engine)
        await wait_until(lambda: engine.state is S.READY)
        assert gone(before)
        assert await ask(engine) == 200

    async def test_sleeping_engine_that_dies_is_restarted(self, make: Make) -> None:
        engine = make(sleep_level=1, restart=AT_ONCE)
        await ready(engine)
        await engine.unload()
        os.kill(engine.pid or 0, signal.SIGKILL)
        await wait_until(lambda: engine.restarts == 1)

    async def test_sleep_without_sleep_level_is_refused(self, make: Make) -> None:
        engine = make()
        await ready(engine)
        with pytest.raises(EngineNotReady, match="sleep_level"):
            await engine.sleep(1)
        assert engine.state is S.READY

    async def test_canceled_unload_leaves_the_engine_serving(self, make: Make) -> None:
        engine = make()
        await ready(engine)
        response = await engine.send(chat(fake="pace:5"))
        unloading = asyncio.create_task(engine.unload())
        await wait_until(lambda: engine.state is S.DRAINING)
        await ready(engine)
        await unloading
        response.close()
        assert await ask(engine) == 200


async def leave_running(make: Make, **fields: Any) -> list[psutil.Process]:
    """Start an engine that outlives its gateway, and release it; return its processes."""
    engine = make(keep=True, **fields)
    await ready(engine)
    processes = family(engine)
    await engine.release()
    return processes


class TestAdoption:
    async def test_next_gateway_adopts_a_running_engine(self, make: Make) -> None:
        old = make(keep=True, args={"fake-children": True})
        await ready(old)
        processes = family(old)
        stream = await old.send(chat(fake="pace:5"))
        await old.release()
        new = make(keep=True, args={"fake-children": True})
        await ready(new)
        assert new.pid == processes[1].pid
        assert new.facts == old.facts
        assert new.load_s == old.load_s
        assert await ask(new) == 200
        assert await stream.read()  # in the old gateway, while the new one runs
        stream.close()
        await new.stop(5.0)
        assert gone(processes)

    async def test_released_engine_is_not_restarted_by_its_former_gateway(self, make: Make) -> None:
        processes = await leave_running(make, restart=AT_ONCE)
        processes[1].kill()
        await wait_until(lambda: gone(processes))
        new = make(keep=True)
        await ready(new)
        assert new.pid != processes[1].pid

    async def test_engine_of_another_configuration_is_replaced(self, make: Make) -> None:
        processes = await leave_running(make)
        new = make(keep=True, args={"max-model-len": 17})
        await ready(new)
        assert gone(processes)
        assert "--max-model-len=17" in psutil.Process(new.pid).cmdline()

    async def test_changed_variables_are_another_configuration(self, make: Make) -> None:
        processes = await leave_running(make)
        new = make(keep=True, env={"A": "1"})
        await ready(new)
        assert gone(processes)

    async def test_loading_engine_is_adopted(self, make: Make, tmp_path: Path) -> None:
        loaded = tmp_path / "loaded"
        old = make(keep=True, args={"fake-load-until": str(loaded)})
        starting = asyncio.create_task(ready(old))
        await wait_until(lambda: old.pid is not None)
        pid = old.pid
        await old.release()
        starting.cancel()
        new = make(keep=True, args={"fake-load-until": str(loaded)})
        taking_over = asyncio.create_task(ready(new))
        await wait_until(lambda: new.pid is not None)
        loaded.touch()
        await taking_over
        assert new.pid == pid

    async def test_adopted_engine_ends_with_a_gateway_that_does_not_keep_it(
        self, make: Make
    ) -> None:
        processes = await leave_running(make)
        new = make(keep=False)
        await ready(new)
        assert new.pid == processes[1].pid
        await new.release()
        await wait_until(lambda: gone(processes))

    async def test_unconfigured_engine_is_stopped(self, make: Make, tmp_path: Path) -> None:
        processes = await leave_running(make)
        await guardian_client.stop_unconfigured(tmp_path, {"another"})
        assert gone(processes)


class TestLeftovers:
    async def test_recycled_pids_are_left_alone(self, make: Make, tmp_path: Path) -> None:
        stranger = psutil.Popen(["sleep", "60"])
        try:
            directory = tmp_path / "demo-0"
            directory.mkdir()
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            record = {"boot": boot, "guardian": stranger.pid, "engine": stranger.pid}
            record |= {"guardian_started": 1, "engine_started": 1}
            (directory / "engine.json").write_text(json.dumps(record))
            engine = make()
            await ready(engine)
            assert stranger.is_running()
        finally:
            stranger.kill()
            stranger.wait()

    @pytest.mark.parametrize("text", ["", "\x00\xff", "[]", '{"guardian": "x"}', "{}"])
    async def test_invalid_record_is_replaced(self, make: Make, tmp_path: Path, text: str) -> None:
        directory = tmp_path / "demo-0"
        directory.mkdir()
        (directory / "engine.json").write_text(text)
        for name in ("http.sock", "ctl.sock"):
            (directory / name).write_text("not a socket")
        engine = make()
        await ready(engine)
        assert json.loads((directory / "engine.json").read_text())["engine"] == engine.pid

    async def test_leftovers_of_a_crash_are_ended_before_the_next_start(self, make: Make) -> None:
        processes = await leave_running(make, args={"fake-children": True})
        for process in processes:
            process.suspend()  # no process can clean up
        processes[0].kill()
        processes[1].kill()
        new = make(keep=True)
        await ready(new)
        assert gone(processes)

    async def test_frozen_earlier_guardian_is_ended_with_its_engine(
        self, make: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(guardian_client, "HELLO_TIMEOUT_S", 0.3)
        processes = await leave_running(make, args={"fake-children": True})
        processes[0].suspend()
        new = make(keep=True)
        await ready(new)
        assert gone(processes)
        assert new.pid != processes[1].pid


class TestStarting:
    """The forecast of a start (`Engine.starting`)."""

    async def test_start_is_shown_while_it_is_under_way(self, make: Make, tmp_path: Path) -> None:
        up = tmp_path / "up"
        engine = make(args={"fake-load-until": str(up)})
        assert engine.starting is None
        task = asyncio.create_task(ready(engine))
        await wait_until(lambda: engine.starting is not None and engine.starting.elapsed_s > 0)
        assert engine.starting is not None
        assert engine.starting.expected_s is None, "it has not been measured yet"
        up.touch()
        await task
        assert engine.starting is None

    async def test_restart_is_expected_to_take_backoff_and_last_load(
        self, make: Make, tmp_path: Path
    ) -> None:
        dies = tmp_path / "dies"
        engine = make(
            args={"fake-die-when": str(dies)}, restart={"backoff_s": 60, "max_backoff_s": 60}
        )
        await ready(engine)
        load_s = engine.load_s
        assert load_s is not None
        dies.touch()
        await wait_until(lambda: engine.state is S.FAILED)
        await wait_until(
            lambda: (start := engine.starting) is not None and _expects(start, 50 + load_s)
        )

    async def test_start_after_a_failed_one_has_no_forecast(self, make: Make) -> None:
        engine = make(args={"fake-start": "crash"}, restart={"backoff_s": 60, "max_backoff_s": 60})
        with pytest.raises(EngineNotReady):
            await ready(engine)
        assert engine.starting is None
        assert engine.blocked_by is None

    async def test_engine_that_has_served_is_started_again_after_a_failed_start(
        self, make: Make, tmp_path: Path
    ) -> None:
        up, failing = tmp_path / "up", tmp_path / "failing"
        up.touch()
        engine = make(
            args={"fake-load-until": str(up), "fake-crash-while": str(failing)},
            restart=AT_ONCE | {"budget": 50},
        )
        await ready(engine)
        up.unlink()
        failing.touch()
        family(engine)[0].kill()
        await wait_until(lambda: engine.restarts >= 2)
        failing.unlink()
        await wait_until(lambda: (start := engine.starting) is not None and start.after_failure)
        assert engine.starting is not None
        assert engine.starting.expected_s is None
        up.touch()
        await wait_until(lambda: engine.state is S.READY)
        assert engine.starting is None

    async def test_lasting_fault_is_named_by_its_kind(self, make: Make) -> None:
        engine = make(args={"fake-start": "refuse"})
        with pytest.raises(EngineNotReady, match="unrecognized arguments: --no-such-flag"):
            await ready(engine)
        assert engine.blocked_by == "unknown flag"
        assert engine.starting is None

    async def test_exhausted_restarts_are_named(self, make: Make) -> None:
        engine = make(args={"fake-start": "crash"}, restart={"budget": 0})
        with pytest.raises(EngineNotReady):
            await ready(engine)
        await wait_until(lambda: engine.given_up)
        assert engine.blocked_by == GIVEN_UP


def _expects(start: Start, least_s: float) -> bool:
    return start.expected_s is not None and start.expected_s >= least_s
