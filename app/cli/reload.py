"""`vllm-gateway reload`: have a running gateway read its configuration again."""

from typing import Annotated

import msgspec
import typer

from app.cli.faults import ConfigOption, fail
from app.cli.gateway_client import AdminKeyOption, Gateway, UrlOption, refusals, shown

CONNECT_S = 10.0
# What ended otherwise than asked for, though nothing of the call was wrong.
EXIT_FAILED = 1


class Answer(msgspec.Struct):
    """What POST /admin/reload answers, as far as it is needed here."""

    ok: bool
    lines: list[str]


def reload(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would change, and change nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")] = False,
    url: UrlOption = None,
    admin_key: AdminKeyOption = None,
    config: ConfigOption = None,
) -> None:
    """Read the configuration again and apply what differs; the rest goes on undisturbed."""
    import httpx

    # The answer comes when the engines that changed are up, which they bound themselves.
    patience = httpx.Timeout(None, connect=CONNECT_S)
    gateway = Gateway(url, admin_key, config)
    with refusals():
        asked = {"dry_run": dry_run}
        body = gateway.ask("/admin/reload", msgspec.Raw, None, "POST", patience, asked)
    try:
        answer = msgspec.json.decode(body, type=Answer)
    except msgspec.DecodeError:
        fail(f"{gateway.shown} does not answer as a gateway does")
    if as_json:
        print(msgspec.json.format(bytes(body), indent=2).decode())
    else:
        for line in answer.lines:
            print(shown(line))
    if not answer.ok:
        raise SystemExit(EXIT_FAILED)
