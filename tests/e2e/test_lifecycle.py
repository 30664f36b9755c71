"""Starts, ends and deaths of the whole thing, on real vLLM."""

import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.e2e.deployment import (
    COMMAND,
    ENGINE_WITH_WORKER,
    KEY,
    Deployment,
    alive,
    demo_model,
    deployed,
    engine_processes,
    environment,
    run,
    traces,
    until_ready,
    use_known_flags,
    write_config,
)
from tests.waiting import poll_until

DEMO: dict[str, Any] = {"name": "demo", "engines": [ENGINE_WITH_WORKER]}


def kill_api_server(processes: list[psutil.Process]) -> None:
    """Kill the API server among an engine's processes."""
    server = next(p for p in processes if "vllm_gateway_serve.py" in " ".join(p.cmdline()[:3]))
    os.kill(server.pid, signal.SIGKILL)


def sleeping_processes(deployment: Deployment) -> set[str]:
    """Return which processes of vLLM said that the gateway's plugin has them sleep."""
    lines = (deployment.run_dir / "demo-0" / "engine.log").read_text().splitlines()
    return {line.split(" ")[0] for line in lines if line.endswith("instead of spinning")}


def test_killed_api_server_leaves_no_process_and_no_file_and_sigterm_ends_its_restart(
    tmp_path: Path,
) -> None:
    demo_model()
    with deployed(tmp_path, DEMO) as deployment:
        until_ready(deployment)
        assert {"(EngineCore", "(VllmWorker-0"} <= sleeping_processes(deployment)
        processes = engine_processes(deployment)
        left = traces(deployment, processes)
        kill_api_server(processes)
        poll_until(lambda: not any(alive(p) for p in processes), 5)
        assert not [path for path in left if path.exists()]
        with deployment.client() as client:
            poll_until(lambda: client.get("/ready").status_code == 503, 5)
            assert client.get("/health").status_code == 200
            assert client.get("/v1/models").status_code == 200
            body = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
            answer = client.post("/v1/chat/completions", json=body, timeout=120)
            assert answer.status_code == 200, "it waits for the restart"
            assert "it died while serving (killed by SIGKILL)" in deployment.said()
            kill_api_server(engine_processes(deployment))
            poll_until(lambda: client.get("/ready").status_code == 503, 5)
            poll_until(lambda: len(deployment.family()) >= 2, 20)
            assert client.get("/ready").status_code == 503
        starting = deployment.family()
        assert deployment.terminate() == 0
        assert not [p for p in starting if alive(p)]


def test_port_in_use_is_one_line_and_exit_2(tmp_path: Path) -> None:
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
    ended = run(command, "--config", str(file))
    assert ended.returncode == 2
    assert "gateway.yaml:1: servr: unknown key; did you mean server?" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_gateway_without_keys_in_the_environment_has_those_of_its_store(tmp_path: Path) -> None:
    file = write_config(tmp_path, DEMO)
    use_known_flags(tmp_path / "run")
    bare = {k: v for k, v in environment().items() if k != "GATEWAY_API_KEYS"}
    ended = subprocess.run(
        [*COMMAND, "check", "--config", str(file)],
        env=bare, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "keys: 0 from the environment, others from the key store" in ended.stdout


def test_check_prints_what_would_run(tmp_path: Path) -> None:
    file = write_config(tmp_path, DEMO)
    ended = run("check", "--config", str(file))
    assert ended.returncode == 0, ended.stderr
    assert "--served-model-name=demo" in ended.stdout
    assert KEY not in ended.stdout
    # It starts nothing, and writes what vLLM's parser said, so that the next check is quick.
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["vllm-flags.json"]


def test_second_gateway_with_the_same_run_directory_is_refused(tmp_path: Path) -> None:
    idle = {"name": "m", "engines": [{"kind": "remote", "url": "http://127.0.0.1:9"}]}
    with deployed(tmp_path, idle) as first:
        assert first.process.poll() is None
        file = tmp_path / "second.yaml"
        settings = yaml.safe_load((tmp_path / "gateway.yaml").read_text())
        settings["server"]["port"] = 0
        file.write_text(yaml.safe_dump(settings))
        ended = run("serve", "--config", str(file))
    assert ended.returncode == 2
    assert "is in use by another gateway" in ended.stderr
