"""Reads files of prompts: one per line, as plain text or JSON Lines (jsonlines.org)."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
# The keys of a JSON line; `id` is copied to the records.
KEYS = ("prompt", "messages", "id")


class PromptsError(ValueError):
    """An invalid file of prompts; the text has the line number, from 1, and the fault."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt: a text, or the messages of a conversation; never both."""

    text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    id: str | int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the prompt as the object of a JSON line."""
        fields = {"id": self.id, "prompt": self.text, "messages": self.messages}
        return {name: value for name, value in fields.items() if value is not None}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """Return the prompt of an object that `to_json` returned, as JSON has it."""
        messages = fields.get("messages")
        return cls(
            fields.get("prompt"), None if messages is None else tuple(messages), fields.get("id")
        )


def read_prompts(data: bytes, name: str) -> list[Prompt]:
    """Return the prompts of a file; blank lines are skipped.

    The file is JSON Lines when its name says so, or when its first line is a JSON string or
    object and its name does not end in .txt. Raises PromptsError, with the name and the line.
    """
    lines = list(_lines(data, name))
    if not lines:
        raise PromptsError(f"{name} contains no prompt")
    if not _is_json(lines[0][1], name):
        return [Prompt(text) for _, text in lines]
    prompts = []
    for number, line in lines:
        try:
            prompts.append(_prompt(line))
        except _LineError as error:
            raise PromptsError(f"{name} line {number}: {error}") from None
    return prompts


def _lines(data: bytes, name: str) -> Iterator[tuple[int, str]]:
    # Not splitlines(), which would also break at U+2028 and other characters of a text.
    for number, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        try:
            line = raw.removesuffix(b"\r").decode()
        except UnicodeDecodeError:
            raise PromptsError(f"{name} line {number}: not UTF-8") from None
        if line.strip():
            yield number, line


def _is_json(first: str, name: str) -> bool:
    if name.endswith(JSON_SUFFIXES):
        return True
    if name.endswith(".txt"):
        return False
    try:
        return isinstance(json.loads(first), str | dict)
    except (ValueError, RecursionError):
        return False


def _prompt(line: str) -> Prompt:
    """Return the prompt of a line of JSON. Raises _LineError."""
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise _LineError(f"not JSON: {error.msg} (column {error.colno})") from None
    except RecursionError:
        raise _LineError("nested too deeply") from None
    if isinstance(value, str):
        value = {"prompt": value}
    if not isinstance(value, dict):
        raise _LineError("must be a string, or an object with prompt or messages")
    if unknown := [key for key in value if key not in KEYS]:
        raise _LineError(f"unknown key {unknown[0]!r}; allowed are prompt or messages, and id")
    if ("prompt" in value) == ("messages" in value):
        raise _LineError("must hold either prompt or messages")
    identity = value.get("id")
    if not isinstance(identity, str | int | None) or isinstance(identity, bool):
        raise _LineError("id must be a string or a whole number")
    if "messages" in value:
        return Prompt(messages=_messages(value["messages"]), id=identity)
    text = value["prompt"]
    if not isinstance(text, str) or not text:
        raise _LineError("prompt must be a string that is not empty")
    return Prompt(text, id=identity)


def _messages(value: object) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list) or not value:
        raise _LineError("messages must be a list that is not empty")
    for place, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _LineError(f"messages.{place} must be an object with a role")
        if not isinstance(message.get("content"), str | list | None):
            raise _LineError(f"messages.{place}.content must be a string or a list of parts")
    return tuple(value)


class _LineError(Exception):
    """The fault of one line."""
