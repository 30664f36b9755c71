"""The command line of vllm-gateway, to check the commands on pages."""

import re
import shlex
from collections.abc import Iterator
from functools import cache

import typer
from typer.core import TyperCommand, TyperGroup

from app.cli import app

NAME = "vllm-gateway"
Command = TyperCommand | TyperGroup


@cache
def tree() -> TyperGroup:
    """Return the commands of vllm-gateway."""
    command = typer.main.get_command(app)
    assert isinstance(command, TyperGroup)
    return command


def members(group: TyperGroup) -> dict[str, Command]:
    """Return the commands of a group by name."""
    found = group.commands.items()
    return {n: c for n, c in found if isinstance(c, TyperCommand | TyperGroup)}


def every(command: Command, path: str = NAME) -> Iterator[tuple[str, Command]]:
    """Yield every command with its whole name, groups before their members."""
    yield path, command
    if isinstance(command, TyperGroup):
        for name, member in members(command).items():
            yield from every(member, f"{path} {name}")


def parse(words: list[str]) -> None:
    """Parse the arguments of vllm-gateway. Raises Typer's UsageError."""
    command: Command = tree()
    while True:
        if {"-h", "--help"} & set(words):
            return
        context = command.make_context(command.name, list(words))
        if not isinstance(command, TyperGroup):
            return
        words = [*context._protected_args, *context.args]
        if not words and command.invoke_without_command:
            return
        _, member, words = command.resolve_command(context, words)
        assert isinstance(member, TyperCommand | TyperGroup)
        command = member


def mention(code: str) -> str | None:
    """Return the fault of inline code that begins with vllm-gateway, None if it is valid.

    Arguments may be missing or placeholders; commands and options must exist.
    """
    command: Command = tree()
    for word in code.split()[1:]:
        option = word.lstrip("[").rstrip("]").partition("=")[0]
        if option.startswith("-"):
            known = {name for p in command.params for name in (*p.opts, *p.secondary_opts)}
            if option not in known | {"-h", "--help"}:
                return f"{command.name} has no option {option}"
        elif isinstance(command, TyperGroup) and re.fullmatch(r"[a-z-]+", word):
            if (member := members(command).get(word)) is None:
                return f"there is no command {word}"
            command = member
    return None


def arguments(text: str) -> list[str] | None:
    """Return the arguments of a vllm-gateway command, None for other commands.

    Raises ValueError for an incomplete command.
    """
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    while words and re.fullmatch(r"[A-Za-z_]\w*=.*", words[0], re.DOTALL):
        del words[0]
    if words and words[0].rpartition("/")[2] == NAME:
        return words[1:]
    return None
