"""Servers join their model when they are ready and serve it, and drain when they leave."""

import asyncio
import logging
import socket
from pathlib import Path

import pytest

from app.fleet import DetachedEngines
from app.main import create_app
from engines.base import Engine, EngineState
from tests.app.fleet.members.gateways import (
    Listing,
    Load,
    discovered,
    model,
    name_of,
    run,
    servers,
)
from tests.fakes.vllm import Fake
from tests.gateway import free_port, settings_for
from tests.waiting import run_pending_tasks, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_checks")]


async def test_listed_servers_serve_as_soon_as_the_gateway_has_started(
    tmp_path: Path, listing: Listing
) -> None:
    async with servers(2) as (a, b):
        listing.set(a.url, b.url)
        async with run(tmp_path, find_source=listing) as gateway:
            assert sorted(gateway.names) == sorted([name_of(a), name_of(b)])
            assert (await gateway.chat()).status_code == 200
        assert listing.watches == 0


async def test_servers_come_and_go_under_load_without_a_failed_request(
    tmp_path: Path, listing: Listing
) -> None:
    async with servers(4) as fakes:
        a, b, c, d = fakes
        listing.set(a.url)
        async with run(tmp_path, find_source=listing) as gateway, Load(gateway).run() as load:
            for present in ((a, b), (b,), (b, c, d), (a, d), (c,), fakes):
                listing.set(*(fake.url for fake in present))
                await gateway.until(*present)
                await load.more()
        assert load.faults == []
        assert all(any(one.target.startswith("/v1/chat") for one in f.seen) for f in fakes)


async def test_stream_on_a_server_that_left_finishes(tmp_path: Path, listing: Listing) -> None:
    async with servers(2) as (a, b):
        listing.set(a.url)
        async with run(tmp_path, find_source=listing) as gateway:
            engine = gateway.find(name_of(a))
            async with gateway.stream("tokens:100:5") as stream:
                listing.set(b.url)
                await gateway.until(b)
                assert engine.state is EngineState.READY
                data = await stream.read()
            assert data.endswith(b"data: [DONE]\n\n")
            assert data.count(b'"content":"word"') == 100
            await wait_until(lambda: engine.state is EngineState.STOPPED)


async def test_server_that_is_listed_again_while_it_drains_joins_afterwards(
    tmp_path: Path, listing: Listing
) -> None:
    async with servers(2) as (a, b):
        listing.set(a.url, b.url)
        async with run(tmp_path, find_source=listing) as gateway:
            first = gateway.find(name_of(a))
            listing.set(a.url)
            await gateway.until(a)
            async with gateway.stream("tokens:60:5") as stream:
                listing.set(b.url)
                await gateway.until(b)
                listing.set(a.url, b.url)
                await run_pending_tasks()
                assert gateway.names == [name_of(b)]
                assert await gateway.unused() == {name_of(a): "its next check has not begun"}
                data = await stream.read()
            assert data.endswith(b"data: [DONE]\n\n")
            await gateway.until(a, b)
            assert first.state is EngineState.STOPPED
            assert gateway.find(name_of(a)) is not first


async def test_endless_stream_is_cut_after_the_drain(tmp_path: Path, listing: Listing) -> None:
    async with servers(2) as (a, b):
        listing.set(a.url)
        async with run(tmp_path, find_source=listing, server={"drain_timeout_s": 0.1}) as gateway:
            async with gateway.stream("pace:5") as stream:
                listing.set(b.url)
                data = await stream.read()
            assert b'"code":"engine_failed"' in data


async def test_server_that_does_not_respond_joins_when_it_does(
    tmp_path: Path, listing: Listing, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    async with servers(1) as (a,):
        listing.set(a.url, f"http://127.0.0.1:{port}")
        async with run(tmp_path, find_source=listing) as gateway:
            assert gateway.names == [name_of(a)]
            await asyncio.sleep(0.2)  # several checks
            name = f"demo-127.0.0.1-{port}"
            lines = [line for line in caplog.messages if name in line]
            assert len(lines) == 1
            assert lines[0].startswith(f"engine {name} does not respond: ")
            late = await Fake().start(port=port)
            await gateway.until(a, late)
            await late.stop()


async def test_server_of_another_model_stays_outside(
    tmp_path: Path, listing: Listing, caplog: pytest.LogCaptureFixture
) -> None:
    async with servers(1) as (a,), servers(1, model="other") as (b,):
        listing.set(a.url, b.url)
        async with run(tmp_path, find_source=listing) as gateway:
            assert gateway.names == [name_of(a)]
            await wait_until(lambda: len([one for one in b.seen if one.target == "/v1/models"]) > 2)
            assert [line for line in caplog.messages if name_of(b) in line] == [
                f"engine {name_of(b)} is not used: it does not serve the model 'demo'"
            ]
            assert await gateway.unused() == {name_of(b): "it does not serve the model 'demo'"}
            b.model = "demo"
            await gateway.until(a, b)
            assert await gateway.unused() == {}


async def test_served_model_name_is_the_one_that_counts(tmp_path: Path, listing: Listing) -> None:
    async with servers(1, model="meta/llama") as (a,):
        listing.set(a.url)
        spec = discovered(served_model_name="meta/llama")
        async with run(tmp_path, model("demo", spec), find_source=listing) as gateway:
            assert gateway.names == [name_of(a)]
            assert (await gateway.chat()).status_code == 200


async def test_address_that_passes_to_another_model_gets_no_more_requests(
    tmp_path: Path, listing: Listing
) -> None:
    async with servers(2) as (a, b):
        listing.set(a.url, b.url)
        async with run(tmp_path, find_source=listing) as gateway:
            a.model = "other"
            engine = gateway.find(name_of(a))
            await wait_until(lambda: engine.state is EngineState.FAILED)
            assert engine.last_error == "it does not serve the model 'demo'"
            a.seen.clear()
            listing.set(a.url)
            await gateway.until(a)
            assert (await gateway.chat()).status_code == 503
            assert not any(one.target.startswith("/v1/chat") for one in a.seen)
            a.model = "demo"
            await wait_until(lambda: engine.state is EngineState.READY)
            assert (await gateway.chat()).status_code == 200


async def test_server_that_dies_stays_listed_and_comes_back(
    tmp_path: Path, listing: Listing
) -> None:
    async with servers(1) as (a,):
        listing.set(a.url)
        async with run(tmp_path, find_source=listing) as gateway:
            engine = gateway.find(name_of(a))
            a.kill()
            await wait_until(lambda: engine.state is EngineState.FAILED)
            assert (await gateway.chat()).status_code == 503
            await a.revive()
            await wait_until(lambda: engine.state is EngineState.READY)
            assert (await gateway.chat()).status_code == 200


class TestReasons:
    async def test_reason_is_that_of_the_latest_check(
        self, tmp_path: Path, listing: Listing
    ) -> None:
        async with servers(1) as (a,):
            a.api_key = "sk-another"
            listing.set(a.url)
            async with run(tmp_path, find_source=listing) as gateway:
                assert "refuses the key" in (await gateway.unused())[name_of(a)]
                a.api_key, a.model = None, "other"
                discovery = gateway.state.servers
                await wait_until(
                    lambda: discovery.unused()[0].reason == "it does not serve the model 'demo'"
                )

    async def test_server_that_hangs_does_not_refuse_connections(
        self, tmp_path: Path, listing: Listing, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("engines.http.probe.TIMEOUT_S", 0.1)
        port = free_port()
        listing.set(f"http://127.0.0.1:{port}")
        async with run(tmp_path, find_source=listing) as gateway:
            name = f"demo-127.0.0.1-{port}"
            assert "refused" in (await gateway.unused())[name].lower()
            discovery = gateway.state.servers
            with socket.create_server(("127.0.0.1", port)):
                await wait_until(lambda: "refused" not in discovery.unused()[0].reason.lower())

    async def test_server_that_was_never_used_leaves_without_a_warning(
        self, tmp_path: Path, listing: Listing, caplog: pytest.LogCaptureFixture
    ) -> None:
        listing.set(f"http://127.0.0.1:{free_port()}")
        async with run(tmp_path, find_source=listing) as gateway:
            discovery = gateway.state.servers
            await wait_until(lambda: len(discovery.unused()) == 1)
            caplog.set_level(logging.WARNING)
            caplog.clear()
            listing.set()
            await wait_until(lambda: discovery.unused() == [])
        assert caplog.messages == []


class TestNoServer:
    async def test_requests_are_refused_and_the_gateway_goes_on(
        self, tmp_path: Path, listing: Listing
    ) -> None:
        async with run(tmp_path, find_source=listing) as gateway:
            refused = await gateway.chat()
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "engine_unavailable"
            assert "none is known" in refused.json()["error"]["message"]
            assert (await gateway.client.get("/ready")).status_code == 503
            assert (await gateway.client.get("/health")).status_code == 200
            models = (await gateway.client.get("/v1/models")).json()["data"]
            assert [one["id"] for one in models] == ["demo"]
            assert not gateway.state.engine_lifecycle.hopeless
            async with servers(1) as (a,):
                listing.set(a.url)
                await gateway.until(a)
                assert (await gateway.chat()).status_code == 200
                assert (await gateway.client.get("/ready")).status_code == 200
                listing.set()
                await gateway.until()
                assert (await gateway.chat()).status_code == 503

    async def test_fallback_serves(self, tmp_path: Path, listing: Listing) -> None:
        async with servers(1, model="other") as (a,):
            other = model("other", {"kind": "remote", "url": a.url})
            demo = model("demo", fallbacks=["other"])
            async with run(tmp_path, demo, other, find_source=listing) as gateway:
                answer = await gateway.chat()
                assert answer.status_code == 200
                assert answer.headers["x-gateway-model"] == "other"


async def test_servers_of_a_source_are_bounded(
    tmp_path: Path,
    listing: Listing,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("app.fleet.members.roster.MAX_SERVERS", 2)
    async with servers(3) as fakes:
        a, b, c = sorted(fakes, key=lambda fake: fake.url)
        listing.set(b.url, c.url)
        async with run(tmp_path, find_source=listing) as gateway:
            for _ in range(2):
                # Those that serve stay.
                listing.set(a.url, b.url, c.url)
                await run_pending_tasks()
                await gateway.until(b, c)
            assert [line for line in caplog.messages if "left out" in line] == [
                "servers of vllm.test:8000 by DNS: 3 are listed, at most 2 are used; left out: 1"
            ]
            listing.set(a.url, c.url)
            await gateway.until(a, c)


async def test_server_of_two_sources_counts_once(tmp_path: Path, listing: Listing) -> None:
    async with servers(2) as (a, b):
        listing.set(a.url, name="one.test")
        listing.set(a.url, b.url, name="two.test")
        demo = model("demo", discovered("one.test"), discovered("two.test"))
        async with run(tmp_path, demo, find_source=listing) as gateway:
            await gateway.until(a, b)
            engine = gateway.find(name_of(a))
            listing.set(name="one.test")
            await run_pending_tasks()
            await gateway.until(a, b)
            assert gateway.find(name_of(a)) is engine


async def test_sources_that_cannot_be_read_are_counted(tmp_path: Path, listing: Listing) -> None:
    async with servers(1) as (a,):
        listing.set(a.url, name="one.test")
        listing.failing.add("two.test")
        demo = model("demo", discovered("one.test"), discovered("two.test"))
        async with run(tmp_path, demo, find_source=listing) as gateway:
            await gateway.until(a)
            text = (await gateway.client.get("/metrics")).text
            assert 'gateway_discovery_sources_failing{model="demo"} 1' in text


async def test_source_that_raises_is_read_again(
    tmp_path: Path,
    listing: Listing,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("app.fleet.members.roster.RETRY_S", 0.05)
    watch, calls = listing.watch, 0

    def failing(name: str) -> object:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("a bug")
        return watch(name)

    monkeypatch.setattr(listing, "watch", failing)
    async with servers(1) as (a,):
        listing.set(a.url)
        async with run(tmp_path, find_source=listing) as gateway:
            await gateway.until(a)
    assert "unhandled exception while discovering servers of vllm.test:8000 by DNS" in caplog.text


async def test_server_whose_steps_raise_joins_later(
    tmp_path: Path,
    listing: Listing,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("app.fleet.members.roster.RETRY_S", 0.05)
    begin, calls = DetachedEngines.begin, 0

    async def failing(detached: DetachedEngines, server: Engine) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("a bug")
        await begin(detached, server)

    monkeypatch.setattr(DetachedEngines, "begin", failing)
    async with servers(1) as (a,):
        listing.set(a.url)
        async with run(tmp_path, find_source=listing) as gateway:
            await gateway.until(a)
            listing.set()
            await gateway.until()
    assert f"unhandled exception in the steps of server {name_of(a)}" in caplog.text


async def test_gateway_stops_while_servers_join_and_drain(
    tmp_path: Path, listing: Listing, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with servers(3) as (a, b, c):
        listing.set(a.url, b.url)
        async with run(tmp_path, find_source=listing) as gateway, gateway.stream("pace:5"):
            listing.set(b.url, c.url, f"http://127.0.0.1:{free_port()}")
            await run_pending_tasks(3)
        assert listing.watches == 0
    assert [one for one in caplog.messages if "unhandled" in one] == []


async def test_next_gateway_accepts_no_connection_before_its_servers_are_checked(
    tmp_path: Path, listing: Listing
) -> None:
    """Of a hand-over: connections wait already, and their requests would get 503."""
    async with servers(2) as (a, b):
        listing.set(a.url, b.url)
        settings = settings_for(model(), run_dir=tmp_path)
        application = create_app(settings, find_source=listing)
        application.waits_for_engines = True
        async with application.run():
            assert application.catalogue.ready
            assert len(application.catalogue.engines) == 2
