"""`vllm-gateway reload`: make a running gateway read its configuration again."""

from typing import Annotated

import msgspec
import typer

from app.cli.faults import EXIT_FAILED
from app.cli.gateway_client import GatewayClient, refusal_faults
from app.cli.options import AdminKeyOption, ConfigOption, JsonOption, UrlOption
from app.cli.output import print_json_text, printable

CONNECT_S = 10.0


class ReloadResponse(msgspec.Struct):
    """The part of the response of POST /admin/reload that is used here."""

    ok: bool
    lines: list[str]


def reload(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would change, and change nothing.")
    ] = False,
    json: JsonOption = False,
    url: UrlOption = None,
    admin_key: AdminKeyOption = None,
    config: ConfigOption = None,
) -> None:
    """Reload the configuration. Only engines and settings that changed are affected."""
    import httpx

    # The response comes when the changed engines are ready, and they have timeouts of their own.
    timeout = httpx.Timeout(None, connect=CONNECT_S)
    gateway = GatewayClient(url, admin_key, config)
    with refusal_faults():
        options = {"dry_run": dry_run}
        body = gateway.request(
            "/admin/reload", msgspec.Raw, method="POST", timeout=timeout, json=options
        )
    try:
        report = msgspec.json.decode(body, type=ReloadResponse)
    except msgspec.DecodeError:
        gateway.fail_unexpected()
    if json:
        print_json_text(bytes(body))
    else:
        for line in report.lines:
            print(printable(line))
    if not report.ok:
        raise SystemExit(EXIT_FAILED)
