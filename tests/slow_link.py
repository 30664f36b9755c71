"""A TCP connection to PostgreSQL whose answers are late, as across a slow network."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass


@dataclass
class SlowLink:
    """Where it listens, and how late each piece of an answer is."""

    port: int
    delay_s: float = 0.0

    def url(self, database: str) -> str:
        """Return the gateway's URL for a database behind it."""
        return f"postgresql+asyncpg://postgres@127.0.0.1:{self.port}/{database}"


@contextlib.asynccontextmanager
async def slow_link(port: int) -> AsyncIterator[SlowLink]:
    """Pass connections on to a port of this machine."""
    link = SlowLink(0)

    connections: set[asyncio.Task[None]] = set()

    async def copy(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, late: bool
    ) -> None:
        try:
            while data := await reader.read(65536):
                await asyncio.sleep(link.delay_s if late else 0)
                writer.write(data)
                await writer.drain()
        except OSError:  # the other side is gone
            pass
        finally:
            writer.transport.abort()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(
            copy(reader, server_writer, late=False), copy(server_reader, writer, late=True)
        )

    def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.add(asyncio.create_task(pass_on(reader, writer)))

    async with await asyncio.start_server(connect, "127.0.0.1", 0) as server:
        link.port = server.sockets[0].getsockname()[1]
        yield link
    for connection in connections:
        connection.cancel()
    await asyncio.gather(*connections, return_exceptions=True)
