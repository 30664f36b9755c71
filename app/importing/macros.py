"""Macros of llama-swap: `${name}`, `${env.NAME}`, and those that the program itself sets."""

import re
from collections.abc import Mapping
from typing import Any

from app.importing.source import SourceFault, mapping_of, replaced
from engines.output.redact import is_secret

_USE = re.compile(r"\$\{([A-Za-z0-9_-]{1,63})\}")
_ENVIRONMENT = re.compile(r"\$\{env\.([A-Za-z_][A-Za-z0-9_]*)\}")
_KEPT = frozenset({"PORT", "PID"})
# A few macros that name each other twice would fill the memory.
_MAX_CHARACTERS = 65_536
_MAX_DEPTH = 16


class Macros:
    """The macros that a place knows: the program's, then those of the model."""

    def __init__(
        self, environment: Mapping[str, str], *sources: tuple[str, object], **own: str
    ) -> None:
        """`sources` are mappings with their places; a later one stands above an earlier."""
        self._environment = environment
        self._values: dict[str, str] = dict(own)
        for place, source in sources:
            for name, value in mapping_of(source, place).items():
                self._values[name] = _scalar(value, f"{place}.{name}")

    def expanded(self, value: object, place: str) -> Any:
        """Return a value with every macro in it replaced. Raises SourceFault."""
        return replaced(value, lambda text: self.text(text, place))

    def text(self, text: str, place: str) -> str:
        """Return a text with every macro replaced; ${PORT} stays. Raises SourceFault."""
        for _ in range(_MAX_DEPTH):
            whole = self._once(_ENVIRONMENT.sub(self._variable, text), place)
            if whole == text:
                return whole
            text = whole
        raise SourceFault(f"{place}: its macros name each other in a circle")

    def _once(self, text: str, place: str) -> str:
        size = len(text)

        def value(match: re.Match[str]) -> str:
            nonlocal size
            name = match[1]
            if name in _KEPT:
                return match[0]
            if name not in self._values:
                raise SourceFault(f"{place}: the macro {name!r} is not defined")
            size += len(self._values[name])
            if size > _MAX_CHARACTERS:
                raise SourceFault(
                    f"{place}: its macros make more than {_MAX_CHARACTERS} characters"
                )
            return self._values[name]

        return _USE.sub(value, text)

    def _variable(self, match: re.Match[str]) -> str:
        """Return a variable's value; a secret, or one that is not set, stays a shell variable."""
        name = match[1]
        known = None if is_secret(name) else self._environment.get(name)
        return f"${name}" if known is None or "$" in known else known


def variable_of(text: str) -> str | None:
    """Return the variable that a text takes its whole value from, `${env.NAME}`."""
    match = _ENVIRONMENT.fullmatch(text.strip())
    return match[1] if match else None


def _scalar(value: object, place: str) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)
    raise SourceFault(f"{place}: a macro must be text, a number, true or false")
