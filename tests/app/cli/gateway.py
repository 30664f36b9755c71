"""A server that answers commands as the gateway does, or does not, and notes what it was asked."""

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


class Server(http.server.ThreadingHTTPServer):
    """Answers to each path what a test says: the answers in turn, the last one for ever."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.answers: dict[str, list[tuple[int, bytes]]] = {}
        self.asked: list[tuple[str, str, str | None]] = []

    def tell(self, path: str, *bodies: Any, status: int = 200) -> None:
        self.answers[path] = [
            (status, body if isinstance(body, bytes) else json.dumps(body).encode())
            for body in bodies
        ]

    def refuse(self, path: str, status: int, message: str) -> None:
        self.tell(path, {"error": {"message": message, "code": "x"}}, status=status)


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        self.server.asked.append((self.command, unquote(self.path), self.headers["authorization"]))
        answers = self.server.answers.get(path, [(404, b"{}")])
        status, body = answers.pop(0) if len(answers) > 1 else answers[0]
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(patch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Serve, at the address and with the key that the environment tells commands."""
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        patch.setenv("GATEWAY_URL", server.url)
        patch.setenv("GATEWAY_KEY", KEY)
        yield server
        server.shutdown()
        thread.join()


def run(*words: str) -> Result:
    result = CliRunner().invoke(app, words)
    assert KEY not in result.output
    return result


def fault(*words: str, code: int = 2) -> str:
    """Run what must fail; return its one line."""
    result = run(*words)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    return line.removeprefix("vllm-gateway: ")
