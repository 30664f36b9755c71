"""Faults of commands: one line each on standard error, and the exit code.

2   the input or the configuration is wrong, or the gateway refused the request
1   the request was valid and failed
130 Ctrl-C
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from app.settings import ConfigError

EXIT_FAULT = 2
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


@contextmanager
def faults() -> Iterator[None]:
    """Turn faults that the user can fix into one line each and exit code 2."""
    from engines.process import LauncherMissing

    try:
        yield
    except ConfigError as error:
        fail(*error.faults)
    except BrokenPipeError:
        raise  # the reader has closed the pipe: `main` ends the command
    except (LauncherMissing, OSError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None


def fail(*lines: str, code: int = EXIT_FAULT) -> NoReturn:
    """Print each line to standard error and exit."""
    for line in lines:
        complain(line)
    raise SystemExit(code)


def complain(line: str) -> None:
    """Print a line to standard error."""
    print(f"vllm-gateway: {line}", file=sys.stderr)
