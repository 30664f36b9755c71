"""Expands the macros of llama-swap: `${name}`, `${env.NAME}`, and its predefined ones."""

import re
from collections.abc import Mapping
from typing import Any

from app.config_import.reading import ImportFault, mapping_of, replace_texts
from engines.output import is_secret

_USE = re.compile(r"\$\{([A-Za-z0-9_-]{1,63})\}")
_ENVIRONMENT = re.compile(r"\$\{env\.([A-Za-z_][A-Za-z0-9_]*)\}")
_KEPT = frozenset({"PORT", "PID"})
# A few macros that each use another twice would fill the memory.
_MAX_CHARACTERS = 65_536
_MAX_DEPTH = 16


class Macros:
    """The macros in scope: predefined, shared, and the model's own."""

    def __init__(
        self, environment: Mapping[str, str], *sources: tuple[str, object], **own: str
    ) -> None:
        """Take mappings with their places; a later mapping overrides an earlier one."""
        self._environment = environment
        self._values: dict[str, str] = dict(own)
        for place, source in sources:
            for name, value in mapping_of(source, place).items():
                self._values[name] = _scalar(value, f"{place}.{name}")

    def expand(self, value: object, place: str) -> Any:
        """Return a value with every macro in it replace_texts. Raises ImportFault."""
        return replace_texts(value, lambda text: self.expand_text(text, place))

    def expand_text(self, text: str, place: str) -> str:
        """Return a text with every macro replace_texts; ${PORT} stays. Raises ImportFault."""
        for _ in range(_MAX_DEPTH):
            whole = self._once(_ENVIRONMENT.sub(self._variable, text), place)
            if whole == text:
                return whole
            text = whole
        raise ImportFault(f"{place}: its macros form a cycle")

    def _once(self, text: str, place: str) -> str:
        size = len(text)

        def value(match: re.Match[str]) -> str:
            nonlocal size
            name = match[1]
            if name in _KEPT:
                return match[0]
            if name not in self._values:
                raise ImportFault(f"{place}: the macro {name!r} is not defined")
            size += len(self._values[name])
            if size > _MAX_CHARACTERS:
                raise ImportFault(
                    f"{place}: its macros expand to more than {_MAX_CHARACTERS} characters"
                )
            return self._values[name]

        return _USE.sub(value, text)

    def _variable(self, match: re.Match[str]) -> str:
        """Return a variable's value; secrets and unset variables remain shell variables."""
        name = match[1]
        known = None if is_secret(name) else self._environment.get(name)
        return f"${name}" if known is None or "$" in known else known


def whole_variable(text: str) -> str | None:
    """Return NAME where a text is `${env.NAME}` and nothing else."""
    match = _ENVIRONMENT.fullmatch(text.strip())
    return match[1] if match else None


def _scalar(value: object, place: str) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)
    raise ImportFault(f"{place}: a macro must be text, a number, true or false")
