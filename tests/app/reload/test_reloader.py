"""A reload of a gateway that runs: real engine processes with a fake in vLLM's place."""

import asyncio
import contextlib
import json
import re
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from app.errors import Conflict
from app.fleet.preflight import PreflightResult
from app.reload.report import Report
from app.routing.policies import SessionAffinity
from app.server.run import hand_over
from app.settings import ConfigError, Settings, digest
from engines.base import EngineState
from engines.gpu import HostMemory
from engines.process import ProcessEngine
from tests.fakes import vllm_flags
from tests.fakes.vllm import Fake
from tests.gateway import (
    KEY,
    ROOT,
    Gateway,
    free_port,
    remote,
    running,
    settings_for,
)

LAUNCHER = (sys.executable, "-m", "tests.fakes.vllm")

pytestmark = pytest.mark.slow


def model(name: str = "demo", *engines: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"name": name, "engines": list(engines) or [process()], **fields}


def process(replicas: int = 1, **fields: Any) -> dict[str, Any]:
    """An engine of which it is known what memory it takes, before it has run."""
    return {"kind": "process", "model": "m", "replicas": replicas, "memory_gib": 0.1, **fields}


def alone(replicas: int = 1, **fields: Any) -> dict[str, Any]:
    """An engine that cannot start beside another like it."""
    return process(replicas, env={"SIDE_CHANNEL_PORT": "5600"}, **fields)


def crashing(**fields: Any) -> dict[str, Any]:
    return process(args={"fake-start": "crash"}, **fields)


LONGER = {"max-model-len": 4096}
PORT_TAKEN = "both would use the same port (env.SIDE_CHANNEL_PORT)"


@pytest.fixture(autouse=True)
def free_gib(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A machine without GPUs, and how much memory it has left."""
    free = [100.0]
    monkeypatch.setattr("app.fleet.builder.find_accelerator", HostMemory)
    monkeypatch.setattr("app.reload.planner.vllm_runs_on_cpu", lambda: True)
    monkeypatch.setattr("app.reload.planner.available_host_gib", lambda: free[0])
    return free


class File:
    """The configuration as the gateway would read it now."""

    def __init__(self, run_dir: Path, *models: dict[str, Any], **fields: Any) -> None:
        self.run_dir = run_dir
        self.fault: str | None = None
        self.write(*models, **fields)

    def write(self, *models: dict[str, Any], **fields: Any) -> None:
        self.settings = settings_for(*models, run_dir=self.run_dir, **fields)

    def read(self) -> Settings:
        if self.fault is not None:
            raise ConfigError([self.fault, "another line"])
        return self.settings


@asynccontextmanager
async def gateway(file: File) -> AsyncIterator[Gateway]:
    async with running(file.settings, LAUNCHER, source=file.read) as one:
        yield one


async def reload(gateway: Gateway, **body: Any) -> dict[str, Any]:
    answer = await gateway.client.post("/admin/reload", json=body, headers=ROOT)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def engine(gateway: Gateway, name: str) -> ProcessEngine:
    [found] = [one for one in gateway.state.catalogue.engines if one.name == name]
    assert isinstance(found, ProcessEngine)
    return found


def pids(gateway: Gateway) -> dict[str, int | None]:
    return {
        one.name: one.pid
        for one in gateway.state.catalogue.engines
        if isinstance(one, ProcessEngine)
    }


def longest(gateway: Gateway, name: str) -> bool:
    """Whether an engine was started with the longer length."""
    return "--max-model-len=4096" in engine(gateway, name).describe()


def serving(*engines: ProcessEngine) -> list[ProcessEngine]:
    return [one for one in engines if one.state is EngineState.READY]


def below() -> set[int]:
    """Every process below this one that lives."""
    family = psutil.Process().children(recursive=True)
    return {one.pid for one in family if one.status() != psutil.STATUS_ZOMBIE}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


class TestWhatStays:
    async def test_nothing_differs(self, tmp_path: Path) -> None:
        file = File(tmp_path, model())
        async with gateway(file) as one:
            before = pids(one)
            assert (await reload(one))["lines"] == ["nothing differs"]
            assert pids(one) == before

    async def test_a_dry_run_tells_and_changes_nothing(self, tmp_path: Path) -> None:
        file = File(tmp_path, model(), model("old"))
        async with gateway(file) as one:
            before = pids(one)
            file.write(model("demo", process(args=LONGER), aliases=["d"]), model("new"))
            told = await reload(one, dry_run=True)
            assert told["lines"] == [
                "~ model demo: aliases [] → [d]",
                "~ model demo: args.max-model-len added: 4096 (replaces demo-0)",
                "~ model demo: demo-1 starts beside demo-0 and takes over when it is ready",
                "- model old (stops old-0)",
                "+ model new (starts new-0)",
                "dry run: nothing was changed",
            ]
            assert told["ok"]
            assert told["dry_run"]
            assert pids(one) == before
            assert (await one.chat("old")).status_code == 200
            assert (await one.chat("new")).status_code == 404

    async def test_a_stream_on_another_model_is_whole_and_its_engine_the_same(
        self, tmp_path: Path
    ) -> None:
        file = File(tmp_path, model(), model("other"))
        async with gateway(file) as one:
            pid = engine(one, "other-0").pid
            body = {"model": "other", "stream": True, "fake": "tokens:400:2"}
            async with one.client.stream("POST", "/v1/chat/completions", json=body) as stream:
                pieces = stream.aiter_bytes()
                data = await anext(pieces)
                file.write(model("demo", process(args=LONGER)), model("other", aliases=["o"]))
                assert (await reload(one))["ok"]
                async for piece in pieces:
                    data += piece
            events = data.split(b"\n\n")
            assert events[-2:] == [b"data: [DONE]", b""]
            assert data.count(b'"content":"word"') == 400
            assert engine(one, "other-0").pid == pid
            assert longest(one, "demo-1")
            assert (await one.chat("o")).status_code == 200

    async def test_replicas_come_and_go_around_those_that_stay(self, tmp_path: Path) -> None:
        file = File(tmp_path, model())
        async with gateway(file) as one:
            first = pids(one)
            file.write(model("demo", process(3)))
            assert (await reload(one))["ok"]
            three = pids(one)
            assert list(three) == ["demo-0", "demo-1", "demo-2"]
            assert three.items() >= first.items()
            file.write(model("demo", process(2)))
            assert (await reload(one))["ok"]
            assert list(pids(one)) == ["demo-0", "demo-1"]
            assert three.items() >= pids(one).items()

    async def test_an_engine_that_somebody_stopped_stays_so(self, tmp_path: Path) -> None:
        file = File(tmp_path, model("demo", process(2)))
        async with gateway(file) as one:
            await engine(one, "demo-1").stop(0.0)
            file.write(model("demo", process(3)))
            assert (await reload(one))["ok"]
            states = [engine.state for engine in one.state.catalogue.engines]
            assert states == [EngineState.READY, EngineState.STOPPED, EngineState.READY]

    async def test_names_limits_and_bounds_change_without_an_engine(self, tmp_path: Path) -> None:
        file = File(tmp_path, model(aliases=["a"]), model("other", aliases=["b"]))
        async with gateway(file) as one:
            before = pids(one)
            nothing = {"requests_per_minute": 0}
            file.write(
                model(aliases=["b"], max_choices=1),
                model("other", aliases=["a"], limits=nothing),
                server={"max_body_bytes": 300},
            )
            assert (await reload(one))["ok"]
            assert pids(one) == before
            assert (await one.chat("a")).status_code == 429
            assert (await one.chat("b")).status_code == 200
            assert (await one.chat("b", user="x" * 300)).status_code == 413
            listed = (await one.client.get("/v1/models")).json()["data"]
            assert [card["id"] for card in listed] == ["demo", "b", "other", "a"]

    async def test_keys_and_default_limits_change_at_once(self, tmp_path: Path) -> None:
        file = File(tmp_path, model())
        async with gateway(file) as one:
            other = "sk-other-0123456789abcdef"
            file.write(model(), limits={"default": {"requests_per_minute": 7}})
            keys = (digest(KEY.encode()), digest(other.encode()))
            file.settings = file.settings.model_copy(update={"api_keys": keys})
            told = await reload(one)
            assert told["difference"] == [
                "~ limits.default.requests_per_minute 600 → 7",
                "~ api_keys changed",
            ]
            bearer = {"authorization": f"Bearer {other}"}
            body = {"model": "demo", "messages": []}
            answer = await one.client.post("/v1/chat/completions", json=body, headers=bearer)
            assert answer.status_code == 200
            assert answer.headers["x-ratelimit-limit-requests"] == "7"
            file.settings = file.settings.model_copy(
                update={"api_keys": keys[1:], "admin_key": digest(b"sk-next-0123456789abcdef")}
            )
            assert (await reload(one))["ok"]
            assert (await one.chat()).status_code == 401
            assert (await one.client.post("/admin/reload", headers=ROOT)).status_code == 401

    async def test_more_room_is_there_for_those_who_wait_already(self, tmp_path: Path) -> None:
        file = File(tmp_path, model(queue={"max_in_flight": 1}))
        async with gateway(file) as one:
            body = {"model": "demo", "stream": True, "fake": "pace:5"}
            async with one.client.stream("POST", "/v1/chat/completions", json=body) as stream:
                pieces = stream.aiter_bytes()  # closes the stream when it is let go
                await anext(pieces)
                waiting = asyncio.create_task(one.chat())
                await until(lambda: one.state.admission.waiting == 1)
                file.write(model(queue={"max_in_flight": 2}))
                told = await reload(one)
                assert told["lines"] == [
                    "~ model demo: queue.max_in_flight 1 → 2",
                    "model demo: changed",
                    "done",
                ]
                assert (await waiting).status_code == 200

    async def test_what_needs_a_restart_is_told_each_time_and_the_rest_is_done(
        self, tmp_path: Path
    ) -> None:
        file = File(tmp_path, model())
        async with gateway(file) as one:
            file.write(model(aliases=["a"]), server={"port": 1})
            told = "! server.port 0 → 1 (needs a restart)"
            assert (await reload(one))["difference"] == ["~ model demo: aliases [] → [a]", told]
            assert (await one.chat("a")).status_code == 200
            assert (await reload(one))["difference"] == [told]


class TestModelsThatChange:
    async def test_the_engine_is_another_in_the_same_directory(self, tmp_path: Path) -> None:
        file = File(tmp_path, model("demo", alone()))
        async with gateway(file) as one:
            old = engine(one, "demo-0")
            file.write(model("demo", alone(args=LONGER)))
            told = await reload(one)
            assert told["models"] == [{"model": "demo", "outcome": "changed", "reason": None}]
            assert (await one.chat()).status_code == 200
            assert longest(one, "demo-0")
            assert old.state is EngineState.STOPPED
            assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["demo-0"]

    async def test_a_stream_may_end_before_its_engine_does(self, tmp_path: Path) -> None:
        file = File(tmp_path, model("demo", alone()))
        async with gateway(file) as one:
            old = engine(one, "demo-0")
            body = {"model": "demo", "stream": True, "fake": "tokens:100:5"}
            async with one.client.stream("POST", "/v1/chat/completions", json=body) as stream:
                pieces = stream.aiter_bytes()
                data = await anext(pieces)
                file.write(model("demo", alone(args=LONGER)))
                reloading = asyncio.create_task(reload(one))
                await until(lambda: old.state is EngineState.DRAINING)
                refused = await one.chat()
                assert refused.status_code == 503
                assert refused.json()["error"]["code"] == "engine_unavailable"
                assert int(refused.headers["retry-after"]) > 0
                async for piece in pieces:
                    data += piece
            assert data.endswith(b"data: [DONE]\n\n")
            assert data.count(b'"content":"word"') == 100
            assert (await reloading)["ok"]

    async def test_a_stream_without_end_is_cut_after_the_drain_and_told(
        self, tmp_path: Path
    ) -> None:
        file = File(tmp_path, model(), server={"drain_timeout_s": 0.2})
        async with gateway(file) as one:
            body = {"model": "demo", "stream": True, "fake": "pace:5"}
            async with one.client.stream("POST", "/v1/chat/completions", json=body) as stream:
                pieces = stream.aiter_bytes()
                data = await anext(pieces)
                file.write(model("demo", process(args=LONGER)), server={"drain_timeout_s": 0.2})
                reloading = asyncio.create_task(reload(one))
                with contextlib.suppress(httpx.RemoteProtocolError):
                    async for piece in pieces:
                        data += piece
            assert b'"code":"engine_failed"' in data
            assert not data.endswith(b"[DONE]\n\n")
            assert (await reloading)["ok"]
            assert (await one.chat()).status_code == 200

    async def test_of_two_engines_one_serves_at_every_moment(self, tmp_path: Path) -> None:
        file = File(tmp_path, model("demo", alone(2)))
        async with gateway(file) as one:
            file.write(model("demo", alone(2, args=LONGER)))
            reloading = asyncio.create_task(reload(one))
            statuses = []
            while not reloading.done():
                statuses.append((await one.chat()).status_code)
            assert (await reloading)["ok"]
            assert set(statuses) == {200}
            assert longest(one, "demo-0")
            assert longest(one, "demo-1")

    async def test_who_waits_is_served_by_the_engine_that_comes(self, tmp_path: Path) -> None:
        """What it found of the model names an engine that is gone by the time it may go on."""
        queue = {"max_in_flight": 1}
        file = File(tmp_path, model(queue=queue), server={"drain_timeout_s": 0.2})
        async with gateway(file) as one:
            lane = await one.state.admission.permit("demo", "key")
            waiting = asyncio.create_task(one.chat())
            await until(lambda: one.state.admission.waiting == 1)
            file.write(
                model("demo", process(args=LONGER), queue=queue), server={"drain_timeout_s": 0.2}
            )
            assert (await reload(one))["ok"]
            with lane:
                pass
            assert (await waiting).status_code == 200

    async def test_one_that_does_not_start_makes_way_for_the_old_one(self, tmp_path: Path) -> None:
        file = File(tmp_path, model(aliases=["a"]), model("other"))
        async with gateway(file) as one:
            other = engine(one, "other-0").pid
            file.write(
                model("demo", crashing(), aliases=["b"], max_choices=3),
                model("other", aliases=["o"]),
            )
            told = await reload(one)
            reason = "engine demo-1: no room for KV cache; demo-0 serves on"
            assert not told["ok"]
            assert told["models"] == [
                {"model": "demo", "outcome": "rolled back", "reason": reason},
                {"model": "other", "outcome": "changed", "reason": None},
            ]
            assert told["lines"][-1] == "done, except for 1 of 2 models"
            assert (await one.chat("a")).status_code == 200
            assert (await one.chat("b")).status_code == 404
            assert (await one.chat("o")).status_code == 200
            assert engine(one, "other-0").pid == other
            # What could not be done differs still.
            assert len((await reload(one, dry_run=True))["difference"]) == 4

    async def test_all_replicas_are_as_before_when_the_last_fails(self, tmp_path: Path) -> None:
        before = [process(env={"A": "1"}), process(env={"B": "1"}), process(env={"C": "1"})]
        file = File(tmp_path, model("demo", *before))
        async with gateway(file) as one:
            kept = engine(one, "demo-1").pid
            file.write(model("demo", process(args=LONGER), before[1], crashing(), process()))
            told = await reload(one)
            assert told["models"][0]["outcome"] == "rolled back"
            assert list(pids(one)) == ["demo-0", "demo-1", "demo-2"]
            assert engine(one, "demo-1").pid == kept
            assert not longest(one, "demo-0")
            assert {r.state for r in one.state.catalogue.engines} == {EngineState.READY}
            assert one.state.settings.models[0].engines == file_engines(before)

    async def test_an_engine_that_fails_both_ways_is_told_with_both_reasons(
        self, tmp_path: Path
    ) -> None:
        file = File(tmp_path, model("demo", crashing()), model("other"))
        async with gateway(file) as one:
            file.write(model("demo", crashing(env={"X": "1"})), model("other"))
            [report] = (await reload(one))["models"]
            fault = "engine demo-0: no room for KV cache"
            assert report["reason"] == f"{fault}; with its old settings, {fault}"
            file.write(model(), model("other"))
            assert (await reload(one))["ok"]
            assert (await one.chat()).status_code == 200

    async def test_a_remote_server_is_asked_before_the_old_one_is_let_go(
        self, tmp_path: Path
    ) -> None:
        file = File(tmp_path, model())
        async with gateway(file) as one:
            pid = engine(one, "demo-0").pid
            file.write(model("demo", remote(f"http://127.0.0.1:{free_port()}")))
            [report] = (await reload(one))["models"]
            assert report["outcome"] == "rolled back"
            assert "Connection refused" in report["reason"]
            assert engine(one, "demo-0").pid == pid

    async def test_key_of_a_new_remote_server_is_not_inherited_any_more(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_TOKEN", "hf_canary0123456789")
        file = File(tmp_path, model())
        async with gateway(file) as one, Fake() as server:
            before = psutil.Process(engine(one, "demo-0").pid).environ()
            box = remote(server.url, api_key_env="HF_TOKEN")
            file.write(model("demo", process(args=LONGER)), model("box", box))
            assert (await reload(one))["ok"]
            after = psutil.Process(engine(one, "demo-1").pid).environ()
        assert (before.get("HF_TOKEN"), after.get("HF_TOKEN")) == ("hf_canary0123456789", None)

    async def test_other_media_domains_restart_the_engines(self, tmp_path: Path) -> None:
        file = File(tmp_path, model())
        async with gateway(file) as one:
            file.write(model(media={"domains": ["a.org"]}))
            told = await reload(one)
            assert told["difference"] == [
                "~ model demo: media.domains [] → [a.org] (replaces demo-0)",
                "~ model demo: demo-1 starts beside demo-0 and takes over when it is ready",
            ]
            assert "--allowed-media-domains a.org" in engine(one, "demo-1").describe()

    async def test_an_alias_stays_with_a_model_that_was_rolled_back(self, tmp_path: Path) -> None:
        file = File(tmp_path, model(aliases=["a"]), model("other"))
        async with gateway(file) as one:
            file.write(model("demo", crashing()), model("other", aliases=["a", "o"]), model("a1"))
            told = await reload(one)
            reports = {report["model"]: report for report in told["models"]}
            assert reports["other"]["reason"] == "a is still a name of demo"
            assert reports["a1"]["outcome"] == "added"
            assert (await one.chat("a")).status_code == 200
            assert (await one.chat("o")).status_code == 200
            assert one.state.settings.models[1].aliases == ("o",)


def file_engines(engines: list[dict[str, Any]]) -> tuple[Any, ...]:
    return Settings(models=[{"name": "x", "engines": engines}]).models[0].engines


class TestBeside:
    async def test_a_request_is_served_at_every_moment_by_the_only_engine(
        self, tmp_path: Path
    ) -> None:
        loaded = tmp_path / "loaded"
        file = File(tmp_path, model())
        async with gateway(file) as one:
            old = engine(one, "demo-0")
            file.write(model("demo", process(args={**LONGER, "fake-load-until": str(loaded)})))
            reloading = asyncio.create_task(reload(one))
            await until(lambda: len(one.state.catalogue.engines) == 2)
            statuses = [(await one.chat()).status_code for _ in range(20)]
            assert engine(one, "demo-1").state is EngineState.STARTING
            loaded.touch()
            while not reloading.done():
                statuses.append((await one.chat()).status_code)
            told = await reloading
            assert set(statuses) == {200}
            assert told["lines"][1:] == [
                f"~ model demo: args.fake-load-until added: {loaded} (replaces demo-0)",
                "~ model demo: demo-1 starts beside demo-0 and takes over when it is ready",
                "model demo: changed",
                "done",
            ]
            assert list(pids(one)) == ["demo-1"]
            assert longest(one, "demo-1")
            assert old.state is EngineState.STOPPED

    async def test_a_stream_ends_on_the_old_engine_while_the_new_one_serves(
        self, tmp_path: Path
    ) -> None:
        file = File(tmp_path, model())
        async with gateway(file) as one:
            old = engine(one, "demo-0")
            body = {"model": "demo", "stream": True, "fake": "tokens:200:5"}
            async with one.client.stream("POST", "/v1/chat/completions", json=body) as stream:
                pieces = stream.aiter_bytes()
                data = await anext(pieces)
                file.write(model("demo", process(args=LONGER)))
                reloading = asyncio.create_task(reload(one))
                await until(lambda: list(pids(one)) == ["demo-1"])
                assert (await one.chat()).status_code == 200
                assert old in serving(old), "it refuses nothing that is on its way"
                async for piece in pieces:
                    data += piece
            assert data.endswith(b"data: [DONE]\n\n")
            assert data.count(b'"content":"word"') == 200
            assert (await reloading)["ok"]
            assert old.state is EngineState.STOPPED

    async def test_a_stream_without_end_is_cut_after_the_drain(self, tmp_path: Path) -> None:
        drain = {"drain_timeout_s": 0.2}
        file = File(tmp_path, model(), server=drain)
        async with gateway(file) as one:
            old = engine(one, "demo-0")
            body = {"model": "demo", "stream": True, "fake": "pace:5"}
            async with one.client.stream("POST", "/v1/chat/completions", json=body) as stream:
                pieces = stream.aiter_bytes()
                data = await anext(pieces)
                file.write(model("demo", process(args=LONGER)), server=drain)
                assert (await reload(one))["ok"]
                assert old.state is EngineState.STOPPED
                with contextlib.suppress(httpx.RemoteProtocolError):
                    async for piece in pieces:
                        data += piece
            assert b'"code":"engine_failed"' in data

    async def test_a_request_that_waited_for_its_limits_finds_the_new_engine(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What it found of the model before that names an engine that is gone."""
        file = File(tmp_path, model())
        async with gateway(file) as one:
            limiter, gate, asked = one.state.limiter, asyncio.Event(), asyncio.Event()
            decide = limiter.decide

            async def slow(ask: Any) -> Any:
                asked.set()
                await gate.wait()
                return await decide(ask)

            monkeypatch.setattr(limiter, "decide_at_once", lambda _: None)
            monkeypatch.setattr(limiter, "decide", slow)
            waiting = asyncio.create_task(one.chat())
            await asked.wait()
            file.write(model("demo", process(args=LONGER)))
            assert (await reload(one))["ok"]
            gate.set()
            assert (await waiting).status_code == 200

    async def test_one_that_does_not_start_leaves_the_old_one_serving(self, tmp_path: Path) -> None:
        file = File(tmp_path, model())
        async with gateway(file) as one:
            before, processes = pids(one), below()
            file.write(model("demo", crashing()))
            reloading = asyncio.create_task(reload(one))
            statuses = []
            while not reloading.done():
                statuses.append((await one.chat()).status_code)
            told = await reloading
            assert set(statuses) == {200}
            assert told["models"] == [
                {
                    "model": "demo",
                    "outcome": "rolled back",
                    "reason": "engine demo-1: no room for KV cache; demo-0 serves on",
                }
            ]
            assert pids(one) == before
            assert below() == processes
            file.write(model("demo", process(args=LONGER)))
            assert (await reload(one))["ok"]
            assert list(pids(one)) == ["demo-1"]

    async def test_a_stored_response_is_gone_with_the_engine_that_kept_it(
        self, tmp_path: Path
    ) -> None:
        file = File(tmp_path, model(stores_responses=True))
        async with gateway(file) as one:
            body = {"model": "demo", "input": "hi"}
            kept = (await one.client.post("/v1/responses", json=body)).json()["id"]
            further = {**body, "previous_response_id": kept}
            assert (await one.client.post("/v1/responses", json=further)).status_code == 200
            file.write(model("demo", process(args=LONGER), stores_responses=True))
            assert (await reload(one))["ok"]
            assert (await one.client.post("/v1/responses", json=further)).status_code == 404
            assert (await one.client.get(f"/v1/responses/{kept}")).status_code == 404

    async def test_replicas_are_replaced_one_at_a_time(self, tmp_path: Path) -> None:
        file = File(tmp_path, model("demo", process(2)))
        async with gateway(file) as one:
            file.write(model("demo", process(2, args=LONGER)))
            reloading = asyncio.create_task(reload(one))
            most = 0
            while not reloading.done():
                states = [engine.state for engine in one.state.catalogue.engines]
                assert states.count(EngineState.READY) >= 2
                most = max(most, len(states))
                await asyncio.sleep(0.005)
            assert (await reloading)["ok"]
            assert most == 3
            assert list(pids(one)) == ["demo-2", "demo-3"]

    async def test_replicas_go_back_one_at_a_time_when_a_later_one_fails(
        self, tmp_path: Path
    ) -> None:
        before = [process(env={"A": "1"}), process(env={"B": "1"})]
        file = File(tmp_path, model("demo", *before))
        async with gateway(file) as one:
            kept = pids(one)["demo-1"]
            file.write(model("demo", process(args=LONGER), crashing()))
            reloading = asyncio.create_task(reload(one))
            while not reloading.done():
                states = [engine.state for engine in one.state.catalogue.engines]
                assert states.count(EngineState.READY) >= 2
                await asyncio.sleep(0.005)
            [report] = (await reloading)["models"]
            assert report["reason"] == "engine demo-3: no room for KV cache; demo-1 serves on"
            assert list(pids(one)) == ["demo-0", "demo-1"]
            assert pids(one)["demo-1"] == kept
            assert not longest(one, "demo-0")
            assert (await reload(one, dry_run=True))["difference"], "the file differs still"
            file.write(model("demo", *before))
            assert (await reload(one))["lines"] == ["nothing differs"]

    async def test_an_engine_that_dies_meanwhile_is_replaced_all_the_same(
        self, tmp_path: Path
    ) -> None:
        loaded, dead = tmp_path / "loaded", tmp_path / "dead"
        slow = {"backoff_s": 60, "max_backoff_s": 60}
        file = File(
            tmp_path, model("demo", process(args={"fake-die-when": str(dead)}, restart=slow))
        )
        async with gateway(file) as one:
            old = engine(one, "demo-0")
            file.write(model("demo", process(args={"fake-load-until": str(loaded)})))
            reloading = asyncio.create_task(reload(one))
            await until(lambda: len(one.state.catalogue.engines) == 2)
            dead.touch()
            await until(lambda: old.state is EngineState.FAILED)
            loaded.touch()
            assert (await reloading)["ok"]
            assert list(pids(one)) == ["demo-1"]
            assert (await one.chat()).status_code == 200

    async def test_memory_that_went_since_the_plan_was_made_is_seen(
        self, tmp_path: Path, free_gib: list[float], caplog: pytest.LogCaptureFixture
    ) -> None:
        loaded = tmp_path / "loaded"
        file = File(tmp_path, model(), model("other"))
        async with gateway(file) as one:
            slow = process(args={"fake-load-until": str(loaded)})
            file.write(model("demo", slow), model("other", process(args=LONGER)))
            reloading = asyncio.create_task(reload(one))
            await until(lambda: len(one.state.catalogue.engines) == 3)
            free_gib[0] = 0.1
            loaded.touch()
            told = await reloading
            assert told["ok"]
            assert "other-1 starts beside other-0" in told["difference"][3]
            assert "engine other-0 ends before other-1 starts: no memory for both" in caplog.text
            assert list(pids(one)) == ["demo-1", "other-1"]
            assert (await one.chat("other")).status_code == 200

    async def test_memory_that_another_engine_is_about_to_take_is_not_free(
        self, tmp_path: Path, free_gib: list[float]
    ) -> None:
        hangs = process(args={"fake-start": "hang"})
        lazy = model("lazy", {**hangs, "memory_gib": 1.0}, load="on_demand")
        file = File(tmp_path, model(), lazy)
        async with gateway(file) as one:
            loading = asyncio.create_task(one.chat("lazy"))
            await until(lambda: engine(one, "lazy-0").state is EngineState.STARTING)
            free_gib[0] = 1.1
            file.write(model("demo", process(args=LONGER)), lazy)
            [_, told] = (await reload(one, dry_run=True))["difference"]
            assert "no memory for both: it takes up to 0.1 GiB to start, 0.1 are free" in told
            loading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await loading

    async def test_a_dry_run_tells_how_long_nobody_would_serve(
        self, tmp_path: Path, free_gib: list[float]
    ) -> None:
        file = File(tmp_path, model())
        async with gateway(file) as one:
            free_gib[0] = 0.1
            facts = tmp_path / "demo-0" / "facts.json"
            known = json.loads(facts.read_text())
            facts.write_text(json.dumps(known | {"load_s": 57.2}))
            file.write(model("demo", process(args=LONGER)))
            told = await reload(one, dry_run=True)
            assert told["difference"][1] == (
                "~ model demo: demo-0 ends before its successor starts, about 59 s without demo: "
                "no memory for both: it takes up to 0.1 GiB to start, 0.1 are free; "
                "last load took 57 s"
            )

    async def test_an_engine_that_somebody_stopped_is_replaced_in_place(
        self, tmp_path: Path
    ) -> None:
        file = File(tmp_path, model())
        async with gateway(file) as one:
            await engine(one, "demo-0").stop(0.0)
            file.write(model("demo", process(args=LONGER)))
            told = await reload(one)
            assert told["ok"]
            assert len(told["difference"]) == 1
            assert list(pids(one)) == ["demo-0"]

    async def test_other_models_on_demand_leave_the_new_engine_its_memory(
        self, tmp_path: Path
    ) -> None:
        loaded, budget = tmp_path / "loaded", {"memory_budget_gib": 0.45, "parallel_starts": 2}
        lazy = [model(name, load="on_demand") for name in ("one", "two")]
        file = File(tmp_path, model(), *lazy, server=budget)
        async with gateway(file) as here:
            slow = process(args={"fake-load-until": str(loaded)}, memory_gib=0.2)
            file.write(model("demo", slow), *lazy, server=budget)
            reloading = asyncio.create_task(reload(here))
            await until(lambda: len(here.state.catalogue.engines) == 4)
            for name in ("one", "two"):
                assert (await here.chat(name)).status_code == 200
            assert engine(here, "one-0").state is EngineState.STOPPED, "it made room"
            loaded.touch()
            assert (await reloading)["ok"]
            assert (await here.chat("one")).status_code == 200
            assert engine(here, "two-0").state is EngineState.READY, "there is room for both"

    async def test_the_largest_model_on_demand_can_be_loaded_all_along(
        self, tmp_path: Path
    ) -> None:
        budget, lazy = {"memory_budget_gib": 0.35}, model("lazy", load="on_demand")
        file = File(tmp_path, model(), lazy, server=budget)
        async with gateway(file) as one:
            file.write(model("demo", process(memory_gib=0.2)), lazy, server=budget)
            told = await reload(one)
            assert told["ok"]
            assert "it takes 0.2 GiB, server.memory_budget_gib leaves 0.1" in told["difference"][1]
            assert list(pids(one)) == ["demo-0", "lazy-0"]

    async def test_a_model_on_demand_that_is_loaded_serves_all_along(self, tmp_path: Path) -> None:
        loaded = tmp_path / "loaded"
        lazy = model("lazy", load="on_demand", load_wait_s=0.1)
        file = File(tmp_path, model(), lazy)
        async with gateway(file) as one:
            await one.state.loader.load("lazy")
            slow = process(args={**LONGER, "fake-load-until": str(loaded)})
            file.write(model(), {**lazy, "engines": [slow]})
            reloading = asyncio.create_task(reload(one))
            await until(lambda: len(one.state.catalogue.engines) == 3)
            statuses = [(await one.chat("lazy")).status_code for _ in range(5)]
            loaded.touch()
            while not reloading.done():
                statuses.append((await one.chat("lazy")).status_code)
            assert (await reloading)["ok"]
            assert set(statuses) == {200}
            assert longest(one, "lazy-1")
            await one.state.loader.unload("lazy")
            assert engine(one, "lazy-1").state is EngineState.STOPPED
            loaded.unlink()
            file.write(model(), lazy)
            assert (await reload(one))["ok"]
            assert engine(one, "lazy-1").state is EngineState.STOPPED

    async def test_a_model_on_demand_whose_new_engine_fails_stays_loaded(
        self, tmp_path: Path
    ) -> None:
        file = File(tmp_path, model(), model("lazy", load="on_demand"))
        async with gateway(file) as one:
            assert (await one.chat("lazy")).status_code == 200
            pid = pids(one)["lazy-0"]
            file.write(model(), model("lazy", crashing(), load="on_demand"))
            [report] = (await reload(one))["models"]
            assert report["reason"] == "engine lazy-1: no room for KV cache; lazy-0 serves on"
            assert pids(one)["lazy-0"] == pid
            assert engine(one, "lazy-0").state is EngineState.READY
            assert (await one.chat("lazy")).status_code == 200

    async def test_engines_of_a_model_on_demand_go_back_when_a_later_one_fails(
        self, tmp_path: Path
    ) -> None:
        before = [process(env={"A": "1"}), process(env={"B": "1"})]
        file = File(tmp_path, model(), model("lazy", *before, load="on_demand"))
        async with gateway(file) as one:
            assert (await one.chat("lazy")).status_code == 200
            kept = pids(one)["lazy-1"]
            after = [process(args=LONGER), crashing()]
            file.write(model(), model("lazy", *after, load="on_demand"))
            [report] = (await reload(one))["models"]
            assert report["reason"] == "engine lazy-3: no room for KV cache; lazy-1 serves on"
            assert list(pids(one)) == ["demo-0", "lazy-0", "lazy-1"]
            assert pids(one)["lazy-1"] == kept
            assert not longest(one, "lazy-0")
            assert (await one.chat("lazy")).status_code == 200
            file.write(model(), model("lazy", *before, load="on_demand"))
            assert (await reload(one))["lines"] == ["nothing differs"]

    async def test_a_request_waits_for_no_engine_that_only_starts(self, tmp_path: Path) -> None:
        """A bound on what runs at once counts READY engines, of which there is one all along."""
        loaded = tmp_path / "loaded"
        file = File(tmp_path, model("demo", policy="session"))
        async with gateway(file) as one:
            slow = process(args={"fake-load-until": str(loaded)})
            file.write(model("demo", slow, policy="session"))
            reloading = asyncio.create_task(reload(one))
            await until(lambda: len(one.state.catalogue.engines) == 2)
            assert one.state.catalogue.ready_engines("demo") == 1
            for number in range(8):
                assert (await one.chat(user=f"u{number}")).status_code == 200
            loaded.touch()
            assert (await reloading)["ok"]
            assert one.state.catalogue.ready_engines("demo") == 1


class TestModelsThatComeAndGo:
    async def test_one_that_goes_is_404_at_once_and_its_requests_end(self, tmp_path: Path) -> None:
        file = File(tmp_path, model(), model("old"))
        others = below()
        async with gateway(file) as one:
            both = below() - others
            old = engine(one, "old-0")
            body = {"model": "old", "stream": True, "fake": "tokens:100:5"}
            async with one.client.stream("POST", "/v1/chat/completions", json=body) as stream:
                pieces = stream.aiter_bytes()
                data = await anext(pieces)
                file.write(model())
                reloading = asyncio.create_task(reload(one))
                await until(lambda: len(one.state.catalogue.models) == 1)
                assert (await one.chat("old")).status_code == 404
                async for piece in pieces:
                    data += piece
            assert data.endswith(b"data: [DONE]\n\n")
            assert (await reloading)["ok"]
            assert old.state is EngineState.STOPPED
            assert len(below() - others) == len(both) // 2
            assert one.state.admission.in_flight == 0

    async def test_who_waits_for_one_that_goes_is_served(self, tmp_path: Path) -> None:
        file = File(tmp_path, model(), model("old", queue={"max_in_flight": 1}))
        async with gateway(file) as one:
            first = asyncio.create_task(one.chat("old", fake="tokens:50:5"))
            await until(lambda: one.state.admission.in_flight == 1)
            second = asyncio.create_task(one.chat("old"))
            await until(lambda: one.state.admission.waiting == 1)
            file.write(model())
            assert (await reload(one))["ok"]
            assert [(await first).status_code, (await second).status_code] == [200, 200]

    async def test_one_that_comes_is_served_when_the_answer_is_there(self, tmp_path: Path) -> None:
        file = File(tmp_path, model())
        async with gateway(file) as one:
            file.write(model(), model("new", process(2), aliases=["n"]))
            told = await reload(one)
            assert told["lines"] == [
                "+ model new (starts new-0, new-1)",
                "model new: added",
                "done",
            ]
            assert (await one.chat("n")).status_code == 200
            assert await one.metric(
                "gateway_engine_state", model="new", gateway_engine="new-1", state="ready"
            )

    async def test_nothing_is_left_of_one_that_did_not_start(self, tmp_path: Path) -> None:
        file = File(tmp_path, model())
        async with gateway(file) as one:
            before = below()
            file.write(model(), model("new", process(), crashing()))
            told = await reload(one)
            assert told["models"] == [
                {
                    "model": "new",
                    "outcome": "not added",
                    "reason": "engine new-1: no room for KV cache",
                }
            ]
            assert (await one.chat("new")).status_code == 404
            assert below() == before
            assert (await one.chat()).status_code == 200

    async def test_a_name_may_pass_from_one_model_to_another(self, tmp_path: Path) -> None:
        file = File(tmp_path, model(aliases=["a"]), model("b"))
        async with gateway(file) as one:
            file.write(model("a", aliases=["b"]))
            told = await reload(one)
            assert [str(r["outcome"]) for r in told["models"]] == ["removed", "removed", "added"]
            assert (await one.chat("b")).status_code == 200
            assert (await one.chat("demo")).status_code == 404
            assert list(pids(one)) == ["a-0"]

    async def test_on_demand_is_not_started(self, tmp_path: Path) -> None:
        file = File(tmp_path, model())
        async with gateway(file) as one:
            file.write(model(), model("lazy", load="on_demand"))
            told = await reload(one)
            assert told["difference"] == ["+ model lazy (loads at the first request)"]
            assert engine(one, "lazy-0").state is EngineState.STOPPED
            file.write(model(), model("lazy", process(args=LONGER), load="on_demand"))
            assert (await reload(one))["ok"]
            assert engine(one, "lazy-0").state is EngineState.STOPPED
            file.write(model(), model("lazy", process(args=LONGER)))
            assert (await reload(one))["ok"]
            assert engine(one, "lazy-0").state is EngineState.READY


class TestOnDemand:
    async def test_a_loaded_model_is_loaded_again_with_its_new_engine(self, tmp_path: Path) -> None:
        file = File(tmp_path, model(), model("lazy", alone(), load="on_demand"))
        async with gateway(file) as one:
            assert (await one.chat("lazy")).status_code == 200
            before = pids(one)
            file.write(model(), model("lazy", alone(args=LONGER), load="on_demand"))
            assert (await reload(one))["ok"]
            assert longest(one, "lazy-0")
            assert engine(one, "lazy-0").state is EngineState.READY
            assert pids(one)["lazy-0"] != before["lazy-0"]
            assert pids(one)["demo-0"] == before["demo-0"]
            assert (await one.chat("lazy")).status_code == 200

    async def test_one_that_does_not_load_goes_back_and_loads_at_the_next_request(
        self, tmp_path: Path
    ) -> None:
        file = File(tmp_path, model(), model("lazy", load="on_demand"))
        async with gateway(file) as one:
            assert (await one.chat("lazy")).status_code == 200
            file.write(model(), model("lazy", crashing(), load="on_demand"))
            [report] = (await reload(one))["models"]
            assert report["outcome"] == "rolled back"
            assert "no room for KV cache" in report["reason"]
            assert "fake-start" not in engine(one, "lazy-0").describe()
            assert (await one.chat("lazy")).status_code == 200

    async def test_a_stream_ends_before_its_engine_is_replaced(self, tmp_path: Path) -> None:
        file = File(tmp_path, model(), model("lazy", alone(), load="on_demand"))
        async with gateway(file) as one:
            body = {"model": "lazy", "stream": True, "fake": "tokens:100:5"}
            async with one.client.stream("POST", "/v1/chat/completions", json=body) as answer:
                lines = answer.aiter_lines()
                await anext(lines)
                file.write(model(), model("lazy", alone(args=LONGER), load="on_demand"))
                reloading = asyncio.create_task(reload(one))
                told = [line async for line in lines if line]
            assert told[-1] == "data: [DONE]"
            assert (await reloading)["ok"]
            assert longest(one, "lazy-0")


class TestWhatIsRefused:
    async def test_a_fault_in_the_file_touches_nothing(self, tmp_path: Path) -> None:
        file = File(tmp_path, model())
        async with gateway(file) as one:
            before = pids(one)
            file.fault = "gateway.yaml: models: is required"
            answer = await one.client.post("/admin/reload", json={}, headers=ROOT)
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == "invalid_configuration"
            assert answer.json()["error"]["message"].splitlines() == [file.fault, "another line"]
            file.fault = None
            assert (await reload(one))["lines"] == ["nothing differs"]
            assert pids(one) == before

    async def test_a_directory_that_is_not_there_touches_nothing(self, tmp_path: Path) -> None:
        file = File(tmp_path, model())
        async with gateway(file) as one:
            before = pids(one)
            away = {"kind": "process", "model": "./nowhere", "replicas": 2}
            file.write(model("demo", away), model("new"))
            answer = await one.client.post("/admin/reload", json={}, headers=ROOT)
            fault = "model demo: engines[0].model: model directory ./nowhere does not exist"
            assert answer.json()["error"]["message"] == fault
            assert pids(one) == before

    @pytest.mark.parametrize("dry_run", [True, False])
    async def test_a_flag_that_vllm_does_not_have_touches_nothing(
        self, dry_run: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        vllm_flags.install(monkeypatch)
        file = File(tmp_path, model("far", remote("http://127.0.0.1:9")))
        async with running(file.settings, source=file.read, settle=False) as one:
            await one.state.settled.wait()
            file.write(
                model("far", remote("http://127.0.0.1:9")),
                model("demo", process(args={"max-modellen": 1})),
            )
            body = {"dry_run": dry_run}
            answer = await one.client.post("/admin/reload", json=body, headers=ROOT)
            assert answer.status_code == 400
            assert answer.json()["error"]["message"] == (
                f"model demo: engines[0].args.max-modellen: vLLM {vllm_flags.table().version} has "
                "no such flag; did you mean max-model-len?"
            )
            assert [m.name for m in one.state.catalogue.models] == ["far"]

    async def test_two_at_once(self, tmp_path: Path) -> None:
        file, loaded = File(tmp_path, model()), tmp_path / "loaded"
        async with gateway(file) as one:
            file.write(model("demo", process(args={**LONGER, "fake-load-until": str(loaded)})))
            first = asyncio.create_task(reload(one))
            await until(lambda: len(one.state.catalogue.engines) == 2)
            second = await one.client.post("/admin/reload", json={}, headers=ROOT)
            assert second.status_code == 409
            assert second.json()["error"]["code"] == "conflict"
            third = asyncio.create_task(one.state.reloader.reload(wait=True))
            loaded.touch()
            assert (await first)["ok"]
            assert (await third).difference == ()

    async def test_one_of_two_that_come_together(self, tmp_path: Path) -> None:
        file = File(tmp_path, model("demo", remote("http://127.0.0.1:1")))
        async with running(file.settings, source=file.read) as one:
            reloader = one.state.reloader
            told = await asyncio.gather(
                reloader.reload(), reloader.reload(dry_run=True), return_exceptions=True
            )
            assert [type(one) for one in told] == [Report, Conflict]

    async def test_when_the_gateway_ends(self, tmp_path: Path) -> None:
        file = File(tmp_path, model("demo", remote("http://127.0.0.1:1")))
        async with running(file.settings, source=file.read) as one:
            one.state.admission.drain()
            answer = await one.client.post("/admin/reload", json={}, headers=ROOT)
            assert answer.status_code == 409
            assert answer.json()["error"]["message"] == "the gateway is shutting down"

    async def test_while_the_gateway_starts(self, tmp_path: Path) -> None:
        loaded = tmp_path / "loaded"
        file = File(tmp_path, model("demo", process(args={"fake-load-until": str(loaded)})))
        async with running(file.settings, LAUNCHER, source=file.read, settle=False) as one:
            answer = await one.client.post("/admin/reload", json={}, headers=ROOT)
            assert answer.status_code == 409
            waiting = asyncio.create_task(one.state.reloader.reload(wait=True))
            loaded.touch()
            assert (await waiting).difference == ()
            assert one.state.settled.is_set()

    @pytest.mark.parametrize("body", [{"dry_run": "perhaps"}, {"dryrun": True}, []])
    async def test_a_call_that_is_not_understood_does_nothing(
        self, tmp_path: Path, body: object
    ) -> None:
        file = File(tmp_path, model("demo", remote("http://127.0.0.1:1")))
        async with running(file.settings, source=file.read, settle=False) as one:
            answer = await one.client.post("/admin/reload", json=body, headers=ROOT)
            assert answer.status_code == 400

    async def test_vllm_is_not_installed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file = File(tmp_path, model("demo", remote("http://127.0.0.1:1")))
        async with running(file.settings, source=file.read) as one:
            monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
            file.write(model("demo", remote("http://127.0.0.1:1")), model("new"))
            answer = await one.client.post("/admin/reload", json={}, headers=ROOT)
            assert answer.status_code == 400
            assert "vLLM is not installed here" in answer.json()["error"]["message"]
            assert len(one.state.catalogue.models) == 1


class TestTheEndOfTheGateway:
    async def test_ends_a_reload_and_every_engine(self, tmp_path: Path) -> None:
        file = File(tmp_path, model(), model("old"))
        before = below()
        async with gateway(file) as one:
            body = {"model": "old", "stream": True, "fake": "pace:5"}
            async with one.client.stream("POST", "/v1/chat/completions", json=body) as stream:
                pieces = stream.aiter_bytes()  # closes the stream when it is let go
                await anext(pieces)
                file.write(model(), model("new", process(args={"fake-start": "hang"})))
                reloading = asyncio.create_task(one.state.reloader.reload())
                await until(lambda: len(one.state.catalogue.models) == 1)
        with pytest.raises(asyncio.CancelledError):
            await reloading
        assert below() == before

    async def test_ends_the_question_to_vllms_parser(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The end of the process waits for every thread of the loop's executor."""
        asked, told = threading.Event(), threading.Event()

        def slow(*given: object) -> PreflightResult:
            asked.set()
            ended = given[-1]
            assert isinstance(ended, threading.Event)
            if ended.wait(20):
                told.set()
            return PreflightResult((), ())

        monkeypatch.setattr("app.reload.planner.run_preflight", slow)
        file = File(tmp_path, model())
        async with gateway(file) as one:
            file.write(model("demo", process(args=LONGER)))
            reloading = asyncio.create_task(one.state.reloader.reload())
            await until(asked.is_set)
        with pytest.raises(asyncio.CancelledError):
            await reloading
        await until(told.is_set)

    async def test_ends_an_engine_that_starts_beside_another(self, tmp_path: Path) -> None:
        file, before = File(tmp_path, model()), below()
        async with gateway(file) as one:
            file.write(model("demo", process(args={"fake-start": "hang"})))
            reloading = asyncio.create_task(one.state.reloader.reload())
            await until(lambda: pids(one).get("demo-1") is not None)
        with pytest.raises(asyncio.CancelledError):
            await reloading
        assert below() == before

    async def test_the_next_gateway_takes_over_the_engine_that_took_over(
        self, tmp_path: Path
    ) -> None:
        file, before = File(tmp_path, model(), server=KEEP), below()
        async with gateway(file) as one:
            file.write(model("demo", process(args=LONGER)), server=KEEP)
            assert (await reload(one))["ok"]
            kept = pids(one)
            assert list(kept) == ["demo-1"]
        async with gateway(file) as one:
            assert pids(one) == kept
            assert (await one.chat()).status_code == 200
        await ended(file, before)

    async def test_what_is_in_flight_on_a_retired_engine_ends_when_others_are_handed_over(
        self, tmp_path: Path
    ) -> None:
        file, before = File(tmp_path, model(), server=KEEP), below()
        async with gateway(file) as one:
            body = {"model": "demo", "stream": True, "fake": "tokens:20:20"}
            async with one.client.stream("POST", "/v1/chat/completions", json=body) as answer:
                lines = answer.aiter_lines()
                await anext(lines)
                file.write(model("demo", process(args=LONGER)), server=KEEP)
                reloading = asyncio.create_task(one.state.reloader.reload())
                await until(lambda: list(pids(one)) == ["demo-1"])
                kept = pids(one)
                await hand_over(one.state, [], contextlib.ExitStack())
                told = [line async for line in lines if line]
            assert told[-1] == "data: [DONE]"
            with pytest.raises(asyncio.CancelledError):
                await reloading
        async with gateway(file) as one:
            assert pids(one) == kept
        await ended(file, before)

    async def test_the_next_gateway_takes_over_the_engine_that_was_starting(
        self, tmp_path: Path
    ) -> None:
        loaded, before = tmp_path / "loaded", below()
        file = File(tmp_path, model(), server=KEEP)
        async with gateway(file) as one:
            slow = process(args={"fake-load-until": str(loaded)})
            file.write(model("demo", slow), server=KEEP)
            reloading = asyncio.create_task(one.state.reloader.reload())
            await until(lambda: pids(one).get("demo-1") is not None)
            starting = pids(one)["demo-1"]
        with pytest.raises(asyncio.CancelledError):
            await reloading
        loaded.touch()
        async with gateway(file) as one:
            assert pids(one) == {"demo-1": starting}
            assert (await one.chat()).status_code == 200
        await ended(file, before)


KEEP = {"keep_engines": True}


async def ended(file: File, before: set[int]) -> None:
    """End engines that were kept, and see that nothing else is left."""
    file.settings = file.settings.model_copy(
        update={"server": file.settings.server.model_copy(update={"keep_engines": False})}
    )
    async with gateway(file):
        pass
    assert below() == before


class TestRouting:
    async def test_another_policy_applies_at_once_and_touches_no_engine(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = File(tmp_path, model("demo", process(2)))
        async with gateway(file) as one:
            before = pids(one)
            file.write(model("demo", process(2), policy="session"))
            told = await reload(one)
            assert told["difference"] == ["~ model demo: policy least_loaded → session"]
            assert pids(one) == before
            for _ in range(4):
                assert (await one.chat()).status_code == 200
            [now] = one.state.catalogue.models
            assert isinstance(now.policy, SessionAffinity)
            one.state.access.flush()
            told_engines = re.findall(r'"engine":"(\S+?)"', capsys.readouterr().err)
            assert len(told_engines) == 4
            assert len(set(told_engines)) == 1, "all of a key is one session"

    async def test_what_a_policy_has_learned_outlasts_other_changes(self, tmp_path: Path) -> None:
        file = File(tmp_path, model("demo", process(2), policy="prefix"))
        async with gateway(file) as one:
            await one.chat(messages=[{"role": "user", "content": "x" * 5000}])
            [before] = one.state.catalogue.models
            file.write(model("demo", process(2), policy="prefix", aliases=["al"]))
            await reload(one)
            [after] = one.state.catalogue.models
            assert after.aliases == ("al",)
            assert after.policy is before.policy

    async def test_fallbacks_come_and_go(self, tmp_path: Path) -> None:
        broken = remote(f"http://127.0.0.1:{free_port()}")
        file = File(tmp_path, model("demo", broken), model("small"))
        async with gateway(file) as one:
            assert (await one.chat()).status_code == 503
            file.write(model("demo", broken, fallbacks=["small"]), model("small"))
            told = await reload(one)
            assert told["difference"] == ["~ model demo: fallbacks [] → [small]"]
            assert (await one.chat()).json()["model"] == "small"
            file.write(model("demo", broken))
            await reload(one)
            assert (await one.chat()).status_code == 503


async def test_reloads_are_counted_by_their_ends_and_dry_runs_are_not(tmp_path: Path) -> None:
    file = File(tmp_path, model("demo", remote("http://127.0.0.1:1")))
    async with gateway(file) as one:
        await reload(one, dry_run=True)
        await reload(one)
        file.fault = "gateway.yaml: a fault"
        for dry_run in (True, False):
            answer = await one.client.post("/admin/reload", json={"dry_run": dry_run}, headers=ROOT)
            assert answer.status_code == 400
        file.fault = None
        file.write(model("demo", remote("http://127.0.0.1:1")), model("new", crashing()))
        assert (await reload(one))["ok"] is False
        for outcome, count in {"done": 1, "invalid": 1, "partial": 1, "failed": 0}.items():
            assert await one.metric("gateway_reloads_total", outcome=outcome) == count, outcome
