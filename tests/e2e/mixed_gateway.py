"""`vllm-gateway` where an engine with a `fake-` flag runs the fake in place of vLLM.

For what real vLLM cannot be made to do beside a real one: end again and again, load in a second.
"""

import shlex
import sys
from unittest import mock

from app.cli import main
from engines.process import vllm_launcher

MIXED = (sys.executable, "-m", "tests.e2e.mixed_gateway")
FAKE = (sys.executable, "-m", "tests.fakes.vllm")


def launcher() -> tuple[str, ...]:
    """Return the command of an engine: a shell script that reads the flags."""
    fake, real = shlex.join(FAKE), shlex.join(vllm_launcher())
    script = f'case "$*" in *--fake-*) exec {fake} "$@";; *) exec {real} "$@";; esac'
    return "/bin/sh", "-c", script, "engine"


if __name__ == "__main__":
    with mock.patch("app.fleet.builder.vllm_launcher", launcher):
        main()
