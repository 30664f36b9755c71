"""Forks of the command end as the command does."""

import signal
import subprocess
from pathlib import Path

import pytest

from tests.e2e.deployment import COMMAND, deployed, environment
from tests.forked import run_forked
from tests.gateway import remote

pytestmark = pytest.mark.slow


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
    model = {"name": "demo", "engines": [remote("http://127.0.0.1:1")]}
    with deployed(tmp_path, model, fork=True) as deployment:
        deployment.process.kill()
        assert deployment.process.wait(20) == -signal.SIGKILL
