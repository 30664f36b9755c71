"""Reads the usage of a stream in passing, without parsing chunks that cannot contain it. Pure.

vLLM reports a stream's usage only if `stream_options.include_usage` is set, in an extra chunk
before `[DONE]`. The gateway always sets it, and withholds that chunk from a client that did not.
Since vLLM (0.32) then moves `system_fingerprint` from the chunks that finish a choice into the
usage chunk, it is moved back. So the client receives the bytes of a direct call, and every other
chunk passes with one or two substring searches.
"""

import re

import msgspec

from app.sse import read_data, split_events
from app.usage.token_usage import HOLDS_USAGE, UNREADABLE, Usage, read_usage

_USAGE = b'"usage"'
# Names with their colons, which distinguishes them from texts: vLLM writes no blank between. A
# string value means that the choice is finished; before it is null.
_FINISHED = b'"finish_reason":"'
_FINGERPRINT = b'"system_fingerprint":'
# Logprobs list every token: completions in one list per chunk, chats and responses in an object.
_TOKEN_LOGPROBS = re.compile(rb'"token_logprobs":\[([^\]]*)\]')
_TOP_LOGPROBS = b'"top_logprobs":['
_NO_CHOICES = b'"choices":[]'
# Bytes per token of English text, as in estimates of prompts.
TOKEN_BYTES = 4
# Maximum bytes of finishing chunks that wait for the fingerprint; beyond it they pass unchanged.
MAX_HELD = 256 * 1024


class _UsageChunk(msgspec.Struct):
    choices: list[msgspec.Raw]
    usage: dict[str, msgspec.Raw]
    system_fingerprint: str | None = None


_usage_chunk = msgspec.json.Decoder(_UsageChunk)


class StreamMeter(msgspec.Struct, eq=False, kw_only=True):
    """Meters one stream: takes whole events and returns the bytes for the client.

    `withhold`: only the gateway requested the usage chunk. A chunk that finishes the only choice
    then waits for the usage chunk, which follows at once. With several choices it passes at once
    with the engine's last known fingerprint, and waits only if none is known.
    """

    withhold: bool = False
    one_choice: bool = True
    has_logprobs: bool = False  # events list their tokens
    hides_thoughts: bool = False  # some thoughts have no event
    opens_without_token: bool = True  # the first event has none, except in completions
    # The engine's fingerprint, of the last stream or this one; "" if it has none.
    fingerprint: str | None = None
    usage: Usage | None = None
    events: int = 0
    listed: int = 0  # tokens in logprobs
    has_total: bool = False  # the usage of all choices was reported
    # Bytes of an event without its text: the first event of a stream has hardly any text.
    envelope: int = 0
    held: list[bytes] = []  # from a finishing chunk on, in order
    held_bytes: int = 0

    def pass_on(self, events: bytes) -> bytes:
        """Return the bytes of these whole events that pass to the client now."""
        if not self.events:
            self.envelope = events.find(b"\n\n") + 2
        self.events += events.count(b"\n\n") or events.count(b"\n\r\n") or 1
        if self.has_logprobs:
            self.listed += _count_listed(events)
        # `in` raises and clears an error inside before it searches bytes (CPython 3.11).
        if events.find(_USAGE) < 0 and not (
            self.withhold and (self.held or events.find(_FINISHED) >= 0)
        ):
            return events
        out: list[bytes] = []
        for event in split_events(events):
            self._pass_event(event, out)
        return b"".join(out)

    def passes(self, events: bytes) -> bool:
        """Return whether whole events pass as they are, and nothing but their number counts."""
        return not (
            self.held
            or self.has_logprobs
            or events.find(_USAGE) >= 0
            or events.find(_FINISHED) >= 0
        )

    def flush(self) -> bytes:
        """Return the held bytes, at the end of the stream or when it breaks.

        With the fingerprint, if it is known from another stream.
        """
        fingerprint = self.fingerprint or ""
        held = b"".join(_with_fingerprint(event, fingerprint) for event in self.held)
        self.held.clear()
        self.held_bytes = 0
        return held

    @property
    def counts_all(self) -> bool:
        """True if `so_far` counts every token, or nearly.

        Of several choices and of hidden thoughts, the engine may have generated far more than the
        events show, until it has reported the usage of the whole stream.
        """
        return self.has_total or (self.one_choice and not self.hides_thoughts)

    def so_far(self, prompt: int, bytes_out: int, counted: int | None = None) -> Usage:
        """Return an estimate of the usage of an incomplete response.

        `counted` is the number of tokens by their IDs, if those were recorded. vLLM sends one event
        per token, after an opening event if there is one. For a client that reads slowly it puts
        many tokens into one event: those are counted in its logprobs, or by their bytes, of which
        `bytes_out` have passed. `prompt` is the estimated prompt, if the engine reported none.
        """
        known = self.usage or Usage(prompt, 0)
        if counted is None:
            counted = self.listed or (bytes_out - self.events * self.envelope) // TOKEN_BYTES
            counted = max(counted, self.events - self.opens_without_token, 0)
        completion = max(known.completion, counted)
        return msgspec.structs.replace(known, completion=completion, estimated=True)

    def _pass_event(self, event: bytes, out: list[bytes]) -> None:
        if _USAGE in event and HOLDS_USAGE.search(event) is not None:
            data = read_data(event)
            if (usage := read_usage(data)) is not None:
                self.usage = usage if self.usage is None else self.usage.merged(usage)
                self.has_total = self.has_total or _NO_CHOICES in event
            if self.withhold and (chunk := _as_usage_chunk(data)) is not None:
                self.fingerprint = chunk.system_fingerprint or ""
                out.append(self.flush())
                return
        finishing = self.withhold and _FINISHED in event
        if finishing and self.fingerprint is not None and not self.one_choice:
            event = _with_fingerprint(event, self.fingerprint)
            finishing = False
        if not finishing and not self.held:
            out.append(event)
            return
        self.held.append(event)
        self.held_bytes += len(event)
        if self.held_bytes > MAX_HELD:
            out.append(self.flush())


def _count_listed(events: bytes) -> int:
    """Return the number of tokens whose logprobs are in events."""
    if lists := _TOKEN_LOGPROBS.findall(events):
        return sum(tokens.count(b",") + 1 for tokens in lists if tokens)
    return events.count(_TOP_LOGPROBS)


def _as_usage_chunk(data: bytes) -> _UsageChunk | None:
    try:
        chunk = _usage_chunk.decode(data)
    except UNREADABLE:
        return None
    return None if chunk.choices else chunk


def _with_fingerprint(event: bytes, fingerprint: str) -> bytes:
    """Return a chunk as vLLM writes it without usage: a finishing one ends in the fingerprint."""
    if not fingerprint or _FINISHED not in event or _FINGERPRINT in event:
        return event
    if not event.endswith(b"\n"):
        return event  # incomplete
    end = event.rfind(b"}")
    member = b',"system_fingerprint":' + msgspec.json.encode(fingerprint)
    return event[:end] + member + event[end:]
