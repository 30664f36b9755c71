"""Both names of a model's reasoning, for models with `reasoning_field: both`.

vLLM 0.12 and later call it `reasoning`; DeepSeek, vLLM before and the examples of both call it
`reasoning_content`. The copy is made in the bytes, so that everything else passes unchanged; models
without the setting never get here.
"""

import re

from app.usage import StreamMeter, Usage

# A member of an object, not text in a string: there, the quotes are escaped. Its value is a string
# or null. A member that has its copy already is left alone.
_REASONING = re.compile(
    rb'(?<=[{,\s])"reasoning":(\s*(?:"[^"\\]*(?:\\.[^"\\]*)*"|null))(?!\s*,\s*"reasoning_content")',
    re.DOTALL,
)
_BOTH = rb'"reasoning":\1,"reasoning_content":\1'
_NAME = b'"reasoning"'


def with_reasoning_content(data: bytes) -> bytes:
    """Return chat completions, or whole events of one, with `reasoning_content` beside `reasoning`.

    The result is the same where it is applied twice.
    """
    return data if data.find(_NAME) < 0 else _REASONING.sub(_BOTH, data)


class BothFieldsMeter(StreamMeter):
    """Meters what the engine sent, and returns it with both fields."""

    _added = 0  # bytes that the engine did not send

    def pass_on(self, events: bytes) -> bytes:
        return self._with_copy(super().pass_on(events))

    def flush(self) -> bytes:
        return self._with_copy(super().flush())

    def so_far(self, prompt: int, bytes_out: int, counted: int | None = None) -> Usage:
        return super().so_far(prompt, bytes_out - self._added, counted)

    def _with_copy(self, events: bytes) -> bytes:
        both = with_reasoning_content(events)
        self._added += len(both) - len(events)
        return both
