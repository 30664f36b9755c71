"""A daemon of Docker or Podman on this machine as the place of an engine."""

import asyncio
import json
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engines import environment
from engines.container.request import Daemon, create_request, default_user
from engines.gpu import EngineMemory
from engines.guard import containers, directories, scratch
from engines.guard.docker_api import DaemonError, DockerApi
from engines.guard.guardian_client import (
    GuardianClient,
    LaunchError,
    find_guardian,
    start_guardian,
)
from engines.process import SOCKET, HostUnavailable, Launch, LocalHost
from engines.spec import ContainerSpec

# Holds the engine's socket, and is all that the container sees of the engine's directory.
SOCKET_DIRECTORY = "socket"
CONTAINER_RUN = Path(containers.__file__).with_name("container_run.py")


class ContainerHost(LocalHost):
    """Starts and finds the guardian of one engine, whose child runs the container.

    The engine's socket is in a directory that is mounted in the container; the path where the
    gateway expects it is a link.
    """

    def __init__(
        self, launch: Launch, memory: EngineMemory, socket: Path, gpus: Sequence[int] | None
    ) -> None:
        super().__init__(launch, memory)
        assert isinstance(launch.spec, ContainerSpec)
        self._spec = launch.spec
        self._daemon_socket = socket
        self._gpus = gpus

    async def find(self, stopping: Callable[[], bool]) -> GuardianClient | None:
        directory = self._launch.directory
        if (found := await find_guardian(directory)) is not None:
            return found
        if left := await asyncio.to_thread(containers.remove, directory):
            raise HostUnavailable(f"a container of an earlier run may be left: {left}")
        return None

    async def start(self, stopping: Callable[[], bool]) -> GuardianClient:
        launch = self._launch
        await asyncio.to_thread(self._remove_socket_directory)
        launch.prepare()
        try:
            daemon = await asyncio.to_thread(self._ask_daemon)
        except DaemonError as error:
            raise HostUnavailable(str(error)) from None
        self._write_plan(daemon)
        launch.set_log_aside()
        await self._memory.record_baseline()
        return await start_guardian(
            launch.directory,
            (sys.executable, "-I", "-S", str(CONTAINER_RUN), str(launch.directory)),
            environment.inherited(os.environ),
            fingerprint=launch.fingerprint,
            keep=launch.keep,
        )

    def _remove_socket_directory(self) -> None:
        """Remove what the last run left: with `user` it is that user's, and nothing else may be."""
        directory = self._launch.directory
        if directories.ownership_fault(directory) is None:
            shutil.rmtree(directory / SOCKET_DIRECTORY, ignore_errors=True)

    def _ask_daemon(self) -> Daemon:
        api = DockerApi(str(self._daemon_socket))
        info: Any = api.call("GET", "/info")
        return Daemon.of(info, podman=api.is_podman())

    def _write_plan(self, daemon: Daemon) -> None:
        """Write what the guardian's child runs, and the directories for it."""
        launch, spec = self._launch, self._spec
        user = spec.user or default_user(daemon, os.geteuid(), os.getegid())
        temporary = scratch.create(launch.directory)
        shared = launch.directory / SOCKET_DIRECTORY
        shared.mkdir(mode=0o700)
        launch.socket.unlink(missing_ok=True)
        launch.socket.symlink_to(Path(SOCKET_DIRECTORY, SOCKET))
        if spec.user is not None:
            for directory in (temporary, shared):
                _give(directory, spec.user)
        record = containers.read_record(launch.directory)
        label = str(record.get("label") or secrets.token_hex(16))
        socket = str(self._daemon_socket)
        containers.write_record(launch.directory, {"socket": socket, "label": label})
        (launch.directory / containers.LOST).unlink(missing_ok=True)
        body = create_request(
            spec,
            daemon,
            name=launch.name,
            label=label,
            command=launch.command,
            env=self._variables(),
            user=user,
            socket_directory=shared,
            scratch=temporary,
            gpus=self._gpus,
        )
        plan = {
            "socket": socket,
            "name": f"vllm-gateway-{launch.name}-{label[:8]}",
            "image": spec.image,
            "pull": spec.pull,
            "body": body,
        }
        file = launch.directory / containers.PLAN
        file.touch(mode=0o600)
        file.write_text(json.dumps(plan))

    def _variables(self) -> Mapping[str, str]:
        """Return the variables of the container: none of the gateway's that were not asked for."""
        launch = self._launch
        asked = environment.requested(os.environ, self._spec.inherit_env, launch.withheld)
        return {**asked, **launch.own_env}


def _give(directory: Path, user: str) -> None:
    """Make a directory the container's user's. Raises LaunchError."""
    uid, _, gid = user.partition(":")
    try:
        os.chown(directory, int(uid), int(gid or -1))
    except PermissionError:
        raise LaunchError(
            f"user {user} needs a gateway that runs as root: remove it, so that the container has "
            "the gateway's user"
        ) from None
