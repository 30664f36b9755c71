"""A Markdown page: fenced blocks, headings, links and inline code."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^`]*)$")
_HEADING = re.compile(r"^#{1,6} +(?P<text>.+?) *#*$")
_LINK = re.compile(r"\[[^\]\n]*(?:\n[^\]\n]*)?\]\((?P<target>[^()\s]+)\)")
_SPAN = re.compile(r"`([^`\n]+)`")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block; `line` is the first line of its text, counted from 1."""

    language: str
    words: tuple[str, ...]
    lines: tuple[str, ...]
    line: int

    @property
    def text(self) -> str:
        return "".join(f"{line}\n" for line in self.lines)


@dataclass(frozen=True, slots=True)
class Page:
    """A page; its name is its path in the repository."""

    name: str
    text: str

    @classmethod
    def read(cls, path: Path) -> "Page":
        return cls(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))

    @property
    def blocks(self) -> list[Block]:
        """The fenced blocks. Raises ValueError for an unclosed block."""
        return [part for part in _parts(self.text) if isinstance(part, Block)]

    @property
    def prose(self) -> list[tuple[int, str]]:
        """The lines outside of fenced blocks, with their numbers."""
        return [part for part in _parts(self.text) if not isinstance(part, Block)]

    @property
    def anchors(self) -> set[str]:
        """Anchors of the headings, as GitHub derives them."""
        found: set[str] = set()
        for _, line in self.prose:
            if match := _HEADING.match(line):
                name = anchor(match["text"])
                count = 0
                while (numbered := f"{name}-{count}" if count else name) in found:
                    count += 1
                found.add(numbered)
        return found

    @property
    def links(self) -> list[str]:
        """Targets of the links, images included."""
        text = "\n".join(line for _, line in self.prose)
        return [match["target"] for match in _LINK.finditer(_SPAN.sub("``", text))]

    @property
    def spans(self) -> list[str]:
        """The inline code of the page."""
        return [code for _, line in self.prose for code in _SPAN.findall(line)]


def anchor(heading: str) -> str:
    """Return GitHub's anchor of a heading: lower case, no punctuation, dashes for blanks."""
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w\- ]", "", words).replace(" ", "-")


def _parts(text: str) -> Iterator[Block | tuple[int, str]]:
    lines = iter(enumerate(text.splitlines(), 1))
    for number, line in lines:
        if (match := _FENCE.match(line)) is None:
            yield number, line
            continue
        inside: list[str] = []
        for _, inner in lines:
            if inner.strip() == "```":
                break
            inside.append(inner.removeprefix(match["indent"]))
        else:
            raise ValueError(f"line {number}: the block is not closed")
        language, *words = match["info"].split() or [""]
        yield Block(language, tuple(words), tuple(inside), number + 1)
