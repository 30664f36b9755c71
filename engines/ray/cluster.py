"""The gateway's connection to a Ray cluster: starts and calls the connector, a child process.

A connector that ends, or whose Ray does not respond, is replaced at the next call: engines and
their places are in the cluster, so nothing is lost with it.
"""

import asyncio
import contextlib
import importlib.util
import itertools
import logging
import os
import re
import secrets
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from engines import environment
from engines.guard import directories
from engines.output import redact_line
from engines.ray import protocol
from engines.ray.placement import Node
from engines.ray.protocol import Call, ClusterError, Reply, Result
from engines.timing import LOOP_GRACE_S

log = logging.getLogger(__name__)

REACH_S = 5.0  # to reach the port of a cluster's head
# For engines that are removed at the same time, by one connector.
KILL_ALL_S = 90.0
# A connection that failed is not tried again for other engines in this time.
PAUSE_S = 2.0
CLOSE_S = 10.0
# Late calls of a connector that answers others: threads that may be stuck in Ray's library.
MAX_LATE = 4
# To stop engines that are not configured; other engines wait meanwhile.
TIDY_S = 20.0
_OWNER = re.compile(r"[0-9a-f]{32}")
# The addresses and secrets of Ray, which the connector needs and engines do not get.
_VARIABLES = ("RAY_*",)
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


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
        # Engines that may have left something in the cluster, which did not respond.
        self._abandoned: set[str] = set()
        self._tidying: asyncio.Task[None] | None = None

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

    async def call(self, call: Call[Result], timeout_s: float | None = None) -> Result:
        """Return the result of a call; default of `timeout_s`: the call's. Raises ClusterError."""
        connection = await self._connect()
        return await connection.call(call, timeout_s)

    async def nodes(self) -> list[Node]:
        """Return the living nodes. Raises ClusterError."""
        return await self.call(protocol.ListNodes())

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

    def abandon(self, engine: str) -> None:
        """Record that an engine may have left something in the cluster; it is removed later."""
        self._abandoned.add(engine)

    def clear(self, engine: str) -> None:
        """Record that nothing unknown is left of an engine."""
        self._abandoned.discard(engine)

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
                connection = await _Connection.start(
                    self.address, self._directory, self._variables()
                )
                try:
                    await connection.call(
                        protocol.Connect(address=self.address, namespace=self.namespace)
                    )
                    await self._stop_unconfigured(connection)
                    self._remove_abandoned(connection)
                except BaseException:
                    await connection.close()
                    raise
            except ClusterError as error:
                self._failed_at, self._failure = now(), str(error)
                raise
            self._connection = connection
            return connection

    async def _stop_unconfigured(self, connection: "_Connection") -> None:
        """Stop the engines that an earlier gateway left and that are no longer configured.

        What does not respond is tried again with the next connection: engines do not wait for it.
        """
        if self._swept or not self._configured:
            return
        try:
            async with asyncio.timeout(TIDY_S):
                left = await connection.call(protocol.ListEngines(owner=self.owner))
                names = [name for name in left if name not in self._configured]
                for name in names:
                    log.info(
                        "stopping engine %s: it is no longer configured",
                        name,
                        extra={"engine": name},
                    )
                await self._kill(connection, names)
        except (ClusterError, TimeoutError) as error:
            reason = str(error) or f"no answer in {TIDY_S:g} s"
            log.warning("engines that are no longer configured may still run: %s", reason)
        else:
            self._swept = True

    def _remove_abandoned(self, connection: "_Connection") -> None:
        """Remove what is left of engines that are not in use, in the background."""

        async def remove() -> None:
            with contextlib.suppress(ClusterError):
                await self._kill(connection, names)
                self._abandoned.difference_update(names)

        if names := sorted(self._abandoned - self._users):
            self._tidying = asyncio.create_task(remove(), name="abandoned engines")

    async def _kill(self, connection: "_Connection", names: Sequence[str]) -> None:
        """Kill engines. Raises the first ClusterError when all were tried."""
        calls = (protocol.Kill(name=name, owner=self.owner) for name in names)
        tried = (connection.call(call, KILL_ALL_S) for call in calls)
        for outcome in await asyncio.gather(*tried, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    def _variables(self) -> dict[str, str]:
        """Return the variables of the connector."""
        found = {**environment.inherited(os.environ, _VARIABLES), **_QUIET}
        if self.address == "local":  # the connector starts it
            found.setdefault("RAY_worker_niceness", "0")
            if not any(name.startswith("RAY_AUTH") for name in found):
                found |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        return found


def _read_owner(directory: Path) -> str:
    """Return the name in a directory; the first call makes both."""
    directories.make_private(directory)
    file = directory / "ray-owner"
    # It may be empty after a loss of power.
    if not (file.exists() and _OWNER.fullmatch(file.read_text())):
        new = file.with_name(f"{file.name}.new")
        new.write_text(secrets.token_hex(16))
        new.replace(file)
    return file.read_text()


def _reach(address: str) -> None:
    """Connect to an address that has a port: a connector takes a second of CPU to start.

    Blocks. Raises ClusterError.
    """
    host, colon, port = address.rpartition(":")
    if not colon:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()
    except OSError as error:
        reason = error.strerror or str(error) or "timed out"
        raise ClusterError(f"no Ray at {address}: {reason}") from None


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
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        # Replies so far, and the calls whose timeout has passed without one.
        self._replies = 0
        self._late: set[int] = set()
        self._reading = asyncio.create_task(self._read(reader), name="Ray connector")

    @classmethod
    async def start(cls, address: str, directory: Path, variables: dict[str, str]) -> "_Connection":
        """Start a connector, if something listens at the cluster's address. Raises ClusterError."""
        await asyncio.to_thread(_reach, address)
        ours, theirs = socket.socketpair()
        log = directory / "ray-connector.log"
        try:
            directories.make_private(directory)
            with theirs, log.open("ab") as output:  # errors refer to what the previous one wrote
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
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=protocol.MAX_LINE)
        return cls(process, reader, writer, log)

    @property
    def broken(self) -> bool:
        """True when it has ended, or a call took too long."""
        return self._reading.done() or self._writer.is_closing()

    async def call(self, call: Call[Result], timeout_s: float | None = None) -> Result:
        """Return the result of a call. Raises ClusterError."""
        number = next(self._numbers)
        timeout_s = call.timeout_s if timeout_s is None else timeout_s
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        if self.broken:
            raise ClusterError(self._end())
        self._waiting[number] = future
        replies = self._replies
        try:
            self._writer.write(msgspec.json.encode((number, call)) + b"\n")
            for timeout in (timeout_s, LOOP_GRACE_S):
                if not future.done():
                    await asyncio.wait({future}, timeout=timeout)
        finally:
            del self._waiting[number]
        if not future.done():
            self._late.add(number)
            # Ray's library may be stuck for good. But it also waits for a head that is away, and
            # reaches actors meanwhile.
            if replies == self._replies or len(self._late) >= MAX_LATE:
                self._writer.close()
            raise ClusterError(f"Ray gave no answer in {timeout_s:g} s")
        reply = future.result()
        if reply.kind is not None:
            raise protocol.ERRORS[reply.kind](redact_line(reply.error))
        result: Result = msgspec.json.decode(reply.result, type=protocol.result_type(call))
        return result

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
        await asyncio.wait({self._reading})

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                reply = msgspec.json.decode(line, type=Reply)
                self._replies += 1
                self._late.discard(reply.id)
                future = self._waiting.get(reply.id)
                if future is not None and not future.done():
                    future.set_result(reply)
        except (OSError, ValueError) as error:
            log.warning("the reply of the Ray connector cannot be read: %s", error)
        finally:
            for number, future in self._waiting.items():
                if not future.done():
                    future.set_result(Reply(number, kind=ClusterError.kind, error=self._end()))

    def _end(self) -> str:
        return f"the connection to the Ray cluster was lost, see {self._log}"
