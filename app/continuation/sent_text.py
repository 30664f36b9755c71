"""Records what the client of a stream has received, for comparison with another run. Pure.

The hot path appends whole events to a list; they are parsed in batches. What is recorded is the
text per channel in UTF-8, one entry per atom, and the last event.
"""

from math import inf

import msgspec

from app.continuation.dialects import DIALECTS
from app.continuation.parts import UNREADABLE, Channel, Part
from app.continuation.renaming import Run, read_number
from app.continuation.text_template import TextTemplate, decode_body, make_template
from app.sse import read_data, split_events

# Calls of `add` between two batches.
_BATCH = 32
# A chunk of this size is parsed at once: a client that reads slowly gets large ones.
_BATCH_BYTES = 16 * 1024
# Bytes of a segment's record besides its text, roughly.
_SEGMENT_BYTES = 256


class Segment(msgspec.Struct, gc=False):
    """Consecutive text of one kind within a channel, or one atom."""

    kind: str
    ids: tuple[str, ...]
    text: bytearray | None  # None: an atom


class SentText:
    """What the client of one stream has, by channel.

    `endpoint` is the label of the request's endpoint. A stream that cannot be read makes no error
    here, where nothing has happened yet: `unreadable` then says why it cannot be compared.
    """

    def __init__(self, endpoint: str, max_bytes: float = inf) -> None:
        """`max_bytes` bounds what is recorded; a longer stream cannot be compared.

        Raises `KeyError` for an endpoint whose streams cannot be compared.
        """
        self.dialect = DIALECTS[endpoint]
        self._max_bytes = max_bytes
        self.unreadable: str | None = None
        self._run = Run(self.dialect)
        self._channels: dict[Channel, list[Segment]] = {}
        self._size = 0
        self._pending: list[bytes] = []
        self._last = b""
        self._ended = False
        self._templates: dict[tuple[Channel, str], TextTemplate] = {}

    def add(self, events: bytes) -> None:
        """Record whole events that were sent to the client."""
        pending = self._pending
        pending.append(events)
        if len(pending) >= _BATCH or len(events) >= _BATCH_BYTES:
            self._read()

    @property
    def size(self) -> int:
        """Return the bytes that are recorded, without up to 32 chunks that are not parsed yet."""
        return self._size

    @property
    def channels(self) -> dict[Channel, list[Segment]]:
        """Return what the client has, by channel and in order."""
        self._read()
        return self._channels

    @property
    def run(self) -> Run:
        """Return what identifies the run to the client."""
        self._read()
        return self._run

    @property
    def ended(self) -> bool:
        """Return whether the client has the event with which a stream ends."""
        self._read()
        return self._ended

    @property
    def last_number(self) -> int:
        """Return the sequence number of the last event, -1 if there is none."""
        self._read()
        number = read_number(read_data(self._last))
        return -1 if number is None else number

    def _read(self) -> None:
        pending, self._pending = self._pending, []
        if not pending or self.unreadable is not None:
            return
        try:
            self._read_events(split_events(b"".join(pending)))
        except UNREADABLE as error:
            self._forget(f"an event of the stream could not be read: {type(error).__name__}")
        if self._size > self._max_bytes:
            self._forget("the stream is too long to be compared")

    def _forget(self, why: str) -> None:
        self.unreadable = why
        self._channels.clear()
        self._templates.clear()
        self._size = 0

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
        if not self._run.known:
            self._run.learn(data)
        parts = self.dialect.read_parts(data)
        for part in parts:
            self._record(part)
            self._ended = self._ended or part.ends
        if (template := make_template(event, parts)) is not None:
            self._templates[template.part.channel, template.part.kind] = template

    def _record(self, part: Part) -> None:
        if part.text is not None:
            self._record_text(part, part.text)
            return
        segments = self._channels.setdefault(part.channel, [])
        segments.append(Segment(part.kind, part.ids, None))
        self._size += _SEGMENT_BYTES

    def _record_text(self, part: Part, text: str) -> None:
        segments = self._channels.setdefault(part.channel, [])
        new = text.encode()
        self._size += len(new)
        if segments:
            last = segments[-1]
            if last.text is not None and last.kind == part.kind:
                last.text += new
                return
        segments.append(Segment(part.kind, part.ids, bytearray(new)))
        self._size += _SEGMENT_BYTES
