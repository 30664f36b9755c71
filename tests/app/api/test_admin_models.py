"""/admin/models over HTTP: the list, and loading, unloading, sleeping and waking by name."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engines.base import EngineNotReady, EngineState
from engines.process import ProcessEngine
from tests.app.api.test_admin_engines import message, put
from tests.app.routing.fakes import FakeEngine
from tests.gateway import ROOT, Gateway, free_port, remote, running, settings_for
from tests.waiting import wait_until


class Process(FakeEngine):
    """An engine whose load may have to be waited for, and that can be unloaded."""

    capabilities = ProcessEngine.capabilities
    may_load: asyncio.Event | None = None
    slept: int | None = None

    async def ensure_ready(self, deadline: float) -> None:
        if self.may_load is not None:
            await self.may_load.wait()
        self.state = EngineState.READY

    async def unload(self) -> None:
        self.state = EngineState.STOPPED

    async def sleep(self, level: int) -> None:
        if level == 2:
            raise EngineNotReady("sleep mode is not supported on this platform")
        self.state, self.slept = EngineState.ASLEEP, level


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    """A gateway with a model whose engine is a fake, and one that is remote and dead."""
    far = remote(f"http://127.0.0.1:{free_port()}")
    first: dict[str, Any] = {"name": "org/demo/load", "aliases": ["gpt"], "engines": [far]}
    second: dict[str, Any] = {"name": "far", "engines": [far]}
    async with running(settings_for(first, second, run_dir=tmp_path)) as one:
        one.client.headers.update(ROOT)
        yield one


@pytest.fixture
def engine(gateway: Gateway) -> Process:
    engine = Process("demo-0", EngineState.STOPPED)
    put(gateway, engine)
    return engine


async def post(gateway: Gateway, path: str) -> httpx.Response:
    return await gateway.client.post(f"/admin/models/{path}")


async def test_the_list(gateway: Gateway, engine: Process) -> None:
    answer = await gateway.client.get("/admin/models")
    assert answer.status_code == 200
    assert answer.json()["data"][0] == {
        "name": "org/demo/load",
        "aliases": ["gpt"],
        "parent": None,
        "split": [],
        "load": "eager",
        "state": "stopped",
        "engines": 1,
        "ready": 0,
        "in_flight": 0,
        "waiting": 0,
        "under_way": None,
        "loading": None,
        "last_error": None,
    }


async def test_requests_under_way_are_counted(gateway: Gateway, engine: Process) -> None:
    with await gateway.state.admission.acquire("org/demo/load", "key"):
        row = (await gateway.client.get("/admin/models")).json()["data"][0]
    assert (row["in_flight"], row["waiting"]) == (1, 0)


@pytest.mark.parametrize("name", ["org/demo/load", "gpt", "org%2Fdemo%2Fload"])
async def test_a_model_is_found_by_name_and_alias(
    gateway: Gateway, engine: Process, name: str
) -> None:
    answer = await post(gateway, f"{name}/load?wait=true")
    assert answer.status_code == 200
    assert (answer.json()["name"], answer.json()["ready"]) == ("org/demo/load", 1)


async def test_without_a_wait_the_answer_comes_at_once(gateway: Gateway, engine: Process) -> None:
    engine.may_load = asyncio.Event()
    answer = await post(gateway, "gpt/load")
    assert answer.status_code == 202
    assert (answer.json()["ready"], answer.json()["under_way"]) == (0, "load")
    refused = await post(gateway, "gpt/unload")
    assert refused.status_code == 409
    assert message(refused) == "org/demo/load: load is under way; try again when it is done"
    engine.may_load.set()
    await wait_until(lambda: engine.state is EngineState.READY)


async def test_a_client_that_does_not_wait_on_ends_nothing(
    gateway: Gateway, engine: Process
) -> None:
    engine.may_load = asyncio.Event()
    asking = asyncio.create_task(gateway.client.post("/admin/models/gpt/load?wait=true"))
    await wait_until(lambda: gateway.state.operations.under_way("org/demo/load") == "load")
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert gateway.state.operations.under_way("org/demo/load") == "load"
    engine.may_load.set()
    await wait_until(lambda: engine.state is EngineState.READY)


async def test_sleep_wake_and_unload(gateway: Gateway, engine: Process) -> None:
    assert (await post(gateway, "gpt/sleep?wait=true")).status_code == 200
    assert (engine.state, engine.slept) == (EngineState.ASLEEP, 1)
    assert (await post(gateway, "gpt/wake?wait=true")).json()["ready"] == 1
    assert (await post(gateway, "gpt/unload?wait=true")).json()["ready"] == 0


async def test_a_platform_that_cannot_sleep_says_so(gateway: Gateway, engine: Process) -> None:
    answer = await post(gateway, "gpt/sleep?level=2&wait=true")
    assert answer.status_code == 503
    assert message(answer) == "engine demo-0: sleep mode is not supported on this platform"


@pytest.mark.parametrize("level", ["0", "3", "x"])
async def test_unknown_sleep_level_is_refused(
    gateway: Gateway, engine: Process, level: str
) -> None:
    answer = await post(gateway, f"gpt/sleep?level={level}")
    assert answer.status_code == 400
    assert message(answer).startswith("level: ")


@pytest.mark.parametrize(
    ("verb", "said"),
    [
        ("unload", "the model far cannot be unloaded: its engines are remote"),
        ("sleep", "the model far cannot sleep: its engines are remote"),
    ],
)
async def test_remote_engine_refuses_unsupported_operations(
    gateway: Gateway, verb: str, said: str
) -> None:
    answer = await post(gateway, f"far/{verb}?wait=true")
    assert (answer.status_code, message(answer)) == (409, said)


@pytest.mark.slow
async def test_a_remote_engine_that_does_not_answer_says_so(gateway: Gateway) -> None:
    answer = await post(gateway, "far/load?wait=true")
    assert answer.status_code == 503
    assert message(answer).startswith("engine far-0: cannot connect to 127.0.0.1:")


@pytest.mark.parametrize("verb", ["load", "unload", "sleep", "wake"])
async def test_unknown_model_is_404(gateway: Gateway, verb: str) -> None:
    answer = await post(gateway, f"no/such/{verb}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert message(answer) == "there is no model 'no/such'; there are org/demo/load, far"
