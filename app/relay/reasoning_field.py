"""Both names of a model's reasoning, for models with `reasoning_field: both`.

vLLM 0.12 and later call it `reasoning`; DeepSeek, vLLM before and the examples of both call it
`reasoning_content`. The copy is made in the bytes, so that everything else passes unchanged; models
without the setting never get here.
"""

import re

from app.usage import StreamMeter, Usage

# The name of a member, not text in a string: there, the quotes are escaped.
_NAME = b'"reasoning":'
_COPY = b',"reasoning_content":'
# Its value, a string or null, unless its copy follows already.
_VALUE = re.compile(
    rb'\s*(?:"[^"\\]*(?:\\.[^"\\]*)*"|null)(?!\s*,\s*"reasoning_content")', re.DOTALL
)
_BEFORE_NAME = b"{, \t\r\n"


def with_reasoning_content(data: bytes) -> bytes:
    """Return chat completions, or whole events of one, with `reasoning_content` beside `reasoning`.

    The result is the same where it is applied twice.
    """
    at = data.find(_NAME)
    if at < 0:
        return data
    pieces: list[bytes] = []
    sent = 0
    while at >= 0:
        begin = at + len(_NAME)
        value = _VALUE.match(data, begin) if data[at - 1] in _BEFORE_NAME else None
        if value is not None:
            pieces += (data[sent : value.end()], _COPY, value[0])
            sent = value.end()
        at = data.find(_NAME, begin)
    pieces.append(data[sent:])
    return b"".join(pieces)


class BothFieldsMeter(StreamMeter):
    """Meters what the engine sent, and returns it with both fields."""

    added: int = 0  # bytes that the engine did not send

    def pass_on(self, events: bytes) -> bytes:
        return self._with_copy(super().pass_on(events))

    def passes(self, events: bytes) -> bool:
        return False

    def flush(self) -> bytes:
        return self._with_copy(super().flush())

    def so_far(self, prompt: int, bytes_out: int, counted: int | None = None) -> Usage:
        return super().so_far(prompt, bytes_out - self.added, counted)

    def _with_copy(self, events: bytes) -> bytes:
        both = with_reasoning_content(events)
        self.added += len(both) - len(events)
        return both
