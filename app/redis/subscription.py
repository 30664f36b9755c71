"""A subscription to one channel of Redis."""

import asyncio

from app.deadline import deadline
from app.redis.connection import FAULTS, RedisConnection, send
from app.redis.errors import RedisUnavailable


class Subscription(RedisConnection):
    """Reads the messages of one channel; those sent while it is not connected are lost."""

    def __init__(self, url: str, channel: bytes, silence_s: float) -> None:
        """`silence_s` is the longest time without a message on a channel that is never silent."""
        super().__init__(url, silence_s)
        self._channel = channel

    async def read(self) -> bytes:
        """Return the next message; connects on first use, and again after a fault.

        Raises RedisUnavailable, also after `silence_s` without a message. A message that is larger
        than Redis' bound for subscribers (32 MB by default) costs the connection.
        """
        try:
            async with deadline(asyncio.get_running_loop().time() + self._timeout_s):
                driver = self._driver
                if driver is None or not driver.is_connected:
                    driver = await self._connect()
                    await send(driver, (b"SUBSCRIBE", self._channel))
                while True:
                    match await driver.read_response(disable_decoding=True):
                        case [b"message", _, bytes(message)]:
                            return message
        except FAULTS as error:
            raise RedisUnavailable(await self._fault(error)) from None
