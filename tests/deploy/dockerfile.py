"""A Dockerfile read into stages, as far as ours needs it."""

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Stage:
    """One FROM and what follows it."""

    name: str
    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, instruction: str) -> list[str]:
        """The arguments of every instruction of one kind."""
        return [text for kind, text in self.instructions if kind == instruction]

    def runs(self) -> Iterator[str]:
        """The shell commands of RUN, without the options for the builder."""
        for text in self.all("RUN"):
            yield re.sub(r"^(--mount=\S+\s+)+", "", text)

    def copies(self) -> Iterator[list[str]]:
        """The words of each COPY, the target last."""
        for text in self.all("COPY"):
            yield shlex.split(text)

    def exec_form(self, instruction: str) -> list[str]:
        """The last one's words. Raises ValueError when it would be run by a shell."""
        text = self.all(instruction)[-1]
        words: Any = json.loads(text[text.index("[") :])
        return [str(word) for word in words]

    def env(self) -> dict[str, str]:
        """The variables that ENV sets."""
        return dict(word.split("=", 1) for text in self.all("ENV") for word in shlex.split(text))


def read(path: Path) -> dict[str, Stage]:
    """Return the stages by name."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    text = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    stages: dict[str, Stage] = {}
    current: Stage | None = None
    for line in filter(str.strip, text.splitlines()):
        kind, rest = line.split(maxsplit=1)
        if kind == "FROM":
            base, _, name = rest.split()
            current = Stage(name, base)
            stages[name] = current
        elif current is not None:
            current.instructions.append((kind, rest))
    return stages


def lineage(stages: dict[str, Stage], name: str) -> Stage:
    """Return a stage with what it inherits."""
    stage = stages[name]
    if stage.base not in stages:
        return stage
    parent = lineage(stages, stage.base)
    return Stage(name, parent.base, [*parent.instructions, *stage.instructions])
