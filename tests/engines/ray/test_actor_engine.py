"""The engine of an actor and its lease, without Ray: real guardians, fake vLLM servers."""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Callable
from typing import Any

import psutil
import pytest

from engines.ray import actor as module
from engines.ray.actor import EngineActor
from tests.engines.processes import gone
from tests.engines.ray.clusters import LAUNCHER, family
from tests.waiting import run_pending_tasks, wait_until

pytestmark = pytest.mark.slow

LONG_S = 60.0
SHORT_S = 0.05
Actors = Callable[..., EngineActor]


class Ended(BaseException):
    """In place of the end of the actor's process."""


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the places that actors have given back at their end."""
    given: list[str] = []

    def leave(_: int) -> None:
        raise Ended

    monkeypatch.setattr(module, "_give_back", given.append)
    monkeypatch.setattr(os, "_exit", leave)
    return given


@pytest.fixture
async def make(monkeypatch: pytest.MonkeyPatch, ends: list[str]) -> AsyncIterator[Actors]:
    """Make actors whose engines have their files in a directory of the test."""
    directory = tempfile.TemporaryDirectory(prefix="ray-")  # short enough for sockets
    monkeypatch.setattr(tempfile, "tempdir", directory.name)
    monkeypatch.setattr(module, "_raylet_environment", lambda: dict(os.environ))
    made: list[EngineActor] = []

    def one(owner: str = "first", lease_s: float = LONG_S) -> EngineActor:
        made.append(EngineActor(owner, f"gateway {owner}", "place", lease_s))
        return made[-1]

    yield one
    for actor in made:
        for owner in ("first", "second"):
            await actor.kill(owner)
        if actor._leasing is not None:
            actor._leasing.cancel()
            await asyncio.gather(actor._leasing, return_exceptions=True)
    directory.cleanup()


def plan(**fields: Any) -> dict[str, Any]:
    return {
        "node": "127.0.0.1",
        "owner": "first",
        "owner_name": "gateway first",
        "lease_s": LONG_S,
        "namespace": "test",
        "name": "demo-0",
        "fingerprint": "f",
        "launcher": LAUNCHER,
        "arguments": ["--model=m", "--served-model-name=demo"],
        "env": {},
        "inherit": ["PYTHONPATH"],
        "withheld": [],
        "gpus": False,
        "model_path": None,
        "files": [],
        **fields,
    }


async def start(actor: EngineActor, **fields: Any) -> list[psutil.Process]:
    """Start the engine of an actor; return its processes."""
    hello = await actor.start(plan(**fields))
    assert "error" not in hello, hello
    return family(hello["pid"])


async def until_it_listens(actor: EngineActor, owner: str = "first") -> None:
    listens = False
    while not listens:
        report = await actor.watch(owner, False, None, False, 1.0)
        assert report["exit"] is None
        listens = report["listens"]


def test_actor_that_is_never_used_gives_its_place_back(make: Actors, ends: list[str]) -> None:
    with pytest.raises(Ended):
        make(lease_s=SHORT_S).end_if_unused()
    assert ends == ["place"]


async def test_actor_waits_for_its_start_while_its_owner_renews_the_lease(
    make: Actors, ends: list[str]
) -> None:
    actor = make(lease_s=0.5)

    def wait() -> None:
        with pytest.raises(Ended):
            actor.end_if_unused()

    waiting = asyncio.create_task(asyncio.to_thread(wait))
    for _ in range(10):
        await actor.renew("first")
        await asyncio.sleep(0.1)
    assert ends == []
    while not waiting.done():
        await actor.renew("second")
        await asyncio.sleep(0.1)
    assert ends == ["place"]


async def test_actor_has_an_owner_before_it_has_an_engine(make: Actors) -> None:
    actor = make()
    assert await actor.claim("second", "other") == {"owned_by": "gateway first"}
    assert await actor.claim("first", "same") == {"place": "place"}


async def test_actor_without_an_engine_ends_with_its_lease(make: Actors, ends: list[str]) -> None:
    actor = make(lease_s=SHORT_S)
    assert "does not exist" in (await actor.start(plan(model_path="/no/such/model")))["error"]
    await wait_until(lambda: ends == ["place"])


async def test_engine_that_its_gateway_never_saw_ends_with_the_lease(
    make: Actors, ends: list[str]
) -> None:
    processes = await start(make(lease_s=SHORT_S), keep=True)
    await wait_until(lambda: ends == ["place"])
    assert gone(processes)


async def test_engine_that_is_being_ended_is_not_claimed(
    make: Actors, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = make(lease_s=SHORT_S)
    may_kill, kill = asyncio.Event(), actor._kill

    async def killed_later() -> None:
        await may_kill.wait()
        await kill()

    monkeypatch.setattr(actor, "_kill", killed_later)
    processes = await start(actor)
    await wait_until(lambda: actor._over)
    claiming = asyncio.create_task(actor.claim("second", "other"))
    await run_pending_tasks()
    assert not claiming.done()
    may_kill.set()
    with pytest.raises(Ended):
        await claiming
    assert gone(processes)


async def test_engines_of_two_clusters_on_one_machine_may_have_one_name(make: Actors) -> None:
    first, second = make("first"), make("second")
    processes = await start(first)
    await until_it_listens(first)
    await start(second)
    await until_it_listens(second, "second")
    assert not gone(processes[:1])
    assert (await first.watch("first", False, None, True, 0.0))["exit"] is None


async def test_engine_may_have_a_long_name(make: Actors) -> None:
    actor = make()
    await start(actor, name="m" * 120, namespace="n" * 64)
    await until_it_listens(actor)
