"""Runs the script of the limits in Redis."""

import asyncio
import hashlib
from pathlib import Path

from redis.exceptions import NoScriptError

from app.deadline import deadline
from app.redis import RedisUnavailable
from app.redis.connection import FAULTS, RedisConnection

SCRIPT = Path(__file__).with_name("script.lua")


class ScriptConnection(RedisConnection):
    """A connection that runs the script, which it sends where Redis does not have it yet."""

    def __init__(self, url: str, timeout_s: float) -> None:
        super().__init__(url, timeout_s)
        self._source = SCRIPT.read_bytes()
        self._sha = hashlib.sha1(self._source, usedforsecurity=False).hexdigest()

    async def run(self, keys: list[bytes], argument: bytes, until: float) -> bytes:
        """Run the script and return its result; `until` is the deadline in the loop's time.

        Raises RedisUnavailable, after which the script may or may not have run.
        """
        arguments: tuple[bytes | int, ...] = (len(keys), *keys, argument)
        try:
            async with deadline(until):
                try:
                    answer: bytes = await self._execute("EVALSHA", self._sha, *arguments)
                except NoScriptError:
                    answer = await self._execute("EVAL", self._source, *arguments)
                return answer
        except FAULTS as error:
            raise RedisUnavailable(await self._fault(error)) from None

    async def probe(self, keys: list[bytes], argument: bytes) -> None:
        """Check that Redis answers and runs the script. Raises RedisUnavailable."""
        until = asyncio.get_running_loop().time() + self._timeout_s
        try:
            async with deadline(until):
                await self._execute("PING")
        except FAULTS as error:
            raise RedisUnavailable(await self._fault(error)) from None
        await self.run(keys, argument, until)
