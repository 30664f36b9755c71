"""Reloads while servers are discovered: what did not change stays, and nothing fails meanwhile."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from engines.base import EngineState
from tests.app.fleet.members.gateways import (
    DiscoveringGateway,
    Listing,
    Load,
    discovered,
    listed_in,
    model,
    name_of,
    run,
    servers,
)
from tests.gateway import remote
from tests.waiting import run_pending_tasks, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_checks")]


async def reload(gateway: DiscoveringGateway, *models: dict[str, Any]) -> list[str]:
    """Reload with these models; return what it says has changed."""
    report = await gateway.reload(*models)
    assert report["ok"], report
    changes: list[str] = report["difference"]
    return changes


async def test_reload_of_other_settings_keeps_the_servers(tmp_path: Path, listing: Listing) -> None:
    async with servers(2) as (a, b):
        listing.set(a.url, b.url)
        async with run(tmp_path, find_source=listing) as gateway:
            engines = {name: gateway.find(name) for name in gateway.names}
            new = model("new", discovered(served_model_name="demo"))
            assert await reload(gateway, model("demo", aliases=["other"]), new)
            await wait_until(lambda: len(gateway.names) == 4)
            for name, engine in engines.items():
                assert gateway.find(name) is engine
                assert engine.state is EngineState.READY
            # Both models have the same source, and each its own engines.
            assert set(gateway.names) == set(engines) | {name_of(a, "new"), name_of(b, "new")}


async def test_reload_without_a_change_says_so(tmp_path: Path, listing: Listing) -> None:
    async with servers(1) as (a,):
        listing.set(a.url)
        async with run(tmp_path, find_source=listing) as gateway:
            assert (await gateway.reload())["difference"] == []
            assert (await gateway.reload(dry_run=True))["difference"] == []


async def test_source_that_went_takes_its_servers_along(tmp_path: Path, listing: Listing) -> None:
    async with servers(2) as (a, b):
        listing.set(a.url, name="one.test")
        listing.set(b.url, name="two.test")
        both = model("demo", discovered("one.test"), discovered("two.test"))
        async with run(tmp_path, both, find_source=listing) as gateway:
            await gateway.until(a, b)
            changes = await reload(gateway, model("demo", discovered("two.test")))
            assert changes == ["~ model demo: servers of one.test:8000 by DNS removed"]
            await gateway.until(b)
            assert listing.watches == 1


@pytest.mark.parametrize("back", [False, True])
async def test_url_becomes_discovered_and_back_under_load(
    tmp_path: Path, listing: Listing, back: bool
) -> None:
    async with servers(2) as (a, b):
        listing.set(b.url)
        static, dynamic = model("demo", remote(a.url)), model("demo", discovered())
        before, after = (dynamic, static) if back else (static, dynamic)
        async with (
            run(tmp_path, before, find_source=listing) as gateway,
            Load(gateway).run() as load,
        ):
            await load.more()
            changes = await reload(gateway, after)
            assert any("servers of vllm.test:8000 by DNS" in change for change in changes)
            await wait_until(lambda: gateway.names == (["demo-0"] if back else [name_of(b)]))
            await load.more()
        assert load.faults == []


async def test_one_source_replaces_another_under_load(tmp_path: Path, listing: Listing) -> None:
    async with servers(2) as (a, b):
        listing.set(a.url, name="one.test")
        listing.set(b.url, name="two.test")
        async with (
            run(tmp_path, model("demo", discovered("one.test")), find_source=listing) as gateway,
            Load(gateway).run() as load,
        ):
            await load.more()
            await reload(gateway, model("demo", discovered("two.test")))
            await gateway.until(b)
            await load.more()
        assert load.faults == []


async def test_changed_settings_replace_the_engine_of_a_server_under_load(
    tmp_path: Path, listing: Listing
) -> None:
    async with servers(1) as (a,):
        listing.set(a.url)
        async with (
            run(tmp_path, find_source=listing) as gateway,
            Load(gateway).run() as load,
        ):
            old = gateway.find(name_of(a))
            await load.more()
            slower = discovered(timeouts={"stall_s": 9})
            changes = await reload(gateway, model("demo", slower))
            assert changes == ["~ model demo: servers of vllm.test:8000 by DNS changed"]
            await wait_until(lambda: gateway.find(name_of(a)) is not old)
            await wait_until(lambda: old.state is EngineState.STOPPED)
            await load.more()
        assert load.faults == []


async def test_server_leaves_at_once_while_its_old_engine_drains(
    tmp_path: Path, listing: Listing
) -> None:
    async with servers(2) as (a, b):
        listing.set(a.url, b.url)
        async with run(tmp_path, find_source=listing) as gateway:
            listing.set(a.url)
            await gateway.until(a)
            old = gateway.find(name_of(a))
            async with gateway.stream("tokens:60:5") as stream:
                await reload(gateway, model("demo", discovered(timeouts={"stall_s": 9})))
                await wait_until(lambda: gateway.find(name_of(a)) is not old)
                listing.set(b.url)
                await gateway.until(b)
                assert old.state is EngineState.READY
                assert (await stream.read()).endswith(b"data: [DONE]\n\n")
            await wait_until(lambda: old.state is EngineState.STOPPED)


async def test_server_that_serves_no_more_under_new_settings_stays_with_the_old(
    tmp_path: Path, listing: Listing
) -> None:
    async with servers(1) as (a,):
        listing.set(a.url)
        async with run(tmp_path, find_source=listing) as gateway:
            old = gateway.find(name_of(a))
            await reload(gateway, model("demo", discovered(served_model_name="other")))
            await run_pending_tasks()
            assert gateway.find(name_of(a)) is old
            assert (await gateway.chat()).status_code == 200


async def test_model_is_added_with_servers_and_removed(tmp_path: Path, listing: Listing) -> None:
    async with servers(2) as (a, b):
        listing.set(a.url)
        b.model = "new"
        listing.set(b.url, name="new.test")
        async with run(tmp_path, find_source=listing) as gateway:
            added = model("new", discovered("new.test"))
            assert await reload(gateway, model(), added) == [
                "+ model new (discovers servers of new.test:8000 by DNS)"
            ]
            # Its servers were checked before the reload was over.
            assert (await gateway.chat("new")).status_code == 200
            engine = gateway.find(name_of(b, "new"))
            async with gateway.stream("tokens:60:5", "new") as stream:
                reloading = asyncio.create_task(reload(gateway, model()))
                await wait_until(lambda: len(gateway.names) == 1)
                # A list that comes in the middle of it changes nothing.
                listing.set(a.url, b.url, name="new.test")
                assert (await stream.read()).endswith(b"data: [DONE]\n\n")
            assert await reloading == ["- model new (stops its discovered servers)"]
            await wait_until(lambda: engine.state is EngineState.STOPPED)
            assert listing.watches == 1


async def test_servers_come_and_go_while_reloads_run(tmp_path: Path, listing: Listing) -> None:
    async with servers(4) as fakes:
        a, b, c, d = fakes
        listing.set(a.url)
        static = remote(d.url)
        async with (
            run(tmp_path, find_source=listing) as gateway,
            Load(gateway, clients=2).run() as load,
        ):
            for turn in range(6):
                demo = model("demo", discovered(), *([static] if turn % 2 == 0 else []))
                reloading = asyncio.create_task(reload(gateway, demo))
                for present in ((a, b), (b, c), (c, a)):
                    listing.set(*(fake.url for fake in present))
                    await asyncio.sleep(0.01)
                await reloading
            await gateway.until(c, a)
            await load.more()
        assert load.faults == []


async def test_rolled_back_model_keeps_its_servers(tmp_path: Path, listing: Listing) -> None:
    async with servers(3) as (a, b, c):
        listing.set(a.url)
        listing.set(b.url, name="two.test")
        demo = model("demo", remote(c.url), discovered())
        async with run(tmp_path, demo, find_source=listing) as gateway:
            await wait_until(lambda: name_of(a) in gateway.names)
            old = gateway.find(name_of(a))
            dead = remote("http://127.0.0.1:1")
            report = await gateway.reload(model("demo", dead, discovered("two.test")))
            assert [one["outcome"] for one in report["models"]] == ["rolled back"]
            assert gateway.find(name_of(a)) is old
            assert listing.watches == 1


async def test_file_is_replaced_by_another(tmp_path: Path) -> None:
    async with servers(2) as (a, b):
        one, two = tmp_path / "one.json", tmp_path / "two.json"
        one.write_text(json.dumps([a.url]))
        two.write_text(json.dumps([b.url]))
        async with run(tmp_path / "run", model("demo", listed_in(one))) as gateway:
            await gateway.until(a)
            await reload(gateway, model("demo", listed_in(two)))
            await gateway.until(b)
            assert (await gateway.chat()).status_code == 200
