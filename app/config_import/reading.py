"""Reads an untrusted source: YAML within bounds, and values of the required types."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import yaml

from app.settings import MAX_VALUES, count_values
from engines.output import redact_by_form

# LiteLLM's largest example has 25 kB; parsing takes about a second per megabyte.
MAX_CHARACTERS = 1_048_576


class ImportFault(Exception):
    """The source cannot be imported; the message is one line and holds no secret of it."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


def one_line(text: str) -> str:
    """Return text in one line, without control characters and without secrets.

    A source may hold a secret where a name belongs.
    """
    line = redact_by_form(" ".join(text.split()))
    return "".join(mark if mark.isprintable() else "?" for mark in line)


def read_mapping(text: str) -> dict[str, Any]:
    """Return the mapping in a YAML text. Raises ImportFault."""
    check_size(text)
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is not None and count_values(root) > MAX_VALUES:
            raise ImportFault(f"holds more than {MAX_VALUES} values")
        data = None if root is None else loader.construct_document(root)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        problem = getattr(error, "problem", None) or "not YAML"
        raise ImportFault(f"{where}{problem}") from None
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError):
        # PyYAML does not translate its constructors' errors; their messages may hold the value.
        raise ImportFault(
            "a value does not fit its YAML tag or form, or is nested too deeply"
        ) from None
    _check_text(data)
    return mapping_of(data, "the source")


def check_size(text: str) -> None:
    """Raise ImportFault for a text that is too long, or not valid Unicode."""
    if len(text) > MAX_CHARACTERS:
        raise ImportFault(f"is longer than {MAX_CHARACTERS} characters")
    if not is_unicode(text):
        raise ImportFault("is not UTF-8")


def is_unicode(text: str) -> bool:
    """Return whether a text can be encoded: it has no lone surrogate."""
    return text.isascii() or not any("\ud800" <= mark <= "\udfff" for mark in text)


def _check_text(data: object) -> None:
    remaining = [data]
    while remaining:
        value = remaining.pop()
        if isinstance(value, str) and not is_unicode(value):
            raise ImportFault("holds text that is not valid Unicode")
        if isinstance(value, dict):
            remaining += value.keys()
            remaining += value.values()
        elif isinstance(value, list):
            remaining += value


def mapping_of(value: object, place: str) -> dict[str, Any]:
    """Return a mapping with text keys; an empty one for null. Raises ImportFault."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ImportFault(f"{place}: must be a mapping")
    return {text_of(key, f"a key of {place}"): member for key, member in value.items()}


def list_of(value: object, place: str) -> list[Any]:
    """Return a list; an empty one for null. Raises ImportFault."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise ImportFault(f"{place}: must be a list")
    return value


def text_of(value: object, place: str) -> str:
    """Return text; numbers count, because YAML reads `model_name: 4` as one. Raises ImportFault."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ImportFault(f"{place}: must be text")
    return str(value)


def number_of(value: object, place: str) -> int | float | None:
    """Return a finite number of at least 0; None for null. Raises ImportFault."""
    if value is None:
        return None
    if isinstance(value, str):
        value = _number(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e15:
        raise ImportFault(f"{place}: must be a number of at least 0")
    return int(value) if value == int(value) else value


def _number(text: str) -> object:
    try:
        return float(text)
    except ValueError:
        return text


def named_lists(value: object, place: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the entries of a list of mappings from a name to names. Raises ImportFault."""
    for entry in list_of(value, place):
        for name, members in mapping_of(entry, place).items():
            yield name, [text_of(member, place) for member in list_of(members, f"{place}.{name}")]


def replace_texts(value: object, replace: Callable[[str], str]) -> Any:
    """Return a value with every text in it replace_texts, keys of mappings included."""
    if isinstance(value, str):
        return replace(value)
    if isinstance(value, list):
        return [replace_texts(member, replace) for member in value]
    if isinstance(value, Mapping):
        return {
            replace_texts(key, replace): replace_texts(member, replace)
            for key, member in value.items()
        }
    return value
