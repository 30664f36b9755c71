"""What vLLM's log says of a start that failed: pure text in, one line out.

Read on logs of vLLM 0.32. A traceback there is prefixed line by line, often printed by two
processes, and followed by a second error that only says that the first one happened.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from engines.base import EngineFacts, Progress

# "(APIServer pid=12) ERROR 11-21 05:30:00 [core.py:100] ", each part optional
_PREFIX = re.compile(
    r"^(?:\((?P<process>[\w ]+) pid=\d+\)\s?)?"
    r"(?:(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d (?:\[[^\]]*\] ?)*)?"
)
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
# "ValueError: text", "pydantic_core._pydantic_core.ValidationError: text"
_EXCEPTION = re.compile(
    r"^(?:[A-Za-z_]\w*\.)*(?P<name>(?=[A-Z])\w*(?:Error|Exception|Exit|Interrupt))"
    r"(?:: (?P<text>.*))?$"
)
_USAGE = re.compile(r"^[\w./-]+: error: (?P<text>.+)$")
_VALUE = re.compile(r"^\s+(?:Value|Assertion) error, (?P<text>.+)$")
_PYDANTIC_TAIL = re.compile(r"\s*\[type=\w+, input_value=.*$")
# Errors that only report that something else failed.
_ECHOES = (
    "Engine core initialization failed",
    "WorkerProc initialization failed",
    "Failed core proc",
    "Frontend process failed during engine core initialization",
)
# Errors whose own words speak of a library's insides, in words for who wrote the configuration.
_REWORDED = {
    "LocalEntryNotFoundError": "the model is neither a directory here nor in the local "
    "Hugging Face cache, and downloads are off (HF_HUB_OFFLINE)",
}
LONGEST = 400


def plain(line: str) -> str:
    """Return a log line without process prefix, level, colours and control characters."""
    return _PREFIX.sub("", _CONTROL.sub("", _ANSI.sub("", line))).rstrip()


def failure_reason(lines: Iterable[str]) -> str | None:
    """Return in one line why an engine did not start, or None when the log does not say.

    The last cause wins; an error that merely reports another one is passed over. The text is the
    engine's own, without its stack trace.
    """
    reason = echo = None
    exception = False  # a value error belongs to the pydantic error right above it
    for raw in lines:
        line = plain(raw)
        if match := _USAGE.match(line):
            reason = match["text"]
        elif exception and (match := _VALUE.match(line)):
            reason = _PYDANTIC_TAIL.sub("", match["text"])
            exception = False
        elif match := _EXCEPTION.match(line):
            text = _REWORDED.get(match["name"]) or match["text"] or match["name"]
            if match["name"] in ("SystemExit", "KeyboardInterrupt"):
                continue
            exception = match["name"] == "ValidationError"
            if any(mark in text for mark in _ECHOES):
                echo = text
            else:
                reason = text
    found = reason or echo
    return None if found is None else " ".join(found.split())[:LONGEST]


@dataclass(frozen=True, slots=True)
class StartFailure:
    reason: str
    lasting: bool

    def __str__(self) -> str:
        return self.reason


class StartupLog:
    def __init__(self) -> None:
        self._lines: list[str] = []
        self.facts = EngineFacts()
        self.progress: Progress | None = None

    def feed(self, line: str) -> None:
        self._lines.append(line)

    @property
    def failure(self) -> StartFailure | None:
        reason = failure_reason(self._lines)
        return StartFailure(reason, False) if reason else None
