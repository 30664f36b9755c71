"""A fake gateway for commands, and runs of commands."""

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from typer.testing import CliRunner, Result

from app.cli import app

KEY = "sk-canary-0123456789abcdef"


class FakeGateway(http.server.ThreadingHTTPServer):
    """Answers each path with its responses in turn, and repeats the last one."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.headers: dict[str, str] = {}  # of every response
        self.responses: dict[str, list[tuple[int, bytes]]] = {}
        self.requests: list[tuple[str, str, str | None]] = []  # method, path, authorization
        self.bodies: list[Any] = []  # the JSON of every POST

    def respond(self, path: str, *bodies: Any, status: int = 200) -> None:
        self.responses[path] = [
            (status, body if isinstance(body, bytes) else json.dumps(body).encode())
            for body in bodies
        ]

    def refuse(self, path: str, status: int, message: str) -> None:
        self.respond(path, {"error": {"message": message, "code": "x"}}, status=status)

    @property
    def paths(self) -> list[str]:
        """The paths and queries of the requests."""
        return [path for _, path, _ in self.requests]


class Handler(http.server.BaseHTTPRequestHandler):
    server: FakeGateway

    def do_GET(self) -> None:
        request = (self.command, unquote(self.path), self.headers["authorization"])
        self.server.requests.append(request)
        responses = self.server.responses.get(urlsplit(self.path).path, [(404, b"{}")])
        status, body = responses.pop(0) if len(responses) > 1 else responses[0]
        self.send_response(status)
        for name, value in {**self.server.headers, "content-length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.bodies.append(json.loads(body or b"null"))
        self.do_GET()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(patch: pytest.MonkeyPatch) -> Iterator[FakeGateway]:
    """Serve at the address and with the key that the environment gives to commands."""
    with FakeGateway() as gateway:
        thread = threading.Thread(target=gateway.serve_forever, args=(0.01,))
        thread.start()
        patch.setenv("GATEWAY_URL", gateway.url)
        patch.setenv("GATEWAY_KEY", KEY)
        yield gateway
        gateway.shutdown()
        thread.join()


def run(*words: str) -> Result:
    result = CliRunner().invoke(app, words)
    assert KEY not in result.output
    return result


def output(*words: str) -> str:
    """Run a command that must succeed; return its output."""
    result = run(*words)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    return result.stdout


def output_json(*words: str) -> Any:
    return json.loads(output(*words, "--json"))


def faults(*words: str, code: int = 2) -> list[str]:
    """Run a command that must fail; return the lines of its faults."""
    result = run(*words)
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    lines = result.stderr.splitlines()
    assert all(line.startswith("vllm-gateway: ") for line in lines)
    return [line.removeprefix("vllm-gateway: ") for line in lines]


def fault(*words: str, code: int = 2) -> str:
    """Run a command that must fail with one line; return it."""
    (line,) = faults(*words, code=code)
    return line
