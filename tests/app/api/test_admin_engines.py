"""/admin/engines over HTTP: what is shown, what is not, and logs that are followed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.api.log_stream import MAX_FOLLOWERS
from engines.base import EngineFacts, EngineNotReady, EngineState, Progress
from engines.process import ProcessEngine
from tests.app.raw import connected, request
from tests.app.routing.fakes import FakeEngine
from tests.gateway import ROOT, Gateway, free_port, remote, running, settings_for
from tests.services import RedisServer
from tests.waiting import PATIENCE_S, wait_until

CANARY = "hf_canary0123456789"


class Process(FakeEngine):
    """An engine that is shown as a process with a log."""

    capabilities = ProcessEngine.capabilities

    pid: int | None = 42
    cannot: str | None = None

    def describe(self) -> str:
        return f"vllm --hf-token={CANARY} --model=m"

    async def ensure_ready(self, deadline: float) -> None:
        if self.cannot is not None:
            raise EngineNotReady(self.cannot)
        self.state = EngineState.READY


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    """A gateway whose first engine is a fake process and whose second is remote and dead."""
    far = remote(f"http://127.0.0.1:{free_port()}")
    first: dict[str, Any] = {"name": "org/demo", "aliases": ["gpt"], "engines": [far]}
    second: dict[str, Any] = {"name": "far", "engines": [far]}
    async with running(settings_for(first, second, run_dir=tmp_path)) as one:
        one.client.headers.update(ROOT)
        put(one, Process("org-demo-0"))
        (tmp_path / "org-demo-0").mkdir()
        yield one


def put(gateway: Gateway, engine: FakeEngine) -> None:
    """Let an engine stand in the place of the first."""
    replica = gateway.state.catalogue.models[0].replicas[0]
    replica.engine = engine
    engine.changes.forward_to(gateway.state.catalogue.changes)


def log_of(gateway: Gateway) -> Path:
    return gateway.state.settings.server.run_dir / "org-demo-0" / "engine.log"


def message(answer: httpx.Response) -> str:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    text: str = error["message"]
    return text


async def test_engines_are_listed_with_their_facts(gateway: Gateway) -> None:
    facts = EngineFacts(version="0.32.0", kv_cache_tokens=16384, supported_tasks=("generate",))
    put(gateway, Process("org-demo-0", facts=facts, last_error=f"--api-key {CANARY}", restarts=3))
    answer = await gateway.client.get("/admin/engines")
    assert answer.status_code == 200
    first, second = answer.json()["data"]
    assert (first["name"], first["model"], first["state"]) == ("org-demo-0", "org/demo", "ready")
    assert (first["pid"], first["restarts"], first["kind"]) == (42, 3, "process")
    reported = {"version": "0.32.0", "kv_cache_tokens": 16384, "supported_tasks": ["generate"]}
    assert first["facts"] == reported
    assert (second["kind"], second["pid"], second["facts"]) == ("remote", None, {})
    assert CANARY not in answer.text
    one = await gateway.client.get("/admin/engines/org-demo-0")
    assert one.json() == first


async def test_starting_engine_shows_its_progress(gateway: Gateway) -> None:
    progress = Progress("loading weights", 1, 4)
    put(gateway, Process("org-demo-0", EngineState.STARTING, progress=progress))
    reported = (await gateway.client.get("/admin/engines/org-demo-0")).json()["progress"]
    assert reported == {"phase": "loading weights", "done": 1, "total": 4}


@pytest.mark.parametrize("path", ["", "/log", "/log?follow=true"])
async def test_unknown_engine_is_404(gateway: Gateway, path: str) -> None:
    answer = await gateway.client.get(f"/admin/engines/nope{path}")
    assert answer.status_code == 404
    assert message(answer) == "there is no engine 'nope'; there are org-demo-0, far-0"


async def test_schema_documents_engine_facts(gateway: Gateway) -> None:
    schema = (await gateway.client.get("/admin/openapi.json")).json()
    assert {"/admin/engines", "/admin/engines/{name}/log"} <= set(schema["paths"])
    assert (
        "text/plain"
        in schema["paths"]["/admin/engines/{name}/log"]["get"]["responses"]["200"]["content"]
    )
    assert "kv_cache_tokens" in str(schema["components"]["schemas"]["EngineFacts"])


class TestRestart:
    async def test_at_once_or_when_it_is_done(self, gateway: Gateway) -> None:
        put(gateway, engine := Process("org-demo-0", EngineState.FAILED))
        answer = await gateway.client.post("/admin/engines/org-demo-0/restart?wait=true")
        assert (answer.status_code, answer.json()["state"]) == (200, "ready")
        engine.state = EngineState.FAILED
        answer = await gateway.client.post("/admin/engines/org-demo-0/restart")
        assert answer.status_code == 202
        await wait_until(lambda: engine.state is EngineState.READY)

    async def test_one_that_does_not_start(self, gateway: Gateway) -> None:
        put(gateway, Process("org-demo-0", EngineState.FAILED, cannot="no room"))
        answer = await gateway.client.post("/admin/engines/org-demo-0/restart?wait=true")
        assert (answer.status_code, message(answer)) == (503, "engine org-demo-0: no room")

    async def test_one_that_is_not_ours(self, gateway: Gateway) -> None:
        answer = await gateway.client.post("/admin/engines/far-0/restart?wait=true")
        assert answer.status_code == 409
        assert message(answer) == "engine far-0 is remote: it is started where it runs"


class TestLog:
    async def test_the_last_lines(self, gateway: Gateway) -> None:
        log_of(gateway).write_text("".join(f"line {n}\n" for n in range(1000)) + "half")
        answer = await gateway.client.get("/admin/engines/org-demo-0/log")
        assert answer.headers["content-type"] == "text/plain; charset=utf-8"
        assert answer.headers["cache-control"] == "no-store"
        lines = answer.text.splitlines()
        assert (len(lines), lines[0], lines[-1]) == (200, "line 801", "half")
        three = await gateway.client.get("/admin/engines/org-demo-0/log?lines=3")
        assert three.text == "line 998\nline 999\nhalf\n"

    async def test_a_log_that_is_not_there_yet_is_empty(self, gateway: Gateway) -> None:
        answer = await gateway.client.get("/admin/engines/org-demo-0/log")
        assert (answer.status_code, answer.text) == (200, "")

    async def test_binary_garbage_and_secrets(self, gateway: Gateway) -> None:
        log_of(gateway).write_bytes(
            bytes(range(256)) * 4 + f"\n\x1b[31mnon-default: {{'hf_token': '{CANARY}'}}\n".encode()
        )
        answer = await gateway.client.get("/admin/engines/org-demo-0/log")
        assert answer.text.splitlines()[-1] == "non-default: {'hf_token': ***}"
        assert all(c.isprintable() or c in "\t\n" for c in answer.text)

    @pytest.mark.parametrize("lines", ["-1", "10001", "x"])
    async def test_a_number_of_lines_that_is_none(self, gateway: Gateway, lines: str) -> None:
        answer = await gateway.client.get(f"/admin/engines/org-demo-0/log?lines={lines}")
        assert answer.status_code == 400
        assert message(answer).startswith("lines: ")

    async def test_a_remote_engine_has_none(self, gateway: Gateway) -> None:
        answer = await gateway.client.get("/admin/engines/far-0/log")
        assert answer.status_code == 409
        assert message(answer) == "engine far-0 is remote and has no log of its own"

    @pytest.mark.parametrize("follow", ["false", "true"])
    async def test_a_log_that_cannot_be_read(self, gateway: Gateway, follow: str) -> None:
        log_of(gateway).mkdir()
        answer = await gateway.client.get(f"/admin/engines/org-demo-0/log?follow={follow}")
        assert answer.status_code == 503
        assert message(answer) == "the log cannot be read: Is a directory"


@asynccontextmanager
async def followed(gateway: Gateway, lines: int = 10) -> AsyncIterator[AsyncIterator[str]]:
    """Follow the log of the first engine."""
    path = f"/admin/engines/org-demo-0/log?follow=true&lines={lines}"
    async with gateway.client.stream("GET", path) as answer:
        assert answer.status_code == 200
        yield answer.aiter_lines()


def follower_count() -> int:
    """Return how many responses follow a log, by the tasks that watch their clients."""
    watchers = [task.get_coro() for task in asyncio.all_tasks()]
    return sum(
        getattr(coroutine, "__name__", None) == "wait_for_disconnect" for coroutine in watchers
    )


@pytest.mark.slow
class TestFollow:
    async def test_new_lines_come_until_the_client_leaves(self, gateway: Gateway) -> None:
        log = log_of(gateway)
        log.write_text("1\n2\n")
        async with followed(gateway, lines=1) as lines:
            assert await anext(lines) == "2"
            with log.open("a") as file:
                file.write(f"3 --hf-token={CANARY}\n")
            assert await anext(lines) == "3 --hf-token=***"
            assert follower_count() == 1
        await wait_until(lambda: follower_count() == 0)

    async def test_a_log_that_is_rotated_is_followed_on(self, gateway: Gateway) -> None:
        log = log_of(gateway)
        log.write_text("1\n")
        async with followed(gateway) as lines:
            assert await anext(lines) == "1"
            with log.open("a") as file:
                file.write("2\n")
            log.replace(log.with_suffix(".log.1"))
            log.write_text("3\n")
            assert [await anext(lines), await anext(lines)] == ["2", "3"]
        await wait_until(lambda: follower_count() == 0)

    async def test_a_client_that_breaks_off_leaves_nothing(self, gateway: Gateway) -> None:
        log_of(gateway).write_text("1\n")
        path = b"/admin/engines/org-demo-0/log?follow=true"
        for _ in range(MAX_FOLLOWERS + 2):
            async with connected(gateway) as client:
                head = b"authorization: " + ROOT["authorization"].encode()
                client.send(request(None, head, path=path, method=b"GET", key=False))
                await wait_until(lambda: follower_count() > 0)
            await wait_until(lambda: follower_count() == 0)

    async def test_so_many_may_follow_and_no_more(self, gateway: Gateway) -> None:
        log_of(gateway).write_text("1\n")
        path = "/admin/engines/org-demo-0/log?follow=true"
        async with asyncio.timeout(20):
            async with AsyncExitStack() as stack:
                # All are kept: httpx closes an answer whose iterator is collected.
                many = [
                    await stack.enter_async_context(followed(gateway)) for _ in range(MAX_FOLLOWERS)
                ]
                assert [await anext(lines) for lines in many] == ["1"] * MAX_FOLLOWERS
                refused = await gateway.client.get(path)
                assert refused.status_code == 503
                assert message(refused) == "8 clients follow logs already; try again later"
            await wait_until(lambda: follower_count() == 0)
            async with followed(gateway) as lines:
                assert await anext(lines) == "1"

    async def test_drain_ends_log_followers(self, gateway: Gateway) -> None:
        log_of(gateway).write_text("1\n")
        async with asyncio.timeout(20), followed(gateway) as lines:
            assert await anext(lines) == "1"
            gateway.state.admission.drain()
            assert [line async for line in lines] == []

    async def test_a_large_file_is_not_in_the_way_of_others(self, gateway: Gateway) -> None:
        log = log_of(gateway)
        log.write_text("")
        async with asyncio.timeout(20), followed(gateway) as lines:
            log.write_text("x" * 99 + "\n" * 1 + ("y" * 99 + "\n") * 100_000)
            assert (await gateway.client.get("/health")).status_code == 200
            assert await anext(lines) == "x" * 99
        await wait_until(lambda: follower_count() == 0)


@pytest.mark.services
@pytest.mark.slow
async def test_load_is_shown_as_shared_while_it_is(tmp_path: Path) -> None:
    model = {"name": "far", "engines": [remote("http://gpu-box:8000")]}
    async with AsyncExitStack() as stack:
        redis = stack.enter_context(RedisServer())
        state = {
            "redis_url": redis.url,
            "database_url": f"sqlite+aiosqlite:///{tmp_path}/shared.db",
        }
        one, other = [
            await stack.enter_async_context(
                running(settings_for(model, run_dir=tmp_path / name, state=state))
            )
            for name in ("one", "other")
        ]
        other.state.catalogue.models[0].replicas[0].in_flight = 3

        async def show() -> dict[str, Any]:
            answer = await one.client.get("/admin/engines", headers=ROOT)
            return dict(answer.json())

        async with asyncio.timeout(PATIENCE_S):
            while True:
                shown = await show()
                if shown["gateways"] == 2 and shown["data"][0]["in_flight_elsewhere"] == 3:
                    break
        other.state.catalogue.models[0].replicas[0].in_flight = 0
        redis.stop()
        async with asyncio.timeout(PATIENCE_S):
            while (await show())["gateways"] is not None:
                await asyncio.sleep(0.05)


async def test_load_that_is_not_shared_is_shown_as_such(gateway: Gateway) -> None:
    shown = (await gateway.client.get("/admin/engines")).json()
    assert shown["gateways"] is None
    assert [row["in_flight_elsewhere"] for row in shown["data"]] == [0, 0]
