"""What every command shares: the option for the file, and how a fault is told."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from app.settings import ConfigError

EXIT_FAULT = 2

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="The YAML file; default: GATEWAY_CONFIG, gateway.yaml."),
]


@contextmanager
def faults() -> Iterator[None]:
    """Turn what the user can mend into one line each and exit code 2."""
    from engines.process.engine import LauncherMissing

    try:
        yield
    except ConfigError as error:
        fail(*error.faults)
    except BrokenPipeError:
        raise  # no fault of the user's: `main` ends the command
    except (LauncherMissing, OSError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def fail(*lines: str, code: int = EXIT_FAULT) -> NoReturn:
    """Print each line to standard error and exit."""
    for line in lines:
        print(f"vllm-gateway: {line}", file=sys.stderr)
    raise SystemExit(code)
