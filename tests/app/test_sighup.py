"""SIGHUP and `vllm-gateway reload`, as a user has them: the whole command and its words."""

import os
import pty
import signal
import socket
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e import deployment as e2e
from tests.e2e.deployment import (
    ADMIN_KEY,
    COMMAND,
    ROOT,
    Deployment,
    environment,
    until_ready,
    write_config,
)
from tests.forked import run_forked
from tests.gateway import free_port, remote, responds
from tests.waiting import poll_until

pytestmark = pytest.mark.slow
deployed = partial(e2e.deployed, fork=True)


def rewrite(file: Path, *models: dict[str, Any], **server: Any) -> None:
    """Write other models and settings into a configuration file."""
    data = yaml.safe_load(file.read_text())
    data["models"] = list(models)
    data["server"] |= server
    file.write_text(yaml.safe_dump(data))


def reload(deployment: Deployment, *options: str) -> tuple[int, list[str], list[str]]:
    """Run the command; return its exit code and what it said on both outputs."""
    ended = run_forked("reload", *options, env=environment(GATEWAY_URL=deployment.url), cwd=ROOT)
    assert ADMIN_KEY not in ended.stdout + ended.stderr
    return ended.returncode, ended.stdout.splitlines(), ended.stderr.splitlines()


def models(deployment: Deployment) -> list[str]:
    with deployment.client() as client:
        return [card["id"] for card in client.get("/v1/models").json()["data"]]


def hang_up(deployment: Deployment, until_said: str) -> None:
    """Send SIGHUP; return when the gateway has said something."""
    deployment.process.send_signal(signal.SIGHUP)
    poll_until(lambda: until_said in deployment.said(), 10)


def test_sighup_applies_the_file_and_a_fault_in_it_changes_nothing(
    fake_url: str, tmp_path: Path
) -> None:
    demo = {"name": "demo", "engines": [remote(fake_url)]}
    file = tmp_path / "gateway.yaml"
    with deployed(tmp_path, demo) as deployment:
        until_ready(deployment)
        rewrite(file, {**demo, "aliases": ["d"]}, {"name": "new", "engines": [remote(fake_url)]})
        hang_up(deployment, "reload: done")
        assert models(deployment) == ["demo", "d", "new"]

        rewrite(file, {**demo, "aliasses": ["e"]})
        hang_up(deployment, "reload: nothing was changed")
        fault = ": model demo: aliasses: unknown key; did you mean aliases?"
        assert fault in deployment.said()

        file.chmod(0)
        file.unlink()
        hang_up(deployment, f"reload: {file}: no such file")
        file.mkdir()
        hang_up(deployment, f"reload: {file}: cannot be read")
        assert models(deployment) == ["demo", "d", "new"]
        said = deployment.said()
    for line in (
        "~ model demo: aliases [] → [d]",
        "+ model new (starts new-0)",
        "model new: added",
    ):
        assert f'"reload: {line}"' in said
    assert "Traceback" not in said


def test_sighup_waits_until_the_gateway_has_started(tmp_path: Path) -> None:
    """A refused connection fails a remote server at once; a silent server times out."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        demo = {"name": "demo", "engines": [remote(url)]}
        with deployed(tmp_path, demo) as deployment:
            rewrite(tmp_path / "gateway.yaml", {**demo, "aliases": ["d"]})
            hang_up(deployment, "SIGHUP: reloading the configuration")
            assert models(deployment) == ["demo"]
            assert reload(deployment)[2] == [
                f"vllm-gateway: {deployment.url} answers 409: "
                "a reload is under way; try again when it has ended"
            ]


def test_closing_the_terminal_stops_the_gateway(fake_url: str, tmp_path: Path) -> None:
    """A shell's hang-up ends the gateway, as it did before the signal had another meaning."""
    file = write_config(tmp_path, {"name": "demo", "engines": [remote(fake_url)]})
    master, slave = pty.openpty()
    port = yaml.safe_load(file.read_text())["server"]["port"]
    process = subprocess.Popen(
        [*COMMAND, "serve", "--config", str(file)],
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=slave,
    )
    os.close(slave)
    poll_until(lambda: responds(f"http://127.0.0.1:{port}/ready"), 30)
    os.close(master)
    process.send_signal(signal.SIGHUP)
    assert process.wait(20) == 0


def test_reload_command_shows_the_difference_and_applies_it(fake_url: str, tmp_path: Path) -> None:
    demo = {"name": "demo", "engines": [remote(fake_url)]}
    other = {"name": "other", "engines": [remote(fake_url)]}
    file = tmp_path / "gateway.yaml"
    dead = f"http://127.0.0.1:{free_port()}"
    with deployed(tmp_path, demo, other) as deployment:
        until_ready(deployment)
        assert reload(deployment, "--dry-run") == (0, ["nothing differs"], [])
        quick = {"stall_s": 5.0}
        rewrite(
            file,
            {"name": "demo", "aliases": ["d"], "engines": [remote(fake_url, timeouts=quick)]},
            {"name": "new", "engines": [remote(fake_url)]},
            host="127.0.0.2",
            drain_timeout_s=5.0,
        )
        difference = [
            "~ model demo: aliases [] → [d]",
            "~ model demo: timeouts.stall_s 300.0 → 5.0 (replaces demo-0)",
            "- model other (stops other-0)",
            "+ model new (starts new-0)",
            "~ server.drain_timeout_s 30.0 → 5.0",
            "! server.host 127.0.0.1 → 127.0.0.2 (needs a restart)",
        ]
        dry = [*difference, "dry run: nothing was changed"]
        assert reload(deployment, "--dry-run") == (0, dry, [])
        assert models(deployment) == ["demo", "other"]
        done = ["model other: removed", "model new: added", "model demo: changed", "done"]
        assert reload(deployment) == (0, [*difference, *done], [])
        assert models(deployment) == ["demo", "d", "new"]

        rewrite(file, demo, {"name": "new", "engines": [remote(dead)]}, host="127.0.0.1")
        code, said, faults = reload(deployment)
        assert (code, faults) == (1, [])
        refused = f"cannot connect to {dead[7:]}: Connection refused"
        assert said[-3] == f"model new: rolled back: engine new-0: {refused}"
        assert said[-2:] == ["model demo: changed", "done, except for 1 of 2 models"]

        file.write_text("models: [")
        code, said, faults = reload(deployment)
        assert (code, said) == (2, [])
        assert faults[0].startswith(f"vllm-gateway: {deployment.url} answers 400: {file}:1:")
