"""Engines that start alongside the ones that they replace."""

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from engines.base import EngineState
from tests.app.reload.gateways import (
    LONGER,
    ConfigFile,
    child_processes,
    crashing,
    is_ready,
    longer,
    model,
    process,
    run,
    slow_start,
)
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


class TestOverlap:
    async def test_only_engine_is_replaced_without_a_gap(self, tmp_path: Path) -> None:
        loaded = tmp_path / "loaded"
        async with run(tmp_path, model()) as one:
            old = one.engine("demo-0")
            reloading = asyncio.create_task(one.reload(model("demo", slow_start(loaded, **LONGER))))
            await wait_until(lambda: len(one.state.catalogue.engines) == 2)
            statuses = [(await one.chat()).status_code for _ in range(20)]
            assert one.engine("demo-1").state is EngineState.STARTING
            loaded.touch()
            while not reloading.done():
                statuses.append((await one.chat()).status_code)
            report = await reloading
            assert set(statuses) == {200}
            assert report["lines"][1:] == [
                f"~ model demo: args.fake-load-until added: {loaded} (replaces demo-0)",
                "~ model demo: demo-1 starts alongside demo-0 and takes over when it is ready",
                "model demo: changed",
                "done",
            ]
            assert list(one.pids()) == ["demo-1"]
            assert one.has_longer_context("demo-1")
            assert old.state is EngineState.STOPPED

    async def test_stream_ends_on_the_old_engine(self, tmp_path: Path) -> None:
        async with run(tmp_path, model()) as one:
            old = one.engine("demo-0")
            async with one.stream("tokens:200:20") as stream:
                reloading = asyncio.create_task(one.reload(longer()))
                await wait_until(lambda: list(one.pids()) == ["demo-1"])
                assert (await one.chat()).status_code == 200
                assert is_ready(old), "it refuses no request that is on its way"
                data = await stream.read()
            assert data.endswith(b"data: [DONE]\n\n")
            assert data.count(b'"content":"word"') == 200
            assert (await reloading)["ok"]
            assert old.state is EngineState.STOPPED

    async def test_endless_stream_is_cut_after_the_drain(self, tmp_path: Path) -> None:
        drain = {"drain_timeout_s": 0.2}
        async with run(tmp_path, model(), server=drain) as one:
            old = one.engine("demo-0")
            async with one.stream("pace:5") as stream:
                assert (await one.reload(longer(), server=drain))["ok"]
                assert old.state is EngineState.STOPPED
                data = await stream.read()
            assert b'"code":"engine_failed"' in data

    async def test_request_delayed_by_limits_finds_the_successor(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The model that it found earlier has an engine that is gone."""
        async with run(tmp_path, model()) as one:
            limiter, gate, asked = one.state.limiter, asyncio.Event(), asyncio.Event()
            decide = limiter.decide_terms

            async def slow(ask: Any) -> Any:
                asked.set()
                await gate.wait()
                return await decide(ask)

            monkeypatch.setattr(limiter, "decide_at_once", lambda _: None)
            monkeypatch.setattr(limiter, "decide_terms", slow)
            waiting = asyncio.create_task(one.chat())
            await asked.wait()
            assert (await one.reload(longer()))["ok"]
            gate.set()
            assert (await waiting).status_code == 200

    async def test_failed_successor_leaves_the_old_one_serving(self, tmp_path: Path) -> None:
        async with run(tmp_path, model()) as one:
            before, processes = one.pids(), child_processes()
            reloading = asyncio.create_task(one.reload(model("demo", crashing())))
            statuses = []
            while not reloading.done():
                statuses.append((await one.chat()).status_code)
            report = await reloading
            assert set(statuses) == {200}
            assert report["models"] == [
                {
                    "model": "demo",
                    "outcome": "rolled back",
                    "reason": "engine demo-1: no room for KV cache; demo-0 serves on",
                    "warning": None,
                }
            ]
            assert one.pids() == before
            assert child_processes() == processes
            assert (await one.reload(longer()))["ok"]
            assert list(one.pids()) == ["demo-1"]

    async def test_stored_response_is_lost_with_its_engine(self, tmp_path: Path) -> None:
        async with run(tmp_path, model(stores_responses=True)) as one:
            body = {"model": "demo", "input": "hi"}
            kept = (await one.client.post("/v1/responses", json=body)).json()["id"]
            further = {**body, "previous_response_id": kept}
            assert (await one.client.post("/v1/responses", json=further)).status_code == 200
            assert (await one.reload(longer(stores_responses=True)))["ok"]
            assert (await one.client.post("/v1/responses", json=further)).status_code == 404
            assert (await one.client.get(f"/v1/responses/{kept}")).status_code == 404

    async def test_replicas_are_replaced_one_at_a_time(self, tmp_path: Path) -> None:
        async with run(tmp_path, model("demo", process(2))) as one:
            reloading = asyncio.create_task(one.reload(model("demo", process(2, args=LONGER))))
            most = 0
            while not reloading.done():
                states = one.states()
                assert states.count(EngineState.READY) >= 2
                most = max(most, len(states))
                await asyncio.sleep(0.005)
            assert (await reloading)["ok"]
            assert most == 3
            assert list(one.pids()) == ["demo-2", "demo-3"]

    async def test_replicas_are_rolled_back_one_at_a_time(self, tmp_path: Path) -> None:
        before = [process(env={"A": "1"}), process(env={"B": "1"})]
        async with run(tmp_path, model("demo", *before)) as one:
            kept = one.pids()["demo-1"]
            reloading = asyncio.create_task(
                one.reload(model("demo", process(args=LONGER), crashing()))
            )
            while not reloading.done():
                states = one.states()
                assert states.count(EngineState.READY) >= 2
                await asyncio.sleep(0.005)
            [report] = (await reloading)["models"]
            assert report["reason"] == "engine demo-3: no room for KV cache; demo-1 serves on"
            assert list(one.pids()) == ["demo-0", "demo-1"]
            assert one.pids()["demo-1"] == kept
            assert not one.has_longer_context("demo-0")
            assert (await one.reload(dry_run=True))["difference"], "the file differs still"
            assert (await one.reload(model("demo", *before)))["lines"] == ["nothing differs"]

    async def test_engine_that_dies_meanwhile_is_replaced(self, tmp_path: Path) -> None:
        loaded, dead = tmp_path / "loaded", tmp_path / "dead"
        slow = {"backoff_s": 60, "max_backoff_s": 60}
        async with run(
            ConfigFile(
                tmp_path, model("demo", process(args={"fake-die-when": str(dead)}, restart=slow))
            )
        ) as one:
            old = one.engine("demo-0")
            reloading = asyncio.create_task(one.reload(model("demo", slow_start(loaded))))
            await wait_until(lambda: len(one.state.catalogue.engines) == 2)
            dead.touch()
            await wait_until(lambda: old.state is EngineState.FAILED)
            loaded.touch()
            assert (await reloading)["ok"]
            assert list(one.pids()) == ["demo-1"]
            assert (await one.chat()).status_code == 200

    async def test_memory_is_checked_again_before_each_start(
        self, tmp_path: Path, free_gib: list[float], caplog: pytest.LogCaptureFixture
    ) -> None:
        loaded = tmp_path / "loaded"
        async with run(tmp_path, model(), model("other")) as one:
            slow = slow_start(loaded)
            reloading = asyncio.create_task(one.reload(model("demo", slow), longer("other")))
            await wait_until(lambda: len(one.state.catalogue.engines) == 3)
            free_gib[0] = 0.1
            loaded.touch()
            report = await reloading
            assert report["ok"]
            assert "other-1 starts alongside other-0" in report["difference"][3]
            assert "engine other-0 ends before other-1 starts: no memory for both" in caplog.text
            assert list(one.pids()) == ["demo-1", "other-1"]
            assert (await one.chat("other")).status_code == 200

    async def test_memory_of_a_starting_engine_is_not_free(
        self, tmp_path: Path, free_gib: list[float]
    ) -> None:
        hangs = process(args={"fake-start": "hang"})
        lazy = model("lazy", {**hangs, "memory_gib": 1.0}, load="on_demand")
        async with run(tmp_path, model(), lazy) as one:
            loading = asyncio.create_task(one.chat("lazy"))
            await wait_until(lambda: one.engine("lazy-0").state is EngineState.STARTING)
            free_gib[0] = 1.1
            [_, report] = (await one.reload(longer(), lazy, dry_run=True))["difference"]
            assert "no memory for both: it takes up to 0.1 GiB to start, 0.1 are free" in report
            loading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await loading

    async def test_dry_run_reports_the_downtime(
        self, tmp_path: Path, free_gib: list[float]
    ) -> None:
        async with run(tmp_path, model()) as one:
            free_gib[0] = 0.1
            facts = tmp_path / "demo-0" / "facts.json"
            known = json.loads(facts.read_text())
            facts.write_text(json.dumps(known | {"load_s": 57.2}))
            report = await one.reload(longer(), dry_run=True)
            assert report["difference"][1] == (
                "~ model demo: demo-0 ends before its successor starts, about 59 s without demo: "
                "no memory for both: it takes up to 0.1 GiB to start, 0.1 are free; "
                "last load took 57 s"
            )

    async def test_stopped_engine_is_replaced_in_place(self, tmp_path: Path) -> None:
        async with run(tmp_path, model()) as one:
            await one.engine("demo-0").stop(0.0)
            report = await one.reload(longer())
            assert report["ok"]
            assert len(report["difference"]) == 1
            assert list(one.pids()) == ["demo-0"]

    async def test_on_demand_loads_respect_a_starting_successor(self, tmp_path: Path) -> None:
        loaded, budget = tmp_path / "loaded", {"memory_budget_gib": 0.45, "parallel_starts": 2}
        lazy = [model(name, load="on_demand") for name in ("one", "two")]
        file = ConfigFile(tmp_path, model(), *lazy, server=budget)
        async with run(file) as one:
            slow = {**slow_start(loaded), "memory_gib": 0.2}
            file.write(model("demo", slow), *lazy, server=budget)
            reloading = asyncio.create_task(one.reload())
            await wait_until(lambda: len(one.state.catalogue.engines) == 4)
            for name in ("one", "two"):
                assert (await one.chat(name)).status_code == 200
            assert one.engine("one-0").state is EngineState.STOPPED, "it made room"
            loaded.touch()
            assert (await reloading)["ok"]
            assert (await one.chat("one")).status_code == 200
            assert one.engine("two-0").state is EngineState.READY, "there is room for both"

    async def test_largest_on_demand_model_stays_loadable(self, tmp_path: Path) -> None:
        budget, lazy = {"memory_budget_gib": 0.35}, model("lazy", load="on_demand")
        async with run(tmp_path, model(), lazy, server=budget) as one:
            report = await one.reload(model("demo", process(memory_gib=0.2)), lazy, server=budget)
            assert report["ok"]
            assert (
                "it takes 0.2 GiB, server.memory_budget_gib leaves 0.1" in report["difference"][1]
            )
            assert list(one.pids()) == ["demo-0", "lazy-0"]

    async def test_loaded_on_demand_model_serves_all_along(self, tmp_path: Path) -> None:
        loaded = tmp_path / "loaded"
        lazy = model("lazy", load="on_demand", load_wait_s=0.1)
        async with run(tmp_path, model(), lazy) as one:
            await one.state.loader.load("lazy")
            slow = slow_start(loaded, **LONGER)
            reloading = asyncio.create_task(one.reload(model(), {**lazy, "engines": [slow]}))
            await wait_until(lambda: len(one.state.catalogue.engines) == 3)
            statuses = [(await one.chat("lazy")).status_code for _ in range(5)]
            loaded.touch()
            while not reloading.done():
                statuses.append((await one.chat("lazy")).status_code)
            assert (await reloading)["ok"]
            assert set(statuses) == {200}
            assert one.has_longer_context("lazy-1")
            await one.state.loader.unload("lazy")
            assert one.engine("lazy-1").state is EngineState.STOPPED
            loaded.unlink()
            assert (await one.reload(model(), lazy))["ok"]
            assert one.engine("lazy-1").state is EngineState.STOPPED

    async def test_on_demand_model_stays_loaded_after_a_failure(self, tmp_path: Path) -> None:
        async with run(tmp_path, model(), model("lazy", load="on_demand")) as one:
            assert (await one.chat("lazy")).status_code == 200
            pid = one.pids()["lazy-0"]
            [report] = (await one.reload(model(), model("lazy", crashing(), load="on_demand")))[
                "models"
            ]
            assert report["reason"] == "engine lazy-1: no room for KV cache; lazy-0 serves on"
            assert one.pids()["lazy-0"] == pid
            assert one.engine("lazy-0").state is EngineState.READY
            assert (await one.chat("lazy")).status_code == 200

    async def test_on_demand_engines_are_rolled_back(self, tmp_path: Path) -> None:
        before = [process(env={"A": "1"}), process(env={"B": "1"})]
        async with run(tmp_path, model(), model("lazy", *before, load="on_demand")) as one:
            assert (await one.chat("lazy")).status_code == 200
            kept = one.pids()["lazy-1"]
            after = [process(args=LONGER), crashing()]
            [report] = (await one.reload(model(), model("lazy", *after, load="on_demand")))[
                "models"
            ]
            assert report["reason"] == "engine lazy-3: no room for KV cache; lazy-1 serves on"
            assert list(one.pids()) == ["demo-0", "lazy-0", "lazy-1"]
            assert one.pids()["lazy-1"] == kept
            assert not one.has_longer_context("lazy-0")
            assert (await one.chat("lazy")).status_code == 200
            assert (await one.reload(model(), model("lazy", *before, load="on_demand")))[
                "lines"
            ] == ["nothing differs"]

    async def test_starting_successor_gets_no_requests(self, tmp_path: Path) -> None:
        """The concurrency limit counts READY engines, of which there is always one."""
        loaded = tmp_path / "loaded"
        async with run(tmp_path, model("demo", policy="session")) as one:
            slow = slow_start(loaded)
            reloading = asyncio.create_task(one.reload(model("demo", slow, policy="session")))
            await wait_until(lambda: len(one.state.catalogue.engines) == 2)
            assert one.state.catalogue.resolve("demo").ready == 1
            for number in range(8):
                assert (await one.chat(user=f"u{number}")).status_code == 200
            loaded.touch()
            assert (await reloading)["ok"]
            assert one.state.catalogue.resolve("demo").ready == 1
