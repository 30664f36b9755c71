"""Options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", "-c", help="Configuration file; default: GATEWAY_CONFIG, else gateway.yaml."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
UrlOption = Annotated[
    str | None,
    typer.Option(
        help="Address of the gateway; default: GATEWAY_URL, else server.host and server.port of "
        "the configuration."
    ),
]
AdminKeyOption = Annotated[
    str | None,
    typer.Option(help="Admin key; default: GATEWAY_KEY, else GATEWAY_ADMIN_KEY."),
]
PAGE = 100
MAX_PAGE = 1000
PageOption = Annotated[int, typer.Option(min=1, max=MAX_PAGE, help="Maximum number of rows.")]
