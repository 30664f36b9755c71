"""`vllm-gateway owners`, with no gateway up."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from app.cli import app
from tests.app.configuration import isolate
from tests.gateway import remote

MODEL = {"name": "demo", "engines": [remote("http://127.0.0.1:1")]}


@pytest.fixture(autouse=True)
def configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    state = {"database_url": "sqlite+aiosqlite:///state/gateway.db"}
    Path("gateway.yaml").write_text(yaml.safe_dump({"state": state, "models": [MODEL]}))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def done(*arguments: str) -> str:
    """Return what a command prints that ends well."""
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return result.stdout


def as_json(*arguments: str) -> Any:
    return json.loads(done(*arguments, "--json"))


def fault(*arguments: str) -> str:
    """Return the line with which a command refuses."""
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    return line.removeprefix("vllm-gateway: ")


def test_an_owner_is_set_shown_listed_and_deleted() -> None:
    made = as_json("owners", "set", "research", "--daily-tokens", "7", "--tokens-per-minute", "0")
    assert (made["daily_tokens"], made["tokens_per_minute"], made["keys"]) == (7, 0, 0)
    done("keys", "create", "--name", "alice", "--owner", "research")
    shown = as_json("owners", "show", "research")
    assert shown == {**made, "keys": 1}
    assert as_json("owners", "list") == {"data": [shown], "has_more": False}
    (_, row) = done("owners", "list").splitlines()
    assert row.split() == ["research", "1", "-", "0", "-", "7", "-"]
    assert done("owners", "delete", "research") == "deleted 'research'\n"
    assert fault("owners", "show", "research") == "there is no such owner"
    assert as_json("keys", "list")["data"][0]["owner"] == "research"


def test_what_is_not_given_stays_and_none_removes() -> None:
    done("owners", "set", "a", "--daily-tokens", "7", "--concurrent-requests", "3")
    changed = as_json("owners", "set", "a", "--daily-tokens", "none", "--monthly-tokens", "8")
    given = ("daily_tokens", "monthly_tokens", "concurrent_requests")
    assert [changed[name] for name in given] == [None, 8, 3]


def test_a_list_is_read_page_by_page() -> None:
    for name in ("a", "b", "c"):
        done("owners", "set", name)
    *_, told = done("owners", "list", "--limit", "2").splitlines()
    assert told == "there are more: --after 'b'"
    page = as_json("owners", "list", "--after", "b")
    assert [owner["name"] for owner in page["data"]] == ["c"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("set", "a", "--daily-tokens", "x"), "daily_tokens: must be a whole number, or none"),
        (("set", "a", "--daily-tokens", "-1"), "daily_tokens: must be a whole number, or none"),
        (("set", "a", "--requests-per-minute", "9" * 12), "requests_per_minute: "),
        (("set", " a"), "name: begins or ends with a space"),
        (("set", ""), "name: "),
        (("delete", "a"), "there is no such owner"),
    ],
)
def test_a_fault_is_one_line(arguments: tuple[str, ...], told: str) -> None:
    assert fault("owners", *arguments).startswith(told)
    assert as_json("owners", "list")["data"] == []


def test_a_name_steers_no_terminal_and_is_no_markup() -> None:
    assert "[red]x" in done("owners", "set", "[red]x")
    assert "[red]x" in done("owners", "list")
