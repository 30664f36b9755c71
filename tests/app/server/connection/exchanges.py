"""Handlers that serve the request of a real client, which may be slow."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from app.asgi import ClientExchange, ClientStalled
from app.relay.request_context import RequestContext
from app.request_body import Endpoint
from app.telemetry import RequestTimeline
from tests.app.bare import Bare, serving
from tests.app.raw import Answer, Client, request
from tests.gateway import until_tasks_end

PIECE = bytes(range(256)) * 256  # the high-water mark of a connection
OLD = request(version=b"1.0")

Handler = Callable[[ClientExchange], Awaitable[None]]


class Exchanged:
    """A server of one handler, and a client that has sent it one request."""

    def __init__(self, server: Bare, client: Client) -> None:
        self.server = server
        self.client = client

    def read_on(self) -> None:
        """Have a client read that has read nothing yet."""
        self.client.writer.transport.resume_reading()  # type: ignore[attr-defined]


@asynccontextmanager
async def exchanging(
    handler: Handler, payload: bytes | None = None, *, slow: bool = False
) -> AsyncIterator[Exchanged]:
    """ExchangeHandler a request that has been sent; raise what the handler raised.

    A slow client reads nothing before `read_on`.
    """
    raised: list[BaseException] = []

    async def serve(exchange: ClientExchange) -> None:
        try:
            await handler(exchange)
        except BaseException as error:  # noqa: BLE001 - raised again below
            raised.append(error)

    async with serving(serve) as server:
        async with server.connected() as client:
            if slow:
                client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            client.send(request() if payload is None else payload)
            yield Exchanged(server, client)
        await until_tasks_end(server.state)
    for error in raised:
        raise error


async def answered(handler: Handler, payload: bytes | None = None) -> Answer:
    """Return the response to one request."""
    async with exchanging(handler, payload) as served:
        return await served.client.answer()


async def fill(exchange: ClientExchange) -> bytes:
    """Push to a slow client until its connection is full; return what was pushed."""
    pushed = b""
    while exchange.writable:
        while exchange.writable:
            pushed += PIECE
            exchange.push(PIECE)
        await asyncio.sleep(0.01)  # the kernel may move on what one side of it holds
        with suppress(ClientStalled):
            exchange.stall_s, stall_s = 0.0, exchange.stall_s
            await exchange.flush()
        exchange.stall_s = stall_s
    return pushed


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


def in_flight(exchange: ClientExchange) -> RequestContext:
    """Return what the relay knows of a request of which there is only the exchange."""
    timeline = RequestTimeline(exchange.received_at)
    return RequestContext(exchange, Endpoint(exchange.path), timeline)
