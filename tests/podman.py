"""A real Podman for the tests: its Docker API on a socket, its own storage, an image.

The machine's own configuration and storage of containers are not used: the variables of
containers.conf(5), storage.conf(5) and registries.conf(5) name other files.
"""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from engines.guard.docker_api import DaemonError, DockerApi
from tests.bare_image import IMAGE, bare_image
from tests.disks import SmallDisk
from tests.gateway import free_port, responds
from tests.waiting import poll_until

START_S = 30.0
# Hard limits cannot be raised here, so they lie below the usual ones; `crun` needs cgroups 2.
_CONTAINERS = """
[containers]
default_ulimits = ["nofile=10000:10000", "nproc=2000:2000"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
[network]
network_config_dir = "{0}/networks"
"""
_STORAGE = """
[storage]
driver = "overlay"
graphroot = "{0}/storage"
runroot = "{0}/run"
"""
_REGISTRY = """
version: 0.1
storage: {{filesystem: {{rootdirectory: {0}/registry}}}}
http: {{addr: "127.0.0.1:{1}"}}
"""


class Podman:
    """`podman system service`, and what can happen to it and its containers."""

    def __init__(self, directory: Path, disk: SmallDisk | None = None) -> None:
        """Its images are on `disk`, if given, where `run` does not see them."""
        self.directory = directory
        self._disk = disk
        self.socket = directory / "p.sock"
        self.registry_port = free_port()
        for name, text in {
            "containers": _CONTAINERS.format(directory),
            "storage": _STORAGE.format(directory),
            "registries": f'[[registry]]\nlocation = "127.0.0.1:{self.registry_port}"\n'
            "insecure = true\n",
        }.items():
            (directory / f"{name}.conf").write_text(text)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def _environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "CONTAINERS_CONF": f"{self.directory}/containers.conf",
            "CONTAINERS_STORAGE_CONF": f"{self.directory}/storage.conf",
            "CONTAINERS_REGISTRIES_CONF": f"{self.directory}/registries.conf",
        }

    def start(self) -> None:
        """Start the service; return when it answers."""
        command = ["podman", "system", "service", "--time=0", f"unix://{self.socket}"]
        self._process = subprocess.Popen(
            command if self._disk is None else self._disk.command(*command),
            env=self._environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        poll_until(self._answers, START_S)

    def _answers(self) -> bool:
        try:
            return DockerApi(str(self.socket)).is_podman()
        except DaemonError:
            return False

    def stop(self) -> None:
        """End the service; containers go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(START_S)
        self.socket.unlink(missing_ok=True)

    def run(self, *arguments: str, data: bytes | None = None) -> str:
        """Run a command of podman; return its output."""
        done = subprocess.run(
            ["podman", *arguments],
            env=self._environment,
            input=data,
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode()

    def containers(self) -> list[dict[str, Any]]:
        """Return all containers, ended ones too."""
        api = DockerApi(str(self.socket))
        return cast(
            list[dict[str, Any]], api.call("GET", "/containers/json", query={"all": "true"})
        )

    def container(self) -> str:
        """Return the ID of the only container."""
        (found,) = self.containers()
        return str(found["Id"])

    @contextmanager
    def registry(self) -> Iterator[str]:
        """Run a registry; yield its address."""
        config = self.directory / "registry.yml"
        config.write_text(_REGISTRY.format(self.directory, self.registry_port))
        address = f"127.0.0.1:{self.registry_port}"
        with subprocess.Popen(
            ["docker-registry", "serve", str(config)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as process:
            try:
                poll_until(lambda: responds(f"http://{address}/v2/"), START_S)
                yield address
            finally:
                process.kill()


@contextmanager
def podman() -> Iterator[Podman]:
    """Run Podman's service with an image; nothing of it is left afterwards."""
    # A short path: its sockets are below.
    directory = Path(tempfile.mkdtemp(prefix="podman-"))
    service = Podman(directory)
    try:
        service.start()
        service.run("import", "-", IMAGE, data=bare_image())
        yield service
    finally:
        service.run("rm", "--all", "--force", "--time=0")
        service.stop()
        shutil.rmtree(directory)
