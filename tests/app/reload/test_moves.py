"""Streams move off engines that are replaced, restarted, removed or unloaded: none ends early.

The engines repeat their answers, so a stream goes on where the repeated answer is new.
"""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.residency import Residency
from app.residency.policy import LoadTerms
from engines.base import EngineState
from tests.app.reload.gateways import (
    LAUNCHER,
    LONGER,
    ReloadableGateway,
    alone,
    model,
    process,
    run,
)
from tests.gateway import ROOT
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

PACE = {"fake-pace-ms": 10}
# A flag that changes no answer (it is no flag of vLLM).
WIDER = {**PACE, "fake-tasks": "generate"}
WORDS = [f"word{n}" for n in range(60)]
TEXT = " ".join(WORDS)
AT_ONCE = LoadTerms(patience_s=0, keep_s=0, keep_loads=0, idle_after_s=0, idle_after_loads=0)


class Client:
    """A client with one stream, of which it keeps the text."""

    def __init__(self, gateway: ReloadableGateway, name: str = "demo") -> None:
        self._client = gateway.client
        self._model = name
        self.text = ""
        self.done = False
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": "hi"}],
            "stream": True,
            "temperature": 0,
            "fake": f"say:{TEXT}",
        }
        async with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                self._take(line)

    def _take(self, line: str) -> None:
        if line == "data: [DONE]":
            self.done = True
        elif line.startswith("data: "):
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            for choice in chunk["choices"]:
                self.text += choice["delta"].get("content") or ""

    async def check(self) -> None:
        """Check that the whole answer came, and nothing twice."""
        await self.task
        assert self.text == TEXT
        assert self.done


@asynccontextmanager
async def streaming(
    one: ReloadableGateway, count: int = 8, name: str = "demo"
) -> AsyncIterator[list[Client]]:
    """Begin streams, and check at the end that each is complete."""
    clients = [Client(one, name) for _ in range(count)]
    try:
        await wait_until(lambda: all(client.text for client in clients))
        yield clients
        await asyncio.gather(*(client.check() for client in clients))
    finally:
        for client in clients:
            client.task.cancel()


async def continued(one: ReloadableGateway, name: str = "demo") -> float:
    """Return how many streams of a model have gone on elsewhere."""
    ways = [
        await one.metric("gateway_continuations_total", model=name, way=way, outcome="continued")
        for way in ("replay", "verify")
    ]
    return sum(ways)


async def restart(one: ReloadableGateway, engine: str) -> None:
    path = f"/admin/engines/{engine}/restart"
    response = await one.client.post(path, params={"wait": True}, headers=ROOT)
    assert response.status_code == 200, response.text


class TestReload:
    async def test_under_load_ends_no_stream(self, tmp_path: Path) -> None:
        """Clients that begin a stream after the other, all the time."""
        async with run(tmp_path, model("demo", process(args=PACE))) as one:
            old, over = one.engine("demo-0"), asyncio.Event()

            async def use() -> int:
                count = 0
                while not over.is_set():
                    await Client(one).check()
                    count += 1
                return count

            users = [asyncio.create_task(use()) for _ in range(8)]
            await wait_until(lambda: one.state.admission.in_flight == len(users))
            assert (await one.reload(model("demo", process(args=WIDER))))["ok"]
            assert old.state is EngineState.STOPPED
            over.set()
            assert sum(await asyncio.gather(*users)) >= len(users)
            assert await continued(one) >= 1

    async def test_streams_move_to_the_successor_as_soon_as_it_is_ready(
        self, tmp_path: Path
    ) -> None:
        async with run(tmp_path, model("demo", process(args=PACE))) as one, streaming(one):
            old = one.engine("demo-0")
            assert (await one.reload(model("demo", process(args=WIDER))))["ok"]
            assert old.state is EngineState.STOPPED
            assert await continued(one) + one.state.admission.in_flight >= 8

    async def test_streams_wait_for_a_successor_that_cannot_start_alongside(
        self, tmp_path: Path
    ) -> None:
        async with run(tmp_path, model("demo", alone(args=PACE))) as one:
            async with streaming(one) as clients:
                assert (await one.reload(model("demo", alone(args=WIDER))))["ok"]
                assert not any(client.done for client in clients)
            assert await continued(one) == 8

    async def test_streams_of_a_removed_replica_move(self, tmp_path: Path) -> None:
        async with run(tmp_path, model("demo", process(2, args=PACE))) as one:
            async with streaming(one):
                assert (await one.reload(model("demo", process(args=PACE))))["ok"]
            assert await continued(one) >= 1

    async def test_streams_finish_where_the_successor_has_another_context_length(
        self, tmp_path: Path
    ) -> None:
        async with run(tmp_path, model("demo", process(args=PACE))) as one:
            async with streaming(one) as clients:
                longer = process(args={**PACE, **LONGER})
                assert (await one.reload(model("demo", longer)))["ok"]
                # The reload has waited for them; the client may not have read the end yet.
                await asyncio.gather(*(client.check() for client in clients))
            assert await continued(one) == 0

    async def test_streams_of_a_removed_model_finish(self, tmp_path: Path) -> None:
        async with run(tmp_path, model(), model("gone", process(args=PACE))) as one:
            async with streaming(one, name="gone"):
                assert (await one.reload(model()))["ok"]
            assert await continued(one, "gone") == 0

    async def test_streams_of_a_model_without_continuation_finish(self, tmp_path: Path) -> None:
        off = {"continuation": "off"}
        async with run(tmp_path, model("demo", process(args=PACE), **off)) as one:
            async with streaming(one):
                assert (await one.reload(model("demo", process(args=WIDER), **off)))["ok"]
            assert await continued(one) == 0

    async def test_streams_of_an_on_demand_model_wait_for_its_load(self, tmp_path: Path) -> None:
        lazy = {"name": "lazy", "load": "on_demand"}
        async with run(tmp_path, model(), {**lazy, "engines": [alone(args=PACE)]}) as one:
            async with streaming(one, name="lazy"):
                report = await one.reload(model(), {**lazy, "engines": [alone(args=WIDER)]})
                assert report["ok"]
                # It is asked for while it has no engine to load.
                assert (await one.chat("lazy")).status_code == 200
            assert await continued(one, "lazy") == 8


class TestRestart:
    async def test_streams_of_the_only_engine_go_on_after_it(self, tmp_path: Path) -> None:
        async with run(tmp_path, model("demo", process(args=PACE))) as one:
            async with streaming(one):
                await restart(one, "demo-0")
            assert await continued(one) == 8

    async def test_streams_go_on_at_the_other_engine(self, tmp_path: Path) -> None:
        async with run(tmp_path, model("demo", process(2, args=PACE))) as one:
            async with streaming(one):
                await restart(one, "demo-0")
            assert 1 <= await continued(one) < 8

    async def test_one_engine_after_the_other(self, tmp_path: Path) -> None:
        """A move is no death: a stream moves as often as need be."""
        async with run(tmp_path, model("demo", process(2, args={"fake-pace-ms": 40}))) as one:
            async with streaming(one):
                await restart(one, "demo-0")
                await restart(one, "demo-1")
            assert await continued(one) > 8

    async def test_both_engines_at_once(self, tmp_path: Path) -> None:
        async with run(tmp_path, model("demo", process(2, args=PACE))) as one:
            async with streaming(one):
                await asyncio.gather(restart(one, "demo-0"), restart(one, "demo-1"))
            assert await continued(one) >= 8

    async def test_streams_of_an_on_demand_model_go_on_after_it(self, tmp_path: Path) -> None:
        lazy = model("lazy", process(args=PACE), load="on_demand")
        async with run(tmp_path, model(), lazy) as one:
            for _ in range(2):  # the second is no death of the model either
                async with streaming(one, 4, "lazy"):
                    await restart(one, "lazy-0")
            assert await continued(one, "lazy") == 8

    async def test_client_that_leaves_during_the_restart_leaves_nothing_behind(
        self, tmp_path: Path
    ) -> None:
        loaded = tmp_path / "loaded"
        loaded.touch()
        slow = process(args={**PACE, "fake-load-until": str(loaded)})
        async with run(tmp_path, model("demo", slow)) as one:
            client = Client(one)
            await wait_until(lambda: client.text)
            loaded.unlink()
            restarting = asyncio.create_task(restart(one, "demo-0"))
            await wait_until(lambda: one.engine("demo-0").state is EngineState.STARTING)
            client.task.cancel()
            await wait_until(lambda: not one.state.admission.in_flight)
            loaded.touch()
            await restarting
            [replica] = one.state.catalogue.models[0].replicas
            assert (replica.in_flight, replica.streams) == (0, set())


class TestUnload:
    async def test_streams_finish_first_where_no_engine_is_left(self, tmp_path: Path) -> None:
        async with run(tmp_path, model("demo", process(2, args=PACE))) as one:
            async with streaming(one):
                response = await one.client.post(
                    "/admin/models/demo/unload", params={"wait": True}, headers=ROOT
                )
                assert response.status_code == 200, response.text
            assert await continued(one) == 0


class TestEviction:
    async def test_eviction_that_is_called_off_costs_no_stream(self, tmp_path: Path) -> None:
        """The engine that the streams left is still READY, and theirs again."""
        engine = {**process(args=PACE), "memory_gib": 1.0}
        models = [model(name, engine, load="on_demand") for name in ("stays", "takes")]
        async with run(tmp_path, *models, server={"memory_budget_gib": 1.5}) as one:
            one.state.loader._terms = AT_ONCE
            for name in ("takes", "stays"):
                assert (await one.chat(name)).status_code == 200
            async with streaming(one, name="stays") as clients:
                with await one.state.loader.lease("stays"):  # by a request that cannot be moved
                    waits = asyncio.create_task(one.state.loader.lease("takes"))
                    await wait_until(lambda: one.state.loader.waiting > len(clients))
                    waits.cancel()
                    await asyncio.gather(*(client.check() for client in clients))
            assert await continued(one, "stays") == 8

    async def test_streams_of_a_model_with_two_engines_do_not_go_back_and_forth(
        self, tmp_path: Path
    ) -> None:
        pair = process(2, args=PACE)
        pair["memory_gib"] = 0.5
        single = {**process(args=PACE), "memory_gib": 1.0}
        models = [
            model("stays", pair, load="on_demand"),
            model("takes", single, load="on_demand"),
        ]
        async with run(tmp_path, *models, server={"memory_budget_gib": 1.5}) as one:
            one.state.loader._terms = AT_ONCE
            for name in ("takes", "stays"):
                assert (await one.chat(name)).status_code == 200
            async with streaming(one, name="stays") as clients:
                assert (await one.chat("takes")).status_code == 200
                assert not any(client.done for client in clients)
            assert await continued(one, "stays") == 8

    async def test_streams_of_a_model_that_gives_way_go_on_after_its_next_load(
        self, tmp_path: Path
    ) -> None:
        engine = {**process(args=PACE), "memory_gib": 1.0}
        models = [model(name, engine, load="on_demand") for name in ("stays", "takes")]
        budget: dict[str, Any] = {"memory_budget_gib": 1.5}
        async with run(tmp_path, *models, server=budget) as one:
            one.state.loader._terms = AT_ONCE
            for name in ("takes", "stays"):  # their load times are known then
                assert (await one.chat(name)).status_code == 200
            async with streaming(one, name="stays") as clients:
                assert (await one.chat("takes")).status_code == 200
                assert not any(client.done for client in clients)
            assert await continued(one, "stays") >= 8
            residencies = {one.name: one.residency for one in one.state.loader.snapshots()}
            assert residencies == {"stays": Residency.LOADED, "takes": Residency.UNLOADED}


class TestDeathsUnderAReload:
    async def test_streams_and_requests_outlive_both_engines_and_a_successor(
        self, tmp_path: Path
    ) -> None:
        """Both are killed under streams, then a successor under requests without an end."""
        flag, over = tmp_path / "load", asyncio.Event()
        slow = {**WIDER, "fake-load-until": str(flag)}

        async def use(one: ReloadableGateway) -> int:
            count = 0
            while not over.is_set():
                answer = await one.chat(fake="say:hello")
                assert answer.status_code == 200, answer.text
                count += 1
            return count

        engines = model("demo", process(2, args=PACE))
        async with run(tmp_path, engines) as one:
            old = started()
            assert len(old) == 2
            async with streaming(one):
                users = [asyncio.create_task(use(one)) for _ in range(4)]
                successors = model("demo", process(2, args=slow))
                reload = asyncio.create_task(one.reload(successors))
                await wait_until(lambda: len(started() - old) > 0)
                kill_at_once(old)
                flag.touch()
            # The streams are whole; a third death would have ended them.
            await wait_until(lambda: len(started() - old) > 1)
            os.kill(min(started() - old), signal.SIGKILL)
            await reload
            over.set()
            assert sum(await asyncio.gather(*users)) > 0
            await wait_until(lambda: one.states() == [EngineState.READY] * 2)
            assert one.state.admission.in_flight == 0
            assert not one.state.requests.in_flight()


def kill_at_once(pids: set[int]) -> None:
    """Kill processes, and let the gateway, which is in this process, see them dead together."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            while (process := psutil.Process(pid)).status() != psutil.STATUS_ZOMBIE:
                with contextlib.suppress(psutil.TimeoutExpired):
                    process.wait(0.005)


def started() -> set[int]:
    """Return the processes of all engines, those that a reload starts included.

    An engine is below its guardian; the fakes of other tests are children of this process.
    """
    found, own = set(), psutil.Process()
    for child in own.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if child.ppid() != own.pid and child.cmdline()[1:3] == list(LAUNCHER[1:]):
                found.add(child.pid)
    return found
