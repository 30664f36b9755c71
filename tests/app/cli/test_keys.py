"""`vllm-gateway keys`, with the gateway down and up."""

import contextlib
import json
import socket
import sqlite3
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.auth.key_format import id_of
from app.cli.key_files import secrets_file
from app.settings import ConfigError, load_settings
from tests.app.cli import gateway
from tests.app.cli.conftest import MODEL
from tests.e2e.deployment import deployed, environment
from tests.forked import run_forked
from tests.gateway import remote
from tests.waiting import poll_until

pytestmark = pytest.mark.usefixtures("database")
run = partial(gateway.run, "keys")
output = partial(gateway.output, "keys")
output_json = partial(gateway.output_json, "keys")
faults = partial(gateway.faults, "keys")


def test_secret_is_printed_only_when_the_key_is_created() -> None:
    *_, note, secret = output("create", "--name", "team").splitlines()
    assert note == "the secret, which cannot be shown again:"
    key_id = id_of(secret.encode())
    assert key_id is not None
    for shown in (output("list"), output("show", key_id), output("list", "--json")):
        assert key_id in shown
        assert secret[17:] not in shown


def test_keys_are_those_of_the_configuration_from_any_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = output_json("create", "--name", "a")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    [listed] = output_json("list", "--config", "../gateway.yaml")["data"]
    assert listed["id"] == made["id"]


def test_secrets_of_the_running_gateway_need_not_be_set_here() -> None:
    """A service gets them from its manager; commands run in an administrator's shell."""
    file = Path("gateway.yaml")
    values = yaml.safe_load(file.read_text())
    values["models"] = [{**MODEL, "engines": [remote("http://127.0.0.1:1", api_key_env="NO_KEY")]}]
    values["capture"] = {"models": ["demo"]}
    values["console"] = {
        "oidc": {
            "issuer": "https://id.example",
            "client_id": "gateway",
            "client_secret_env": "NO_SECRET",
            "role_claim": "groups",
            "roles": {"staff": "client"},
        }
    }
    file.write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError) as refused:
        load_settings(file)
    assert len(refused.value.faults) == 3
    assert output_json("create", "--name", "a")["name"] == "a"
    assert [key["name"] for key in output_json("list")["data"]] == ["a"]
    assert gateway.output("owners", "set", "research", "--requests-per-minute", "0")
    assert gateway.run("db", "check").exit_code == 0


def test_no_command_makes_a_database(database: Path) -> None:
    database.unlink()
    assert faults("create", "--name", "a") == [
        "sqlite+aiosqlite:///state/gateway.db: no gateway has made a database there; start one "
        "with this configuration first, or name its configuration with --config"
    ]
    assert not database.exists()


def test_create_takes_every_property() -> None:
    made = output_json(
        *("create", "--name", "n", "--owner", "o", "--role", "manager", "--expires", "12h"),
        *("--model", "demo", "--model", "de*", "--requests-per-minute", "0"),
        *("--tokens-per-minute", "5", "--concurrent-requests", "6", "--daily-tokens", "7"),
        *("--monthly-tokens", "8", "--priority", "-3", "--weight", "9", "--max-wait-s", "10"),
        *("--fields", '{"deny": ["tools"], "max": {"n": 2}}', "--may-load-models"),
    )
    shown = output_json("show", made["id"])
    assert made.pop("key").startswith(f"sk-gw-{made['id']}-")
    assert shown == made
    assert (shown["role"], shown["models"]) == ("manager", ["demo", "de*"])
    limits = ("requests_per_minute", "tokens_per_minute", "concurrent_requests")
    assert [shown[name] for name in limits] == [0, 5, 6]
    budgets = ("daily_tokens", "monthly_tokens", "priority", "weight", "max_wait_s")
    assert [shown[name] for name in budgets] == [7, 8, -3, 9, 10]
    assert shown["may_load_models"] is True
    assert shown["fields"] == {"allow": [], "deny": ["tools"], "force": {}, "max": {"n": 2}}
    assert '{"deny": ["tools"], "max": {"n": 2}}' in output("show", made["id"])


def test_permission_to_load_models_is_given_and_taken_back() -> None:
    made = output_json("create", "--name", "a")
    assert made["may_load_models"] is False
    given = output_json("update", "a", "--may-load-models")
    renamed = output_json("update", "a", "--owner", "me")
    taken = output_json("update", "a", "--no-may-load-models")
    assert [one["may_load_models"] for one in (given, renamed, taken)] == [True, True, False]


def test_a_longest_wait_is_set_and_taken_back() -> None:
    output_json("create", "--name", "a")
    given = output_json("update", "a", "--max-wait-s", "30")
    taken = output_json("update", "a", "--max-wait-s", "none")
    assert [one["max_wait_s"] for one in (given, taken)] == [30, None]


def test_key_is_rotated_disabled_enabled_and_deleted() -> None:
    made = output_json("create", "--name", "a")
    rotated = output_json("rotate", made["id"], "--grace", "0s")
    assert rotated["id"] == made["id"]
    assert rotated["key"] != made["key"]
    assert output_json("disable", made["id"])["disabled"]
    assert " disabled " in output("list")
    assert not output_json("enable", made["id"])["disabled"]
    assert " active " in output("list")
    assert output("delete", made["id"]) == f"deleted {made['id']}\n"
    assert output_json("list") == {"data": [], "has_more": False}
    assert faults("show", made["id"]) == ["there is no such key"]


@pytest.mark.parametrize("command", ["disable", "delete"])
def test_now_marks_the_requests_in_flight_to_be_aborted(database: Path, command: str) -> None:
    def cut_ms(key_id: str) -> int | None:
        with sqlite3.connect(database) as connection:
            query = "SELECT cut_ms FROM api_keys WHERE id = ?"
            [[found]] = connection.execute(query, [key_id]).fetchall()
        connection.close()
        return int(found) if found is not None else None

    for flags in ([], ["--now"]):
        made = output_json("create", "--name", command + "".join(flags))
        output(command, made["id"], *flags)
        assert (cut_ms(made["id"]) is not None) is bool(flags)
    if command == "disable":
        output("enable", made["id"])
        assert cut_ms(made["id"]) is None


def test_every_command_takes_the_name_for_the_id() -> None:
    made = output_json("create", "--name", "team a")
    assert output_json("show", "team a")["id"] == made["id"]
    assert output_json("disable", "team a")["disabled"]
    assert not output_json("enable", "team a")["disabled"]
    assert output_json("update", "team a", "--owner", "o")["owner"] == "o"
    assert output_json("rotate", "team a")["id"] == made["id"]
    assert output("delete", "team a") == f"deleted {made['id']}\n"


def test_unknown_name_suggests_the_nearest() -> None:
    output("create", "--name", "research")
    assert faults("show", "reserch") == ["there is no such key; did you mean 'research'?"]


class TestUpdate:
    def test_update_changes_only_the_given_properties(self) -> None:
        made = output_json("create", "--name", "a", "--weight", "5", "--daily-tokens", "7")
        del made["key"]
        changed = output_json(
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

    def test_update_resets_every_property(self) -> None:
        rules = ("--fields", '{"deny": ["tools"]}')
        made = output_json(
            *("create", "--name", "a", "--requests-per-minute", "1", "--tokens-per-minute", "2"),
            *("--concurrent-requests", "3", "--daily-tokens", "4", "--monthly-tokens", "5"),
            *("--expires", "1d", "--owner", "o", "--model", "demo", *rules),
        )
        changed = output_json(
            *("update", "a", "--requests-per-minute", "default", "--tokens-per-minute", "default"),
            *("--concurrent-requests", "default", "--daily-tokens", "none", "--owner", ""),
            *("--monthly-tokens", "none", "--expires", "never", "--fields", "none"),
            *("--model", "*"),
        )
        other = output_json("create", "--name", "other")
        for name in ("id", "name", "created", "key"):
            made.pop(name), other.pop(name), changed.pop(name, None)
        assert changed == other

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            ([], "nothing to change: give an option, such as --owner"),
            (["--name", ""], "name: "),
            (["--requests-per-minute", "many"], "requests_per_minute: must be a whole number or "),
            (["--requests-per-minute", "-1"], "requests_per_minute: "),
            (["--daily-tokens", "default"], "daily_tokens: must be a whole number or `none`"),
            (["--model", "a*b"], "models.0: a * is allowed only at the end"),
            (["--weight", "0"], "weight: "),
            (["--expires", "soon"], "expires: "),
            (["--fields", "{"], "fields: not JSON"),
        ],
    )
    def test_update_with_an_invalid_value_changes_nothing(
        self, arguments: list[str], said: str
    ) -> None:
        output("create", "--name", "a")
        before = output_json("show", "a")
        [line] = faults("update", "a", *arguments)
        assert line.startswith(said)
        assert output_json("show", "a") == before

    def test_update_to_a_taken_name_is_refused(self) -> None:
        made = output_json("create", "--name", "a")
        output("create", "--name", "b")
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
    def test_model_not_in_the_configuration_is_a_warning(
        self, model: str, kept: str, said: str
    ) -> None:
        output("create", "--name", "b")
        for command in (["create", "--name", "a"], ["update", "b"]):
            result = run(*command, "--model", model, "--json")
            assert result.exit_code == 0
            assert result.stderr == f"vllm-gateway: warning: {said}\n"
            assert json.loads(result.stdout)["models"] == [kept]


def test_limits_in_force_are_shown_and_defaults_marked() -> None:
    made = output_json("create", "--name", "a", "--tokens-per-minute", "5000")
    lines = [line.split("  ", 1) for line in output("show", "a").splitlines()]
    shown = {name: value.strip() for name, value in filter(lambda line: len(line) == 2, lines)}
    assert shown["requests per minute"] == "600 (default)"
    assert shown["tokens per minute"] == "5,000"
    assert shown["concurrent requests"] == "32 (default)"
    head, row = output("list").splitlines()
    assert "requests/min   tokens/min  at once" in head
    assert row.split()[:6] == [made["id"], "client", "active", "a", "-", "*"]
    assert "  600 (default)  5,000       32 (default)  " in row
    output("create", "--name", "me", "--role", "admin")
    assert "(default)" not in output("show", "me")


def test_list_shows_until_when_an_old_secret_is_valid() -> None:
    output("create", "--name", "a")
    assert "old secret until" not in output("list")
    until = output_json("rotate", "a", "--grace", "2d")["previous_secret_until"]
    assert "old secret until" in output("list")
    assert until[:16] in output("list")
    assert until in output("show", "a")
    output("rotate", "a", "--grace", "0s")
    assert "old secret until" not in output("list")


def test_list_on_a_narrow_pipe_is_not_truncated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    made = output_json("create", "--name", "a long name of a key that a team has")
    head, row = output("list").splitlines()
    assert made["name"] in row
    assert head.startswith("id ")


def test_list_is_read_page_by_page() -> None:
    for name in "abc":
        output("create", "--name", name)
    first = output_json("list", "--limit", "2")
    last = first["data"][-1]["id"]
    assert output("list", "--limit", "2").splitlines()[-1] == f"there are more: --after {last}"
    assert [key["name"] for key in output_json("list", "--after", last)["data"]] == ["a"]


def test_list_marks_an_expired_key() -> None:
    output("create", "--name", "a", "--expires", "2020-01-01T00:00:00Z")
    assert " expired " in output("list")


def test_markup_in_names_is_printed_as_text() -> None:
    made = output_json("create", "--name", "[red]a[/red]", "--owner", "[/]")
    for shown in (output("list"), output("show", made["id"])):
        assert "[red]a[/red]" in shown
        assert "[/]" in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--name", ""], "name: "),
        (["--name", "a\nb"], "name: contains a non-printable character"),
        (["--name", "a", "--role", "root"], "role: "),
        (["--name", "a", "--model", "a*b"], "models.0: a * is allowed only at the end"),
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
def test_create_with_an_invalid_value_creates_nothing(arguments: list[str], said: str) -> None:
    [line] = faults("create", *arguments)
    assert line.startswith(said)
    assert output_json("list")["data"] == []


def test_create_with_a_taken_name_is_refused() -> None:
    made = output_json("create", "--name", "a")
    assert faults("create", "--name", "a") == [f"name: the key {made['id']} has this name already"]
    assert len(output_json("list")["data"]) == 1


@pytest.mark.parametrize("command", ["show", "rotate", "disable", "enable", "delete", "update"])
@pytest.mark.parametrize("key_id", ["0000000000", "' OR 1=1 --", "sk-gw-canary"])
def test_unknown_key_is_one_line_without_the_given_name(command: str, key_id: str) -> None:
    options = ["--owner", "o"] if command == "update" else []
    assert faults(command, key_id, *options) == ["there is no such key"]


@pytest.mark.parametrize("grace", ["", "1", "-1d", "31d", "forever"])
def test_rotate_with_an_invalid_grace_is_refused(grace: str) -> None:
    made = output_json("create", "--name", "a")
    [line] = faults("rotate", made["id"], f"--grace={grace}")
    assert line.startswith("grace")


def test_file_that_is_no_database_is_one_line(database: Path) -> None:
    database.write_bytes(b"not a database" * 100)
    [line] = faults("list")
    assert line.endswith("file is not a database")


def test_missing_configuration_is_one_line() -> None:
    [line] = faults("list", "--config", "nowhere.yaml")
    assert line.startswith("nowhere.yaml: no such file")


@pytest.mark.slow
def test_running_gateway_notices_changes(tmp_path: Path) -> None:
    def keys(*arguments: str) -> Any:
        config = ("--config", str(tmp_path / "gateway.yaml"), "--json")
        ran = run_forked("keys", *arguments, *config, env=environment(), cwd=tmp_path)
        assert ran.returncode == 0, ran.stderr
        return json.loads(ran.stdout)

    with deployed(tmp_path, MODEL, fork=True) as deployment, deployment.client() as client:
        made = keys("create", "--name", "a")
        client.headers["authorization"] = f"Bearer {made['key']}"
        assert client.get("/v1/models").status_code == 200
        assert keys("disable", made["id"])["disabled"]
        poll_until(lambda: client.get("/v1/models").status_code == 401, 10)
        keys("enable", made["id"])
        poll_until(lambda: client.get("/v1/models").status_code == 200, 10)
        assert made["key"] not in deployment.said()


class TestManyKeys:
    """`keys create --from FILE.csv`."""

    @pytest.fixture
    def people(self, tmp_path: Path) -> Path:
        return tmp_path / "people.csv"

    def test_every_row_becomes_a_key(self, people: Path) -> None:
        people.write_text(
            "\ufeffname,owner,models,daily_tokens,daily_cost,expires\n"
            "ann,research,demo de*,5,2.50,never\n"
            'bob,,,,,"30d"\n',
            encoding="utf-8",
        )
        options = ("--owner", "team", "--monthly-cost", "20", "--model", "demo")
        head, *rows = output("create", "--from", str(people), *options).splitlines()
        assert head == "name,owner,id,key"
        ann, bob = (dict(zip(head.split(","), row.split(","), strict=True)) for row in rows)
        assert id_of(ann["key"].encode()) == ann["id"]
        shown = output_json("show", "ann")
        assert (shown["owner"], shown["models"], shown["daily_tokens"]) == (
            "research", ["demo", "de*"], 5,
        )  # fmt: skip
        assert (shown["daily_cost"], shown["monthly_cost"], shown["expires"]) == (2.5, 20, None)
        shown = output_json("show", bob["id"])
        assert (shown["owner"], shown["models"], shown["daily_tokens"]) == ("team", ["demo"], None)
        assert shown["expires"] is not None

    def test_secrets_go_to_a_new_private_file(self, people: Path, tmp_path: Path) -> None:
        people.write_text("name\nann\nbob\n")
        secrets = tmp_path / "secrets.csv"
        shown = output("create", "--from", str(people), "--out", str(secrets))
        assert shown == f"secrets written to {secrets}\n"
        assert secrets.stat().st_mode & 0o777 == 0o600
        assert len(secrets.read_text().splitlines()) == 3
        people.write_text("name\neve\n")
        [fault] = faults("create", "--from", str(people), "--out", str(secrets))
        assert fault == f"--out {secrets}: File exists; no key was created"

    def test_secrets_that_were_written_stay_whatever_follows(self, tmp_path: Path) -> None:
        secrets = tmp_path / "secrets.csv"
        with contextlib.suppress(KeyboardInterrupt), secrets_file(secrets) as write:
            write("name,key\n")
            raise KeyboardInterrupt
        assert secrets.read_text() == "name,key\n"

    @pytest.mark.parametrize(
        ("rows", "fault"),
        [
            ("name\nann\nann\n", "line 3: name: line 2 has it already"),
            ("name,daily_cost\nann,1\nbob,-1\n", "line 3: daily_cost: must be from 0 to"),
            ("name,weight\nann,heavy\n", "that is in {}, line 2; no key was created"),
            ("name,wight\nann,1\n", "unknown column 'wight'"),
            ("owner\nann\n", "the first line must name the columns"),
            ("name,owner\nann\n", "line 2: it has not 2 cells"),
            ("name\nann\ntaken\n", "has this name already"),
            ("name\n", "it has 0 keys"),
        ],
    )
    def test_a_fault_creates_no_key(
        self, people: Path, tmp_path: Path, rows: str, fault: str
    ) -> None:
        output("create", "--name", "taken")
        people.write_text(rows)
        secrets = tmp_path / "secrets.csv"
        told = faults("create", "--from", str(people), "--out", str(secrets))
        assert any(fault.format(people) in line for line in told), told
        assert not secrets.exists()
        assert [key["name"] for key in output_json("list")["data"]] == ["taken"]


def test_list_shows_use_and_budgets(database: Path) -> None:
    output("create", "--name", "a", "--monthly-tokens", "20000", "--daily-cost", "2.50")
    key_id = output_json("show", "a")["id"]
    today = datetime.now(UTC).date().isoformat()
    with sqlite3.connect(database) as connection:
        connection.execute(
            "INSERT INTO usage_daily VALUES (?, ?, 'demo', 1, 0, 1000, 0, 234, 0, 520000000)",
            (today, key_id),
        )
    row = output("list").splitlines()[1]
    assert row.endswith("1,234 tokens, 0.52 of 2.50  1,234 of 20,000 tokens, 0.52")


def test_changes_name_who_made_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUDO_USER", "ann")
    who = f"ann@{socket.gethostname()}"
    assert output_json("create", "--name", "a", "--owner", "team")["changed_by"] == who
    monkeypatch.setenv("SUDO_USER", "bob")
    assert output_json("disable", "a")["changed_by"] == who.replace("ann", "bob")
    monkeypatch.setenv("SUDO_USER", "eve")
    gateway.output("owners", "set", "team", "--daily-cost", "5")
    assert gateway.output_json("owners", "show", "team")["changed_by"] == who.replace("ann", "eve")
    assert output_json("show", "a")["changed_by"] == who.replace("ann", "eve")
