"""`vllm-gateway usage`: the token usage of keys and models, from a running gateway."""

import sys
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Annotated

import msgspec
import typer

from app.cli.faults import fail
from app.cli.gateway_client import GatewayClient, refusal_faults
from app.cli.options import AdminKeyOption, ConfigOption, JsonOption, UrlOption
from app.cli.output import Column, print_json, print_table, printable
from app.csv_text import csv_table

GROUPS: tuple[str, ...] = ("day", "owner", "key", "model")


class Group(msgspec.Struct):
    """A row of the report; None for what it is not grouped by."""

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
    owner: str | None = None  # last, so that the order of CSV columns stays


class UsageReport(msgspec.Struct):
    """The response of GET /admin/usage."""

    by: list[str]
    since: str = msgspec.field(name="from")
    until: str = msgspec.field(name="to")
    data: list[Group]
    currency: str | None = None


def usage(
    by: Annotated[
        str, typer.Option(help="Group by owner, key, model, day or several, comma-separated.")
    ] = "key",
    since: Annotated[
        str | None,
        typer.Option("--from", help="First UTC day, such as 2026-11-01; default: the month's."),
    ] = None,
    until: Annotated[str | None, typer.Option("--to", help="Last UTC day; default: today.")] = None,
    month: Annotated[
        str | None, typer.Option(help="A UTC month, such as 2026-10, in place of --from and --to.")
    ] = None,
    key: Annotated[str | None, typer.Option(help="Only this key, by name or ID.")] = None,
    owner: Annotated[str | None, typer.Option(help="Only keys of this owner.")] = None,
    model: Annotated[str | None, typer.Option(help="Only this model, by name.")] = None,
    json: JsonOption = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    url: UrlOption = None,
    admin_key: AdminKeyOption = None,
    config: ConfigOption = None,
) -> None:
    """Show token usage by owner, key, model and day."""
    if json and as_csv:
        fail("--json and --csv exclude each other: give one of them")
    if month is not None:
        if since is not None or until is not None:
            fail("--month excludes --from and --to")
        since, until = days_of_month(month)
    given = {
        "by": by, "from": since, "to": until, "key": key, "owner": owner, "model": model,
    }  # fmt: skip
    params = {name: value for name, value in given.items() if value is not None}
    with refusal_faults():
        gateway = GatewayClient(url, admin_key, config)
        report = gateway.request("/admin/usage", UsageReport, params=params)
    if json:
        print_json(report)
    elif as_csv:
        sys.stdout.write(_csv(report.data))
    else:
        _print_table(report)


def days_of_month(text: str) -> tuple[str, str]:
    """Return the first and the last day of a month such as 2026-10."""
    try:
        first = datetime.strptime(text, "%Y-%m").date()  # noqa: DTZ007 - a month has no zone
    except ValueError:
        fail(f"--month must be a month such as 2026-10, not {text!r}")
    last = (first + timedelta(days=31)).replace(day=1) - timedelta(days=1)
    return first.isoformat(), last.isoformat()


def _csv(groups: Iterable[Group]) -> str:
    return csv_table(Group.__struct_fields__, map(msgspec.structs.astuple, groups))


def _print_table(report: UsageReport) -> None:
    groups = [group for group in GROUPS if group in report.by]
    columns = [Column(group, long=group != "day") for group in groups]
    counts = ("requests", "prompt", "cached", "completion")
    columns += [Column(name, number=True) for name in counts]
    columns.append(Column("cost" if report.currency is None else report.currency, number=True))
    print(f"usage from {printable(report.since)} to {printable(report.until)}, UTC")
    print_table(columns, (_cells(row, groups) for row in report.data), names=len(groups))


def _cells(row: Group, groups: Iterable[str]) -> list[str]:
    names = {
        "day": row.day,
        "owner": row.owner,
        "key": row.key_name or row.key_id,
        "model": row.model,
    }
    counts = (row.requests, row.prompt_tokens, row.cached_tokens, row.completion_tokens)
    return [
        *(printable(names[group] or "-") for group in groups),
        *(f"{count:,}" for count in counts),
        f"{row.cost:,.4f}",
    ]
