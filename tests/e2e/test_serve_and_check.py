"""Starts that are refused, and what `check` prints."""

import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.deployment import (
    ENGINE_WITH_WORKER,
    KEY,
    deployed,
    environment,
    run,
    use_known_flags,
    write_config,
)
from tests.forked import run_forked

DEMO: dict[str, Any] = {"name": "demo", "engines": [ENGINE_WITH_WORKER]}


def test_port_in_use_is_one_line_and_exit_2(tmp_path: Path) -> None:
    use_known_flags(tmp_path / "run")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = run("serve", "--config", str(write_config(tmp_path, DEMO, port=port)))
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1] == (
        f"vllm-gateway: cannot listen on 127.0.0.1:{port}: Address already in use; "
        "choose another: GATEWAY_SERVER__PORT=8001"
    )


@pytest.mark.parametrize("command", ["serve", "check"])
def test_file_that_is_no_configuration_is_one_line_and_exit_2(tmp_path: Path, command: str) -> None:
    """More of them are in tests/app/cli/wrong.py."""
    file = tmp_path / "gateway.yaml"
    file.write_text("servr: {}\nmodels: []")
    ended = run_forked(command, "--config", str(file), env=environment(), cwd=tmp_path)
    assert ended.returncode == 2
    assert "gateway.yaml:1: servr: unknown key; did you mean server?" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_gateway_without_keys_in_the_environment_has_those_of_its_store(tmp_path: Path) -> None:
    file = write_config(tmp_path, DEMO)
    use_known_flags(tmp_path / "run")
    bare = {k: v for k, v in environment().items() if k != "GATEWAY_API_KEYS"}
    ended = run_forked("check", "--config", str(file), env=bare, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "keys: 0 from the environment, others from the key store" in ended.stdout


def test_check_prints_what_would_run(tmp_path: Path) -> None:
    file = write_config(tmp_path, DEMO)
    use_known_flags(tmp_path / "run")  # which an earlier check has written: learn_flags
    ended = run("check", "--config", str(file))
    assert ended.returncode == 0, ended.stderr
    assert "--served-model-name=demo" in ended.stdout
    assert KEY not in ended.stdout
    # It starts nothing.
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["vllm-flags.json"]


def test_second_gateway_with_the_same_run_directory_is_refused(tmp_path: Path) -> None:
    idle = {"name": "m", "engines": [{"kind": "remote", "url": "http://127.0.0.1:9"}]}
    with deployed(tmp_path, idle, fork=True) as first:
        assert first.process.poll() is None
        file = tmp_path / "second.yaml"
        settings = yaml.safe_load((tmp_path / "gateway.yaml").read_text())
        settings["server"]["port"] = 0
        file.write_text(yaml.safe_dump(settings))
        ended = run("serve", "--config", str(file))
    assert ended.returncode == 2
    assert "is in use by another gateway" in ended.stderr
