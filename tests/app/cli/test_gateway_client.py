"""Which gateway a command asks, and with which key."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.auth.key_format import id_of
from app.cli.gateway_client import DEFAULT_URL, Gateway
from tests.app.cli.gateway import KEY, Server, fault, run, serving
from tests.app.configuration import GOOD, isolate
from tests.e2e.deployment import COMMAND, environment, until
from tests.gateway import free_port, remote

OTHER = "sk-another-0123456789abcdef"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Server]:
    """A server that no variable names; the key is in GATEWAY_KEY."""
    isolate(monkeypatch, tmp_path)
    with serving(monkeypatch) as server:
        monkeypatch.delenv("GATEWAY_URL")
        server.tell("/admin/models", {"data": []})
        server.tell("/admin/engines", {"data": []})
        server.tell("/admin/engines/e/log", b"")
        server.tell("/admin/logs", {"levels": {}})
        server.tell("/admin/reload", {"ok": True, "lines": []})
        usage = {"by": ["key"], "from": "2026-11-01", "to": "2026-11-21", "data": []}
        server.tell("/admin/usage", usage)
        yield server


def configure(text: str = "", name: str = "gateway.yaml", **section: Any) -> None:
    """Write a configuration whose server section is this."""
    Path(name).write_text(text or yaml.safe_dump({"server": section}) + GOOD)


COMMANDS = [["status"], ["models"], ["usage"], ["logs", "e"], ["reload"], ["log-level"]]


class TestAddress:
    @pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
    def test_is_that_of_the_configuration(self, server: Server, words: list[str]) -> None:
        configure(host="127.0.0.1", port=server.server_port)
        assert run(*words).exit_code == 0
        assert len(server.asked) == 1

    def test_may_stand_in_another_file(
        self, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        configure(port=free_port())
        configure(name="other.yaml", port=server.server_port)
        assert run("models", "--config", "other.yaml").exit_code == 0
        assert run("models", "--config", "other.yaml", "load", "m").exit_code != 0
        monkeypatch.setenv("GATEWAY_CONFIG", "other.yaml")
        assert run("models").exit_code == 0
        assert len([path for _, path, _ in server.asked if path == "/admin/models"]) == 2
        assert ("POST", "/admin/models/m/load?wait=true", f"Bearer {KEY}") in server.asked

    @pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
    def test_on_loopback_is_not_asked_through_a_proxy(
        self, server: Server, monkeypatch: pytest.MonkeyPatch, words: list[str]
    ) -> None:
        configure(host="127.0.0.1", port=server.server_port)
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
        assert run(*words).exit_code == 0
        assert len(server.asked) == 1

    def test_follows_the_environment_above_the_file(
        self, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        configure(port=free_port())
        monkeypatch.setenv("GATEWAY_SERVER__PORT", str(server.server_port))
        assert run("models").exit_code == 0

    @pytest.mark.parametrize(
        ("host", "url"),
        [
            ("127.0.0.1", "http://127.0.0.1:8123"),
            ("0.0.0.0", "http://127.0.0.1:8123"),
            ("::", "http://[::1]:8123"),
            ("", "http://127.0.0.1:8123"),
            ("fd00::1", "http://[fd00::1]:8123"),
            ("gateway.example.com", "http://gateway.example.com:8123"),
        ],
    )
    def test_is_one_that_can_be_reached(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, host: str, url: str
    ) -> None:
        isolate(monkeypatch, tmp_path)
        configure(host=host, port=8123)
        assert Gateway(None, KEY).shown == url

    def test_is_the_option_then_the_variable_then_the_file(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        isolate(monkeypatch, tmp_path)
        assert Gateway(None, KEY).shown == DEFAULT_URL
        configure(port=8001)
        assert Gateway(None, KEY).shown == "http://127.0.0.1:8001"
        Path(".env").write_text("GATEWAY_URL=http://127.0.0.1:8002\n")
        assert Gateway(None, KEY).shown == "http://127.0.0.1:8002"
        monkeypatch.setenv("GATEWAY_URL", "http://127.0.0.1:8003")
        assert Gateway(None, KEY).shown == "http://127.0.0.1:8003"
        assert Gateway("http://127.0.0.1:8004", KEY).shown == "http://127.0.0.1:8004"

    def test_is_read_from_a_file_whose_models_are_being_edited(self, server: Server) -> None:
        configure(f"server: {{port: {server.server_port}}}\nmodells: [{{}}]\n")
        assert run("models").exit_code == 0

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("server: {port: eight}\n", "gateway.yaml:1: server.port: "),
            ("server: [\n", "gateway.yaml:2:1: "),
            ("server: {port: 0}\n", "server.port is 0, a free one: name the address with --url"),
        ],
    )
    def test_in_a_broken_file_is_one_line(self, server: Server, text: str, said: str) -> None:
        configure(text)
        assert fault("models").startswith(said)
        assert server.asked == []

    def test_in_a_file_that_is_not_there_is_one_line(self, server: Server) -> None:
        assert fault("models", "--config", "x.yaml").startswith("x.yaml: no such file; name one")
        assert server.asked == []

    def test_that_was_guessed_is_said_to_be(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        isolate(monkeypatch, tmp_path)
        monkeypatch.setattr("app.cli.gateway_client.DEFAULT_URL", f"http://127.0.0.1:{free_port()}")
        line = fault("models", "--admin-key", KEY)
        assert line.endswith(
            "; there is no gateway.yaml here: --config, --url or GATEWAY_URL says where"
        )


class TestKey:
    def asked_with(self, server: Server, *options: str) -> str | None:
        configure(port=server.server_port)
        assert run("models", *options).exit_code == 0
        return server.asked[-1][2]

    def test_of_the_commands_stands_above_the_root_key(
        self, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("GATEWAY_ADMIN_KEY", OTHER)
        assert self.asked_with(server) == f"Bearer {KEY}"

    def test_may_be_the_root_key_of_the_gateway(
        self, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("GATEWAY_KEY")
        Path(".env").write_text(f"GATEWAY_ADMIN_KEY={OTHER}\n")
        assert self.asked_with(server) == f"Bearer {OTHER}"

    def test_may_stand_in_the_env_file(
        self, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("GATEWAY_KEY")
        monkeypatch.setenv("GATEWAY_ADMIN_KEY", OTHER)
        Path(".env").write_text(f"GATEWAY_KEY={KEY}\n")
        assert self.asked_with(server) == f"Bearer {KEY}"

    def test_of_the_option_stands_above_both(self, server: Server) -> None:
        assert self.asked_with(server, "--admin-key", OTHER) == f"Bearer {OTHER}"

    def test_that_is_missing_is_one_line(
        self, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("GATEWAY_KEY")
        configure(port=server.server_port)
        assert fault("models").startswith("the admin key is missing: set GATEWAY_KEY")
        assert server.asked == []


@pytest.mark.slow
def test_an_admin_key_that_is_deleted_is_admin_no_longer(fake_url: str, tmp_path: Path) -> None:
    """The commands of the quick start in one shell, then what an operator does after a leak."""
    model = {"name": "demo", "engines": [remote(fake_url)]}
    server = {"host": "127.0.0.1", "port": free_port(), "run_dir": str(tmp_path / "run")}
    configuration = {"server": server, "models": [model]}
    (tmp_path / "gateway.yaml").write_text(yaml.safe_dump(configuration))
    variables = environment(PYTHONPATH=os.environ.get("PYTHONPATH", ""))
    del variables["GATEWAY_ADMIN_KEY"]
    variables["PATH"] = f"{Path(COMMAND[0]).parent}{os.pathsep}{variables['PATH']}"

    def shell(script: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-euc", script],
            cwd=tmp_path,
            env=variables,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    made = shell("vllm-gateway keys create --name me --role admin | tail -n 1")
    variables["GATEWAY_KEY"] = made.stdout.strip()
    key_id = id_of(variables["GATEWAY_KEY"].encode())
    with (tmp_path / "output.txt").open("w") as output:
        gateway = subprocess.Popen(
            [*COMMAND, "serve"], cwd=tmp_path, env=variables, stdout=output, stderr=output
        )
    try:
        until(lambda: "serves on" in (tmp_path / "output.txt").read_text(), 60)
        assert shell("vllm-gateway status").returncode == 0
        assert shell(f"vllm-gateway keys disable {key_id} --now").returncode == 0
        until(lambda: "answers 401: " in shell("vllm-gateway status").stderr, 20)
        assert shell(f"vllm-gateway keys delete {key_id}").returncode == 0
        until(lambda: "answers 401: " in shell("vllm-gateway status").stderr, 20)
        assert "root" not in (tmp_path / "output.txt").read_text()
    finally:
        gateway.terminate()
        gateway.wait(30)

    variables["GATEWAY_ADMIN_KEY"] = variables["GATEWAY_KEY"]
    for command in ("serve", "check"):
        refused = shell(f"vllm-gateway {command}")
        assert refused.returncode == 2
        [line] = refused.stderr.splitlines()
        assert "GATEWAY_ADMIN_KEY: holds a key of the key store (sk-gw-…)" in line
        assert variables["GATEWAY_KEY"] not in line
