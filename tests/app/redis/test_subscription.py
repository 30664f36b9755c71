"""A subscription to a channel of a real Redis, and its faults."""

import asyncio
import secrets
from collections.abc import AsyncIterator

import pytest

from app.redis import RedisUnavailable
from app.redis.connection import RedisConnection
from app.redis.subscription import Subscription
from tests.gateway import free_port
from tests.services import RedisServer
from tests.waiting import wait_until

pytestmark = [pytest.mark.services, pytest.mark.slow]


@pytest.fixture
def channel() -> bytes:
    return secrets.token_hex(8).encode()


@pytest.fixture
async def publisher(redis_server: RedisServer) -> AsyncIterator[RedisConnection]:
    connection = RedisConnection(redis_server.url, 5.0)
    yield connection
    await connection.close()


async def repeat(publisher: RedisConnection, channel: bytes, message: bytes) -> None:
    while True:
        await publisher.publish(channel, message)
        await asyncio.sleep(0.01)


async def test_messages_arrive_in_their_order(
    redis_server: RedisServer, publisher: RedisConnection, channel: bytes
) -> None:
    subscription = Subscription(redis_server.url, channel, 10.0)
    sender = asyncio.create_task(repeat(publisher, channel, b"first"))
    assert await subscription.read() == b"first"
    sender.cancel()
    await asyncio.wait({sender})
    for message in (b"", b"\x00\xff\r\n", b"x" * 1_000_000):
        await publisher.publish(channel, message)
    await publisher.publish(b"other" + channel, b"not for this one")
    await publisher.publish(channel, b"end")
    seen = [await subscription.read()]
    while seen[-1] != b"end":
        seen.append(await subscription.read())
    await subscription.close()
    assert [one for one in seen if one != b"first"] == [
        b"",
        b"\x00\xff\r\n",
        b"x" * 1_000_000,
        b"end",
    ]


async def test_silence_is_a_fault(redis_server: RedisServer, channel: bytes) -> None:
    subscription = Subscription(redis_server.url, channel, 0.05)
    with pytest.raises(RedisUnavailable, match=r"no answer within 0\.05 s"):
        await subscription.read()


async def test_it_subscribes_again_after_a_restart_of_redis(
    own_redis: RedisServer, channel: bytes
) -> None:
    subscription = Subscription(own_redis.url, channel, 10.0)
    reading = asyncio.create_task(subscription.read())
    publisher = RedisConnection(own_redis.url, 5.0)
    sender = asyncio.create_task(repeat(publisher, channel, b"before"))
    assert await reading == b"before"
    sender.cancel()
    await asyncio.wait({sender})
    await asyncio.to_thread(own_redis.stop)

    async def drain() -> None:
        while True:
            await subscription.read()

    with pytest.raises(RedisUnavailable):
        await drain()
    with pytest.raises(RedisUnavailable):
        await publisher.publish(channel, b"lost")
    await asyncio.to_thread(own_redis.start)
    sender = asyncio.create_task(repeat(publisher, channel, b"after"))
    reading = asyncio.create_task(subscription.read())
    await wait_until(reading.done)
    assert await reading == b"after"
    sender.cancel()
    await asyncio.wait({sender})
    await subscription.close()
    await publisher.close()


async def test_errors_have_no_password(channel: bytes) -> None:
    url = f"redis://:hunter2@127.0.0.1:{free_port()}/0"
    subscription = Subscription(url, channel, 1.0)
    assert "hunter2" not in repr(subscription)
    with pytest.raises(RedisUnavailable) as caught:
        await subscription.read()
    assert "hunter2" not in str(caught.value)
    with pytest.raises(RedisUnavailable) as caught:
        await RedisConnection(url, 1.0).publish(channel, b"x")
    assert "hunter2" not in str(caught.value)
