"""`vllm-gateway requests`: the requests of a running gateway, and what their time was spent on."""

from collections.abc import Iterable, Sequence
from typing import Annotated
from urllib.parse import quote

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
from app.cli.output import Column, print_fields, print_json, print_table, printable

requests = typer.Typer(no_args_is_help=True, help="Show requests and why they took so long.")

IdArgument = Annotated[str, typer.Argument(help="ID of the request, from `requests list`.")]


class Request(msgspec.Struct):
    """A request in the response; the fields that are shown."""

    id: str
    request_id: str
    outcome: str
    phase: str | None
    longest_phase: str | None
    longest_phase_s: float | None
    arrived_at: str
    elapsed_s: float
    key_id: str
    key_name: str | None
    owner: str
    model: str | None
    requested_model: str | None
    engine: str | None
    endpoint: str
    status: int | None
    error: str | None
    fault: str | None
    queued_s: float | None
    ttft_s: float | None
    client_wait_s: float
    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int | None
    continued: int


class RequestList(msgspec.Struct):
    """The response of GET /admin/requests."""

    in_flight: list[Request]
    ended: list[Request]
    since: str = msgspec.field(name="from")
    until: str | None = msgspec.field(name="to")
    next: str | None
    complete: bool


class Phase(msgspec.Struct):
    """A part of the time of a request, in seconds from its arrival."""

    name: str
    start_s: float
    end_s: float
    note: str


class RequestDetail(Request):
    """The response of GET /admin/requests/{id}."""

    phases: list[Phase]
    recomputed_tokens: int
    not_continued: str | None


@requests.command("list")
def list_requests(
    key: Annotated[str | None, typer.Option(help="Only this key, by name or ID.")] = None,
    model: Annotated[str | None, typer.Option(help="Only this model.")] = None,
    status: Annotated[
        str | None, typer.Option(help="Only this status, such as 429 or 5xx.")
    ] = None,
    outcome: Annotated[
        str | None,
        typer.Option(help="Only completed, refused, failed, disconnected, canceled or in_flight."),
    ] = None,
    request_id: Annotated[str | None, typer.Option(help="Only with this x-request-id.")] = None,
    slower_than: Annotated[
        float | None, typer.Option(min=0, help="Only those that took longer, in seconds.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="First end, a time such as 2026-11-26T14:00 or a day, UTC; default: 7 days ago.",
        ),
    ] = None,
    until: Annotated[
        str | None, typer.Option("--to", help="Time before which they ended, or the last day, UTC.")
    ] = None,
    order: Annotated[str, typer.Option(help="What comes first: latest or slowest.")] = "latest",
    limit: PageOption = PAGE,
    cursor: Annotated[str | None, typer.Option(help="Go on behind the previous page.")] = None,
    json: JsonOption = False,
    url: UrlOption = None,
    admin_key: AdminKeyOption = None,
    config: ConfigOption = None,
) -> None:
    """List requests in flight and ended, with what most of their time was spent on."""
    given = {
        "key": key, "model": model, "status": status, "outcome": outcome, "request_id": request_id,
        "slower_than_s": slower_than, "from": since, "to": until, "order": order, "limit": limit,
        "cursor": cursor,
    }  # fmt: skip
    params = {name: value for name, value in given.items() if value is not None}
    with refusal_faults():
        gateway = GatewayClient(url, admin_key, config)
        found = gateway.request("/admin/requests", RequestList, params=params)
    if json:
        print_json(found)
        return
    if found.in_flight and cursor is None:
        print("in flight")
        _print_table(found.in_flight)
        print()
    print(f"ended from {printable(found.since)} to {printable(found.until or 'now')}")
    _print_table(found.ended)
    if not found.complete:
        print(
            "the database did not answer in time: these are in the memory of this gateway; "
            "ask for a shorter time, or see whether it is up"
        )
    if found.next is not None:
        print(f"more: --cursor {printable(found.next)}")


@requests.command("show")
def show_request(
    id: IdArgument,
    json: JsonOption = False,
    url: UrlOption = None,
    admin_key: AdminKeyOption = None,
    config: ConfigOption = None,
) -> None:
    """Show a request, and what its time was spent on."""
    with refusal_faults():
        gateway = GatewayClient(url, admin_key, config)
        found = gateway.request(_path(id), RequestDetail)
    if json:
        print_json(found)
        return
    skipped = {"phases", "longest_phase", "longest_phase_s"}
    print_fields(
        [
            (name, printable(_text(getattr(found, name))))
            for name in found.__struct_fields__
            if name not in skipped and getattr(found, name) not in (None, "", 0)
        ]
    )
    print()
    columns = [Column("phase"), Column("from", number=True), Column("took", number=True)]
    columns += [Column("share", number=True), Column("note", long=True)]
    print_table(columns, _phase_rows(found))


@requests.command("cancel")
def cancel_request(
    id: IdArgument,
    url: UrlOption = None,
    admin_key: AdminKeyOption = None,
    config: ConfigOption = None,
) -> None:
    """Cancel a request in flight: its client gets an error, and its engine stops generating."""
    with refusal_faults():
        gateway = GatewayClient(url, admin_key, config)
        canceled = gateway.request(f"{_path(id)}/cancel", Request, method="POST")
    print(f"canceled {printable(canceled.id)} after {canceled.elapsed_s:.1f} s")


def _path(id_: str) -> str:
    return f"/admin/requests/{quote(id_, safe='')}"


def _print_table(rows: Sequence[Request]) -> None:
    columns = [Column("id"), Column("arrived"), Column("key", long=True)]
    columns += [Column("model", long=True), Column("outcome"), Column("took", number=True)]
    columns += [Column("ttft", number=True), Column("tokens", number=True)]
    columns += [Column("longest phase"), Column("error")]
    print_table(columns, map(_cells, rows))


def _cells(row: Request) -> list[str]:
    tokens = "-"
    if row.completion_tokens is not None:
        tokens = f"{row.prompt_tokens or 0:,} + {row.completion_tokens:,}"
    longest = "-"
    if row.longest_phase is not None and row.longest_phase_s is not None:
        longest = f"{row.longest_phase} {_seconds(row.longest_phase_s)}"
    status = "" if row.status is None else f" {row.status}"
    cells = (
        row.id, row.arrived_at, row.key_name or row.key_id, row.model or "-",
        f"{row.outcome}{status}", _seconds(row.elapsed_s), _seconds(row.ttft_s), tokens, longest,
        row.error or "-",
    )  # fmt: skip
    return [printable(cell) for cell in cells]


def _phase_rows(found: RequestDetail) -> Iterable[list[str]]:
    for phase in found.phases:
        took_s = phase.end_s - phase.start_s
        share = took_s / found.elapsed_s if found.elapsed_s else 0.0
        yield [
            printable(phase.name), _seconds(phase.start_s), _seconds(took_s), f"{share:.0%}",
            printable(phase.note),
        ]  # fmt: skip


def _text(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds:.3f} s"
