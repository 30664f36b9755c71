"""`vllm-gateway logs`: an engine's output, as a running gateway tells it."""

import os
import sys
from typing import Annotated
from urllib.parse import quote

import typer

from app.cli.faults import ConfigOption
from app.cli.gateway_client import (
    TIMEOUT_S,
    AdminKeyOption,
    Gateway,
    UrlOption,
    refusals,
    shown,
)


def logs(
    engine: Annotated[str, typer.Argument(help="The engine, as `status` shows it.")],
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with new lines as they come.")
    ] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, max=10_000, help="How many to begin with.")
    ] = 200,
    url: UrlOption = None,
    admin_key: AdminKeyOption = None,
    config: ConfigOption = None,
) -> None:
    """Show what an engine wrote."""
    import httpx

    gateway = Gateway(url, admin_key, config)
    where = gateway.url(f"/admin/engines/{quote(engine, safe='')}/log")
    params = {"lines": lines, "follow": follow}
    # An engine may be silent for hours.
    timeout = httpx.Timeout(TIMEOUT_S, read=None if follow else TIMEOUT_S)
    with (
        refusals(),
        gateway.told(),
        httpx.stream(
            "GET",
            where,
            params=params,
            headers=gateway.headers,
            timeout=timeout,
            trust_env=gateway.trust_env,
        ) as answer,
    ):
        if not answer.is_success:
            answer.read()
            gateway.check(answer)
        try:
            for line in answer.iter_lines():
                print("\t".join(map(shown, line.split("\t"))), flush=follow)
            sys.stdout.flush()
        except BrokenPipeError:
            # Whoever read has seen enough; the interpreter would flush once more at its end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
