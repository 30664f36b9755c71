"""The values of the variables that settings name for secrets.

What only .env has is kept here and not in `os.environ`, which child processes inherit.
"""

import os
from collections.abc import Mapping

_from_dotenv: dict[str, str] = {}


def keep_secrets(variables: Mapping[str, str]) -> None:
    """Keep the variables that the environment lacks. One that is kept stays until a restart."""
    for name, value in variables.items():
        if name not in os.environ:
            _from_dotenv.setdefault(name, value)


def secret_value(name: str) -> str | None:
    """Return the value of a variable; None: it is neither set nor kept."""
    return os.environ.get(name, _from_dotenv.get(name))
