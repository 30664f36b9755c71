"""`vllm-gateway usage`."""

import csv
import io
import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.app.cli.gateway import FakeGateway, fault, output, run

PATH = "/admin/usage"


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


def respond(gateway: FakeGateway, *groups: dict[str, Any], by: Sequence[str] = ("key",)) -> None:
    about = {"object": "list", "by": by, "from": "2026-11-01", "to": "2026-11-21"}
    gateway.respond(PATH, {**about, "data": groups})


def query(gateway: FakeGateway) -> dict[str, list[str]]:
    """Return the query of the first request."""
    return parse_qs(urlsplit(gateway.paths[0]).query)


@pytest.fixture
def gateway(gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch) -> FakeGateway:
    monkeypatch.setenv("COLUMNS", "120")
    respond(gateway, group())
    return gateway


def test_default_output_is_a_table(gateway: FakeGateway) -> None:
    result = run("usage")
    assert result.exit_code == 0
    assert "usage from 2026-11-01 to 2026-11-21, UTC" in result.stdout
    for cell in ("key", "ci", "12,345", "100", "50", "0.1250"):
        assert cell in result.stdout
    assert "day" not in result.stdout
    assert query(gateway) == {"by": ["key"]}


def test_month_is_its_first_to_its_last_day(gateway: FakeGateway) -> None:
    assert run("usage", "--month", "2028-02", "--owner", "ops").exit_code == 0
    assert query(gateway) == {
        "by": ["key"], "from": ["2028-02-01"], "to": ["2028-02-29"], "owner": ["ops"],
    }  # fmt: skip
    assert fault("usage", "--month", "2028-13") == (
        "--month must be a month such as 2026-10, not '2028-13'"
    )
    assert fault("usage", "--month", "2028-02", "--to", "2028-02-03") == (
        "--month excludes --from and --to"
    )


def test_cost_has_the_configured_currency(gateway: FakeGateway) -> None:
    about = {"object": "list", "by": ["key"], "from": "2026-11-01", "to": "2026-11-21"}
    gateway.respond(PATH, {**about, "currency": "EUR", "data": [group()]})
    assert run("usage").stdout.splitlines()[1].split()[-1] == "EUR"


@pytest.mark.parametrize("columns", ["20", "80"])
def test_table_on_a_pipe_is_not_truncated(
    gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    respond(
        gateway,
        group(day="2026-11-21", key_name="a key of a team", model="org/a-model-with-a-long-name"),
        by=["day", "key", "model"],
    )
    assert output("usage", "--by", "day,key,model").splitlines() == [
        "usage from 2026-11-01 to 2026-11-21, UTC",
        "day         key              model                         requests  prompt  cached  "
        "completion  cost",
        "2026-11-21  a key of a team  org/a-model-with-a-long-name  12,345    100     10      "
        "50          0.1250",
    ]


def test_table_at_80_columns_is_not_truncated(
    gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    respond(
        gateway,
        group(day="2026-11-21", key_name="k" * 30, model="m" * 30, prompt_tokens=10**10),
        by=["day", "key", "model"],
    )
    shown = output("usage", "--by", "day,key,model")
    for cell in ("2026-11-21", "12,345", "10,000,000,000", "0.1250"):
        assert cell in shown
    assert "…" not in shown
    assert shown.count("m") >= 30


def test_options_are_sent_to_the_gateway(gateway: FakeGateway) -> None:
    words = ("--by", "key,day", "--from", "2026-11-01", "--to", "2026-11-02", "--key", "a&b",
             "--model", "demo")  # fmt: skip
    assert run("usage", *words).exit_code == 0
    path = f"{PATH}?by=key,day&from=2026-11-01&to=2026-11-02&key=a&b&model=demo"
    assert gateway.paths == [path]


def test_grouping_by_owner_adds_a_column(gateway: FakeGateway) -> None:
    respond(gateway, group(owner="research"), group(owner=""), by=["owner", "key"])
    lines = output("usage", "--by", "owner,key", "--owner", "research").splitlines()
    assert query(gateway) == {"by": ["owner,key"], "owner": ["research"]}
    rows = [line.replace("│", " ").split()[:2] for line in lines if "ci" in line]
    assert rows == [["research", "ci"], ["-", "ci"]]


def test_json_is_the_response_of_the_gateway(gateway: FakeGateway) -> None:
    report = json.loads(output("usage", "--json"))
    assert report["from"] == "2026-11-01"
    assert report["data"] == [group()]


def test_csv_has_a_line_per_group(gateway: FakeGateway) -> None:
    respond(gateway, group(), group(key_id="key-2", key_name=None, model='a "b", c'))
    first, second = csv.DictReader(io.StringIO(output("usage", "--csv")))
    assert (first["key_name"], first["requests"], first["cost"]) == ("ci", "12345", "0.125")
    assert (second["key_name"], second["model"]) == ("", 'a "b", c')


@pytest.mark.parametrize("name", ["=1+1", "+1", "-1", "@SUM(A1)"])
def test_csv_names_are_no_formulas(gateway: FakeGateway, name: str) -> None:
    respond(gateway, group(key_name=name, model=name))
    (row,) = csv.DictReader(io.StringIO(output("usage", "--csv"), newline=""))
    assert row["key_name"] == row["model"] == f"'{name}"


@pytest.mark.parametrize("begin", ["\t", "\r", "\n", "\x1b"])
def test_csv_control_characters_are_replaced(gateway: FakeGateway, begin: str) -> None:
    respond(gateway, group(key_name=f"{begin}=1"))
    (row,) = csv.DictReader(io.StringIO(output("usage", "--csv"), newline=""))
    assert row["key_name"] == "\ufffd=1"


def test_table_control_characters_are_replaced_and_markup_is_text(gateway: FakeGateway) -> None:
    respond(gateway, group(key_name="\x1b[31m[red]x\x07\x9b"))
    shown = output("usage")
    assert "\ufffd[31m[red]x\ufffd\ufffd" in shown
    assert "\x1b" not in shown


def test_json_and_csv_exclude_each_other(gateway: FakeGateway) -> None:
    assert fault("usage", "--json", "--csv") == (
        "--json and --csv exclude each other: give one of them"
    )
