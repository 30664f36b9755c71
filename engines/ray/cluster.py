"""The gateway's connection to a Ray cluster: starts and calls the connector, a child process.

A connector that ends, or whose Ray does not respond, is replaced at the next call: engines and
their places are in the cluster, so nothing is lost with it.
"""

import asyncio
import contextlib
import importlib.util
import itertools
import json
import logging
import os
import secrets
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from engines import environment
from engines.guard import directories
from engines.output import redact_line
from engines.ray.placement import Node

log = logging.getLogger(__name__)

# A cluster of this machine alone takes 5 to 20 s to start.
CONNECT_S = 90.0
# Ray's calls wait for the head of a cluster as long as it is down.
CALL_S = 30.0
# A connection that failed is not tried again for other engines in this time.
PAUSE_S = 2.0
MAX_LINE = 8 * 1024 * 1024
CLOSE_S = 10.0
# The addresses and secrets of Ray, which the connector needs and engines do not get.
_VARIABLES = ("RAY_*",)
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


class ClusterError(Exception):
    """The cluster did not do what was asked; the text says why, in one line."""


class ActorDead(ClusterError):
    """The actor of an engine is dead."""


class EngineRefused(ClusterError):
    """The engine cannot be started with this configuration."""


_ERRORS = {"actor": ActorDead, "refused": EngineRefused, "cluster": ClusterError}


def ray_is_installed() -> bool:
    """Return whether Ray is installed in this environment."""
    return importlib.util.find_spec("ray") is not None


class Cluster:
    """The Ray cluster at one address. Use within one event loop; `close()` when done."""

    def __init__(self, address: str, namespace: str, run_dir: Path) -> None:
        """`run_dir` holds the log of the connector and the name of this gateway as an owner."""
        self.address = address
        self.namespace = namespace
        self._directory = run_dir
        self._connecting = asyncio.Lock()
        self._connection: _Connection | None = None
        self._failed_at = -PAUSE_S
        self._failure = ""
        self._owner: str | None = None
        # The engines that use the connection.
        self._users: set[str] = set()
        # Every engine of the configuration; others of this gateway are stopped once.
        self._configured: set[str] = set()
        self._swept = False

    @property
    def owner(self) -> str:
        """The opaque name of this gateway as the owner of engines; it survives a restart.

        Raises ClusterError.
        """
        if self._owner is None:
            try:
                self._owner = _read_owner(self._directory)
            except (OSError, directories.ForeignDirectory) as error:
                raise ClusterError(str(error)) from None
        return self._owner

    @property
    def owner_name(self) -> str:
        """The name of this gateway for people."""
        return f"{socket.gethostname()}:{self._directory}"

    async def call(self, operation: str, /, timeout_s: float = CALL_S, **arguments: Any) -> Any:
        """Call an operation of the connector (see `Connector`). Raises ClusterError."""
        connection = await self._connect()
        return await connection.call(operation, timeout_s, arguments)

    async def nodes(self) -> list[Node]:
        """Return the living nodes. Raises ClusterError."""
        return [Node(**node) for node in await self.call("nodes")]

    def expect(self, engine: str) -> None:
        """Record that an engine is configured."""
        self._configured.add(engine)

    def join(self, engine: str) -> None:
        """Record that an engine uses the connection."""
        self._users.add(engine)

    async def leave(self, engine: str) -> None:
        """Record that an engine no longer uses the connection; the last one closes it."""
        self._users.discard(engine)
        if not self._users:
            await self.close()

    async def close(self) -> None:
        """End the connector, and a cluster with the address `local`."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def _connect(self) -> "_Connection":
        async with self._connecting:
            if self._connection is not None and not self._connection.broken:
                return self._connection
            now = asyncio.get_running_loop().time
            if now() - self._failed_at < PAUSE_S:
                raise ClusterError(self._failure)
            await self.close()
            try:
                connection = await _Connection.start(self._directory, self._variables())
                try:
                    place = {"address": self.address, "namespace": self.namespace}
                    await connection.call("connect", CONNECT_S, place)
                    await self._stop_unconfigured(connection)
                except BaseException:
                    await connection.close()
                    raise
            except ClusterError as error:
                self._failed_at, self._failure = now(), str(error)
                raise
            self._connection = connection
            return connection

    async def _stop_unconfigured(self, connection: "_Connection") -> None:
        """Stop the engines that an earlier gateway left and that are no longer configured."""
        if self._swept or not self._configured:
            return
        for name in await connection.call("engines", CALL_S, {"owner": self.owner}):
            if name not in self._configured:
                log.info(
                    "stopping engine %s: it is no longer configured", name, extra={"engine": name}
                )
                await connection.call("kill", CONNECT_S, {"name": name, "owner": self.owner})
        self._swept = True

    def _variables(self) -> dict[str, str]:
        """Return the variables of the connector."""
        found = {**environment.inherited(os.environ, _VARIABLES), **_QUIET}
        if self.address == "local" and not any(name.startswith("RAY_AUTH") for name in found):
            found |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        return found


def _read_owner(directory: Path) -> str:
    """Return the name in a directory; the first call makes both."""
    directories.make_private(directory)
    file = directory / "ray-owner"
    if not file.exists():
        new = file.with_name(f"{file.name}.new")
        new.write_text(secrets.token_hex(16))
        new.replace(file)
    return file.read_text()


class _Connection:
    """A running connector."""

    def __init__(
        self,
        process: "subprocess.Popen[bytes]",
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        log: Path,
    ) -> None:
        self._process = process
        self._writer = writer
        self._log = log
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._reading = asyncio.create_task(self._read(reader), name="Ray connector")

    @classmethod
    async def start(cls, directory: Path, variables: dict[str, str]) -> "_Connection":
        """Start a connector. Raises ClusterError."""
        ours, theirs = socket.socketpair()
        log = directory / "ray-connector.log"
        try:
            directories.make_private(directory)
            with theirs, log.open("wb") as output:
                log.chmod(0o600)
                process = subprocess.Popen(  # noqa: ASYNC220 - forks at once; our own file
                    [sys.executable, "-P", "-m", "engines.ray.connector"],
                    stdin=theirs.fileno(),
                    stdout=output,
                    stderr=output,
                    env=variables,
                    start_new_session=True,  # Ctrl-C in a terminal is the gateway's
                )
        except (OSError, directories.ForeignDirectory) as error:
            ours.close()
            raise ClusterError(f"cannot start the Ray connector: {error}") from None
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=MAX_LINE)
        return cls(process, reader, writer, log)

    @property
    def broken(self) -> bool:
        """True when it has ended, or a call took too long."""
        return self._reading.done() or self._writer.is_closing()

    async def call(self, operation: str, timeout_s: float, arguments: dict[str, Any]) -> Any:
        """Return the result of an operation. Raises ClusterError."""
        number = next(self._numbers)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self.broken:
            raise ClusterError(self._end())
        self._waiting[number] = future
        try:
            request = {"id": number, "call": operation, "with": arguments}
            self._writer.write(json.dumps(request).encode() + b"\n")
            async with asyncio.timeout(timeout_s):
                reply = await future
        except TimeoutError:
            self._writer.close()  # Ray's library may be stuck for good
            raise ClusterError(f"Ray gave no answer in {timeout_s:g} s") from None
        finally:
            del self._waiting[number]
        if "error" in reply:
            raise _ERRORS[reply["kind"]](redact_line(reply["error"]))
        return reply["result"]

    async def close(self) -> None:
        """End the process."""
        self._writer.close()
        waiting = asyncio.to_thread(self._process.wait, CLOSE_S)
        try:
            await waiting
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        self._reading.cancel()
        with contextlib.suppress(asyncio.CancelledError, OSError):
            await self._reading

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                reply = json.loads(line)
                future = self._waiting.get(reply["id"])
                if future is not None and not future.done():
                    future.set_result(reply)
        finally:
            lost = {"error": self._end(), "kind": "cluster"}
            for future in self._waiting.values():
                if not future.done():
                    future.set_result(lost)

    def _end(self) -> str:
        return f"the connection to the Ray cluster was lost, see {self._log}"
