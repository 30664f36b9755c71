"""`vllm-gateway usage`: what keys and models used, as a running gateway tells it."""

import csv
import io
import sys
from collections.abc import Iterable
from typing import Annotated

import msgspec
import typer

from app.cli.faults import ConfigOption, fail
from app.cli.gateway_client import AdminKeyOption, Gateway, UrlOption, refusals, shown
from app.cli.tables import Column, print_table

GROUPS: tuple[str, ...] = ("day", "owner", "key", "model")
# What makes a spreadsheet take a text for a formula (OWASP, CSV injection).
FORMULA = ("=", "+", "-", "@")


class Group(msgspec.Struct):
    """A row of the answer; what it is not grouped by is None."""

    day: str | None
    key_id: str | None
    key_name: str | None
    model: str | None
    requests: int
    estimated_requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    total_tokens: int
    cost: float
    owner: str | None = None  # last: columns of CSV keep their places


class Answer(msgspec.Struct):
    """What GET /admin/usage answers."""

    by: list[str]
    since: str = msgspec.field(name="from")
    until: str = msgspec.field(name="to")
    data: list[Group]


def usage(
    by: Annotated[
        str, typer.Option(help="Some of owner, key, model, day; a comma between.")
    ] = "key",
    since: Annotated[
        str | None, typer.Option("--from", help="UTC day, 2026-11-01; default: the month's first.")
    ] = None,
    until: Annotated[str | None, typer.Option("--to", help="UTC day; default: today.")] = None,
    key: Annotated[str | None, typer.Option(help="Only this key, by its name or ID.")] = None,
    owner: Annotated[str | None, typer.Option(help="Only the keys of this owner.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV, for spreadsheets.")] = False,
    url: UrlOption = None,
    admin_key: AdminKeyOption = None,
    config: ConfigOption = None,
) -> None:
    """Show what was used, by owner, key, model and day."""
    if as_json and as_csv:
        fail("--json or --csv, not both")
    asked = {"by": by, "from": since, "to": until, "key": key, "owner": owner}
    params = {name: value for name, value in asked.items() if value is not None}
    with refusals():
        answer = Gateway(url, admin_key, config).ask("/admin/usage", Answer, params)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(answer), indent=2).decode())
    elif as_csv:
        sys.stdout.write(_csv(answer.data))
    else:
        _print_table(answer)


def _csv(groups: Iterable[Group]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Group.__struct_fields__)
    for group in groups:
        values = msgspec.structs.astuple(group)
        writer.writerow(_harmless(value) if isinstance(value, str) else value for value in values)
    return text.getvalue()


def _harmless(name: str) -> str:
    name = shown(name)
    return f"'{name}" if name.startswith(FORMULA) else name


def _print_table(answer: Answer) -> None:
    groups = [group for group in GROUPS if group in answer.by]
    columns = [Column(group, long=group != "day") for group in groups]
    counts = ("requests", "prompt", "cached", "completion", "cost")
    columns += [Column(name, number=True) for name in counts]
    print(f"usage from {shown(answer.since)} to {shown(answer.until)}, UTC")
    print_table(columns, (_cells(row, groups) for row in answer.data), names=len(groups))


def _cells(row: Group, groups: Iterable[str]) -> list[str]:
    names = {
        "day": row.day,
        "owner": row.owner,
        "key": row.key_name or row.key_id,
        "model": row.model,
    }
    counts = (row.requests, row.prompt_tokens, row.cached_tokens, row.completion_tokens)
    return [
        *(shown(names[group] or "-") for group in groups),
        *(f"{count:,}" for count in counts),
        f"{row.cost:,.4f}",
    ]
