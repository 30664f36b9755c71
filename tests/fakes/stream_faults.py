"""What happens to the fake in the middle of a stream."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BEHIND_END = -1

KINDS = {
    "close": "the connection ends without the stream's end, as when the process dies",
    "reset": "the connection is reset",
    "cut": "half of the next event, then the connection ends",
    "error": "the API server's event for a dead EngineCore, then [DONE]",
    "dead": "EngineCore dies: that event in every stream, and status 500 from then on",
    "kill": "the process dies: every connection ends, and none is accepted",
    "stall": "silence, until the client leaves or EngineCore dies",
}


@dataclass
class StreamFault:
    """A fault of streams that have written so many tokens.

    With 0 tokens it happens behind the event that opens a stream, where there is one; with
    BEHIND_END behind the last event, before the response is complete.
    """

    kind: str
    after: int = 0
    # How many streams it happens to; None: to all of them.
    times: int | None = 1
    # It happens once to whatever processes share this file.
    once: Path | None = None
    _happened: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"the fake knows no {self.kind!r}")

    @classmethod
    def parse(cls, text: str, **more: Any) -> "StreamFault":
        """Read `KIND:TOKENS`."""
        kind, _, after = text.partition(":")
        return cls(kind, int(after or 0), **more)

    def strikes(self, tokens: int) -> bool:
        """Return whether it happens to a stream that has written so many tokens."""
        if (
            self.after == BEHIND_END
            or tokens < self.after
            or (self.times is not None and self._happened >= self.times)
        ):
            return False
        if self.once is not None:
            if self.once.exists():
                return False
            self.once.touch()
        self._happened += 1
        return True

    def strikes_behind_end(self) -> bool:
        """Return whether it happens to a stream whose last event was written."""
        if self.after != BEHIND_END or (self.times is not None and self._happened >= self.times):
            return False
        self._happened += 1
        return True
