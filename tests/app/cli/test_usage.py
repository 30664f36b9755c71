"""`vllm-gateway usage` against a server that answers as the gateway does, or does not."""

import csv
import http.server
import io
import json
import threading
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from typer.testing import CliRunner, Result

from app.cli import app
from tests.gateway import free_port

KEY = "sk-canary-0123456789abcdef"


def group(**fields: Any) -> dict[str, Any]:
    usual = {
        "day": None,
        "key_id": "key-1",
        "key_name": "ci",
        "model": None,
        "requests": 12345,
        "estimated_requests": 1,
        "prompt_tokens": 100,
        "cached_tokens": 10,
        "completion_tokens": 50,
        "reasoning_tokens": 5,
        "total_tokens": 150,
        "cost": 0.125,
        "owner": None,
    }
    return {**usual, **fields}


class Server(http.server.ThreadingHTTPServer):
    """Answers what a test says, and notes what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.status = 200
        self.body = b""
        self.asked: list[tuple[str, dict[str, list[str]], str | None]] = []
        self.tell(group())

    def tell(self, *groups: dict[str, Any], by: Sequence[str] = ("key",)) -> None:
        about = {"object": "list", "by": by, "from": "2026-11-01", "to": "2026-11-21"}
        self.body = json.dumps({**about, "data": groups}).encode()


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        self.server.asked.append((url.path, parse_qs(url.query), self.headers["authorization"]))
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
        monkeypatch.setenv("COLUMNS", "120")
        yield server
        server.shutdown()
        thread.join()


def run(*words: str) -> Result:
    result = CliRunner().invoke(app, ["usage", *words])
    assert KEY not in result.output
    return result


def fault(*words: str) -> str:
    """Run what must fail; return its one line."""
    result = run(*words)
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    return line.removeprefix("vllm-gateway: ")


def test_a_table_unless_told_otherwise(server: Server) -> None:
    result = run()
    assert result.exit_code == 0
    assert "usage from 2026-11-01 to 2026-11-21, UTC" in result.stdout
    for cell in ("key", "ci", "12,345", "100", "50", "0.1250"):
        assert cell in result.stdout
    assert "day" not in result.stdout
    assert server.asked == [("/admin/usage", {"by": ["key"]}, f"Bearer {KEY}")]


@pytest.mark.parametrize("columns", ["20", "80"])
def test_a_pipe_gets_whole_days_and_names(
    server: Server, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    server.tell(
        group(day="2026-11-21", key_name="a key of a team", model="org/a-model-with-a-long-name"),
        by=["day", "key", "model"],
    )
    assert run("--by", "day,key,model").stdout.splitlines() == [
        "usage from 2026-11-01 to 2026-11-21, UTC",
        "day         key              model                         requests  prompt  cached  "
        "completion  cost",
        "2026-11-21  a key of a team  org/a-model-with-a-long-name  12,345    100     10      "
        "50          0.1250",
    ]


def test_days_are_whole_on_a_terminal_of_80_columns(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    server.tell(
        group(day="2026-11-21", key_name="k" * 30, model="m" * 30, prompt_tokens=10**10),
        by=["day", "key", "model"],
    )
    shown = run("--by", "day,key,model").stdout
    for cell in ("2026-11-21", "12,345", "10,000,000,000", "0.1250"):
        assert cell in shown
    assert "…" not in shown
    assert shown.count("m") >= 30


def test_what_is_asked_for_reaches_the_gateway(server: Server) -> None:
    words = ("--by", "key,day", "--from", "2026-11-01", "--to", "2026-11-02", "--key", "a&b")
    assert run(*words).exit_code == 0
    asked = {"by": ["key,day"], "from": ["2026-11-01"], "to": ["2026-11-02"], "key": ["a&b"]}
    assert server.asked[0][1] == asked


def test_owners_have_a_column_where_they_are_asked_for(server: Server) -> None:
    server.tell(group(owner="research"), group(owner=""), by=["owner", "key"])
    lines = run("--by", "owner,key", "--owner", "research").stdout.splitlines()
    assert server.asked[0][1] == {"by": ["owner,key"], "owner": ["research"]}
    rows = [line.replace("│", " ").split()[:2] for line in lines if "ci" in line]
    assert rows == [["research", "ci"], ["-", "ci"]]


def test_options_stand_above_the_environment(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GATEWAY_URL", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("GATEWAY_KEY", "another")
    assert run("--url", f"{server.url}/", "--admin-key", KEY).exit_code == 0
    assert server.asked[0][2] == f"Bearer {KEY}"


def test_json_is_what_the_gateway_said(server: Server) -> None:
    told = json.loads(run("--json").stdout)
    assert told["from"] == "2026-11-01"
    assert told["data"] == [group()]


def test_csv_has_a_line_a_group(server: Server) -> None:
    server.tell(group(), group(key_id="key-2", key_name=None, model='a "b", c'))
    first, second = csv.DictReader(io.StringIO(run("--csv").stdout))
    assert (first["key_name"], first["requests"], first["cost"]) == ("ci", "12345", "0.125")
    assert (second["key_name"], second["model"]) == ("", 'a "b", c')


@pytest.mark.parametrize("name", ["=1+1", "+1", "-1", "@SUM(A1)"])
def test_a_spreadsheet_runs_nothing_from_csv(server: Server, name: str) -> None:
    server.tell(group(key_name=name, model=name))
    (row,) = csv.DictReader(io.StringIO(run("--csv").stdout, newline=""))
    assert row["key_name"] == row["model"] == f"'{name}"


@pytest.mark.parametrize("begin", ["\t", "\r", "\n", "\x1b"])
def test_a_name_breaks_no_line_of_csv(server: Server, begin: str) -> None:
    server.tell(group(key_name=f"{begin}=1"))
    (row,) = csv.DictReader(io.StringIO(run("--csv").stdout, newline=""))
    assert row["key_name"] == "\ufffd=1"


def test_a_name_steers_no_terminal_and_is_no_markup(server: Server) -> None:
    server.tell(group(key_name="\x1b[31m[red]x\x07\x9b"))
    shown = run().stdout
    assert "\ufffd[31m[red]x\ufffd\ufffd" in shown
    assert "\x1b" not in shown


def test_json_or_csv(server: Server) -> None:
    assert fault("--json", "--csv") == "--json or --csv, not both"


def test_without_a_key_nothing_is_asked(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GATEWAY_KEY")
    assert fault().startswith("the admin key is missing: set GATEWAY_KEY or give --admin-key")
    assert server.asked == []


@pytest.mark.parametrize("key", ["ключ", "a\nb", "a\r\nx: y"])
def test_a_key_that_no_header_carries(server: Server, key: str) -> None:
    line = fault("--admin-key", key)
    assert line == "the admin key holds a character that a header cannot carry"


def test_the_gateways_own_words(server: Server) -> None:
    server.status = 403
    server.body = b'{"error": {"message": "this key may\\u001b not", "code": "x"}}'
    assert fault() == f"{server.url} answers 403: this key may\ufffd not"


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"error": 1}', b"\xff"])
def test_a_refusal_by_something_else(server: Server, body: bytes) -> None:
    server.status = 502
    server.body = body
    assert fault() == f"{server.url} answers 502: is that a gateway?"


@pytest.mark.parametrize("body", [b"", b"<html>", b"{}", b'{"data": [{}]}', b"\xff", b'"\xff"'])
def test_an_answer_that_is_none(server: Server, body: bytes) -> None:
    server.body = body
    assert fault() == f"{server.url} does not answer as a gateway does"


def test_nobody_answers() -> None:
    port = free_port()
    line = fault("--admin-key", KEY, "--url", f"http://user:secret@127.0.0.1:{port}")
    assert line.startswith(f"no answer from http://127.0.0.1:{port}: ")
    assert "secret" not in line


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://x", "http://", "http://x:y", "\0"])
def test_an_address_that_is_none(url: str) -> None:
    assert fault("--admin-key", KEY, "--url", url) == "--url must be such as http://127.0.0.1:8000"


def test_help_does_not_show_the_key(server: Server) -> None:
    assert run("--help").exit_code == 0
