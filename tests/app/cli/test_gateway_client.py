"""The client of a running gateway: its address, its key and its faults."""

import os
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from app.auth.key_format import id_of
from app.cli.gateway_client import DEFAULT_URL, GatewayClient
from tests.app.cli.gateway import KEY, FakeGateway, fault, run, serving
from tests.app.configuration import GOOD, isolate
from tests.certificates import make_identity
from tests.e2e.deployment import COMMAND, environment
from tests.forked import ForkedCommand, run_forked
from tests.gateway import free_port, remote
from tests.waiting import poll_until

OTHER = "sk-another-0123456789abcdef"


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeGateway]:
    """A fake gateway whose address is in no variable; the key is in GATEWAY_KEY."""
    isolate(monkeypatch, tmp_path)
    with serving(monkeypatch) as gateway:
        monkeypatch.delenv("GATEWAY_URL")
        gateway.respond("/admin/models", {"data": []})
        gateway.respond("/admin/engines", {"data": []})
        gateway.respond("/admin/engines/e/log", b"")
        gateway.respond("/admin/logs", {"levels": {}})
        gateway.respond("/admin/reload", {"ok": True, "lines": []})
        usage = {"by": ["key"], "from": "2026-11-01", "to": "2026-11-21", "data": []}
        gateway.respond("/admin/usage", usage)
        yield gateway


def configure(text: str = "", name: str = "gateway.yaml", **section: Any) -> None:
    """Write a configuration with this section `server`."""
    Path(name).write_text(text or yaml.safe_dump({"server": section}) + GOOD)


COMMANDS = [["status"], ["models"], ["usage"], ["logs", "e"], ["reload"], ["log-level"]]


@pytest.mark.parametrize(
    ("url", "verified"),
    [
        ("http://127.0.0.1:8000", False),
        ("http://[::1]:8000", False),
        ("https://127.0.0.1:8000", True),
        ("http://gateway.example", True),  # a proxy may speak TLS
    ],
)
def test_authorities_are_read_unless_the_gateway_is_here_and_speaks_plain_http(
    url: str, verified: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {}

    def send(*_: object, **given: Any) -> httpx.Response:
        options.update(given)
        return httpx.Response(200)

    monkeypatch.setattr(httpx, "request", send)
    GatewayClient(url, KEY).send("/health")
    assert options["verify"] is verified
    assert options["trust_env"] is verified


class TestAddress:
    @pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
    def test_address_comes_from_the_configuration(
        self, gateway: FakeGateway, words: list[str]
    ) -> None:
        configure(host="127.0.0.1", port=gateway.server_port)
        assert run(*words).exit_code == 0
        assert len(gateway.requests) == 1

    def test_url_may_have_the_path_of_a_proxy(self, gateway: FakeGateway) -> None:
        gateway.respond("/llm/admin/models", {"data": []})
        for path in ("/llm", "/llm/"):
            assert run("models", "--url", f"{gateway.url}{path}").exit_code == 0

    def test_config_option_and_variable_name_the_file(
        self, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        configure(port=free_port())
        configure(name="other.yaml", port=gateway.server_port)
        assert run("models", "--config", "other.yaml").exit_code == 0
        assert run("models", "--config", "other.yaml", "load", "m").exit_code != 0
        monkeypatch.setenv("GATEWAY_CONFIG", "other.yaml")
        assert run("models").exit_code == 0
        assert len([path for _, path, _ in gateway.requests if path == "/admin/models"]) == 2
        assert ("POST", "/admin/models/m/load?wait=true", f"Bearer {KEY}") in gateway.requests

    @pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
    def test_loopback_address_bypasses_proxies(
        self, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch, words: list[str]
    ) -> None:
        configure(host="127.0.0.1", port=gateway.server_port)
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
        assert run(*words).exit_code == 0
        assert len(gateway.requests) == 1

    def test_environment_overrides_the_file(
        self, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        configure(port=free_port())
        monkeypatch.setenv("GATEWAY_SERVER__PORT", str(gateway.server_port))
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
    def test_wildcard_host_becomes_loopback(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, host: str, url: str
    ) -> None:
        isolate(monkeypatch, tmp_path)
        configure(host=host, port=8123)
        assert GatewayClient(None, KEY).address == url

    def test_option_overrides_variable_overrides_file(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        isolate(monkeypatch, tmp_path)
        assert GatewayClient(None, KEY).address == DEFAULT_URL
        configure(port=8001)
        assert GatewayClient(None, KEY).address == "http://127.0.0.1:8001"
        Path(".env").write_text("GATEWAY_URL=http://127.0.0.1:8002\n")
        assert GatewayClient(None, KEY).address == "http://127.0.0.1:8002"
        monkeypatch.setenv("GATEWAY_URL", "http://127.0.0.1:8003")
        assert GatewayClient(None, KEY).address == "http://127.0.0.1:8003"
        assert GatewayClient("http://127.0.0.1:8004", KEY).address == "http://127.0.0.1:8004"

    def test_faults_in_other_sections_are_ignored(self, gateway: FakeGateway) -> None:
        configure(f"server: {{port: {gateway.server_port}}}\nmodells: [{{}}]\n")
        assert run("models").exit_code == 0

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("server: {port: eight}\n", "gateway.yaml:1: server.port: "),
            ("server: [\n", "gateway.yaml:2:1: "),
            ("server: {port: 0}\n", "server.port is 0, a free port: name the address with --url"),
        ],
    )
    def test_faulty_server_section_is_one_line(
        self, gateway: FakeGateway, text: str, said: str
    ) -> None:
        configure(text)
        assert fault("models").startswith(said)
        assert gateway.requests == []

    def test_missing_file_is_one_line(self, gateway: FakeGateway) -> None:
        assert fault("models", "--config", "x.yaml").startswith("x.yaml: no such file; name one")
        assert gateway.requests == []

    def test_guessed_address_without_answer_has_a_hint(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        isolate(monkeypatch, tmp_path)
        monkeypatch.setattr("app.cli.gateway_client.DEFAULT_URL", f"http://127.0.0.1:{free_port()}")
        line = fault("models", "--admin-key", KEY)
        assert line.endswith(
            "; there is no gateway.yaml here: name the gateway with --config, --url or GATEWAY_URL"
        )


class TestKey:
    def sent_key(self, gateway: FakeGateway, *options: str) -> str | None:
        configure(port=gateway.server_port)
        assert run("models", *options).exit_code == 0
        return gateway.requests[-1][2]

    def test_gateway_key_overrides_the_root_key(
        self, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("GATEWAY_ADMIN_KEY", OTHER)
        assert self.sent_key(gateway) == f"Bearer {KEY}"

    def test_root_key_is_the_default(
        self, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("GATEWAY_KEY")
        Path(".env").write_text(f"GATEWAY_ADMIN_KEY={OTHER}\n")
        assert self.sent_key(gateway) == f"Bearer {OTHER}"

    def test_key_may_be_in_the_env_file(
        self, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("GATEWAY_KEY")
        monkeypatch.setenv("GATEWAY_ADMIN_KEY", OTHER)
        Path(".env").write_text(f"GATEWAY_KEY={KEY}\n")
        assert self.sent_key(gateway) == f"Bearer {KEY}"

    def test_option_overrides_both_variables(self, gateway: FakeGateway) -> None:
        assert self.sent_key(gateway, "--admin-key", OTHER) == f"Bearer {OTHER}"

    @pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
    def test_missing_key_is_one_line(
        self, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch, words: list[str]
    ) -> None:
        monkeypatch.delenv("GATEWAY_KEY")
        configure(port=gateway.server_port)
        line = "the admin key is missing: set GATEWAY_KEY or give --admin-key"
        assert fault(*words).startswith(line)
        assert gateway.requests == []

    @pytest.mark.parametrize("key", ["ключ", "a\nb", "a\r\nx: y"])
    def test_key_that_no_header_can_carry_is_one_line(self, key: str) -> None:
        line = fault("models", "--admin-key", key)
        assert line == "the admin key holds a character that a header cannot carry"


class TestFaults:
    @pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
    def test_no_answer_is_one_line_without_the_password(self, words: list[str]) -> None:
        port = free_port()
        url = f"http://user:secret@127.0.0.1:{port}"
        line = fault(*words, "--admin-key", KEY, "--url", url)
        assert line.startswith(f"no answer from http://127.0.0.1:{port}: ")
        assert "secret" not in line

    @pytest.mark.parametrize("url", ["", "localhost:1", "ftp://x", "http://", "http://x:y", "\0"])
    def test_invalid_url_is_one_line(self, url: str) -> None:
        line = fault("models", "--admin-key", KEY, "--url", url)
        assert line == "--url must look like http://127.0.0.1:8000"

    @pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
    def test_refusal_is_the_message_of_the_gateway(
        self, gateway: FakeGateway, words: list[str]
    ) -> None:
        for path in gateway.responses:
            gateway.refuse(path, 403, "this key may\x1b not")
        line = fault(*words, "--url", gateway.url)
        assert line == f"{gateway.url} answers 403: this key may\ufffd not"

    @pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"error": 1}', b"\xff"])
    def test_error_of_another_server_is_one_line(self, gateway: FakeGateway, body: bytes) -> None:
        gateway.respond("/admin/models", body, status=502)
        line = fault("models", "--url", gateway.url)
        assert line == f"{gateway.url} answers 502: is that a gateway?"

    @pytest.mark.parametrize("command", ["status", "models", "usage"])
    @pytest.mark.parametrize("body", [b"", b"<html>", b"{}", b'{"data": [{"name": 1}]}', b"\xff"])
    def test_response_of_another_server_is_one_line(
        self, gateway: FakeGateway, command: str, body: bytes
    ) -> None:
        for path in gateway.responses:
            gateway.respond(path, body)
        line = fault(command, "--url", gateway.url)
        assert line == f"{gateway.url} does not answer as a gateway does"


@pytest.mark.slow
def test_deleted_admin_key_is_refused(fake_url: str, tmp_path: Path) -> None:
    """The commands of the quick start, then what an operator does after a leak."""
    model = {"name": "demo", "engines": [remote(fake_url)]}
    server = {"host": "127.0.0.1", "port": free_port(), "run_dir": str(tmp_path / "run")}
    configuration = {"server": server, "models": [model]}
    (tmp_path / "gateway.yaml").write_text(yaml.safe_dump(configuration))
    variables = environment(PYTHONPATH=os.environ.get("PYTHONPATH", ""))
    del variables["GATEWAY_ADMIN_KEY"]
    variables["PATH"] = f"{Path(COMMAND[0]).parent}{os.pathsep}{variables['PATH']}"

    def command(*words: str) -> subprocess.CompletedProcess[str]:
        return run_forked(*words, env=variables, cwd=tmp_path)

    gateway = ForkedCommand("serve", env=variables, cwd=tmp_path, output=tmp_path / "output.txt")
    try:
        poll_until(lambda: "serves on" in (tmp_path / "output.txt").read_text(), 60)
        create = "vllm-gateway keys create --name me --role admin | tail -n 1"
        made = subprocess.run(
            ["bash", "-euc", create], cwd=tmp_path, env=variables, capture_output=True, text=True
        )
        variables["GATEWAY_KEY"] = made.stdout.strip()
        key_id = id_of(variables["GATEWAY_KEY"].encode())
        assert key_id is not None, made.stderr
        poll_until(lambda: command("status").returncode == 0)
        assert command("keys", "disable", key_id, "--now").returncode == 0
        poll_until(lambda: "answers 401: " in command("status").stderr)
        assert command("keys", "delete", key_id).returncode == 0
        poll_until(lambda: "answers 401: " in command("status").stderr)
        assert '"key":"root"' not in (tmp_path / "output.txt").read_text()
    finally:
        gateway.terminate()
        gateway.wait(30)

    variables["GATEWAY_ADMIN_KEY"] = variables["GATEWAY_KEY"]
    for name in ("serve", "check"):
        refused = command(name)
        assert refused.returncode == 2
        [line] = refused.stderr.splitlines()
        assert "GATEWAY_ADMIN_KEY: holds a key of the key store (sk-gw-…)" in line
        assert variables["GATEWAY_KEY"] not in line


class TestTls:
    """A gateway that serves HTTPS on this machine, with a certificate for another name."""

    IDENTITY = make_identity("gateway.example", address="192.0.2.1")

    @pytest.fixture
    def https(self, gateway: FakeGateway, tmp_path: Path) -> FakeGateway:
        """The fake gateway over TLS, and the configuration that names its certificate."""
        file = self.IDENTITY.write(tmp_path / "gateway.pem")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(file)
        gateway.socket = context.wrap_socket(gateway.socket, server_side=True)
        tls = {"cert_file": str(file), "key_file": str(file)}
        configure(host="127.0.0.1", port=gateway.server_port, tls=tls)
        return gateway

    @pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
    def test_its_own_certificate_is_accepted(self, https: FakeGateway, words: list[str]) -> None:
        assert run(*words).exit_code == 0
        assert len(https.requests) == 1

    def test_certificate_of_another_is_refused(self, https: FakeGateway, tmp_path: Path) -> None:
        """Also one that the same authority has signed, whose certificate follows in the file."""
        authority = make_identity("authority")
        leaf = make_identity(issuer=authority)
        (tmp_path / "gateway.pem").write_bytes(leaf.certificate_pem + authority.certificate_pem)
        assert "certificate verify failed" in fault("status")
        assert https.requests == []

    def test_option_has_its_certificate_verified_by_name(self, https: FakeGateway) -> None:
        line = fault("status", "--url", f"https://127.0.0.1:{https.server_port}")
        assert "certificate verify failed" in line
        assert line.endswith("set SSL_CERT_FILE to the certificate of an authority of your own")

    def test_gateway_that_started_before_a_change_of_tls_is_said(
        self, gateway: FakeGateway, tmp_path: Path
    ) -> None:
        file = str(self.IDENTITY.write(tmp_path / "gateway.pem"))
        tls = {"cert_file": file, "key_file": file}
        configure(host="127.0.0.1", port=gateway.server_port, tls=tls)
        expected = "started before server.port or server.tls changed, give --url or restart it"
        assert fault("status").endswith(expected)

    def test_unreadable_certificate_is_named(self, https: FakeGateway, tmp_path: Path) -> None:
        (tmp_path / "gateway.pem").write_text("hello")
        assert fault("status").startswith(f"server.tls.cert_file {tmp_path}/gateway.pem cannot be")

    def test_client_certificate_that_is_none_is_named(
        self, https: FakeGateway, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("GATEWAY_CLIENT_CERT", "absent.pem")
        assert fault("status").startswith("GATEWAY_CLIENT_CERT absent.pem has no certificate")
