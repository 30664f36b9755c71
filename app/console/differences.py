"""What differs between two states of a record of the audit, as text."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.console.language import gettext

NOTHING = "–"


@dataclass(frozen=True, slots=True)
class Difference:
    """A field as it was and as it became; None: there was, or is, no object."""

    name: str
    before: str | None
    after: str | None


def differences(
    before: Mapping[str, Any] | None, after: Mapping[str, Any] | None
) -> list[Difference]:
    """Return what differs; of an object that is new or gone, the fields that are set."""
    if before is not None and after is not None:
        names = list(dict.fromkeys((*before, *after)))
        return [
            Difference(name, value_text(before.get(name)), value_text(after.get(name)))
            for name in names
        ]
    state = before or after or {}
    found = {name: value_text(value) for name, value in state.items() if _is_set(value)}
    return [
        Difference(name, None if before is None else text, None if after is None else text)
        for name, text in found.items()
    ]


def value_text(value: Any) -> str:
    """Return a value of JSON in words."""
    match value:
        case None | "":
            return NOTHING
        case bool():
            return gettext("yes") if value else gettext("no")
        case int():
            return f"{value:,}"
        case str():
            return value
        case list() if all(isinstance(item, str) for item in value):
            return ", ".join(value) or gettext("none")
        case _:
            return json.dumps(value, ensure_ascii=False)


def _is_set(value: Any) -> bool:
    return value is not None and value is not False and value != ""
