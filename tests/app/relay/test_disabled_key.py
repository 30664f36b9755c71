"""Disabling a key ends its requests, in every phase."""

import json
from contextlib import AsyncExitStack
from typing import Any, cast

import pytest

from app.relay.request_context import KEY_DISABLED
from app.server.connection import ClientConnection
from tests.app.raw import Client, asking, connected, request
from tests.fakes.vllm import Fake
from tests.gateway import ROOT, Gateway, demo_gateway
from tests.waiting import wait_until

PATHS = [b"/v1/chat/completions", b"/v1/messages", b"/v1/responses", b"/v1/completions"]
LARGE = 900_000  # of a body that is scanned as it comes


gateway = demo_gateway(model={"queue": {"max_in_flight": 1}})


class Victim:
    """A key of its own, and the requests that it makes."""

    def __init__(self, gateway: Gateway, made: dict[str, Any]) -> None:
        self._gateway = gateway
        self._id = made["id"]
        self._line = b"authorization: Bearer " + made["key"].encode()

    def request(self, path: bytes, **fields: Any) -> bytes:
        """Return the bytes of a request of this key."""
        body = asking(messages=[], input="hi", prompt="hi", **fields)
        return request(body, self._line, path=path, key=False)

    async def until_in_flight(self, count: int = 1) -> None:
        in_flight = self._gateway.state.in_flight
        await wait_until(lambda: len(in_flight.of_key(self._id)) >= count)

    async def cut_off(self) -> None:
        """Disable the key with its requests."""
        path = f"/admin/keys/{self._id}/disable?now=true"
        answer = await self._gateway.client.post(path, headers=ROOT)
        assert answer.status_code == 200


@pytest.fixture
async def victim(gateway: Gateway) -> Victim:
    made = await gateway.client.post("/admin/keys", json={"name": "victim"}, headers=ROOT)
    return Victim(gateway, made.json())


async def until_full(gateway: Gateway) -> None:
    """Return when a connection holds as much as it takes for a client that reads nothing."""
    connections = cast(set[ClientConnection], gateway.server.connections)
    await wait_until(lambda: any(one.flow.write_paused for one in connections))


async def is_refused(client: Client) -> None:
    answer = await client.answer()
    assert answer.status == 401
    assert KEY_DISABLED in answer.body.decode()


async def recorded(gateway: Gateway, path: bytes, status: int, model: str = "demo") -> float:
    labels = {"model": model, "endpoint": path.decode(), "status": str(status)}
    return await gateway.metric("gateway_requests_total", **labels)


@pytest.mark.parametrize("length", [1000, LARGE])
@pytest.mark.parametrize("chunked", [False, True])
async def test_disabled_key_while_its_body_is_read(
    gateway: Gateway, victim: Victim, length: int, chunked: bool
) -> None:
    path = PATHS[0]
    head, _, body = victim.request(path, filler="f" * length).partition(b"\r\n\r\n")
    if chunked:
        head = head[: head.rindex(b"\r\n")] + b"\r\ntransfer-encoding: chunked"
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    payload = head + b"\r\n\r\n" + body
    async with connected(gateway) as client:
        client.send(payload[:-200])
        await victim.until_in_flight()
        await victim.cut_off()
        await is_refused(client)
        client.send(payload[-200:])  # its connection is as good as ever
        client.send(request(None, method=b"GET", path=b"/v1/models"))
        assert (await client.answer()).status == 200
    assert await recorded(gateway, path, 401, "unknown") == 1


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_disabled_key_while_queued(
    gateway: Gateway, fake: Fake, victim: Victim, path: bytes, stream: bool
) -> None:
    async with connected(gateway) as other, connected(gateway) as client:
        other.send(request(asking(fake="hang")))
        await fake.until_running()
        client.send(victim.request(path, stream=stream))
        await wait_until(lambda: gateway.state.admission.waiting)
        await victim.cut_off()
        await is_refused(client)
    assert await recorded(gateway, path, 401) == 1
    assert sum(seen.method == "POST" for seen in fake.seen) == 1


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_disabled_key_during_prefill(
    gateway: Gateway, fake: Fake, victim: Victim, path: bytes, stream: bool
) -> None:
    async with connected(gateway) as client:
        client.send(victim.request(path, stream=stream, fake="hang"))
        await fake.until_running()
        await victim.cut_off()
        await is_refused(client)
        await fake.until_idle()  # the engine is idle
        client.send(request())
        assert (await client.answer()).status == 200
    assert await recorded(gateway, path, 401) == 1


@pytest.mark.parametrize("path", PATHS)
async def test_disabled_key_during_a_stream(
    gateway: Gateway, fake: Fake, victim: Victim, path: bytes
) -> None:
    async with connected(gateway) as client:
        client.send(victim.request(path, stream=True, fake="pace:2"))
        await client.until(b"data: ")
        await victim.cut_off()
        said = await client.chunked()
    last = json.loads(said.partition(b"\n\n\r\n0\r\n")[0].rpartition(b"data: ")[2])
    assert KEY_DISABLED in (last.get("response") or last)["error"]["message"]
    assert b"[DONE]" not in said, "the stream does not pass for whole"
    assert await recorded(gateway, path, 200) == 1


async def test_disabled_key_of_a_stalled_client(
    gateway: Gateway, fake: Fake, victim: Victim
) -> None:
    async with connected(gateway) as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.send(victim.request(PATHS[0], stream=True, fake="flood:32"))
        await until_full(gateway)
        await victim.cut_off()
        await fake.until_idle()
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert b"[DONE]" not in await client.chunked()


async def test_disconnect_while_the_error_is_sent_is_not_logged_as_a_failure(
    gateway: Gateway, fake: Fake, victim: Victim, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected(gateway) as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.send(victim.request(PATHS[0], stream=True, fake="flood:32"))
        await until_full(gateway)
        await victim.cut_off()
        await fake.until_idle()
        assert gateway.server.tasks, "the event that tells of it waits for the client"
    await wait_until(lambda: not gateway.server.tasks)
    assert [one.getMessage() for one in caplog.records if one.levelname == "ERROR"] == []


async def test_pipelined_request_of_a_disabled_key_is_refused_in_turn(
    gateway: Gateway, fake: Fake, victim: Victim
) -> None:
    async with connected(gateway) as client:
        client.send(victim.request(PATHS[0], fake="hang") + victim.request(PATHS[0]) + request())
        await fake.until_running()
        await victim.cut_off()
        await is_refused(client)
        assert (await client.answer()).status == 401
        assert (await client.answer()).status == 200
    assert sum(seen.method == "POST" for seen in fake.seen) == 2


async def test_requests_of_other_keys_continue(
    gateway: Gateway, fake: Fake, victim: Victim
) -> None:
    async with AsyncExitStack() as stack:
        other, *cut = [await stack.enter_async_context(connected(gateway)) for _ in range(4)]
        other.send(request(asking(stream=True, fake="pace:2")))
        await other.until(b"data: ")
        for client in cut:
            client.send(victim.request(PATHS[0]))
        await victim.until_in_flight(3)
        await victim.cut_off()
        for client in cut:
            await is_refused(client)
        for _ in range(3):
            await other.until(b"data: ")


@pytest.mark.parametrize("first", ["client", "key"])
async def test_disabled_key_at_the_moment_of_a_disconnect(
    gateway: Gateway, fake: Fake, victim: Victim, first: str
) -> None:
    async with connected(gateway) as client:
        client.send(victim.request(PATHS[0], fake="hang"))
        await fake.until_running()
        if first == "client":
            client.writer.transport.abort()
        await victim.cut_off()
    await fake.until_idle()
    await wait_until(lambda: not gateway.server.tasks)
    counted = [await recorded(gateway, PATHS[0], status) for status in (401, 499)]
    assert sum(counted) == 1
