"""Splits a shell command line into commands, and never runs it."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field

from app.config_import.reading import ImportFault, check_size

_OPERATOR = re.compile(r"&&|\|\|?|;|&")
_REDIRECTION = re.compile(r"(?:\d*[<>]{1,2}|&>{1,2})(?P<target>.*)")
_ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)=(?P<value>.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{(?P<braced>[^}]*)\}|(?P<plain>\w+)|\()|`")
_SHELLS = frozenset({"bash", "sh", "zsh", "dash"})
# Programs that run the command after them.
_WRAPPERS = frozenset({"env", "exec", "nohup", "time", "sudo", "setsid", "command"})
_MAX_SHELLS = 3  # `bash -c` within `bash -c`


@dataclass(slots=True)
class Command:
    """A command: the variables before it, its wrapper such as nohup, and its words."""

    words: list[str]
    env: dict[str, str] = field(default_factory=dict)
    wrapper: list[str] = field(default_factory=list)


def split_commands(text: str, depth: int = 0) -> Iterator[Command]:
    """Yield the commands of a text, including those of `bash -c`.

    Raises ImportFault for an unclosed quote.
    """
    check_size(text)
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\s*\n", " ", "\n".join(lines))
    try:
        words = shlex.split(joined)
    except ValueError as error:
        raise ImportFault(f"the command line is not complete: {str(error).lower()}") from None
    for part in _parts(words):
        if inner := _inner(part):
            if depth == _MAX_SHELLS:
                raise ImportFault("bash -c is nested too deeply")
            yield from split_commands(inner, depth + 1)
        else:
            yield _command(part)


def find_variable(word: str) -> str | None:
    """Return the name of the first shell variable in a word, `$(…)` for a command, else None."""
    match = _VARIABLE.search(word)
    if match is None:
        return None
    return match["braced"] or match["plain"] or "$(…)"


def parse_assignment(word: str) -> tuple[str, str] | None:
    """Return name and value of NAME=VALUE, None for other words."""
    match = _ASSIGNMENT.fullmatch(word)
    return (match["name"], match["value"]) if match else None


def base_name(word: str) -> str:
    """Return the name of a program without its directory."""
    return word.rpartition("/")[2]


def _parts(words: list[str]) -> Iterator[list[str]]:
    """Yield the words between operators, without redirections."""
    part: list[str] = []
    skip = False
    for word in words:
        if skip:
            skip = False
        elif match := _REDIRECTION.fullmatch(word):
            skip = not match["target"]
        elif _OPERATOR.fullmatch(word):
            yield part
            part = []
        elif word.endswith(";") and not word.endswith("\\;"):
            yield [*part, word.rstrip(";")]
            part = []
        else:
            part.append(word)
    yield part


def _inner(words: list[str]) -> str | None:
    """Return the text that a part passes to `bash -c`, None for other parts."""
    command = _command(words)
    if command.words and base_name(command.words[0]) in _SHELLS:
        for place, word in enumerate(command.words[1:-1], 1):
            if re.fullmatch(r"-[a-z]*c", word):
                settings = " ".join(shlex.quote(f"{k}={v}") for k, v in command.env.items())
                return f"{settings} {command.words[place + 1]}".strip()
    return None


def _command(words: list[str]) -> Command:
    command = Command([])
    for place, word in enumerate(words):
        if found := parse_assignment(word):
            command.env[found[0]] = found[1]
        elif base_name(word) in _WRAPPERS or (command.wrapper and word.startswith("-")):
            command.wrapper.append(word)
        else:
            command.words = words[place:]
            break
    return command
