"""`vllm-gateway reload` against a server that answers as the gateway does, or does not."""

import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from app.cli import app
from tests.gateway import free_port

KEY = "sk-canary-0123456789abcdef"


class Server(http.server.ThreadingHTTPServer):
    """Answers what a test says, and notes what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.status = 200
        self.body = b""
        self.asked: list[tuple[str, Any, str | None]] = []
        self.tell(ok=True, lines=["~ model demo: aliases [] → [a]", "done"])

    def tell(self, **fields: object) -> None:
        self.body = json.dumps(fields).encode()


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append((self.path, asked, self.headers["authorization"]))
        self.send_response(self.server.status)
        self.send_header("content-length", str(len(self.server.body)))
        self.end_headers()
        self.wfile.write(self.server.body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setenv("GATEWAY_URL", server.url)
        monkeypatch.setenv("GATEWAY_KEY", KEY)
        yield server
        server.shutdown()
        thread.join()


def run(*words: str) -> Result:
    result = CliRunner().invoke(app, ["reload", *words])
    assert KEY not in result.output
    return result


def fault(*words: str) -> list[str]:
    """Run what must fail; return its lines."""
    result = run(*words)
    assert (result.exit_code, result.stdout) == (2, "")
    return [line.removeprefix("vllm-gateway: ") for line in result.stderr.splitlines()]


def test_lines_are_those_of_the_gateway(server: Server) -> None:
    result = run()
    assert (result.exit_code, result.stdout) == (0, "~ model demo: aliases [] → [a]\ndone\n")
    assert server.asked == [("/admin/reload", {"dry_run": False}, f"Bearer {KEY}")]


def test_a_dry_run_is_asked_for(server: Server) -> None:
    assert run("--dry-run").exit_code == 0
    assert server.asked[0][1] == {"dry_run": True}


def test_what_was_not_all_done_is_told_by_the_exit_code(server: Server) -> None:
    server.tell(ok=False, lines=["model demo: rolled back: it \x1b[31mfailed"])
    result = run()
    assert result.exit_code == 1
    assert result.stdout == "model demo: rolled back: it \ufffd[31mfailed\n"


def test_json_is_what_the_gateway_said(server: Server) -> None:
    server.tell(ok=True, lines=[], models=[{"model": "x"}])
    assert json.loads(run("--json").stdout)["models"] == [{"model": "x"}]


def test_each_fault_of_the_file_has_a_line(server: Server) -> None:
    server.status = 400
    server.tell(error={"message": "gateway.yaml: one\ngateway.yaml: two\x1b"})
    assert fault() == [
        f"{server.url} answers 400: gateway.yaml: one",
        "gateway.yaml: two\ufffd",
    ]


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"error": 1}', b"\xff"])
def test_a_refusal_by_something_else(server: Server, body: bytes) -> None:
    server.status, server.body = 502, body
    assert fault() == [f"{server.url} answers 502: is that a gateway?"]


@pytest.mark.parametrize("body", [b"", b"<html>", b"{}", b'{"ok": 1}', b"\xff"])
def test_an_answer_that_is_none(server: Server, body: bytes) -> None:
    server.body = body
    told = f"http://127.0.0.1:{server.server_address[1]} does not answer as a gateway does"
    assert fault() == fault("--json") == [told]


def test_without_a_key_nothing_is_asked(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GATEWAY_KEY")
    assert fault()[0].startswith("the admin key is missing: set GATEWAY_KEY or give --admin-key")
    assert server.asked == []


def test_nobody_answers() -> None:
    port = free_port()
    [line] = fault("--admin-key", KEY, "--url", f"http://user:secret@127.0.0.1:{port}")
    assert line.startswith(f"no answer from http://127.0.0.1:{port}: ")
    assert "secret" not in line


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://x", "http://", "http://x:y", "\0"])
def test_an_address_that_is_none(url: str) -> None:
    assert fault("--admin-key", KEY, "--url", url) == [
        "--url must be such as http://127.0.0.1:8000"
    ]
