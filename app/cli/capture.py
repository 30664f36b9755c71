"""`vllm-gateway capture`: export and delete what was captured of requests and answers."""

import sys
from typing import Annotated, Any

import msgspec
import typer

from app.cli.faults import fail
from app.cli.gateway_client import GatewayClient, refusal_faults
from app.cli.options import AdminKeyOption, ConfigOption, UrlOption

capture = typer.Typer(
    no_args_is_help=True, help="Export and delete captured requests and their answers."
)

KeyOption = Annotated[str | None, typer.Option(help="Only of this key, by name or ID.")]
ModelOption = Annotated[str | None, typer.Option(help="Only of this model, which answered.")]
FromOption = Annotated[
    str | None, typer.Option("--from", help="First time, such as 2026-11-26T14:00, or day, UTC.")
]
ToOption = Annotated[
    str | None, typer.Option("--to", help="Time before which it was, or the last day, UTC.")
]


class Row(msgspec.Struct):
    """A capture in the response."""

    id: str
    fault: str | None
    capture: msgspec.Raw


class CaptureList(msgspec.Struct):
    """The response of GET /admin/captures."""

    data: list[Row]
    next: str | None


class Deleted(msgspec.Struct):
    """The response of DELETE /admin/captures."""

    deleted: int


@capture.command("export")
def export(
    key: KeyOption = None,
    model: ModelOption = None,
    since: FromOption = None,
    until: ToOption = None,
    url: UrlOption = None,
    admin_key: AdminKeyOption = None,
    config: ConfigOption = None,
) -> None:
    """Write captures as JSON, one per line. That each was read is recorded in the audit."""
    params = _params(key, model, since, until)
    unreadable: list[Row] = []
    with refusal_faults():
        gateway = GatewayClient(url, admin_key, config)
        while True:
            page = gateway.request("/admin/captures", CaptureList, params=params)
            for row in page.data:
                if row.fault is not None:
                    unreadable.append(row)
                else:
                    sys.stdout.buffer.write(bytes(row.capture) + b"\n")
            if page.next is None:
                break
            params["cursor"] = page.next
    sys.stdout.buffer.flush()
    if unreadable:
        first = unreadable[0]
        fail(f"{len(unreadable)} captures cannot be decrypted; {first.id}: {first.fault}")


@capture.command("delete")
def delete(
    key: KeyOption = None,
    model: ModelOption = None,
    since: FromOption = None,
    until: ToOption = None,
    everything: Annotated[bool, typer.Option("--all", help="Delete every capture.")] = False,
    url: UrlOption = None,
    admin_key: AdminKeyOption = None,
    config: ConfigOption = None,
) -> None:
    """Delete captures before the end of their retention."""
    params = _params(key, model, since, until)
    if bool(params) is everything:
        fail("give --key, --model, --from or --to, or --all alone")
    if everything:
        params["all"] = "true"
    with refusal_faults():
        gateway = GatewayClient(url, admin_key, config)
        done = gateway.request("/admin/captures", Deleted, params=params, method="DELETE")
    print(f"deleted {done.deleted:,} captures")


def _params(
    key: str | None, model: str | None, since: str | None, until: str | None
) -> dict[str, Any]:
    given = {"key": key, "model": model, "from": since, "to": until}
    return {name: value for name, value in given.items() if value is not None}
