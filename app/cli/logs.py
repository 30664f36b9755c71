"""`vllm-gateway logs`: an engine's output, read through a running gateway."""

import os
import sys
from typing import Annotated
from urllib.parse import quote

import typer

from app.cli.gateway_client import TIMEOUT_S, GatewayClient, refusal_faults
from app.cli.options import AdminKeyOption, ConfigOption, UrlOption
from app.cli.output import printable


def logs(
    engine: Annotated[str, typer.Argument(help="Name of the engine, as `status` shows it.")],
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep printing new lines as they come.")
    ] = False,
    lines: Annotated[
        int,
        typer.Option("--lines", "-n", min=0, max=10_000, help="Number of latest lines to print."),
    ] = 200,
    url: UrlOption = None,
    admin_key: AdminKeyOption = None,
    config: ConfigOption = None,
) -> None:
    """Show the output of an engine."""
    import httpx

    gateway = GatewayClient(url, admin_key, config)
    # An engine may be silent for hours.
    timeout = httpx.Timeout(TIMEOUT_S, read=None if follow else TIMEOUT_S)
    with (
        refusal_faults(),
        gateway.transport_faults(),
        gateway.stream(
            f"/admin/engines/{quote(engine, safe='')}/log",
            params={"lines": lines, "follow": follow},
            timeout=timeout,
        ) as response,
    ):
        if not response.is_success:
            response.read()
            gateway.check(response)
        try:
            for line in response.iter_lines():
                print(printable(line, kept="\t"), flush=follow)
            sys.stdout.flush()
        except BrokenPipeError:
            # The reader has closed the pipe; the interpreter would flush again at its exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
