"""The image `gateway` without Docker: the Dockerfile's own steps in a mount namespace.

There is no daemon here to build with. So bubblewrap makes a root that has this machine's Debian in
/usr and this Python in /usr/local, as the base image does, and each RUN is run in it as it stands;
then the image runs as Docker would run it: as its user, with a root that cannot be written.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.deploy.dockerfile import Stage, lineage, read

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
STATE = "/var/lib/vllm-gateway"
CACHE = "/var/cache/vllm-gateway"


class Image:
    """The image of one target of the Dockerfile, below `directory`."""

    def __init__(self, directory: Path, target: str = "gateway") -> None:
        self.directory = directory
        self.stages = read(DOCKERFILE)
        self.target = lineage(self.stages, target)
        for name in ("opt", "build", "var/lib", "var/cache", "tmp"):
            (directory / name).mkdir(parents=True)
        shutil.copytree("/etc", directory / "etc", symlinks=True, ignore=_unreadable)

    def build(self) -> None:
        """Run every step of the target and of the stages that it copies from."""
        order = ["build", f"{self.target.name}-packages", "wheel", "base", self.target.name]
        for name in order:
            self._stage(self.stages[name])

    def _stage(self, stage: Stage) -> None:
        for *sources, target in stage.copies():
            if sources[0].startswith("--from"):
                if sources[1] != target:  # all stages have one /opt here
                    self._copy_within(sources[1], target)
                continue
            for source in sources:
                self._copy(ROOT / source, target, several=len(sources) > 1)
        env = lineage(self.stages, stage.name).env()
        for command in stage.runs():
            subprocess.run(
                [*self._root(writable=True), "/bin/bash", "-euo", "pipefail", "-c", command],
                env=_environment(env, _registries()),
                check=True,
                timeout=300,
            )

    def _copy(self, source: Path, target: str, *, several: bool) -> None:
        into = self.directory / "build" / target
        if source.is_dir():
            shutil.copytree(source, into, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            if several or target.endswith("/"):
                into.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, into)

    def _copy_within(self, source: str, target: str) -> None:
        d = self.directory
        shutil.copytree(d / source[1:], d / target[1:], symlinks=True, dirs_exist_ok=True)

    def command(self, *words: str, mounts: Sequence[str] = ()) -> list[str]:
        """Return the command line that runs something in the image as its user would.

        Without words it is what the image runs by itself. `mounts` are bubblewrap's.
        """
        run = words or (*self.target.exec_form("ENTRYPOINT"), *self.target.exec_form("CMD"))
        user, group = self.target.all("USER")[-1].split(":")
        identity = ("setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups")
        return [*self._root(writable=False), *mounts, "--remount-ro", "/", *identity, *run]

    def environment(self, **more: str) -> dict[str, str]:
        """Return the environment of what runs in the image."""
        return _environment(self.target.env(), more)

    @property
    def venv(self) -> Path:
        """Its Python environment, seen from outside."""
        return self.directory / "opt" / "venv"

    @property
    def state(self) -> Path:
        """The volume for state, seen from outside."""
        return self.directory / STATE[1:]

    def _root(self, *, writable: bool) -> list[str]:
        bind = "--bind" if writable else "--ro-bind"
        d = self.directory
        words = [
            "bwrap",
            "--die-with-parent",
            "--unshare-pid",
            "--as-pid-1",
            "--unshare-ipc",
            "--unshare-uts",
        ]
        words += ["--ro-bind", "/usr", "/usr", "--ro-bind", sys.base_prefix, "/usr/local"]
        for link in ("bin", "lib", "lib64", "sbin"):
            words += ["--symlink", f"usr/{link}", f"/{link}"]
        words += ["--proc", "/proc", "--dev", "/dev"]
        words += ["--bind", str(d / "tmp"), "/tmp"]
        words += [bind, str(d / "etc"), "/etc", bind, str(d / "opt"), "/opt"]
        if writable:
            words += ["--bind", str(d / "var"), "/var", "--bind", str(d / "build"), "/build"]
            cache = Path.home() / ".cache" / "uv"
            cache.mkdir(parents=True, exist_ok=True)
            words += ["--bind", str(cache), "/root/.cache/uv", "--chdir", "/build"]
        else:
            for parent in ("/var", "/var/lib"):
                words += ["--perms", "0755", "--dir", parent]
            words += ["--bind", str(self.state), STATE, "--chdir", STATE]
        return words


def _unreadable(directory: str, names: list[str]) -> list[str]:
    """Ignore the parts of /etc that an unprivileged test cannot copy, and sockets and the like."""
    return [
        n
        for n in names
        if not os.access(p := os.path.join(directory, n), os.R_OK)
        or (os.path.islink(p) and not os.path.exists(p))
    ]


def _registries() -> dict[str, str]:
    """Settings of this machine for package indexes."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("PIP_", "UV_", "SSL_CERT")) or name.lower().endswith("_proxy")
    }


def _environment(image: Mapping[str, str], more: Mapping[str, Any]) -> dict[str, str]:
    path = "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
    # This Python's library, which is looked for where it was installed, and then in Debian's.
    library = {"LD_LIBRARY_PATH": "/usr/local/lib"}
    env = {"PATH": path, "HOME": "/root", **library, **{k: str(v) for k, v in more.items()}}
    for name, value in image.items():
        env[name] = value.replace("$PATH", path)
    return env
