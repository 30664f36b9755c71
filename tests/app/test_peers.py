"""Connections are counted by the address of the peer, and the application learns that address."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from tests.app.bare import Bare, serving_app
from tests.app.raw import Client, answers, connected, request
from tests.fakes.vllm import Fake
from tests.gateway import serving_demo
from tests.waiting import PATIENCE_S, wait_until

GET = request(None, method=b"GET", path=b"/health", key=False)
NO_CONTENT = {"type": "http.response.start", "status": 204, "headers": []}


async def answer_nothing(scope: Scope, receive: Receive, send: Send) -> None:
    await send(NO_CONTENT)
    await send({"type": "http.response.body"})


async def is_served(client: Client) -> bool:
    client.send(GET)
    return (await client.answer()).status != 503


async def until_served(server: Bare, source: str) -> None:
    """Return when a connection from an address is served."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            async with server.connected(source) as client:
                if await is_served(client):
                    return


async def test_connection_over_the_limit_per_peer_is_503_and_other_peers_are_served() -> None:
    async with serving_app(answer_nothing, connections_per_peer=2) as server:
        async with server.connected("127.0.0.2") as one, server.connected("127.0.0.2") as two:
            assert await is_served(one)
            assert await is_served(two)
            for count in range(1, 4):  # lingering connections do not count
                async with server.connected("127.0.0.2") as third:
                    [answer] = await answers(await third.rest())
                assert (answer.status, answer.code) == (503, "too_many_connections")
                assert int(answer.headers["retry-after"]) > 0
                assert answer.headers["connection"] == "close"
                assert len(server.refused) == count
            async with server.connected("127.0.0.3") as other:
                assert await is_served(other)
            assert await is_served(one)
            assert len(server.connections) <= 3
        await until_served(server, "127.0.0.2")
        await wait_until(lambda: not len(server.peers))


async def test_ipv6_peer_is_counted_by_its_address() -> None:
    async with (
        serving_app(answer_nothing, "::1", connections_per_peer=1) as server,
        server.connected() as one,
        server.connected() as two,
    ):
        assert await is_served(one)
        assert not await is_served(two)


async def test_unix_socket_peer_has_no_connection_limit(tmp_path: Path) -> None:
    path = str(tmp_path / "sock")
    async with serving_app(answer_nothing, path, connections_per_peer=1) as server:
        async with server.connected() as one, server.connected() as two:
            assert await is_served(one)
            assert await is_served(two)
        assert len(server.peers) == 0


async def test_limit_per_peer_is_a_setting(fake: Fake, tmp_path: Path) -> None:
    server = {"max_connections_per_peer": 1}
    async with serving_demo(tmp_path, fake.url, server=server) as gateway:
        async with connected(gateway) as one, connected(gateway) as two:
            assert await is_served(one)
            assert not await is_served(two)
        labels = {"model": "unknown", "endpoint": "none", "status": "503"}
        assert await gateway.metric("gateway_requests_total", **labels) == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "unix"])
async def test_client_address_is_taken_from_the_socket_not_from_a_header(
    host: str, tmp_path: Path
) -> None:
    seen: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["client"])
        await answer_nothing(scope, receive, send)

    forwarded = (b"x-forwarded-for: 192.0.2.1", b"forwarded: for=192.0.2.1")
    payload = request(None, *forwarded, method=b"GET")
    where = str(tmp_path / "sock") if host == "unix" else host
    async with serving_app(app, where) as server, server.connected() as client:
        client.send(payload)
        await client.answer()
        ours = client.writer.get_extra_info("sockname")
    assert seen == [None if host == "unix" else (host, ours[1])]
