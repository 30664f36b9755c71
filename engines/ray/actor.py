"""The actor of one engine: starts our guardian with vLLM on its node, watches both and reports.

It runs no model. Its process holds the guardian's socket, so that the guardian kills the engine as
soon as the actor ends, for whatever reason: Ray itself leaves the children of an actor running when
their node is removed.

One gateway owns an actor, by a lease that each of its calls of `watch` renews. When the lease is
over, the actor ends its engine, unless that is to be kept, and another gateway may take it over.
The lease begins with the actor: one that is never asked to start an engine ends as well.
"""

import asyncio
import codecs
import contextlib
import hashlib
import os
import re
import secrets
import sys
import tempfile
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec

from engines import environment
from engines.gpu import EngineMemory, find_accelerator
from engines.guard import directories, scratch
from engines.guard.guardian_client import (
    GuardianClient,
    LaunchError,
    find_guardian,
    start_guardian,
)
from engines.guard.process_tree import GUARDIAN_SLACK_S
from engines.process import LauncherMissing, vllm_launcher
from engines.ray.addresses import free_port, has_listener, interface_of, meeting_port
from engines.ray.protocol import PROTOCOL, ActorReport, Hello, Plan
from engines.ray.ranks import Rank
from engines.spec import HOST_IP

# Interval at which the lease is looked at.
LEASE_POLL_S = 1.0
# Interval at which a waiting call looks for something new.
POLL_S = 0.25
# For the cluster to take back an actor's place.
GIVE_BACK_S = 10.0
# Bytes of the engine's log that one call returns, and that a new gateway gets of what was before.
LOG_BYTES = 256 * 1024
HEADLESS = Path(__file__).with_name("headless.py")
# A gateway that is further behind misses what is between: an engine may write faster than it reads.
MAX_BEHIND = 4 * LOG_BYTES
# Variables in which Ray tells an actor its GPUs.
DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
PRELOAD = "LD_PRELOAD"
# Ray loads it into its processes (2.60: `ray._private.services`, JEMALLOC_SO).
RAYS_LIBRARY = "/ray/core/libjemalloc.so"


def node_environment(
    own: Mapping[str, str], raylet: Mapping[str, str], *, with_gpus: bool
) -> dict[str, str]:
    """Return the variables of a node for an engine.

    They are those of the raylet: to those of an actor, `own`, Ray adds its own and others, such as
    OMP_NUM_THREADS=1. Only the choice of the GPUs is taken from there. Ray's secrets are left out,
    and the memory allocator that it loads into its own processes.
    """
    chosen = {name: own[name] for name in DEVICES if with_gpus and name in own}
    found = {k: v for k, v in raylet.items() if not k.startswith("RAY_")}
    libraries = re.split("[: ]+", found.pop(PRELOAD, ""))  # ld.so(8) accepts both
    if kept := ":".join(path for path in libraries if not path.endswith(RAYS_LIBRARY)):
        found[PRELOAD] = kept
    return {**found, **chosen}


def take_priority_of_raylet() -> int:
    """Give this process, and those that it starts, the nice value of the raylet; return ours.

    Ray starts its workers with nice 15 (2.60: RAY_worker_niceness). Only root may lower it again:
    without that right it stays. Ray's own threads take part, so that the actor replies in time
    while its engine uses all cores.
    """
    wanted = os.getpriority(os.PRIO_PROCESS, os.getppid())
    for thread in os.listdir("/proc/self/task"):  # Linux: each has its own
        with contextlib.suppress(OSError):  # it has ended, or this is not allowed
            os.setpriority(os.PRIO_PROCESS, int(thread), wanted)
    return os.getpriority(os.PRIO_PROCESS, 0)


class EngineActor:
    """One engine on this node, or one rank of it. Every method takes and returns JSON values."""

    def __init__(self, owner: str, owner_name: str, place: str, lease_s: float) -> None:
        """`place` is the name of its placement group."""
        self._owner, self._owner_name = owner, owner_name
        self._place = place
        self._processes: GuardianClient | None = None
        self._memory: EngineMemory | None = None
        self._log = Path()
        self._listened = False
        self._hello: Hello | None = None
        self._exit: int | None = None
        self._ending: asyncio.Task[None] | None = None
        # Set by the first call of `start`.
        self._leasing: asyncio.Task[None] | None = None
        self._starting = False
        # The lease is over, and the engine is being ended.
        self._over = False
        # A gateway that is lost before it has called `watch` does not know of the engine.
        self._keep = False
        self._lease_s = lease_s
        self._heard = time.monotonic()
        self._scanned = 0.0

    # Called by the gateway, through its connector

    async def meeting_port(self, address: str) -> int:
        """Return a port of this node where the ranks of an engine can meet."""
        return meeting_port(address)

    async def renew(self, owner: str) -> None:
        """Renew the lease, while other ranks of the engine start."""
        if owner == self._owner:
            self._heard = time.monotonic()

    async def start(self, plan: dict[str, Any]) -> dict[str, Any]:
        """Start the engine of a `Plan`; return a `Hello`, or {"error": why not}."""
        self._starting = True
        self._leasing = asyncio.create_task(self._watch_lease())
        try:
            self._hello = await self._start(msgspec.convert(plan, Plan))
        except (OSError, LaunchError, LauncherMissing, directories.ForeignDirectory) as error:
            return {"error": f"{error} (node {plan['node']})"}
        finally:
            self._heard, self._starting = time.monotonic(), False
        return _json(self._hello)

    async def claim(self, owner: str, owner_name: str) -> dict[str, Any]:
        """Make a gateway the owner; return a `Hello`, only "place" if there is no engine.

        Returns {"owned_by": name} while another gateway owns it.
        """
        leased = self._starting or time.monotonic() - self._heard < self._lease_s
        if owner != self._owner and leased:
            return {"owned_by": self._owner_name}
        if self._over and self._leasing is not None:
            await asyncio.shield(self._leasing)  # with which this process ends
        if self._hello is None or self._exit is not None:
            return {"place": self._place}
        self._owner, self._owner_name = owner, owner_name
        self._heard = time.monotonic()
        return _json(self._hello)

    async def describe(self) -> dict[str, Any]:
        """Return the owner and the name of the placement group."""
        return {"owner": self._owner, "place": self._place}

    async def watch(
        self,
        owner: str,
        keep: bool,
        log_at: tuple[int, int] | None,
        listens: bool,
        wait_s: float,
    ) -> dict[str, Any]:
        """Return an `ActorReport` when it changes; {"owned_by": name} of its new owner."""
        if owner != self._owner:
            return {"owned_by": self._owner_name}
        self._heard = time.monotonic()
        self._keep = keep
        until = time.monotonic() + wait_s
        log = _LogReader(self._log, log_at)
        while True:
            ready = self._listens()  # before the log is read: what led there is in it
            text = log.read()
            over = self._exit is not None or time.monotonic() >= until
            if text or over or ready != listens:
                break
            await asyncio.sleep(POLL_S)
        processes = await self._live_processes()
        report = ActorReport(
            exit=None if text else self._exit,
            processes=processes,
            frozen=self._processes is not None and self._processes.frozen,
            listens=ready,
            log=text,
            log_at=log.place,
        )
        return _json(report)

    async def used_gib(self) -> float | None:
        """Return the GiB that the engine uses; None: not known."""
        if self._processes is None or self._memory is None:
            return None
        return await self._memory.used_gib(await self._processes.find_processes())

    async def stop(self, owner: str, grace: float) -> None:
        """Stop the engine gracefully, by force after `grace` seconds."""
        if owner == self._owner and self._processes is not None:
            self._processes.stop(grace)

    async def kill(self, owner: str) -> None:
        """Kill the engine; return when none of its processes is left."""
        if owner == self._owner:
            await self._kill()

    # The engine

    async def _start(self, plan: Plan) -> Hello:
        directory = _directory(self._owner, plan.namespace, plan.name)
        directories.make_private(directory)
        if (leftover := await find_guardian(directory)) is not None:
            leftover.stop(0.0)
            await leftover.wait()
        if not _exists(plan.model_path):
            raise LaunchError(f"model directory {plan.model_path} does not exist")
        for file in plan.files:
            if not os.access(file, os.R_OK):
                raise LaunchError(f"file {file} of ray.tls does not exist or cannot be read")
        rank = plan.rank
        launcher = plan.launcher or _launcher(rank)
        address, key = plan.node, secrets.token_urlsafe(32)
        port = free_port(address) if rank.serves else None
        listens_on = [f"--host={address}", f"--port={port}"] if rank.serves else []
        variables = {
            **environment.inherited(
                node_environment(os.environ, _raylet_environment(), with_gpus=plan.gpus),
                plan.inherit,
                plan.withheld,
            ),
            **_temporary(directory, plan.env),
            **_network(address),
            **plan.env,
            **({environment.API_KEY: key} if rank.serves else {}),
        }
        with contextlib.suppress(FileNotFoundError):
            (directory / "engine.log").replace(directory / "engine.log.previous")
        self._memory = EngineMemory(plan.name, find_accelerator, None)
        await self._memory.record_baseline()
        niceness = take_priority_of_raylet()
        command = [*launcher, *plan.arguments, *rank.flags(), *listens_on]
        self._processes = await start_guardian(
            directory, command, variables, fingerprint=plan.fingerprint, keep=False
        )
        self._log = directory / "engine.log"
        self._ending = asyncio.create_task(self._await_end(self._processes, self._memory))
        return Hello(
            protocol=PROTOCOL,
            pid=self._processes.engine_pid,
            fingerprint=plan.fingerprint,
            host=address,
            port=port,
            key=key,
            place=self._place,
            rank=rank.number,
            nodes=rank.nodes,
            nice=niceness,
        )

    async def _await_end(self, processes: GuardianClient, memory: EngineMemory) -> None:
        code = await processes.wait()
        try:
            await memory.wait_until_released(processes.pids)
        finally:
            self._exit = code

    async def _live_processes(self) -> dict[int, str]:
        if self._processes is None:
            return {}
        if (now := time.monotonic()) - self._scanned >= 1.0:
            self._scanned = now
            live = await self._processes.find_processes()
        else:
            live = self._processes.live_processes()
        return {pid: stat.state for pid, stat in live.items()}

    def _listens(self) -> bool:
        """Return whether the server has accepted connections since its start.

        The port is in its command line, so that another user of this node could listen there first.
        A rank without a server never has.
        """
        port = None if self._hello is None else self._hello.port
        self._listened = self._listened or (port is not None and has_listener(port))
        return self._listened

    async def _kill(self) -> None:
        if self._processes is None or self._ending is None or self._exit is not None:
            return
        self._processes.stop(0.0)
        done, _ = await asyncio.wait({self._ending}, timeout=GUARDIAN_SLACK_S)
        if not done:
            self._processes.kill()
            await asyncio.wait({self._ending})

    # The lease

    def end_if_unused(self) -> None:
        """Give back the place and end if the lease is over before `start` is called. Blocks."""
        while self._leasing is None:
            left_s = self._heard + self._lease_s - time.monotonic()
            if left_s <= 0.0:
                self._end()
                return
            time.sleep(left_s)

    async def _watch_lease(self) -> None:
        """End the engine and give back its place when it has no gateway and is not to be kept."""
        while True:  # of what is watched, the clock raises no event
            left_s = self._heard + self._lease_s - time.monotonic()
            wanted = self._keep and self._processes is not None and self._exit is None
            if left_s <= 0.0 and not self._starting and not wanted:
                break
            await asyncio.sleep(max(left_s, LEASE_POLL_S))
        self._over = True
        await self._kill()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(self._end), GIVE_BACK_S)
        os._exit(0)

    def _end(self) -> None:
        """Give back the place and end this process. Blocks."""
        with contextlib.suppress(Exception):  # Ray has several types, and the end is what counts
            _give_back(self._place)
        os._exit(0)


class _LogReader:
    """Reads the log of an engine on from the place of the previous call."""

    def __init__(self, path: Path, place: tuple[int, int] | None) -> None:
        """`place` is the file's inode and the position in it; None: the end of what there is."""
        self._path = path
        self.place = place

    def read(self) -> str:
        """Return what is new, at most LOG_BYTES; "" if nothing is."""
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                if self.place is None:
                    self.place = status.st_ino, max(status.st_size - LOG_BYTES, 0)
                inode, position = self.place
                if inode != status.st_ino or position > status.st_size:
                    position = 0
                if status.st_size - position > MAX_BEHIND:
                    position = status.st_size - LOG_BYTES
                file.seek(position)
                data = file.read(LOG_BYTES)
        except OSError:
            return ""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(data)
        unfinished, _ = decoder.getstate()  # bytes of a character whose end is not written yet
        self.place = status.st_ino, position + len(data) - len(unfinished)
        return text


def _json(value: msgspec.Struct) -> dict[str, Any]:
    """Return a value as JSON with keys that are strings."""
    found: dict[str, Any] = msgspec.to_builtins(value, str_keys=True)
    return found


def _directory(owner: str, namespace: str, name: str) -> Path:
    """Return the directory of an engine; the path has a bounded length, for sockets.

    Nodes of different clusters may share a machine, and their gateways the names of engines.
    """
    base = Path(tempfile.gettempdir(), f"vllm-gateway-ray-{os.getuid()}")
    directories.make_private(base)
    digest = hashlib.sha256(f"{owner}.{namespace}.{name}".encode()).hexdigest()
    return base / f"{name[:24]}-{digest[:12]}"


def _launcher(rank: Rank) -> tuple[str, ...]:
    """Return the command that runs vLLM for a rank. Raises LauncherMissing."""
    server = vllm_launcher()
    return server if rank.serves else (sys.executable, "-P", str(HEADLESS))


def _exists(model: str | None) -> bool:
    return model is None or Path(model).expanduser().exists()


def _temporary(directory: Path, own_env: Collection[str]) -> dict[str, str]:
    if scratch.TMPDIR in own_env:
        return {}
    try:
        return scratch.variables(directory, scratch.create(directory))
    except scratch.SocketPathTooLong as error:
        raise LaunchError(str(error)) from None


def _network(address: str) -> dict[str, str]:
    """Return the variables that make vLLM's own processes use the address of this node."""
    found = {HOST_IP: address}
    if (interface := interface_of(address)) is not None:
        found |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    return found


def _raylet_environment() -> dict[str, str]:
    """Return the variables of the raylet, which is the parent of an actor's process.

    Raises OSError.
    """
    data = Path(f"/proc/{os.getppid()}/environ").read_bytes()
    members = (os.fsdecode(member).partition("=") for member in data.split(b"\0") if member)
    return {name: value for name, _, value in members}


def _give_back(place: str) -> None:
    """Remove a placement group, with which Ray ends the actor in it. Blocks."""
    from ray.util import get_placement_group, remove_placement_group

    remove_placement_group(get_placement_group(place))
