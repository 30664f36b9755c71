"""Forks of the command end as the command does."""

import signal
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.deployment import COMMAND, deployed, environment
from tests.forked import run_forked
from tests.gateway import remote
from tests.waiting import poll_until

pytestmark = pytest.mark.slow
MODEL = {"name": "demo", "engines": [remote("http://127.0.0.1:1")]}
# What a failed test may leave.
LEAVING = """
import os, signal, sys
from pathlib import Path
from tests.forked import ForkedCommand

command = ForkedCommand("serve", env=os.environ, cwd=Path.cwd(), output=Path(os.devnull))
command.send_signal(signal.SIGSTOP)
print(command.pid)
"""


@pytest.mark.parametrize("arguments", [("--version",), ("serve", "--config", "none.yaml")])
def test_exit_code_and_outputs_are_those_of_the_command(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    env = environment()
    ran = subprocess.run(
        [*COMMAND, *arguments], env=env, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    forked = run_forked(*arguments, env=env, cwd=tmp_path)
    assert (forked.returncode, forked.stdout, forked.stderr) == (
        ran.returncode,
        ran.stdout,
        ran.stderr,
    )


def test_exit_code_after_a_signal_is_its_negative_number(tmp_path: Path) -> None:
    with deployed(tmp_path, MODEL, fork=True) as deployment:
        deployment.process.kill()
        assert deployment.process.wait(20) == -signal.SIGKILL


def test_request_ids_are_those_of_one_gateway(tmp_path: Path) -> None:
    ids = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        with deployed(tmp_path / name, MODEL, fork=True) as deployment:
            ids.append(httpx.get(f"{deployment.url}/v1/models").headers["x-request-id"])
    assert len(set(ids)) == 2


def test_a_paused_gateway_ends_with_the_tests() -> None:
    command = [sys.executable, "-c", LEAVING]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
    poll_until(lambda: not psutil.pid_exists(int(done.stdout)))
