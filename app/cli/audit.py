"""`vllm-gateway audit`: who changed keys, owners, models and the configuration."""

from typing import Annotated, Any

import msgspec
import typer

from app.cli.gateway_client import GatewayClient, refusal_faults
from app.cli.options import (
    PAGE,
    AdminKeyOption,
    ConfigOption,
    JsonOption,
    PageOption,
    UrlOption,
)
from app.cli.output import Column, print_json, print_table, printable


class Record(msgspec.Struct):
    """A record in the response."""

    id: str
    at: str
    who: str
    who_name: str | None
    role: str | None
    address: str | None
    action: str
    target: str
    target_name: str | None
    before: dict[str, Any] | None
    after: dict[str, Any] | None


class AuditList(msgspec.Struct):
    """The response of GET /admin/audit."""

    data: list[Record]
    next: str | None


def audit(
    who: Annotated[
        str | None, typer.Option(help="Only by this key, by name or ID, or by user@host.")
    ] = None,
    action: Annotated[
        str | None,
        typer.Option(help="Only this action, such as key.rotate, or all of a kind: key."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="Only to this key, by name or ID, or this owner, model or engine."),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option("--from", help="First time, such as 2026-11-26T14:00, or day, UTC."),
    ] = None,
    until: Annotated[
        str | None, typer.Option("--to", help="Time before which it was, or the last day, UTC.")
    ] = None,
    limit: PageOption = PAGE,
    cursor: Annotated[str | None, typer.Option(help="Go on behind the previous page.")] = None,
    json: JsonOption = False,
    url: UrlOption = None,
    admin_key: AdminKeyOption = None,
    config: ConfigOption = None,
) -> None:
    """List who did what, from where, and what differs since; the latest first."""
    given = {
        "who": who, "action": action, "target": target, "from": since, "to": until, "limit": limit,
        "cursor": cursor,
    }  # fmt: skip
    params = {name: value for name, value in given.items() if value is not None}
    with refusal_faults():
        gateway = GatewayClient(url, admin_key, config)
        found = gateway.request("/admin/audit", AuditList, params=params)
    if json:
        print_json(found)
        return
    columns = [Column("at"), Column("who", long=True), Column("from"), Column("action")]
    columns += [Column("target", long=True), Column("changes", long=True)]
    print_table(columns, map(_cells, found.data))
    if found.next is not None:
        print(f"more: --cursor {printable(found.next)}")


def _cells(record: Record) -> list[str]:
    cells = (
        record.at, record.who_name or record.who, record.address or "-", record.action,
        record.target_name or record.target, _changes(record),
    )  # fmt: skip
    return [printable(cell) for cell in cells]


def _changes(record: Record) -> str:
    """Return what differs, as `name: before → after`; of a new or deleted object nothing."""
    if record.after is None or (record.before is None and record.action.endswith(".create")):
        return "-"
    before = record.before or {}
    texts = (
        f"{name}: {_text(before[name])} → {_text(value)}"
        if name in before
        else f"{name}: {_text(value)}"
        for name, value in record.after.items()
    )
    return "; ".join(texts) or "-"


def _text(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
