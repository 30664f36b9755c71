"""An environment for each client, below .tools/clients/: what it needs shall not meet vLLM's."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from tests.docs.page import ROOT

REQUIREMENTS = Path(__file__).with_name("requirements")
PLACE = ROOT / ".tools" / "clients"
# Open WebUI brings PyTorch: gigabytes.
INSTALL_S = 900.0
PYTHON = "3.11"


class Unavailable(Exception):
    """A client cannot be installed here; the text is the reason."""


def programs(name: str) -> Path:
    """Return the directory of a client's programs, installed if missing. Raises Unavailable."""
    if (file := REQUIREMENTS / f"{name}.json").exists():
        return _node(name, file)
    return _python(name, REQUIREMENTS / f"{name}.txt")


def _python(name: str, requirements: Path) -> Path:
    directory = PLACE / name
    if not _is_made(directory, requirements):
        uv = output_of("deploy/setup.sh", "uv")
        shutil.rmtree(directory, ignore_errors=True)
        _run(uv, "venv", "--quiet", "--python", PYTHON, str(directory))
        python = str(directory / "bin" / "python")
        # None of the clients computes anything: PyTorch's CPU build is a fraction of the other.
        backend = ("--torch-backend", "cpu")
        try:
            _install(uv, python, requirements, *backend)
        except Unavailable:
            _install(uv, python, requirements)
        _mark(directory, requirements)
    return directory / "bin"


def _install(uv: str, python: str, requirements: Path, *options: str) -> None:
    _run(uv, "pip", "install", "--quiet", "--python", python, *options, "-r", str(requirements))


def _node(name: str, package: Path) -> Path:
    if shutil.which("npm") is None:
        raise Unavailable("npm is not installed")
    directory = PLACE / name
    if not _is_made(directory, package):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        shutil.copy(package, directory / "package.json")
        _run("npm", "install", "--silent", "--prefix", str(directory))
        _mark(directory, package)
    return directory


def _is_made(directory: Path, requirements: Path) -> bool:
    mark = directory / ".made-from"
    return mark.exists() and mark.read_text() == _digest(requirements)


def _mark(directory: Path, requirements: Path) -> None:
    (directory / ".made-from").write_text(_digest(requirements))


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _run(*command: str) -> None:
    output_of(*command)


def output_of(*command: str) -> str:
    """Return what a command prints. Raises Unavailable with its last line where it fails."""
    environment = {k: v for k, v in os.environ.items() if k != "VIRTUAL_ENV"}
    # uv does not read pip's settings, where a machine names its local wheels.
    if links := environment.get("PIP_FIND_LINKS"):
        environment.setdefault("UV_FIND_LINKS", links.replace(" ", ","))
    try:
        ended = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=INSTALL_S,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        last = (error.stderr or error.stdout).strip().splitlines() or ["no message"]
        raise Unavailable(f"{command[0]}: {last[-1]}") from None
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{command[0]}: not within {INSTALL_S:g} s") from None
    return ended.stdout.strip()
