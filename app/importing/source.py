"""Reading a source of unknown form: YAML within bounds, values of the type that a place needs."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import yaml

from engines.output.redact import hidden_by_form

# LiteLLM's largest example has 25 kB; YAML takes about a second per megabyte.
MAX_CHARACTERS = 1_048_576
# Counted with every use of an anchor, so that a few lines cannot stand for millions of values.
MAX_VALUES = 100_000


class SourceFault(Exception):
    """The source cannot be imported; the message is one line and holds no secret of it."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


def one_line(text: str) -> str:
    """Return a text with its blanks joined, without control characters and secrets.

    Its author may have put a secret where a name belongs.
    """
    line = hidden_by_form(" ".join(text.split()))
    return "".join(mark if mark.isprintable() else "?" for mark in line)


def read_mapping(text: str) -> dict[str, Any]:
    """Return the mapping that a YAML text is. Raises SourceFault."""
    check_size(text)
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        problem = getattr(error, "problem", None) or "not YAML"
        raise SourceFault(f"{where}{problem}") from None
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError):
        # PyYAML lets its constructors' own errors out, whose words may hold the value.
        raise SourceFault(
            "a value is not what its tag or form says, or is nested too deeply"
        ) from None
    _check_values(data)
    return mapping_of(data, "the source")


def check_size(text: str) -> None:
    """Raise SourceFault for a text that is too long to be a configuration, or no text."""
    if len(text) > MAX_CHARACTERS:
        raise SourceFault(f"is longer than {MAX_CHARACTERS} characters")
    if not is_unicode(text):
        raise SourceFault("is not UTF-8")


def is_unicode(text: str) -> bool:
    """Return whether a text can be encoded: without half of a surrogate pair."""
    return text.isascii() or not any("\ud800" <= mark <= "\udfff" for mark in text)


def _check_values(data: object) -> None:
    waiting, count = [data], 0
    while waiting:
        value = waiting.pop()
        count += 1
        if count > MAX_VALUES:
            raise SourceFault(f"holds more than {MAX_VALUES} values")
        if isinstance(value, str) and not is_unicode(value):
            raise SourceFault("holds a text that is no Unicode")
        if isinstance(value, dict):
            waiting += value.keys()
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def mapping_of(value: object, place: str) -> dict[str, Any]:
    """Return a mapping with texts as keys, an empty one for null. Raises SourceFault."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise SourceFault(f"{place}: must be a mapping")
    return {text_of(key, f"a key of {place}"): member for key, member in value.items()}


def list_of(value: object, place: str) -> list[Any]:
    """Return a list, an empty one for null. Raises SourceFault."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise SourceFault(f"{place}: must be a list")
    return value


def text_of(value: object, place: str) -> str:
    """Return a text; a number, as YAML reads `model_name: 4`, is one. Raises SourceFault."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise SourceFault(f"{place}: must be text")
    return str(value)


def number_of(value: object, place: str) -> int | float | None:
    """Return a finite number that is at least 0, None for null. Raises SourceFault."""
    if value is None:
        return None
    if isinstance(value, str):
        value = _number(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e15:
        raise SourceFault(f"{place}: must be a number that is not negative")
    return int(value) if value == int(value) else value


def _number(text: str) -> object:
    try:
        return float(text)
    except ValueError:
        return text


def named_lists(value: object, place: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the pairs of a list of mappings from a name to names. Raises SourceFault."""
    for entry in list_of(value, place):
        for name, members in mapping_of(entry, place).items():
            yield name, [text_of(one, place) for one in list_of(members, f"{place}.{name}")]


def replaced(value: object, replace: Callable[[str], str]) -> Any:
    """Return a value with every text in it replaced, keys of mappings included."""
    if isinstance(value, str):
        return replace(value)
    if isinstance(value, list):
        return [replaced(member, replace) for member in value]
    if isinstance(value, Mapping):
        return {replaced(key, replace): replaced(one, replace) for key, one in value.items()}
    return value
