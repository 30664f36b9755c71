"""Reading the usage of a stream as it passes, without parsing what cannot hold it. Pure.

vLLM tells a stream's usage only where `stream_options.include_usage` asks for it, in one more
chunk before `[DONE]`. The gateway always asks. From a client that did not, that chunk is withheld;
and since vLLM (0.32) then moves `system_fingerprint` from the chunks that finish a choice into the
usage chunk, it is put back where a direct call would have it. So the client's bytes are those of a
direct call, and every chunk but these passes with one or two substring searches.
"""

import re

import msgspec

from app.usage.token_usage import HOLDS_USAGE, UNREADABLE, Usage, read_usage

_EVENT_END = re.compile(rb"\r?\n\r?\n")
_USAGE = b'"usage"'
# Names with their colons, which tells them from texts: vLLM writes no blank between. With a string
# the choice is finished: it is null before.
_FINISHED = b'"finish_reason":"'
_FINGERPRINT = b'"system_fingerprint":'
# Of English text, as prompts are estimated.
TOKEN_BYTES = 4
# Chunks that finish a choice wait for the fingerprint up to this many bytes, then go as they are.
MAX_HELD = 256 * 1024


class _UsageChunk(msgspec.Struct):
    choices: list[msgspec.Raw]
    usage: dict[str, msgspec.Raw]
    system_fingerprint: str | None = None


_usage_chunk = msgspec.json.Decoder(_UsageChunk)


class StreamMeter:
    """Watches one stream go by. Give it whole events; what it returns goes to the client.

    `withhold`: the usage chunk was asked for by the gateway alone. A chunk that finishes the only
    choice then waits for the usage chunk, which comes right behind it. One of several choices goes
    on at once with the fingerprint that the engine gave last time, and waits only if none is known.
    """

    def __init__(
        self,
        *,
        withhold: bool = False,
        one_choice: bool = True,
        wide: bool = False,
        opened: bool = True,
    ) -> None:
        """`wide`: events hold much beside their text, such as the logprobs of each token.

        `opened`: the first event brings no token, as everywhere but in completions.
        """
        self.usage: Usage | None = None
        self.events = 0
        # What the engine called itself, the last time or this time; "" if it said no name.
        self.fingerprint: str | None = None
        self._withhold = withhold
        self._one_choice = one_choice
        self._wide = wide
        self._opened = opened
        # The bytes of an event without its text: the first event of a stream has hardly any.
        self._envelope = 0
        self._held: list[bytes] = []  # from a finishing chunk on, in order
        self._held_bytes = 0

    def pass_on(self, events: bytes) -> bytes:
        """Return what of these whole events the client gets now."""
        if not self.events:
            self._envelope = events.find(b"\n\n") + 2
        self.events += events.count(b"\n\n") or events.count(b"\n\r\n") or 1
        # `in` raises and clears an error inside before it searches bytes (CPython 3.11).
        if events.find(_USAGE) < 0 and not (
            self._withhold and (self._held or events.find(_FINISHED) >= 0)
        ):
            return events
        out: list[bytes] = []
        for event in _split(events):
            self._pass_event(event, out)
        return b"".join(out)

    def flush(self) -> bytes:
        """Return what still waits, at the end of the stream or when it broke."""
        held = b"".join(self._held)
        self._held.clear()
        self._held_bytes = 0
        return held

    def so_far(self, prompt: int, bytes_out: int) -> Usage:
        """Return what can be said of an answer that did not get to its end: an estimate.

        vLLM sends an event a token, behind one that opens the answer if any does. For a client that
        reads slowly it puts many tokens into one event: those are counted by their bytes, of which
        `bytes_out` have passed. `prompt` is the estimate of the prompt where none was told.
        """
        told = self.usage or Usage(prompt, 0)
        by_bytes = 0
        if self._one_choice and not self._wide:
            by_bytes = (bytes_out - self.events * self._envelope) // TOKEN_BYTES
        completion = max(told.completion, self.events - self._opened, by_bytes, 0)
        return msgspec.structs.replace(told, completion=completion, estimated=True)

    def _pass_event(self, event: bytes, out: list[bytes]) -> None:
        if _USAGE in event and HOLDS_USAGE.search(event) is not None:
            data = _data_of(event)
            if (usage := read_usage(data)) is not None:
                self.usage = usage if self.usage is None else self.usage.merged(usage)
            if self._withhold and (chunk := _as_usage_chunk(data)) is not None:
                self.fingerprint = chunk.system_fingerprint or ""
                self._held = [_with_fingerprint(e, self.fingerprint) for e in self._held]
                out.append(self.flush())
                return
        finishing = self._withhold and _FINISHED in event
        if finishing and self.fingerprint is not None and not self._one_choice:
            event = _with_fingerprint(event, self.fingerprint)
            finishing = False
        if not finishing and not self._held:
            out.append(event)
            return
        self._held.append(event)
        self._held_bytes += len(event)
        if self._held_bytes > MAX_HELD:
            out.append(self.flush())


def _split(events: bytes) -> list[bytes]:
    """Split bytes of a stream into its events, their ends included."""
    found, start = [], 0
    for end in _EVENT_END.finditer(events):
        found.append(events[start : end.end()])
        start = end.end()
    if start < len(events):
        found.append(events[start:])
    return found


def _data_of(event: bytes) -> bytes:
    """Return the data of an event (WHATWG HTML, 9.2.6); vLLM writes one line of it."""
    lines = [line[5:].lstrip(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines)


def _as_usage_chunk(data: bytes) -> _UsageChunk | None:
    try:
        chunk = _usage_chunk.decode(data)
    except UNREADABLE:
        return None
    return None if chunk.choices else chunk


def _with_fingerprint(event: bytes, fingerprint: str) -> bytes:
    """Return a chunk as vLLM would have written it: a finishing one ends in the fingerprint."""
    if not fingerprint or _FINISHED not in event or _FINGERPRINT in event:
        return event
    if not event.endswith(b"\n"):
        return event  # its end is still to come, or never will
    end = event.rfind(b"}")
    member = b',"system_fingerprint":' + msgspec.json.encode(fingerprint)
    return event[:end] + member + event[end:]
