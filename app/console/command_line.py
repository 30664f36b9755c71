"""The command line of an engine, flag by flag. Pure."""

import re
import shlex
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import dropwhile

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_FLAG = re.compile(r"--?[A-Za-z]")
# The value of a flag that has none.
SET = "set"


@dataclass(frozen=True, slots=True)
class CommandLine:
    """What an engine runs with: environment variables and flags, in their order. Read only."""

    variables: dict[str, str] = field(default_factory=dict)
    flags: dict[str, str] = field(default_factory=dict)


@lru_cache(maxsize=1024)  # pages show those of all engines every second: 1 ms each
def parse(text: str) -> CommandLine:
    """Return the variables and the flags of a command line as `EngineRow.runs` has it.

    A flag that is given twice has both values. Text that is no command line, as the address of a
    remote server, has none.
    """
    try:
        words = shlex.split(text)
    except ValueError:
        words = text.split()
    parsed = CommandLine()
    begin = 0
    while begin < len(words) and _VARIABLE.match(words[begin]):
        name, _, value = words[begin].partition("=")
        parsed.variables[name] = value
        begin += 1
    # What comes before the first long flag is the program, and may have flags of its own (`-m`).
    rest = dropwhile(lambda word: not word.startswith("--"), words[begin:])
    flag = ""
    for word in rest:
        if _FLAG.match(word):
            name, equals, value = word.partition("=")
            flag = name.replace("_", "-")
            _add(parsed.flags, flag, value if equals else "")
        elif flag:
            _add(parsed.flags, flag, word)
    flags = {name: value or SET for name, value in parsed.flags.items()}
    return CommandLine(parsed.variables, flags)


def _add(flags: dict[str, str], name: str, value: str) -> None:
    before = flags.get(name, "")
    flags[name] = f"{before} {value}".strip()
