"""Records what the client of a stream has received, for comparison with another run. Pure.

The hot path appends whole events to a list; they are parsed in batches. What is recorded is the
text per channel in UTF-8, one entry per atom, and the last event.

An engine writes thousands of chunks that are equal except for one string, and in `/v1/responses`
for a sequence number. An event that was parsed once becomes a template: bytes before the text, and
bytes after it. What stands between in another event has to be the body of a JSON string: an event
with several texts of one form has unescaped quotes there, and is no match.
"""

import re
from math import inf

import msgspec

from app.continuation.event_parts import DIALECTS
from app.continuation.parts import UNREADABLE, Channel, Part
from app.continuation.renaming import RunIdentity, read_number
from app.sse import read_data, split_events

# Calls of `add` between two batches.
_BATCH = 32
# A chunk of this size is parsed at once: a client that reads slowly gets large ones.
_BATCH_BYTES = 16 * 1024
# Bytes of a segment's record besides its text, roughly.
_SEGMENT_BYTES = 256

_NUMBER = b'"sequence_number":'
_STRING_BODY = re.compile(rb'(?:[^"\\]|\\.)*')


class Segment(msgspec.Struct, gc=False):
    """Consecutive text of one kind within a channel, or one atom."""

    kind: str
    ids: tuple[str, ...]
    text: bytearray | None  # None: an atom


class TextTemplate:
    """An event with a gap where its text is, and another where its number is, if it has one."""

    def __init__(self, part: Part, before: bytes, after: bytes) -> None:
        self.part = part
        self._before = before
        self._length = len(before)
        between, number, rest = after.partition(_NUMBER)
        self._numbered = between + number if number else b""
        self._after = rest.lstrip(b"0123456789") if number else after
        self._end = -len(self._after)

    def text_body(self, event: bytes) -> bytes | None:
        """Return the body of the JSON string that is this event's text; None if it differs."""
        if not event.startswith(self._before) or not event.endswith(self._after):
            return None
        text_end = self._end
        if self._numbered:
            text_end = event.rfind(self._numbered)
            number = event[text_end + len(self._numbered) : self._end]
            if text_end < 0 or not number.isdigit():
                return None
        body = event[self._length : text_end]
        if body.find(b'"') >= 0 and _STRING_BODY.fullmatch(body) is None:
            return None
        return body


def make_template(event: bytes, parts: list[Part]) -> TextTemplate | None:
    """Return the template of an event, without its end; None unless it contains one text only."""
    if len(parts) != 1 or parts[0].text is None or len(parts[0].places) != 1:
        return None
    part, name = parts[0], parts[0].places[0][-1]
    member = msgspec.json.encode(name) + b":"
    before, found, after = event.partition(member + msgspec.json.encode(part.text))
    if not found or member in after:
        return None  # written otherwise, or not the only member of this name
    return TextTemplate(part, before + member + b'"', b'"' + after)


def decode_body(bodies: list[bytes]) -> str:
    """Return the text of bodies of JSON strings, joined.

    Raises `msgspec.DecodeError` if they are none.
    """
    return msgspec.json.decode(b'"' + b"".join(bodies) + b'"', type=str)


class SentText:
    """The text and the atoms that the client of one stream has, by channel.

    A stream that cannot be read makes no error here, where nothing has happened yet: `unreadable`
    then says why it cannot be compared. All is up to date after `flush`.
    """

    def __init__(self, endpoint: str, max_bytes: float = inf) -> None:
        """`endpoint` is a label. `max_bytes` bounds the record; longer streams are not compared.

        Raises `KeyError` for an endpoint whose streams cannot be compared.
        """
        self.dialect = DIALECTS[endpoint]
        self._max_bytes = max_bytes
        self.unreadable: str | None = None
        self.run = RunIdentity(self.dialect)
        self.channels: dict[Channel, list[Segment]] = {}  # in order
        self.ended = False  # the client has the event with which a stream ends
        self.size = 0  # bytes of the record
        self._pending: list[bytes] = []
        self._last = b""
        self._templates: dict[tuple[Channel, str], TextTemplate] = {}

    def add(self, events: bytes) -> None:
        """Record whole events that were sent to the client."""
        pending = self._pending
        pending.append(events)
        if len(pending) >= _BATCH or len(events) >= _BATCH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Parse the events that were added since the last batch."""
        pending, self._pending = self._pending, []
        if not pending or self.unreadable is not None:
            return
        try:
            self._read_events(split_events(b"".join(pending)))
        except UNREADABLE as error:
            self._forget(f"an event of the stream could not be read: {type(error).__name__}")
        if self.size > self._max_bytes:
            self._forget("the stream is too long to be compared")

    def read_last_number(self) -> int:
        """Return the sequence number of the last event, -1 if there is none."""
        number = read_number(read_data(self._last))
        return -1 if number is None else number

    def _forget(self, why: str) -> None:
        self.unreadable = why
        self.channels.clear()
        self._templates.clear()
        self.size = 0

    def _read_events(self, events: list[bytes]) -> None:
        """Record events; bodies of one template are decoded together, in their channel's order."""
        waiting: dict[Channel, tuple[TextTemplate, list[bytes]]] = {}
        for event in events:
            for template in self._templates.values():
                if (body := template.text_body(event)) is not None:
                    break
            else:
                self._record_bodies(waiting)
                self._read_event(event)
                continue
            channel = template.part.channel
            before = waiting.get(channel)
            if before is not None and before[0] is template:
                before[1].append(body)
                continue
            if before is not None:
                self._record_text(before[0].part, decode_body(before[1]))
            waiting[channel] = template, [body]
        self._record_bodies(waiting)
        if self.dialect.numbered:
            self._last = next((e for e in reversed(events) if read_data(e)), self._last)

    def _record_bodies(self, waiting: dict[Channel, tuple[TextTemplate, list[bytes]]]) -> None:
        for template, bodies in waiting.values():
            self._record_text(template.part, decode_body(bodies))
        waiting.clear()

    def _read_event(self, event: bytes) -> None:
        data = read_data(event)
        if not data:
            return
        if not self.run.known:
            self.run.learn(data)
        parts = self.dialect.read_parts(data)
        for part in parts:
            self._record(part)
            self.ended = self.ended or part.ends
        if (template := make_template(event, parts)) is not None:
            self._templates[template.part.channel, template.part.kind] = template

    def _record(self, part: Part) -> None:
        if part.text is not None:
            self._record_text(part, part.text)
            return
        segments = self.channels.setdefault(part.channel, [])
        segments.append(Segment(part.kind, part.ids, None))
        self.size += _SEGMENT_BYTES

    def _record_text(self, part: Part, text: str) -> None:
        segments = self.channels.setdefault(part.channel, [])
        new = text.encode()
        self.size += len(new)
        if segments:
            last = segments[-1]
            if last.text is not None and last.kind == part.kind:
                last.text += new
                return
        segments.append(Segment(part.kind, part.ids, bytearray(new)))
        self.size += _SEGMENT_BYTES
