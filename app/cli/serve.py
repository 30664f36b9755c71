"""`vllm-gateway serve`: run the gateway."""

import gc
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from app.cli.faults import faults
from app.cli.options import ConfigOption
from app.settings import load_settings


def serve(
    config: ConfigOption = None,
    key_file: Annotated[
        Path | None,
        typer.Option(
            help="File with a client key to accept as well. It is created if it is missing, and "
            "the key is shown at the start."
        ),
    ] = None,
) -> None:
    """Run the gateway."""
    gc.disable()  # imports leave nothing to collect: a sixth of their time; `run` enables it
    from app.telemetry.logs import configured_log

    with faults():
        key = _key_in(key_file) if key_file else None
        source = partial(load_settings, config, extra_keys=[key] if key else [])
        settings = source()
        from app.server import serve as run  # a second: faults of the configuration do not wait

        with configured_log(settings.logs) as output:
            run(
                settings,
                banner_key=key,
                source=source,
                source_of_text=lambda text: source(text=text),
                output=output,
            )


def _key_in(file: Path) -> str:
    """Return the key in a file, which is created if it is missing."""
    from app.server import read_or_create_key

    return read_or_create_key(file)
