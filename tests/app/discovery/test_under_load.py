"""Servers that a DNS server, a file and an API server list come and go under load: none fails."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from app.discovery import FindSource, Source
from app.discovery.dns import DnsSource, SystemResolver
from app.discovery.kubernetes import KubernetesSource
from engines.base import EngineState
from engines.spec import Discovery
from tests.app.discovery.cluster import make_account
from tests.app.fleet.members.gateways import (
    DiscoveringGateway,
    Listing,
    Load,
    listed_in,
    model,
    name_of,
    run,
    servers,
    write_list,
)
from tests.fakes.kubernetes import SELECTOR, ApiServer, Authority, make_slice
from tests.fakes.vllm import Fake
from tests.gateway import free_port
from tests.services import DnsServer
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4")
LIMITS = {"requests_per_minute": 10**6, "tokens_per_minute": 10**9}
UNLIMITED: dict[str, Any] = {"limits": {"default": LIMITS}}
TEXT = " ".join(f"word{n}" for n in range(60))


@asynccontextmanager
async def pods(port: int) -> AsyncIterator[dict[str, Fake]]:
    """Run a server on one port of each of HOSTS, as pods have it."""
    fakes = {host: await Fake().start(host=host, port=port) for host in HOSTS}
    try:
        yield fakes
    finally:
        await asyncio.gather(*(fake.stop() for fake in fakes.values()))


def asking(server: DnsServer) -> FindSource:
    """Return sources whose names are those of a DNS server."""

    def find(spec: Discovery) -> Source:
        assert spec.dns is not None
        assert spec.port is not None
        resolve = SystemResolver(spec.dns, server.resolver())
        return DnsSource(spec.dns, spec.port, resolve=resolve)

    return find


async def until(gateway: DiscoveringGateway, port: int, *hosts: str) -> None:
    names = sorted(f"demo-{host}-{port}" for host in hosts)
    await wait_until(lambda: sorted(gateway.names) == names)


async def say(gateway: DiscoveringGateway, after_words: Callable[[], None]) -> str:
    """Return the text of a streamed answer; the function is called after a few of its words."""
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "temperature": 0,
        "fake": f"say:{TEXT}",
    }
    text, called = "", False
    async with gateway.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    text += choice["delta"].get("content") or ""
            if not called and text.count(" ") > 5:
                called = True
                after_words()
    return text


@pytest.mark.services
async def test_addresses_of_a_name_come_and_go(
    tmp_path: Path, dns_server: DnsServer, show: Callable[[str], None]
) -> None:
    port = free_port()
    a, b, c, d = HOSTS
    demo = model("demo", {"kind": "remote", "discover": {"dns": "vllm.test", "port": port}})
    async with pods(port) as fakes:
        dns_server.put("vllm.test", a, b)
        async with (
            run(tmp_path, demo, find_source=asking(dns_server), **UNLIMITED) as gateway,
            Load(gateway).run() as load,
        ):
            for present in ((a, b), (b, c), (a, d), HOSTS, (d,)):
                await asyncio.to_thread(dns_server.put, "vllm.test", *present)
                await until(gateway, port, *present)
                await load.more()
            # Neither a name without addresses nor a dead DNS server takes a server away.
            await asyncio.to_thread(dns_server.put, "vllm.test")
            await load.more(200)
            await asyncio.to_thread(dns_server.stop)
            await load.more(200)
            await until(gateway, port, d)
            await asyncio.to_thread(dns_server.start)
            await asyncio.to_thread(dns_server.put, "vllm.test", a, d)
            await until(gateway, port, a, d)
        assert load.faults == []
        assert all(any("chat" in one.target for one in fake.seen) for fake in fakes.values())
        show(f"{load.answers} requests, none failed, while addresses came and went")


async def test_endpoints_come_and_go(
    tmp_path: Path, authority: Authority, show: Callable[[str], None]
) -> None:
    port = free_port()
    a, b, c, d = HOSTS
    kubernetes = {"selector": SELECTOR, "port": "http"}
    demo = model("demo", {"kind": "remote", "discover": {"kubernetes": kubernetes}})
    async with pods(port) as fakes, ApiServer(authority) as api:
        account = make_account(tmp_path / "account", authority, api.port)

        def find(spec: Discovery) -> Source:
            assert spec.kubernetes is not None
            return KubernetesSource(spec.kubernetes, account=account, pause=pause)

        async def pause(seconds: float) -> None:
            await asyncio.sleep(min(seconds, 0.2))

        def present(*hosts: str) -> None:
            api.put(make_slice("first", *hosts[:2], port=port))
            api.put(make_slice("second", *hosts[2:], port=port))

        present(a, b)
        async with (
            run(tmp_path, demo, find_source=find, **UNLIMITED) as gateway,
            Load(gateway).run() as load,
        ):
            for hosts in ((a, b), (b, c), (a, d), HOSTS, (d,)):
                present(*hosts)
                await until(gateway, port, *hosts)
                await load.more()
            # A pod that is not ready, and one that terminates while another is ready.
            api.put(make_slice("third", a, port=port, ready=False))
            api.put(make_slice("fourth", b, port=port, ready=False, terminating=True))
            await load.more(200)
            await until(gateway, port, d)
            # A version that expires while the connection is away.
            api.cut_watches(after=100)
            api.put(make_slice("third", a, port=port))
            api.compact()
            await until(gateway, port, a, d)
            # An API server that is away takes no server away.
            await api.stop()
            present(c)
            await load.more(200)
            await until(gateway, port, a, d)
            await api.start()
            await until(gateway, port, a, c)
            await load.more()
        assert load.faults == []
        assert all(any("chat" in one.target for one in fake.seen) for fake in fakes.values())
        show(f"{load.answers} requests, none failed, while endpoints came and went")


async def test_servers_in_a_file_come_and_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.discovery.file.POLL_S", 0.05)
    file = tmp_path / "engines.json"
    async with servers(3) as (a, b, c):
        write_list(file, [a.url])
        async with (
            run(tmp_path / "run", model("demo", listed_in(file)), **UNLIMITED) as gateway,
            Load(gateway).run() as load,
        ):
            for present in ((a, b), (c,), (a, b, c), (b,)):
                write_list(file, (fake.url for fake in present))
                await gateway.until(*present)
                await load.more()
            # Half written, faulty, gone: what was known stays.
            for content in (json.dumps([a.url, c.url])[:-5], "", "{}", None):
                if content is None:
                    file.unlink()
                else:
                    file.write_text(content)
                await load.more(40)
                assert gateway.names == [name_of(b)]
            write_list(file, [a.url, c.url])
            await gateway.until(a, c)
        assert load.faults == []


async def test_stream_goes_on_at_another_server_when_its_own_leaves(tmp_path: Path) -> None:
    listing = Listing()
    async with servers(2) as (a, b):
        for fake in (a, b):
            fake.pace_s = 0.01
        listing.set(a.url)
        async with run(tmp_path, find_source=listing) as gateway:
            engine = gateway.find(name_of(a))
            assert await say(gateway, lambda: listing.set(b.url)) == TEXT
            assert engine.state is EngineState.STOPPED
            assert any("chat" in one.target for one in b.seen)


async def test_stream_of_a_dead_server_waits_for_the_next_one(tmp_path: Path) -> None:
    listing = Listing()
    async with servers(2) as (a, b):
        for fake in (a, b):
            fake.pace_s = 0.01
        listing.set(a.url)
        async with run(tmp_path, find_source=listing) as gateway:

            def replace() -> None:
                """The pod dies, its address vanishes, and later there is another."""
                a.kill()
                listing.set()
                asyncio.get_running_loop().call_later(0.3, listing.set, b.url)

            assert await say(gateway, replace) == TEXT
            assert gateway.names == [name_of(b)]
