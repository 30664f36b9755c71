"""Console blocks: commands after `$ `, each followed by its output.

A line that ends in a backslash or within quotes continues on the next line. In the output, `…`
stands for any text; alone on a line, for any number of lines. A command without output may print
anything.
"""

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.docs.page import Block

PROMPT = "$ "
# Programs that blocks show; tests.clients runs those.
CLIENTS = frozenset({"claude", "gradio", "langchain", "llama-index", "node", "open-webui"})
# Requirements of a block that the tests do not meet: its commands are parsed, not run.
# `environment` is a separate Python environment, `vllm` the command of vLLM's own distribution.
NEEDS = (
    frozenset({"environment", "gpu", "docker", "kubernetes", "ray", "systemd", "vllm"}) | CLIENTS
)
# The last command of the block exits with a status other than 0.
FAILS = "fails"
_SERVE = re.compile(r"(?:\w+=\S+ +)*(?:(?:\S*/)?vllm-gateway +serve|make +serve)(?: |$)")


@dataclass(frozen=True, slots=True)
class Command:
    """A command with its line and its documented output."""

    text: str
    line: int
    output: tuple[str, ...]
    fails: bool = False

    @property
    def serves(self) -> bool:
        """True if it runs until stopped, as in a separate terminal."""
        return not self.fails and _SERVE.match(self.text) is not None


def needs(block: Block) -> set[str]:
    """Return the requirements of a block that the tests do not meet.

    Raises ValueError for an unknown mark.
    """
    if unknown := set(block.words) - NEEDS - {FAILS}:
        raise ValueError(f"line {block.line}: {', '.join(sorted(unknown))} is no mark of a block")
    return set(block.words) & NEEDS


def commands(block: Block) -> list[Command]:
    """Return the commands of a console block.

    Raises ValueError for a block that does not begin with a command or ends within one.
    """
    found: list[Command] = []
    lines = iter(enumerate(block.lines, block.line))
    for number, line in lines:
        if line.startswith(PROMPT):
            text = line.removeprefix(PROMPT)
            while text.endswith("\\") or _open(text):
                _, more = next(lines, (0, None))
                if more is None:
                    raise ValueError(f"line {number}: the command is not complete")
                text += f"\n{more}"
            found.append(Command(text, number, ()))
        elif found:
            last = found[-1]
            found[-1] = Command(last.text, last.line, (*last.output, line))
        else:
            raise ValueError(f"line {number}: a console block begins with a command after `$ `")
    if not found:
        raise ValueError(f"line {block.line}: a console block without a command")
    if FAILS in block.words:
        last = found[-1]
        found[-1] = Command(last.text, last.line, last.output, fails=True)
    return found


def _open(text: str) -> bool:
    """Return whether a quote is not closed yet."""
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return not text.endswith("\\")
    return False


def agrees(wanted: Sequence[str], output: str) -> bool:
    """Return whether an output matches a page, except for blanks and empty lines."""
    shown = _lines(wanted)
    if not shown:
        return True
    pattern = "".join(r"(?:.*\n)*?" if line == "…" else f"{_pattern(line)}\n" for line in shown)
    text = "".join(f"{line}\n" for line in _lines(output.splitlines()))
    return re.fullmatch(pattern, text) is not None


def _lines(lines: Iterable[str]) -> list[str]:
    return [words for line in lines if (words := " ".join(line.split()))]


def _pattern(line: str) -> str:
    return ".*".join(re.escape(part) for part in line.split("…"))
