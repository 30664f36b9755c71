"""Replaces patterns in the texts of a capture, by RE2.

RE2 reads a text in linear time and leaves the interpreter's lock meanwhile; Python's `re` does
neither, and a client who knows a pattern could stop the gateway with a text for it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

from app.settings import pattern_of

# Matches of one pattern in one text. A search may read far beyond its match, so that many of them
# take a time that is quadratic; behind the last, the rest of the text is replaced as a whole.
MAX_MATCHES = 1000
REST = b"[redacted]"


@dataclass(frozen=True, slots=True)
class Redaction:
    """Patterns, each with what stands for its matches."""

    patterns: tuple[tuple[bytes, Any], ...] = ()

    @classmethod
    def of(cls, texts: Iterable[str]) -> Self:
        """Return the patterns of a configuration, which has checked them."""
        named = [pattern_of(text) for text in texts]
        if not named:
            return cls()
        import re2  # 2 MiB, for those who use it

        return cls(tuple((name.encode(), re2.compile(pattern)) for name, pattern in named))

    def apply(self, text: str) -> str:
        """Return a text without what the patterns match."""
        if not self.patterns:
            return text
        data = text.encode()
        for name, pattern in self.patterns:
            data = _without(data, pattern, name)
        return data.decode(errors="replace")


def _without(data: bytes, pattern: Any, name: bytes) -> bytes:
    pieces: list[bytes] = []
    end = 0
    for number, match in enumerate(pattern.finditer(data)):
        if number == MAX_MATCHES:
            pieces += (data[end : match.start()], REST)
            return b"".join(pieces)
        pieces += (data[end : match.start()], name)
        end = match.end()
    return b"".join((*pieces, data[end:])) if pieces else data
