"""The launch of one engine: its command, its environment, its directory and the files in it."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from engines import environment, interpreter, media
from engines.base import EngineFacts
from engines.guard import directories, scratch
from engines.guard.guardian_client import LaunchError, compute_fingerprint, is_running
from engines.process.sleep_mode import SLEEP_ENV
from engines.setup import EngineSetup
from engines.spec import LORA_ENV, ContainerSpec, ProcessSpec, RaySpec

FACTS = "facts.json"
ORIGIN = "origin.json"
LOG = "engine.log"
SOCKET = "http.sock"
# With less room, a file system is full.
FULL_BYTES = 64 * 1024


class HubUnreachable(LaunchError):
    """The model has to be downloaded, and its hub cannot be reached."""


@dataclass(frozen=True, slots=True)
class LaunchOrigin:
    """The configuration that an engine was started from, for a gateway that finds it running.

    Its name does not identify that: an engine that replaced another in a reload has another name.
    """

    # Equal for engines of equal configuration, and opaque otherwise.
    mark: str
    # The GPUs that the gateway assigned; None: it assigned none.
    gpus: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Everything that starting one engine takes."""

    name: str
    spec: ProcessSpec | ContainerSpec | RaySpec
    served_name: str
    directory: Path
    command: tuple[str, ...]
    # Set by the gateway, for example the GPUs.
    env: Mapping[str, str]
    # It outlives the gateway.
    keep: bool
    # Variables that it does not inherit; a reload may add some.
    withheld: Collection[str] = ()
    origin: LaunchOrigin | None = None
    # Before a start, whether the model's hub can be reached is checked. Not for other launchers.
    downloads: bool = False
    # What it takes of a cluster; another place needs another start.
    place: str = ""
    # It takes LoRA adapters.
    lora: bool = False

    @classmethod
    def of(
        cls,
        setup: EngineSetup,
        spec: ProcessSpec | ContainerSpec | RaySpec,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        downloads: bool = False,
        place: str = "",
    ) -> Self:
        """Return the launch of an engine with this command."""
        return cls(
            name=setup.name,
            spec=spec,
            served_name=setup.served_name,
            directory=setup.directory,
            command=tuple(command),
            env=env or {},
            keep=setup.keep,
            withheld=setup.withheld,
            origin=None if setup.mark is None else LaunchOrigin(setup.mark, setup.gpus),
            downloads=downloads,
            place=place,
            lora=setup.lora,
        )

    @property
    def socket(self) -> Path:
        return self.directory / SOCKET

    @property
    def log(self) -> Path:
        return self.directory / LOG

    @property
    def python(self) -> Path | None:
        """The interpreter of another environment of this machine; None: it has none."""
        return self.spec.python if isinstance(self.spec, ProcessSpec) else None

    @property
    def fingerprint(self) -> str:
        """A digest of what an engine must have been started with to be adopted."""
        command = (*self.command, self.place) if self.place else self.command
        return compute_fingerprint(command, self.own_env, self.spec.inherit_env)

    @property
    def own_env(self) -> dict[str, str]:
        """The variables that are set for this engine, whatever the gateway's environment has."""
        asleep = SLEEP_ENV if self.spec.sleep_level else {}
        lora = LORA_ENV if self.lora else {}
        own = {**media.ENV, **asleep, **lora, **self.env, **self.spec.env}
        return own if self.python is None else {**own, **interpreter.python_path(own)}

    def prepare(self) -> dict[str, str]:
        """Make the directory; return the complete environment of the engine.

        Raises OSError, and LaunchError where the directory or the model cannot work.
        """
        try:
            directories.make_private(self.directory)
        except directories.ForeignDirectory as error:
            raise LaunchError(str(error)) from None
        self.directory.chmod(0o700)
        if len(os.fsencode(str(self.socket))) > scratch.MAX_SOCKET_PATH:
            raise LaunchError(
                f"the path {self.socket} is too long for a socket: set server.run_dir"
            )
        if missing := self.missing_model():
            raise LaunchError(missing)
        if self.origin is not None:
            written = json.dumps(dataclasses.asdict(self.origin))
            (self.directory / ORIGIN).write_text(written)
        return {**self._inherited(), **self._temporary(), **self.own_env}

    @property
    def environment(self) -> dict[str, str]:
        """The engine's environment, except for the paths of its temporary files."""
        return {**self._inherited(), **self.own_env}

    def _inherited(self) -> dict[str, str]:
        ours = environment.inherited(os.environ, self.spec.inherit_env, self.withheld)
        return ours if self.python is None else interpreter.variables(ours, self.python)

    def _temporary(self) -> dict[str, str]:
        if scratch.TMPDIR in self.own_env:
            return {}
        try:
            return scratch.variables(self.directory, scratch.create(self.directory))
        except scratch.SocketPathTooLong as error:
            raise LaunchError(str(error)) from None

    def missing_model(self) -> str | None:
        """Return the fault of a model's directory that is not here; None on another machine."""
        return None if isinstance(self.spec, RaySpec) else self.spec.missing_model()

    def disk_is_full(self) -> bool:
        """Return whether the directory's file system has no room, for bytes or for files."""
        with contextlib.suppress(OSError):
            disk = os.statvfs(self.directory)
            return disk.f_bavail * disk.f_frsize < FULL_BYTES or (
                disk.f_files > 0 and disk.f_favail == 0  # some file systems count no files
            )
        return False

    def set_log_aside(self) -> None:
        """Rename the log of the previous run, so that a new one begins."""
        if self.log.exists():
            self.log.replace(self.log.with_suffix(".log.previous"))

    def note(self, facts: EngineFacts, load_s: float | None) -> None:
        """Write what is known of the engine, for a gateway that adopts it."""
        with contextlib.suppress(OSError):
            written = {"facts": dataclasses.asdict(facts), "load_s": load_s}
            (self.directory / FACTS).write_text(json.dumps(written))

    def recall(self) -> tuple[EngineFacts, float | None]:
        """Return the facts and the load time that `note` wrote last, in this gateway or earlier."""
        try:
            data = json.loads((self.directory / FACTS).read_text())
            facts = data["facts"]
            if facts["supported_tasks"] is not None:
                facts["supported_tasks"] = tuple(facts["supported_tasks"])
            return EngineFacts(**facts), data["load_s"]
        except (OSError, ValueError, TypeError, LookupError):
            return EngineFacts(), None


def running_engines(run_dir: Path) -> dict[str, LaunchOrigin]:
    """Return the engines that run in a run directory, by name, with their origin.

    Engines without a readable origin, or in a directory of another user, are left out.
    """
    found: dict[str, LaunchOrigin] = {}
    for file in sorted(run_dir.glob(f"*/{ORIGIN}")):
        directory = file.parent
        if is_running(directory):
            with contextlib.suppress(OSError, ValueError, TypeError, LookupError):
                data = json.loads(file.read_text())
                gpus = None if data["gpus"] is None else tuple(map(int, data["gpus"]))
                found[directory.name] = LaunchOrigin(str(data["mark"]), gpus)
    return found
