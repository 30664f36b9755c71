"""A connection to Redis with one error for every fault.

It uses redis-py's connection without its client: no pool, no retries, no timeouts of its own, which
saves two fifths of the CPU time of a call. One caller at a time.
"""

import asyncio
import contextlib
from typing import Any, Protocol, cast

from hiredis import pack_command
from redis.asyncio.connection import Connection, parse_url
from redis.exceptions import ConnectionError as LostConnection
from redis.exceptions import RedisError

from app.deadline import deadline
from app.redis.errors import RedisUnavailable

# The deadline is the caller's, results are bytes, and RESP3 is not needed.
OPTIONS = {
    "socket_timeout": None,
    "socket_connect_timeout": None,
    "decode_responses": False,
    "protocol": 2,
}
# Each is translated into RedisUnavailable.
FAULTS = (RedisError, OSError, TimeoutError)


class DriverConnection(Protocol):
    """The methods used of redis-py's connections, whose types are incomplete."""

    is_connected: bool

    async def connect(self) -> None: ...
    async def send_packed_command(self, command: bytes, check_health: bool) -> None: ...
    async def read_response(self, disable_decoding: bool) -> Any: ...
    async def disconnect(self, nowait: bool = False) -> None: ...


class RedisConnection:
    """Sends commands; connects on first use, and again after a fault."""

    def __init__(self, url: str, timeout_s: float) -> None:
        """`timeout_s` bounds what has no deadline of its own."""
        self._url = url
        self._timeout_s = timeout_s
        self._driver: DriverConnection | None = None

    def __repr__(self) -> str:
        """Return the address of Redis without user and password."""
        try:
            options = _options(self._url)
        except RedisError:
            return "Redis"
        if "path" in options:
            return f"Redis at {options['path']}"
        return f"Redis at {options.get('host', 'localhost')}:{options.get('port', 6379)}"

    async def publish(self, channel: bytes, message: bytes) -> None:
        """Publish a message on a channel, at most once. Raises RedisUnavailable.

        It is not repeated over another connection as `_execute` would: subscribers could get it
        twice.
        """
        try:
            async with deadline(asyncio.get_running_loop().time() + self._timeout_s):
                driver = self._driver
                if driver is None or not driver.is_connected:
                    driver = await self._connect()
                await send(driver, (b"PUBLISH", channel, message))
        except FAULTS as error:
            raise RedisUnavailable(await self._fault(error)) from None

    async def close(self) -> None:
        """Close the connection."""
        driver, self._driver = self._driver, None
        if driver is not None:
            with contextlib.suppress(*FAULTS):
                async with asyncio.timeout(self._timeout_s):
                    await driver.disconnect()

    async def _execute(self, *arguments: bytes | str | int) -> Any:
        """Send one command and return the reply; if the open connection is lost, reconnect once.

        If the connection is lost after the command ran, it runs again: after a restart Redis has
        forgotten the first run, and otherwise one call is charged twice.
        """
        if self._driver is not None and self._driver.is_connected:
            try:
                return await send(self._driver, arguments)
            except LostConnection:  # Redis may have restarted meanwhile
                await self._driver.disconnect(nowait=True)
        return await send(await self._connect(), arguments)

    async def _connect(self) -> DriverConnection:
        self._driver = driver = _driver_connection(self._url)
        await driver.connect()
        return driver

    async def _fault(self, error: Exception) -> str:
        """Drop the connection, since a late reply may follow; return a description of the fault."""
        driver, self._driver = self._driver, None
        if driver is not None:
            with contextlib.suppress(RedisError, OSError):
                await driver.disconnect(nowait=True)
        if isinstance(error, TimeoutError):
            return f"no answer within {self._timeout_s:g} s"
        return str(error).partition("\n")[0] or type(error).__name__


async def send(driver: DriverConnection, arguments: Any) -> Any:
    """Send one command and return the reply. Raises RedisError and OSError."""
    try:
        await driver.send_packed_command(pack_command(arguments), check_health=False)
    except RuntimeError as error:  # raised by uvloop after a connection reset
        raise LostConnection(str(error)) from None
    return await driver.read_response(disable_decoding=True)


def _driver_connection(url: str) -> DriverConnection:
    """Return a new connection, not connected yet. Raises RedisError."""
    options = _options(url)
    try:
        return cast(DriverConnection, options.pop("connection_class", Connection)(**options))
    except TypeError:
        raise RedisError("state.redis_url has an unknown option") from None


def _options(url: str) -> dict[str, Any]:
    """Return redis-py's options from a URL, overridden by OPTIONS. Raises RedisError."""
    try:
        return {**parse_url(url), **OPTIONS}
    except ValueError:
        # Its own message may contain a part of the password.
        raise RedisError(
            "state.redis_url cannot be read; special characters in a password are written as %XX"
        ) from None
