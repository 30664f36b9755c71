"""Commands over a connection that is lost."""

import asyncio
from typing import Any

import hiredis
import pytest

from app.redis import RedisUnavailable
from app.redis.connection import RedisConnection


async def test_message_is_not_published_twice() -> None:
    """The connection is lost after the command ran and before its reply."""
    published: list[Any] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        commands = hiredis.Reader()
        while data := await reader.read(4096):
            commands.feed(data)
            while (command := commands.gets()) is not False:
                if command[0] == b"PUBLISH":
                    published.append(command[2])
                    if command[2] == b"lost":
                        writer.close()
                        return
                    writer.write(b":1\r\n")
                else:
                    writer.write(b"+OK\r\n")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        connection = RedisConnection(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}", 5.0)
        await connection.publish(b"channel", b"one")
        with pytest.raises(RedisUnavailable):
            await connection.publish(b"channel", b"lost")
        await connection.publish(b"channel", b"two")
        await connection.close()
    assert published == [b"one", b"lost", b"two"]
