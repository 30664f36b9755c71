"""`vllm-gateway keys`, with no gateway up and with one."""

import json
import sqlite3
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from app.auth.key_format import id_of
from app.cli import app
from tests.app.configuration import isolate
from tests.e2e.deployment import COMMAND, deployed, environment, until
from tests.gateway import remote

MODEL = {"name": "demo", "aliases": ["gpt-4o"], "engines": [remote("http://127.0.0.1:1")]}


@pytest.fixture(autouse=True)
def database(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A configuration in the working directory; the value is the file of its database."""
    isolate(monkeypatch, tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    state = {"database_url": "sqlite+aiosqlite:///state/gateway.db"}
    Path("gateway.yaml").write_text(yaml.safe_dump({"state": state, "models": [MODEL]}))
    return tmp_path / "state" / "gateway.db"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["keys", *arguments])


def done(*arguments: str) -> str:
    """Return what a command prints that ends well."""
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return result.stdout


def as_json(*arguments: str) -> Any:
    return json.loads(done(*arguments, "--json"))


def faults(*arguments: str) -> list[str]:
    """Return the lines with which a command refuses."""
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    lines = result.stderr.splitlines()
    assert all(line.startswith("vllm-gateway: ") for line in lines)
    return [line.removeprefix("vllm-gateway: ") for line in lines]


def test_a_new_key_is_printed_once_with_a_line_that_says_so() -> None:
    *_, told, secret = done("create", "--name", "team").splitlines()
    assert told == "the secret, which cannot be shown again:"
    key_id = id_of(secret.encode())
    assert key_id is not None
    for output in (done("list"), done("show", key_id), done("list", "--json")):
        assert key_id in output
        assert secret[17:] not in output


def test_every_field_can_be_given() -> None:
    made = as_json(
        *("create", "--name", "n", "--owner", "o", "--role", "manager", "--expires", "12h"),
        *("--model", "demo", "--model", "de*", "--requests-per-minute", "0"),
        *("--tokens-per-minute", "5", "--concurrent-requests", "6", "--daily-tokens", "7"),
        *("--monthly-tokens", "8", "--priority", "-3", "--weight", "9"),
        *("--fields", '{"deny": ["tools"], "max": {"n": 2}}'),
    )
    shown = as_json("show", made["id"])
    assert made.pop("key").startswith(f"sk-gw-{made['id']}-")
    assert shown == made
    assert (shown["role"], shown["models"]) == ("manager", ["demo", "de*"])
    limits = ("requests_per_minute", "tokens_per_minute", "concurrent_requests")
    assert [shown[name] for name in limits] == [0, 5, 6]
    budgets = ("daily_tokens", "monthly_tokens", "priority", "weight")
    assert [shown[name] for name in budgets] == [7, 8, -3, 9]
    assert shown["fields"] == {"allow": [], "deny": ["tools"], "force": {}, "max": {"n": 2}}
    assert '{"deny": ["tools"], "max": {"n": 2}}' in done("show", made["id"])


def test_a_key_is_rotated_disabled_enabled_and_deleted() -> None:
    made = as_json("create", "--name", "a")
    rotated = as_json("rotate", made["id"], "--grace", "0s")
    assert rotated["id"] == made["id"]
    assert rotated["key"] != made["key"]
    assert as_json("disable", made["id"])["disabled"]
    assert " disabled " in done("list")
    assert not as_json("enable", made["id"])["disabled"]
    assert " active " in done("list")
    assert done("delete", made["id"]) == f"deleted {made['id']}\n"
    assert as_json("list") == {"data": [], "has_more": False}
    assert faults("show", made["id"]) == ["there is no such key"]


@pytest.mark.parametrize("command", ["disable", "delete"])
def test_requests_in_flight_are_ended_where_that_is_asked_for(database: Path, command: str) -> None:
    def cut_ms(key_id: str) -> int | None:
        with sqlite3.connect(database) as connection:
            query = "SELECT cut_ms FROM api_keys WHERE id = ?"
            [[found]] = connection.execute(query, [key_id]).fetchall()
        connection.close()
        return int(found) if found is not None else None

    for flags in ([], ["--now"]):
        made = as_json("create", "--name", command + "".join(flags))
        done(command, made["id"], *flags)
        assert (cut_ms(made["id"]) is not None) is bool(flags)
    if command == "disable":
        done("enable", made["id"])
        assert cut_ms(made["id"]) is None


def test_a_name_stands_for_an_id_everywhere() -> None:
    made = as_json("create", "--name", "team a")
    assert as_json("show", "team a")["id"] == made["id"]
    assert as_json("disable", "team a")["disabled"]
    assert not as_json("enable", "team a")["disabled"]
    assert as_json("update", "team a", "--owner", "o")["owner"] == "o"
    assert as_json("rotate", "team a")["id"] == made["id"]
    assert done("delete", "team a") == f"deleted {made['id']}\n"


def test_the_nearest_name_is_told() -> None:
    done("create", "--name", "research")
    assert faults("show", "reserch") == ["there is no such key; did you mean 'research'?"]


class TestUpdate:
    def test_changes_what_is_given_and_nothing_else(self) -> None:
        made = as_json("create", "--name", "a", "--weight", "5", "--daily-tokens", "7")
        del made["key"]
        changed = as_json(
            *("update", "a", "--name", "b", "--owner", "o", "--model", "demo", "--priority", "-3"),
            *("--requests-per-minute", "60", "--monthly-tokens", "8", "--expires", "12h"),
            *("--fields", '{"deny": ["tools"]}'),
        )
        assert changed["expires"] is not None
        assert changed == {
            **made,
            "name": "b",
            "owner": "o",
            "models": ["demo"],
            "priority": -3,
            "requests_per_minute": 60,
            "monthly_tokens": 8,
            "expires": changed["expires"],
            "fields": {"allow": [], "deny": ["tools"], "force": {}, "max": {}},
            "limits_in_force": {**made["limits_in_force"], "requests_per_minute": 60},
        }

    def test_takes_back_what_was_given(self) -> None:
        rules = ("--fields", '{"deny": ["tools"]}')
        made = as_json(
            *("create", "--name", "a", "--requests-per-minute", "1", "--tokens-per-minute", "2"),
            *("--concurrent-requests", "3", "--daily-tokens", "4", "--monthly-tokens", "5"),
            *("--expires", "1d", "--owner", "o", "--model", "demo", *rules),
        )
        changed = as_json(
            *("update", "a", "--requests-per-minute", "default", "--tokens-per-minute", "default"),
            *("--concurrent-requests", "default", "--daily-tokens", "none", "--owner", ""),
            *("--monthly-tokens", "none", "--expires", "never", "--fields", "none"),
            *("--model", "*"),
        )
        other = as_json("create", "--name", "other")
        for name in ("id", "name", "created", "key"):
            made.pop(name), other.pop(name), changed.pop(name, None)
        assert changed == other

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            ([], "nothing to change: name an option, such as --owner"),
            (["--name", ""], "name: "),
            (["--requests-per-minute", "many"], "requests_per_minute: must be a whole number or "),
            (["--requests-per-minute", "-1"], "requests_per_minute: "),
            (["--daily-tokens", "default"], "daily_tokens: must be a whole number or `none`"),
            (["--model", "a*b"], "models.0: a * may only stand at the end"),
            (["--weight", "0"], "weight: "),
            (["--expires", "soon"], "expires: "),
            (["--fields", "{"], "fields: not JSON"),
        ],
    )
    def test_refuses_a_bad_field_and_changes_nothing(self, arguments: list[str], said: str) -> None:
        done("create", "--name", "a")
        before = as_json("show", "a")
        [line] = faults("update", "a", *arguments)
        assert line.startswith(said)
        assert as_json("show", "a") == before

    def test_refuses_a_name_that_is_taken(self) -> None:
        made = as_json("create", "--name", "a")
        done("create", "--name", "b")
        said = f"name: the key {made['id']} has this name already"
        assert faults("update", "b", "--name", "a") == [said]


class TestModels:
    @pytest.mark.parametrize(
        ("model", "kept", "said"),
        [
            ("gpt-4o", "demo", "gpt-4o is an alias: the key gets its model, demo"),
            ("dmeo", "dmeo", "the configuration has no model dmeo; did you mean demo?"),
            ("zzz", "zzz", "the configuration has no model zzz"),
            ("gpt*", "gpt*", "no model of the configuration begins with gpt"),
        ],
    )
    def test_a_name_that_opens_nothing_is_warned_of(self, model: str, kept: str, said: str) -> None:
        done("create", "--name", "b")
        for command in (["create", "--name", "a"], ["update", "b"]):
            result = run(*command, "--model", model, "--json")
            assert result.exit_code == 0
            assert result.stderr == f"vllm-gateway: warning: {said}\n"
            assert json.loads(result.stdout)["models"] == [kept]


def test_limits_in_force_are_shown_and_which_are_the_defaults() -> None:
    made = as_json("create", "--name", "a", "--tokens-per-minute", "5000")
    lines = [line.split("  ", 1) for line in done("show", "a").splitlines()]
    shown = {name: value.strip() for name, value in filter(lambda line: len(line) == 2, lines)}
    assert shown["requests per minute"] == "600 (default)"
    assert shown["tokens per minute"] == "5,000"
    assert shown["concurrent requests"] == "32 (default)"
    head, row = done("list").splitlines()
    assert "requests/min   tokens/min  at once" in head
    assert row.split()[:6] == [made["id"], "client", "active", "a", "-", "*"]
    assert row.endswith("  600 (default)  5,000       32 (default)")
    done("create", "--name", "me", "--role", "admin")
    assert "(default)" not in done("show", "me")


def test_an_old_secret_that_works_is_shown_until_it_does_not() -> None:
    done("create", "--name", "a")
    assert "old secret until" not in done("list")
    until = as_json("rotate", "a", "--grace", "2d")["previous_secret_until"]
    assert "old secret until" in done("list")
    assert until[:16] in done("list")
    assert until in done("show", "a")
    done("rotate", "a", "--grace", "0s")
    assert "old secret until" not in done("list")


def test_keys_are_whole_on_a_narrow_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    made = as_json("create", "--name", "a long name of a key that a team has")
    head, row = done("list").splitlines()
    assert made["name"] in row
    assert head.startswith("id ")


def test_pages_follow_each_other() -> None:
    for name in "abc":
        done("create", "--name", name)
    first = as_json("list", "--limit", "2")
    last = first["data"][-1]["id"]
    assert done("list", "--limit", "2").splitlines()[-1] == f"there are more: --after {last}"
    assert [key["name"] for key in as_json("list", "--after", last)["data"]] == ["a"]


def test_an_expired_key_is_listed_as_such() -> None:
    done("create", "--name", "a", "--expires", "2020-01-01T00:00:00Z")
    assert " expired " in done("list")


def test_what_looks_like_markup_is_printed_as_it_is() -> None:
    made = as_json("create", "--name", "[red]a[/red]", "--owner", "[/]")
    for output in (done("list"), done("show", made["id"])):
        assert "[red]a[/red]" in output
        assert "[/]" in output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--name", ""], "name: "),
        (["--name", "a\nb"], "name: holds a character that cannot be printed"),
        (["--name", "a", "--role", "root"], "role: "),
        (["--name", "a", "--model", "a*b"], "models.0: a * may only stand at the end"),
        (["--name", "a", "--requests-per-minute", "-1"], "requests_per_minute: "),
        (["--name", "a", "--tokens-per-minute", "1000000001"], "tokens_per_minute: "),
        (["--name", "a", "--daily-tokens", "-1"], "daily_tokens: "),
        (["--name", "a", "--priority", "101"], "priority: "),
        (["--name", "a", "--weight", "0"], "weight: "),
        (["--name", "a", "--fields", "{"], "fields: not JSON"),
        (["--name", "a", "--fields", "[" * 100_000], "fields: not JSON"),
        (["--name", "a", "--fields", '"deny"'], "fields: "),
        (["--name", "a", "--fields", '{"deny": ["model"]}'], "fields: model cannot be named"),
        (["--name", "a", "--expires", "soon"], "expires: must be a time with its zone"),
        (["--name", "a", "--expires", "999999w"], "expires: must be a time with its zone"),
    ],
)
def test_a_bad_field_is_one_line_and_nothing_is_written(arguments: list[str], said: str) -> None:
    [line] = faults("create", *arguments)
    assert line.startswith(said)
    assert as_json("list")["data"] == []


def test_a_name_that_is_taken_is_told() -> None:
    made = as_json("create", "--name", "a")
    assert faults("create", "--name", "a") == [f"name: the key {made['id']} has this name already"]
    assert len(as_json("list")["data"]) == 1


@pytest.mark.parametrize("command", ["show", "rotate", "disable", "enable", "delete", "update"])
@pytest.mark.parametrize("key_id", ["0000000000", "' OR 1=1 --", "sk-gw-canary"])
def test_a_key_that_is_not_there_is_told_without_its_name(command: str, key_id: str) -> None:
    options = ["--owner", "o"] if command == "update" else []
    assert faults(command, key_id, *options) == ["there is no such key"]


@pytest.mark.parametrize("grace", ["", "1", "-1d", "31d", "forever"])
def test_a_grace_that_cannot_be_is_told_and_rotates_nothing(grace: str) -> None:
    made = as_json("create", "--name", "a")
    [line] = faults("rotate", made["id"], f"--grace={grace}")
    assert line.startswith("grace")


def test_a_file_that_is_no_database_is_told(database: Path) -> None:
    database.parent.mkdir()
    database.write_bytes(b"not a database" * 100)
    [line] = faults("list")
    assert line.endswith("file is not a database")


def test_a_configuration_that_is_missing_is_told() -> None:
    [line] = faults("list", "--config", "nowhere.yaml")
    assert line.startswith("nowhere.yaml: no such file")


@pytest.mark.slow
def test_a_gateway_that_runs_finds_what_the_command_changes(tmp_path: Path) -> None:
    def keys(*arguments: str) -> Any:
        config = ("--config", str(tmp_path / "gateway.yaml"), "--json")
        ran = subprocess.run(
            [*COMMAND, "keys", *arguments, *config],
            env=environment(),
            capture_output=True,
            check=True,
        )
        return json.loads(ran.stdout)

    with deployed(tmp_path, MODEL) as deployment, deployment.client() as client:
        made = keys("create", "--name", "a")
        client.headers["authorization"] = f"Bearer {made['key']}"
        assert client.get("/v1/models").status_code == 200
        assert keys("disable", made["id"])["disabled"]
        until(lambda: client.get("/v1/models").status_code == 401, 10)
        keys("enable", made["id"])
        until(lambda: client.get("/v1/models").status_code == 200, 10)
        assert made["key"] not in deployment.said()
