"""Requests to a real ASGI application in this process, on Starlette, with streams."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from engines.base import (
    EngineDied,
    EngineDrained,
    EngineNotReady,
    EngineProtocolError,
    EngineRequest,
    FirstByteTimeout,
    StallTimeout,
)
from engines.http.response import HIGH_WATER
from engines.inprocess import bridge as bridge_module
from engines.inprocess.bridge import App, Bridge, Message, Receive, Send
from engines.spec import Timeouts
from tests.engines.processes import read


class Server:
    """An application whose streams the test feeds, and the requests that it received."""

    def __init__(self) -> None:
        self.chunks: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.sent = 0
        self.entered = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.dead = False
        routes = [
            Route("/echo", self.echo, methods=["GET", "POST"]),
            Route("/stream", self.stream, methods=["POST"]),
            Route("/flood", self.flood, methods=["POST"]),
            Route("/hang", self.hang, methods=["POST"]),
            Route("/raise", self.fault, methods=["POST"]),
            Route("/raise-later", self.fault_later, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes)

    async def echo(self, request: Request) -> Response:
        body = await request.body()
        return JSONResponse(
            {
                "method": request.method,
                "path": request.url.path,
                "query": request.url.query,
                "headers": dict(request.headers),
                "body": body.decode(),
            },
            headers={"X-Seen": "yes"},
        )

    async def stream(self, _: Request) -> Response:
        async def chunks() -> AsyncIterator[bytes]:
            try:
                while (chunk := await self.chunks.get()) is not None:
                    yield chunk
            except asyncio.CancelledError:
                self.cancelled.set()
                raise

        return StreamingResponse(chunks(), media_type="text/event-stream")

    async def flood(self, _: Request) -> Response:
        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(64):
                self.sent += 1
                yield b"x" * 16384

        return StreamingResponse(chunks())

    async def hang(self, _: Request) -> Response:
        self.entered.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return PlainTextResponse("never")

    async def fault(self, _: Request) -> Response:
        raise LookupError("a fault of the application")

    async def fault_later(self, _: Request) -> Response:
        async def chunks() -> AsyncIterator[bytes]:
            yield b"one"
            raise LookupError("a fault of the application")

        return StreamingResponse(chunks())


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the time that an application has to clean up."""
    monkeypatch.setattr(bridge_module, "DISCONNECT_S", 0.01)


@pytest.fixture
def server() -> Server:
    return Server()


@asynccontextmanager
async def bridged(
    app: App, dead: Callable[[], bool] = lambda: False, **timeouts: float
) -> AsyncIterator[Bridge]:
    """A bridge to the application; no task of it is left at the end."""
    bridge = Bridge("engine e", app, Timeouts(**timeouts), dead)
    try:
        yield bridge
    finally:
        await bridge.close()
        assert "engine request" not in {task.get_name() for task in asyncio.all_tasks()}


@pytest.fixture
async def bridge(server: Server) -> AsyncIterator[Bridge]:
    async with bridged(server.app, lambda: server.dead) as one:
        yield one


def post(target: str, body: bytes = b"{}") -> EngineRequest:
    return EngineRequest("POST", target, ((b"content-type", b"application/json"),), body)


async def test_request_and_response_are_complete(bridge: Bridge) -> None:
    response = await bridge.send(post("/echo?a=1&b=%2F", b'{"x":"\xc3\xa9"}'))
    assert response.status == 200
    assert dict(response.headers)[b"x-seen"] == b"yes"
    seen = json.loads(await read(response))
    assert (seen["method"], seen["path"], seen["query"]) == ("POST", "/echo", "a=1&b=%2F")
    assert seen["headers"]["content-length"] == "10"
    assert seen["headers"]["content-type"] == "application/json"
    assert seen["headers"]["host"] == "engine"
    assert seen["body"] == '{"x":"é"}'
    assert response.ended
    assert await response.read() == b""
    assert bridge.in_flight == 0


async def test_get_has_no_body_and_an_unknown_path_is_a_404(bridge: Bridge) -> None:
    seen = json.loads(await read(await bridge.send(EngineRequest("GET", "/echo", (), b""))))
    assert seen["body"] == ""
    assert "content-length" not in seen["headers"]
    assert (await bridge.send(EngineRequest("GET", "/nowhere", (), b""))).status == 404


async def test_stream_is_read_as_it_is_sent(bridge: Bridge, server: Server) -> None:
    response = await bridge.send(post("/stream"))
    assert dict(response.headers)[b"content-type"] == b"text/event-stream; charset=utf-8"
    for chunk in (b"one", b"two"):
        server.chunks.put_nowait(chunk)
        assert await response.read() == chunk
        assert not response.ended
    server.chunks.put_nowait(None)
    assert await response.read() == b""
    assert response.ended


async def test_read_coalesces_chunks(bridge: Bridge, server: Server) -> None:
    for chunk in (b"one", b"two", None):
        server.chunks.put_nowait(chunk)
    response = await bridge.send(post("/stream"))
    await bridge.quiet()
    assert await response.read() == b"onetwo"
    assert response.ended


async def test_pump_runs_the_sink_inside_the_applications_send() -> None:
    """The sink runs in the task that sends."""
    tasks: list[asyncio.Task[object] | None] = []
    taken: list[bytes] = []

    def sink(data: bytes, last: bool) -> bool:
        tasks.append(asyncio.current_task())
        taken.append(data)
        return True

    async def app(_scope: Message, _receive: Receive, send: Send) -> None:
        tasks.append(asyncio.current_task())
        await send({"type": "http.response.start", "status": 200})
        await asyncio.sleep(0)
        for chunk in (b"a", b"b"):
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"c"})

    async with bridged(app) as bridge:
        response = await bridge.send(post("/"))
        assert await response.pump(sink)
    assert taken == [b"a", b"b", b"c"]
    assert len(set(tasks)) == 1


async def test_ended_is_true_while_the_sink_gets_the_last_bytes() -> None:
    ended: list[bool] = []

    async def app(_scope: Message, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200})
        await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        await send({"type": "http.response.body", "body": b"b"})

    async with bridged(app) as bridge:
        response = await bridge.send(post("/"))

        def sink(_: bytes, last: bool) -> bool:
            ended.append(response.ended)
            return True

        assert await response.pump(sink)
    assert ended == [False, True]


async def test_separate_final_message_ends_the_pump(bridge: Bridge, server: Server) -> None:
    response = await bridge.send(post("/stream"))
    taken: list[bytes] = []

    def sink(data: bytes, last: bool) -> bool:
        taken.append(data)
        server.chunks.put_nowait(None)
        return True

    server.chunks.put_nowait(b"one")
    assert await response.pump(sink)
    assert taken == [b"one"]
    assert response.ended


async def test_sink_that_takes_no_more_leaves_the_rest(bridge: Bridge, server: Server) -> None:
    response = await bridge.send(post("/stream"))
    server.chunks.put_nowait(b"one")
    assert not await response.pump(lambda _, last: False)
    for chunk in (b"two", None):
        server.chunks.put_nowait(chunk)
    assert await read(response) == b"two"


async def test_exception_of_the_sink_reaches_the_caller(bridge: Bridge, server: Server) -> None:
    response = await bridge.send(post("/stream"))

    def sink(_: bytes, last: bool) -> bool:
        raise ZeroDivisionError

    server.chunks.put_nowait(b"one")
    with pytest.raises(ZeroDivisionError):
        await response.pump(sink)
    response.close()
    await server.cancelled.wait()


async def test_close_disconnects_the_application(bridge: Bridge, server: Server) -> None:
    response = await bridge.send(post("/stream"))
    server.chunks.put_nowait(b"one")
    assert await response.read() == b"one"
    response.close()
    assert bridge.in_flight == 0
    await server.cancelled.wait()
    response.close()  # a second time: no effect


async def test_interrupt_disconnects_the_application(bridge: Bridge, server: Server) -> None:
    response = await bridge.send(post("/stream"))
    server.chunks.put_nowait(b"one")
    taken: list[bytes] = []

    def sink(data: bytes, last: bool) -> bool:
        taken.append(data)
        return True

    pumping = asyncio.create_task(response.pump(sink))
    while not taken:
        await asyncio.sleep(0)
    response.interrupt(EngineDrained("engine e is drained"))
    assert bridge.in_flight == 0
    with pytest.raises(EngineDrained, match="engine e is drained"):
        await pumping
    await server.cancelled.wait()
    assert taken == [b"one"]


async def test_interrupt_by_the_sink_ends_the_application(bridge: Bridge, server: Server) -> None:
    response = await bridge.send(post("/stream"))

    def sink(_: bytes, last: bool) -> bool:
        response.interrupt(EngineDrained("engine e is drained"))
        return True

    server.chunks.put_nowait(b"one")
    with pytest.raises(EngineDrained):
        await response.pump(sink)
    await server.cancelled.wait()


async def test_interrupt_releases_an_application_under_backpressure(
    bridge: Bridge, server: Server
) -> None:
    response = await bridge.send(post("/flood"))
    while server.sent * 16384 <= HIGH_WATER:
        await asyncio.sleep(0)
    response.interrupt(EngineDrained("engine e is drained"))
    await bridge.quiet()
    assert len(await response.read()) > HIGH_WATER - 16384
    with pytest.raises(EngineDrained):
        await response.read()


async def test_canceled_send_aborts_generation(bridge: Bridge, server: Server) -> None:
    sending = asyncio.create_task(bridge.send(post("/hang")))
    await server.entered.wait()
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    assert bridge.in_flight == 0


async def test_application_gets_a_disconnect_before_it_is_canceled() -> None:
    heard: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

    async def app(_scope: Message, receive: Receive, send: Send) -> None:
        assert (await receive())["type"] == "http.request"
        await send({"type": "http.response.start", "status": 200})
        heard.set_result(await receive())
        # Sending after the disconnect is no error, as with a server.
        await send({"type": "http.response.body", "body": b"late"})

    async with bridged(app) as bridge:
        (await bridge.send(post("/"))).close()
        assert await heard == {"type": "http.disconnect"}


async def test_application_that_ignores_the_disconnect_is_canceled(server: Server) -> None:
    async with bridged(server.app) as bridge:
        sending = asyncio.create_task(bridge.send(post("/hang")))
        await server.entered.wait()
        sending.cancel()
        await server.cancelled.wait()


async def test_slow_reader_applies_backpressure(bridge: Bridge, server: Server) -> None:
    response = await bridge.send(post("/flood"))
    before = -1
    while server.sent != before:
        before = server.sent
        await asyncio.sleep(0.01)
    bound = HIGH_WATER // 16384 + 2
    assert server.sent <= bound
    assert len(await read(response)) == 64 * 16384


async def test_close_releases_an_application_under_backpressure(
    bridge: Bridge, server: Server
) -> None:
    response = await bridge.send(post("/flood"))
    while server.sent * 16384 <= HIGH_WATER:
        await asyncio.sleep(0)
    response.close()
    await bridge.quiet()
    assert bridge.in_flight == 0


async def test_exception_before_the_head_is_the_applications_500(bridge: Bridge) -> None:
    """Starlette responds with 500 and raises; a client of uvicorn sees the response only."""
    response = await bridge.send(post("/raise"))
    assert response.status == 500
    assert await read(response) == b"Internal Server Error"


async def test_exception_before_any_message_is_engine_died() -> None:
    async def app(_scope: Message, _receive: Receive, _send: Send) -> None:
        raise LookupError("a fault of the application")

    async with bridged(app) as bridge:
        with pytest.raises(EngineDied, match="engine e failed: LookupError"):
            await bridge.send(post("/"))
        assert bridge.in_flight == 0


async def test_exception_after_the_head_is_engine_died_after_the_data(bridge: Bridge) -> None:
    response = await bridge.send(post("/raise-later"))
    assert await response.read() == b"one"
    with pytest.raises(EngineDied):
        await response.read()
    assert not response.ended


@pytest.mark.parametrize("head", [False, True])
async def test_early_return_of_the_application_is_engine_died(head: bool) -> None:
    async def app(_scope: Message, _receive: Receive, send: Send) -> None:
        if head:
            await send({"type": "http.response.start", "status": 200})

    async with bridged(app) as bridge:
        with pytest.raises(EngineDied, match="ended in the middle of a response"):
            await read(await bridge.send(post("/")))


@pytest.mark.parametrize("kind", ["http.response.body", "http.response.trailers"])
async def test_message_out_of_turn_is_a_protocol_error(kind: str) -> None:
    async def app(_scope: Message, _receive: Receive, send: Send) -> None:
        await send({"type": kind, "body": b"x"})

    async with bridged(app) as bridge:
        with pytest.raises(EngineProtocolError, match=f"sent {kind} out of turn"):
            await bridge.send(post("/"))


@pytest.mark.parametrize("status", [0, 99, 103, 199, 600, 999])
async def test_invalid_status_is_a_protocol_error(status: int) -> None:
    async def app(_scope: Message, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": status})

    async with bridged(app) as bridge:
        with pytest.raises(EngineProtocolError, match=f"sent the status {status}"):
            await bridge.send(post("/"))
        assert bridge.in_flight == 0


async def test_message_of_a_dead_engine_is_engine_died(bridge: Bridge, server: Server) -> None:
    response = await bridge.send(post("/stream"))
    server.chunks.put_nowait(b"one")
    assert await response.read() == b"one"
    server.dead = True
    server.chunks.put_nowait(b'data: {"error": "EngineCore encountered an issue"}\n\n')
    with pytest.raises(EngineDied, match="engine e died"):
        await response.read()
    with pytest.raises(EngineNotReady):
        await bridge.send(post("/echo"))


async def test_silence_before_the_head_is_a_first_byte_timeout(server: Server) -> None:
    async with bridged(server.app, first_byte_s=0.01) as bridge:
        with pytest.raises(FirstByteTimeout, match=r"engine e did not respond in 0\.01 s"):
            await bridge.send(post("/hang"))
        assert bridge.in_flight == 0


async def test_silence_in_a_stream_is_a_stall(server: Server) -> None:
    async with bridged(server.app, stall_s=0.01) as bridge:
        response = await bridge.send(post("/stream"))
        server.chunks.put_nowait(b"one")
        assert await response.read() == b"one"
        with pytest.raises(StallTimeout, match=r"engine e sent nothing for 0\.01 s"):
            await response.read()
        await server.cancelled.wait()


async def test_closed_bridge_fails_all_requests_and_refuses_new_ones(server: Server) -> None:
    async with bridged(server.app) as bridge:
        streams = [await bridge.send(post("/stream")) for _ in range(3)]
        hanging = asyncio.create_task(bridge.send(post("/hang")))
        await server.entered.wait()
        assert bridge.in_flight == 4
        quiet = asyncio.create_task(bridge.quiet())
        await bridge.close()
        await quiet
        for response in streams:
            with pytest.raises(EngineDied, match="engine e has ended"):
                await response.read()
        with pytest.raises(EngineDied):
            await hanging
        with pytest.raises(EngineNotReady):
            await bridge.send(post("/echo"))


async def test_close_cancels_applications_that_run_after_their_response() -> None:
    cancelled = asyncio.Event()

    async def app(_scope: Message, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"whole"})
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async with bridged(app) as bridge:
        assert await read(await bridge.send(post("/"))) == b"whole"
        assert bridge.in_flight == 0
    assert cancelled.is_set()


async def test_concurrent_responses_do_not_mix(bridge: Bridge) -> None:
    async def one(number: int) -> int:
        response = await bridge.send(post("/echo", b"%d" % number))
        return int(json.loads(await read(response))["body"])

    assert await asyncio.gather(*map(one, range(50))) == list(range(50))
