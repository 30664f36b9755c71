"""Values that only a shell would have changed: `${VARIABLES}`, and quotes around a value.

The gateway expands neither: a start that took them as they are would fail much later, or accept a
key that has quotes in it.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from app.settings.source import PREFIX, Place, Source

# `${NAME}` and `${NAME:-default}` anywhere, `$NAME` as a whole value.
_VARIABLE = re.compile(
    r"\$\{(?P<name>[A-Za-z_]\w{0,63})[^}]*\}|^\$(?P<whole>[A-Z_][A-Z0-9_]{0,63})$"
)
# In a URL, anywhere: no host and no path of an API has such a part.
_IN_URL = re.compile(r"\$\{?(?P<name>[A-Za-z_]\w{0,63})")
# Text of the user's own, in which such a part may be meant.
_FREE_TEXT = frozenset({"fields", "chat-template", "chat_template"})
_QUOTES = frozenset("\"'")


def find_shell_syntax(
    data: Mapping[str, Any], source: Source, environment: Mapping[str, str]
) -> Iterator[str]:
    """Yield a fault for each value of the file or of a GATEWAY_ variable with such a part."""
    for place, text in _texts(data, ()):
        if (name := _variable(text, is_url=_is_url(place))) is not None:
            yield source.fault(
                place, f"holds the variable {name}, which is not expanded here: write its value"
            )
    for variable, text in sorted(environment.items()):
        if not variable.upper().startswith(PREFIX):
            continue
        if text[:1] in _QUOTES and text[-1:] == text[:1] and len(text) > 1:
            yield (
                f"{variable}: is in quotes, which would be a part of it: whatever sets the "
                "variable does not remove them"
            )
        elif (name := _variable(text, is_url=False)) is not None:
            yield f"{variable}: holds the variable {name}, which nothing has expanded"


def _texts(value: object, place: Place) -> Iterator[tuple[Place, str]]:
    """Yield every text in a value with its place."""
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, list):
        for number, member in enumerate(value):
            yield from _texts(member, (*place, number))
    elif isinstance(value, dict):
        for key, member in value.items():
            if isinstance(key, str) and key not in _FREE_TEXT:
                yield from _texts(member, (*place, key))


def _is_url(place: Place) -> bool:
    return isinstance(place[-1], str) and place[-1].endswith("url")


def _variable(text: str, *, is_url: bool) -> str | None:
    """Return the name of the first variable in a text, None if there is none."""
    match = (_IN_URL if is_url else _VARIABLE).search(text)
    return None if match is None else next(filter(None, match.groups()))
