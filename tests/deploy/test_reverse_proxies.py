"""The lines for nginx and Caddy in deploy/proxy/, run by nginx and Caddy in front of a gateway."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from tests.fakes.vllm import Fake
from tests.gateway import AUTH, ROOT, Gateway, serving_demo
from tests.reverse_proxies import (
    BEHIND_PROXY,
    ROOT_PATH,
    Caddy,
    Nginx,
    NginxChain,
    ReverseProxy,
)
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.slow

MESSAGES = [{"role": "user", "content": "hi"}]
PROXIES: dict[str, Callable[[int], ReverseProxy]] = {
    "nginx": Nginx,
    "nginx-strips-prefix": lambda port: Nginx(port, strips_prefix=True),
    "caddy": Caddy,
}


@pytest.fixture
async def fake() -> AsyncIterator[Fake]:
    async with Fake() as fake:
        yield fake


@pytest.fixture
async def gateway(fake: Fake, tmp_path: Path) -> AsyncIterator[Gateway]:
    bounds = {"max_body_bytes": 12_000_000, "body_memory_per_peer_bytes": 12_000_000}
    async with serving_demo(tmp_path, fake.url, server={**BEHIND_PROXY, **bounds}) as gateway:
        yield gateway


@pytest.fixture(params=PROXIES)
async def proxy(gateway: Gateway, request: pytest.FixtureRequest) -> AsyncIterator[ReverseProxy]:
    server = PROXIES[request.param](gateway.port)
    await asyncio.to_thread(server.__enter__)
    yield server
    server.remove()


@asynccontextmanager
async def client_of(
    proxy: ReverseProxy, address: str = "127.0.0.2"
) -> AsyncIterator[httpx.AsyncClient]:
    """Open a client of the proxy with an address of its own."""
    transport = httpx.AsyncHTTPTransport(verify=proxy.context, local_address=address)
    async with httpx.AsyncClient(
        base_url=f"{proxy.url}/", transport=transport, headers=AUTH, timeout=PATIENCE_S
    ) as client:
        yield client


async def test_chunks_arrive_as_the_engine_sends_them(proxy: ReverseProxy, fake: Fake) -> None:
    fake.fault, fake.pause_after = "write", 3
    body = {"model": "demo", "messages": MESSAGES, "stream": True}
    async with (
        client_of(proxy) as client,
        client.stream("POST", "v1/chat/completions", json=body) as response,
    ):
        assert response.headers["cache-control"] == "no-cache"
        events = 0
        async for line in response.aiter_lines():
            events += line.startswith("data: ")
            if events == 3:
                break  # the engine is silent, and its stream open
        assert fake.paused
    await wait_until(lambda: fake.aborted == 1)


async def test_body_of_10_mb_reaches_the_engine(proxy: ReverseProxy, fake: Fake) -> None:
    text = "x" * 10_000_000
    body = {"model": "demo", "messages": [{"role": "user", "content": text}]}
    async with client_of(proxy) as client:
        assert (await client.post("v1/chat/completions", json=body)).status_code == 200
    assert fake.seen[-1].json["messages"][0]["content"] == text


async def test_bounds_per_address_are_those_of_clients(proxy: ReverseProxy, fake: Fake) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": "x" * 7_000_000}]}
    spoofed = {"x-forwarded-for": "192.0.2.1", "forwarded": "for=192.0.2.1"}
    async with client_of(proxy) as client, client_of(proxy, "127.0.0.3") as other:
        held = asyncio.create_task(
            client.post("v1/chat/completions", json={**body, "fake": "hang"})
        )
        await fake.until_running()
        again = await client.post("v1/chat/completions", json=body, headers=spoofed)
        assert (again.status_code, again.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert (await other.post("v1/chat/completions", json=body)).status_code == 200
        held.cancel()


async def test_websocket_is_refused_with_426(proxy: ReverseProxy) -> None:
    upgrade = {
        "connection": "Upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    async with client_of(proxy) as client:
        assert (await client.get("v1/responses", headers=upgrade)).status_code == 426
        assert (await client.get("v1/models")).status_code == 200


async def test_session_cookie_is_for_https_and_the_prefix(proxy: ReverseProxy) -> None:
    async with client_of(proxy) as client:
        found = await client.get("console/overview")
        assert found.headers["location"] == f"{ROOT_PATH}/console/login?next=/console/overview"
        form = {"key": AUTH["authorization"].removeprefix("Bearer "), "next": "/console/account"}
        entered = await client.post(
            "console/login", data=form, headers={"sec-fetch-site": "same-origin"}
        )
    assert entered.headers["location"] == f"{ROOT_PATH}/console/account"
    cookie = entered.headers["set-cookie"].lower()
    assert f"; path={ROOT_PATH}/console;" in cookie
    assert "; secure" in cookie


@pytest.mark.parametrize(
    ("trusted", "seen"),
    [
        pytest.param(NginxChain.ADDRESSES, "127.0.0.9", id="all-are-trusted"),
        pytest.param(NginxChain.ADDRESSES[1:], "127.0.0.1", id="the-outermost-is-not"),
    ],
)
async def test_client_before_three_proxies_cannot_say_who_it_is(
    fake: Fake, tmp_path: Path, trusted: tuple[str, ...], seen: str
) -> None:
    server = {**BEHIND_PROXY, "trusted_proxies": list(trusted)}
    own_words = {
        "x-forwarded-for": "192.0.2.1, 127.0.0.1, 127.0.0.3",
        "x-forwarded-proto": "http",
        "x-forwarded-prefix": "/evil",
        "forwarded": "for=192.0.2.1",
    }
    async with serving_demo(tmp_path, fake.url, server=server) as gateway:
        proxy = NginxChain(gateway.port)
        await asyncio.to_thread(proxy.__enter__)
        try:
            async with client_of(proxy, "127.0.0.9") as client:
                client.headers.update(own_words)
                key = ROOT["authorization"].removeprefix("Bearer ")
                entered = await client.post(
                    "console/login", data={"key": key}, headers={"sec-fetch-site": "same-origin"}
                )
                assert entered.headers["location"] == f"{ROOT_PATH}/console"
                assert "; secure" in entered.headers["set-cookie"].lower()
                made = await client.post("admin/keys", json={"name": "new"}, headers=ROOT)
                assert made.status_code == 201, made.text
            audit = await gateway.client.get("/admin/audit", headers=ROOT)
            assert [one["address"] for one in audit.json()["data"]] == [seen] * 2
        finally:
            proxy.remove()
