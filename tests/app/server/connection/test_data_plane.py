"""Data plane requests from socket to socket: next to other pages, CORS, methods."""

import asyncio
import json
from pathlib import Path

import pytest

from app.asgi import ClientDisconnected, ClientExchange
from app.server.connection import protocol
from tests.app.bare import serving
from tests.app.raw import BODY, Answer, answers, asking, connected, request
from tests.fakes.vllm import Fake
from tests.gateway import Gateway, serving_demo, until_tasks_end
from tests.waiting import wait_until

CHUNKED = b"transfer-encoding: chunked"
PAGE = "https://chat.example"
OTHER = "https://evil.example"
CHAT = b"/v1/chat/completions"
STREAM = request(asking(stream=True, messages=[]), path=CHAT)
PLAIN = request(asking(messages=[]), path=CHAT)


def get(path: bytes, method: bytes = b"GET") -> bytes:
    return request(None, method=method, path=path)


def posts(fake: Fake) -> int:
    return sum(seen.method == "POST" for seen in fake.seen)


# Pipelining


def kind_of(answer: Answer) -> str:
    """Return which of the requests below was answered."""
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        assert answer.whole
        assert answer.body.endswith(b"data: [DONE]\n\n")
        return "stream"
    if answer.status == 204:
        return "options"
    content = json.loads(answer.body)
    if "error" in content:
        return str(content["error"]["code"])
    return "health" if "status" in content else str(content["object"])


MIXED = {
    "stream": STREAM,
    "health": get(b"/health"),
    "chat.completion": PLAIN,
    "list": get(b"/v1/models"),
    "not_found": get(b"/nope"),
    "method_not_allowed": get(CHAT),
    "model_not_found": request(asking(model="absent"), path=CHAT),
    "options": request(None, method=b"OPTIONS", path=CHAT),
    "invalid_api_key": request(BODY, key=False),
}


@pytest.mark.parametrize("order", [list(MIXED), list(reversed(MIXED))])
@pytest.mark.parametrize("piece", [7, 1_000_000])
async def test_pipelined_requests_of_both_kinds_are_answered_in_order(
    gateway: Gateway, order: list[str], piece: int
) -> None:
    payload = b"".join(MIXED[kind] for kind in order)
    async with connected(gateway) as client:
        for start in range(0, len(payload), piece):
            client.send(payload[start : start + piece])
            await asyncio.sleep(0)
        got = [kind_of(await client.answer()) for _ in order]
        assert got == order
        client.send(get(b"/health"))
        assert kind_of(await client.answer()) == "health"


async def test_pipelined_pages_wait_for_the_end_of_a_stream(gateway: Gateway, fake: Fake) -> None:
    slow = request(asking(stream=True, messages=[], fake="tokens:20:1"), path=CHAT)
    async with connected(gateway) as client:
        client.send(slow + get(b"/health") + slow + get(b"/v1/models") + PLAIN)
        got = [kind_of(await client.answer()) for _ in range(5)]
    assert got == ["stream", "health", "stream", "list", "chat.completion"]
    assert posts(fake) == 3


async def test_second_request_is_not_begun_before_the_first_is_answered(
    gateway: Gateway, fake: Fake
) -> None:
    async with connected(gateway) as client:
        client.send(request(asking(stream=True, fake="pace:5"), path=CHAT) + PLAIN * 3)
        await client.until(b"data: ")
        await client.until(b"data: ")
        assert posts(fake) == 1
    await until_tasks_end(gateway.server)
    assert posts(fake) == 1


async def test_disconnect_drops_pipelined_requests(gateway: Gateway, fake: Fake) -> None:
    async with connected(gateway) as client:
        client.send(request(asking(fake="hang"), path=CHAT) + get(b"/v1/models") + PLAIN)
        await fake.until_running()
    await until_tasks_end(gateway.server)
    await fake.until_idle()
    assert posts(fake) == 1


# Heads that repeat


@pytest.mark.parametrize("body", [BODY, b" " * 3 * protocol.SLICE], ids=["small", "in slices"])
async def test_facts_are_shared_by_requests_with_the_same_head_only(body: bytes) -> None:
    """Whatever order the keys come in: no request gets what was read from another one's headers."""
    keys = [b"a", b"a", b"a", b"a", b"b", b"a", b"b", b"b", b"b", b"a", b"a"]
    shared = 0

    async def handler(exchange: ClientExchange) -> None:
        nonlocal shared
        key = exchange.header(b"x-api-key")
        shared += exchange.facts.key_digest is not None
        assert exchange.facts.key_digest in (None, key)
        exchange.facts.key_digest = key
        await exchange.send_response(200, [], key)

    async with serving(handler) as server, server.connected() as client:
        for key in keys:
            client.send(request(body, b"x-api-key: " + key, key=False))
            assert (await client.answer()).body == key
    assert shared


# Bodies that are refused


@pytest.mark.parametrize(
    "behind", [b"nonsense\r\n\r\n", request(None, CHUNKED) + b"zz\r\n", request(None, b": x")]
)
async def test_fault_behind_a_stream_leaves_the_stream_whole_and_ends_the_connection(
    gateway: Gateway, fake: Fake, behind: bytes
) -> None:
    async with connected(gateway) as client:
        client.send(request(asking(stream=True, messages=[], fake="tokens:20:1"), path=CHAT))
        await client.until(b"data: ")
        client.send(behind)
        assert (await client.rest()).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert posts(fake) == 1


@pytest.mark.parametrize("length", [None, b"1000"])
async def test_body_that_breaks_behind_a_started_response_ends_it(length: bytes | None) -> None:
    faults: list[object] = []
    started = asyncio.Event()

    async def handler(exchange: ClientExchange) -> None:
        await exchange.start_response(200, [])
        exchange.push(b"one")
        started.set()
        try:
            while await exchange.read_body():
                pass
        except asyncio.CancelledError:
            faults.append(exchange.take_fault())

    framing = CHUNKED if length is None else b"content-length: " + length
    async with serving(handler, body_timeout_s=0.05) as server, server.connected() as client:
        client.send(request(None, framing))
        await started.wait()
        client.send(b"zz\r\n" if length is None else b"he")
        said = await client.rest()
        await until_tasks_end(server.state)
    assert said.count(b"HTTP/1.1") == 1
    assert not said.endswith(b"0\r\n\r\n")
    assert [type(fault) for fault in faults] == [ClientDisconnected]


async def test_body_that_breaks_behind_another_request_is_refused_and_never_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(protocol, "MAX_PIPELINED_BYTES", 2048)
    begun: list[ClientExchange] = []
    may_answer = asyncio.Event()

    async def handler(exchange: ClientExchange) -> None:
        begun.append(exchange)
        await may_answer.wait()
        await exchange.send_response(200, [], b"one")

    chunk = b"1000\r\n" + b"x" * 4096 + b"\r\n"
    broken = request(None, CHUNKED) + chunk * 2 + b"no chunk\r\n"
    async with serving(handler) as server, server.connected() as client:
        client.send(request() + broken)
        await wait_until(lambda: any(connection.flow.unparsed for connection in server.connections))
        may_answer.set()
        assert (await client.answer()).body == b"one"
        assert (await client.answer()).status == 400
        await asyncio.sleep(0)
        assert len(begun) == 1
        assert [error.status for error in server.refused] == [400]


async def test_body_that_breaks_is_refused_once_and_recorded_so(
    gateway: Gateway, fake: Fake
) -> None:
    payload = request(None, CHUNKED, path=CHAT) + b"5\r\n{    \r\nzz\r\n"
    [answer] = await answers(await gateway.raw(payload))
    assert (answer.status, answer.code) == (400, "invalid_request")
    await until_tasks_end(gateway.server)
    labels = {"model": "unknown", "endpoint": CHAT.decode()}
    assert await gateway.metric("gateway_requests_total", **labels, status="400") == 1
    assert await gateway.metric("gateway_requests_total", **labels, status="499") == 0
    assert await gateway.metric("gateway_client_disconnects_total") == 0
    assert posts(fake) == 0


# Pages of other origins

ASKED = {
    "plain": (PLAIN, 200),
    "stream": (STREAM, 200),
    "error before the head": (request(asking(model="absent"), path=CHAT), 404),
    "error of the engine": (request(asking(fake="status:404"), path=CHAT), 404),
    "engine that fails": (request(asking(fake="close"), path=CHAT), 502),
    "stream that breaks": (request(asking(stream=True, fake="die:1"), path=CHAT), 200),
    "no key": (request(BODY, key=False), 401),
    "no JSON": (request(b"{", path=CHAT), 400),
    "another method": (get(CHAT), 405),
    "which methods": (request(None, method=b"OPTIONS", path=CHAT, key=False), 204),
    "HTTP/1.0": (request(asking(stream=True), path=CHAT, version=b"1.0"), 200),
}


def from_origin(payload: bytes, origin: str | None) -> bytes:
    """Return a request as a page of an origin makes it."""
    line = b"" if origin is None else b"Origin: %b\r\n" % origin.encode()
    # A page has to name JSON; for that a browser asks first.
    line += b"content-type: application/json\r\n"
    return payload.replace(b"host: x\r\n", b"host: x\r\n" + line, 1)


@pytest.mark.parametrize("asked", ASKED)
async def test_page_of_an_allowed_origin_alone_may_read_every_response(
    fake: Fake, tmp_path: Path, asked: str
) -> None:
    payload, status = ASKED[asked]
    async with serving_demo(tmp_path, fake.url, server={"cors_origins": (PAGE,)}) as gateway:
        got: dict[str | None, Answer] = {}
        for origin in (PAGE, OTHER, None):
            async with connected(gateway) as client:
                client.send(from_origin(payload, origin))
                got[origin] = await client.answer()
    assert [answer.status for answer in got.values()] == [status] * 3
    allowed = [answer.headers.get("access-control-allow-origin") for answer in got.values()]
    assert allowed == [PAGE, None, None]
    assert "x-request-id" in got[PAGE].headers["access-control-expose-headers"].lower()
    assert all(answer.headers["vary"].lower() == "origin" for answer in got.values())
    assert all("access-control-allow-credentials" not in one.headers for one in got.values())


@pytest.mark.parametrize("asked", ["plain", "stream", "no key"])
async def test_page_of_any_origin_may_read_responses_where_all_are_allowed(
    fake: Fake, tmp_path: Path, asked: str
) -> None:
    payload, status = ASKED[asked]
    async with (
        serving_demo(tmp_path, fake.url, server={"cors_origins": ("*",)}) as gateway,
        connected(gateway) as client,
    ):
        client.send(from_origin(payload, OTHER))
        answer = await client.answer()
    assert answer.status == status
    assert answer.headers["access-control-allow-origin"] == "*"


async def test_preflight_is_answered_without_the_relay(fake: Fake, tmp_path: Path) -> None:
    lines = (b"origin: " + PAGE.encode(), b"access-control-request-method: POST")
    preflight = request(None, *lines, method=b"OPTIONS", path=CHAT, key=False)
    async with serving_demo(tmp_path, fake.url, server={"cors_origins": (PAGE,)}) as gateway:
        async with connected(gateway) as client:
            client.send(preflight + from_origin(PLAIN, PAGE))
            first, second = [await client.answer() for _ in range(2)]
        labels = {"model": "unknown", "endpoint": CHAT.decode()}
        assert await gateway.metric("gateway_requests_total", **labels, status="204") == 0
    assert first.status == second.status == 200
    for answer in (first, second):
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "origin" in answer.headers["vary"].lower()
    assert first.headers["access-control-allow-methods"] == "GET, POST"


async def test_preflight_is_a_question_for_methods_where_no_origin_is_configured(
    gateway: Gateway,
) -> None:
    lines = (b"origin: " + PAGE.encode(), b"access-control-request-method: POST")
    async with connected(gateway) as client:
        client.send(request(None, *lines, method=b"OPTIONS", path=CHAT, key=False))
        answer = await client.answer()
    assert (answer.status, answer.headers["allow"]) == (204, "POST, OPTIONS")
    assert not [name for name in answer.headers if name.startswith(("access-control", "vary"))]


# Methods and versions


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        (CHAT, "POST"),
        (b"/tokenize", "POST"),
        (b"/v1/responses/resp_1", "GET"),
        (b"/v1/responses/resp_1/cancel", "POST"),
    ],
)
async def test_options_lists_the_methods_and_others_are_405(
    gateway: Gateway, fake: Fake, path: bytes, allowed: str
) -> None:
    async with connected(gateway) as client:
        client.send(get(path, b"HEAD"))
        head = await client.answer(head_only=True)
        client.send(get(path, b"DELETE"))
        deleted = await client.answer()
        client.send(get(path, b"OPTIONS"))
        options = await client.answer()
    assert (head.status, deleted.status, options.status) == (405, 405, 204)
    assert head.headers["allow"] == deleted.headers["allow"] == allowed
    assert options.headers["allow"] == f"{allowed}, OPTIONS"
    assert deleted.code == "method_not_allowed"
    assert "content-length" not in options.headers
    assert fake.seen == [] or all(seen.method == "GET" for seen in fake.seen)


@pytest.mark.parametrize("connection", [b"keep-alive", b"close"])
@pytest.mark.parametrize("stream", [False, True])
async def test_http_1_0_is_answered_without_chunks_and_closed(
    gateway: Gateway, stream: bool, connection: bytes
) -> None:
    payload = request(
        asking(stream=stream, messages=[]),
        b"connection: " + connection,
        path=CHAT,
        version=b"1.0",
    )
    async with connected(gateway) as client:
        client.send(payload)
        answer = await client.answer()
        assert await client.rest() == b""
    assert answer.status == 200
    assert "transfer-encoding" not in answer.headers
    assert ("content-length" in answer.headers) == (not stream)
    assert answer.headers["connection"] == "close"
    assert answer.body.endswith(b"data: [DONE]\n\n" if stream else b"}")


# Targets

TARGETS = {
    b"/v1/chat/completions?a=b": 200,
    b"/v1/chat/completions#fragment": 200,
    b"/v1/chat%2Fcompletions": 200,
    b"/v1/chat%2fcompletion%73?a=%2F": 200,
    b"http://other.example/v1/chat/completions": 200,
    b"/v1/chat/completions/": 404,
    b"//v1/chat/completions": 404,
    b"/v1/../v1/chat/completions": 404,
    b"/v1/CHAT/completions": 404,
    b"/v1/chat/completions%00": 404,
    b"/v1/chat/completions%3Fa=b": 404,
    b"/v1/chat/completions%zz": 404,
    b"/v1/responses/a%2Fb": 404,
    b"/v1/responses/a%0Ab": 404,
    b"/v1/responses/resp%5f1": 405,
    b"*": 404,
    b"http://other.example": 400,
    b"v1/chat/completions": 400,
    b"/v1/chat/completions\xff": 400,
}


@pytest.mark.parametrize("target", TARGETS, ids=repr)
async def test_path_is_compared_unquoted_and_exactly(
    gateway: Gateway, fake: Fake, target: bytes
) -> None:
    async with connected(gateway) as client:
        client.send(request(asking(messages=[]), path=target))
        answer = await client.answer()
    assert answer.status == TARGETS[target]
    asked = [seen.target.partition("?")[0] for seen in fake.seen if seen.method == "POST"]
    assert asked == ([CHAT.decode()] if answer.status == 200 else [])
