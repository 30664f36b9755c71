"""One connection to Redis, and one error for everything that fails on it.

redis-py's connection without its client: no pool, no retries, no timeouts of its own, which takes
two fifths off the CPU of a call. One caller at a time.
"""

import asyncio
import contextlib
import hashlib
from pathlib import Path
from typing import Any, Protocol, cast

from hiredis import pack_command
from redis.asyncio.connection import Connection, parse_url
from redis.exceptions import ConnectionError as LostConnection
from redis.exceptions import NoScriptError, RedisError

from app.deadline import deadline
from app.limits.breaker import RedisUnavailable

# The deadline is the caller's, an answer is MessagePack, and nothing of RESP3 is needed.
OPTIONS = {
    "socket_timeout": None,
    "socket_connect_timeout": None,
    "decode_responses": False,
    "protocol": 2,
}
SCRIPT = Path(__file__).with_name("script.lua")


class Wire(Protocol):
    """What is used of redis-py's connections, whose types are incomplete."""

    is_connected: bool

    async def connect(self) -> None: ...
    async def send_packed_command(self, command: bytes, check_health: bool) -> None: ...
    async def read_response(self, disable_decoding: bool) -> Any: ...
    async def disconnect(self, nowait: bool = False) -> None: ...


class Link:
    """Runs the script; connects when it is first needed, and again after a fault."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._wire: Wire | None = None
        self._source = SCRIPT.read_bytes()
        self._sha = hashlib.sha1(self._source, usedforsecurity=False).hexdigest()

    def __repr__(self) -> str:
        """Return where Redis is, without user and password."""
        try:
            options = _options(self._url)
        except RedisError:
            return "Redis"
        if "path" in options:
            return f"Redis at {options['path']}"
        return f"Redis at {options.get('host', 'localhost')}:{options.get('port', 6379)}"

    async def run(self, keys: list[bytes], argument: bytes, until: float) -> bytes:
        """Return what the script returns; `until` is the deadline in the loop's time.

        Raises RedisUnavailable, after which nothing is known of whether the script ran.
        """
        words: tuple[bytes | int, ...] = (len(keys), *keys, argument)
        try:
            async with deadline(until):
                try:
                    answer: bytes = await self._ask("EVALSHA", self._sha, *words)
                except NoScriptError:
                    answer = await self._ask("EVAL", self._source, *words)
                return answer
        except (RedisError, OSError, TimeoutError) as error:
            raise RedisUnavailable(await self._fault(error)) from None

    async def probe(self, keys: list[bytes], argument: bytes) -> None:
        """Return if Redis answers and runs the script. Raises RedisUnavailable."""
        until = asyncio.get_running_loop().time() + self._timeout_s
        try:
            async with deadline(until):
                await self._ask("PING")
        except (RedisError, OSError, TimeoutError) as error:
            raise RedisUnavailable(await self._fault(error)) from None
        await self.run(keys, argument, until)

    async def close(self) -> None:
        """End the connection."""
        wire, self._wire = self._wire, None
        if wire is not None:
            with contextlib.suppress(RedisError, OSError, TimeoutError):
                async with asyncio.timeout(self._timeout_s):
                    await wire.disconnect()

    async def _ask(self, *words: bytes | str | int) -> Any:
        """Send one command and return the answer; on a connection that had idled, try twice.

        Where the first connection is lost after the command was run, it is run again: a restart
        has forgotten what the first did, and a cut connection costs one call's charges.
        """
        if self._wire is not None and self._wire.is_connected:
            try:
                return await _exchange(self._wire, words)
            except LostConnection:  # Redis may have restarted meanwhile
                await self._wire.disconnect(nowait=True)
        self._wire = _wire(self._url)
        await self._wire.connect()
        return await _exchange(self._wire, words)

    async def _fault(self, error: Exception) -> str:
        """Drop the connection, since an answer may be under way; return what went wrong."""
        wire, self._wire = self._wire, None
        if wire is not None:
            with contextlib.suppress(RedisError, OSError):
                await wire.disconnect(nowait=True)
        if isinstance(error, TimeoutError):
            return f"no answer within {self._timeout_s:g} s"
        return str(error).partition("\n")[0] or type(error).__name__


async def _exchange(wire: Wire, words: Any) -> Any:
    try:
        await wire.send_packed_command(pack_command(words), check_health=False)
    except RuntimeError as error:  # what uvloop says of a connection that was reset
        raise LostConnection(str(error)) from None
    return await wire.read_response(disable_decoding=True)


def _wire(url: str) -> Wire:
    """Return a connection that is not connected. Raises RedisError."""
    options = _options(url)
    try:
        return cast(Wire, options.pop("connection_class", Connection)(**options))
    except TypeError:
        raise RedisError("state.redis_url has an option that is not known") from None


def _options(url: str) -> dict[str, Any]:
    """Return what redis-py reads in a URL, with ours above it. Raises RedisError."""
    try:
        return {**parse_url(url), **OPTIONS}
    except ValueError:
        # Its own words may hold a part of the password.
        raise RedisError(
            "state.redis_url cannot be read; special characters in a password are written as %XX"
        ) from None
