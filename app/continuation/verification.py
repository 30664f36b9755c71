"""Compares a regenerated stream with what its client has, and lets through what is new. Pure.

The same request is sent to another engine. Its events are swallowed as long as they contain what
the client has. Chunk boundaries and the interleaving of choices may differ, so the comparison goes
by channel. The event in which the client's text ends is cut. A choice that is ahead of another one
waits, so that nothing new reaches the client before everything it has was confirmed.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from app.continuation.parts import STREAM, UNREADABLE, Channel, Part, Place
from app.continuation.renaming import Renaming
from app.continuation.sent_text import Segment, SentText
from app.sse import read_data, split_events, with_data


class Diverged(Exception):
    """The regenerated answer differs from what the client has, or cannot be compared with it."""


class Verification:
    """Verifies one regenerated stream against what the client has of the first."""

    def __init__(self, sent: SentText) -> None:
        sent.flush()
        self._sent = sent
        self._dialect = sent.dialect
        self._ids: dict[str, str] = {}
        self._cursors = {name: _Cursor(name, at) for name, at in sent.channels.items()}
        self._renaming = Renaming(sent.dialect, sent.run, self._ids, sent.read_last_number())
        self._held: list[bytes] = []
        # The stream has contained everything that the client has.
        self.caught_up = not self._cursors and sent.unreadable is None

    def pass_on(self, events: bytes) -> bytes:
        """Return the bytes for the client of these whole events of the new run.

        Raises `Diverged` if the answer differs or ends before it has caught up, or cannot be
        compared.
        """
        if self._sent.unreadable is not None:
            raise Diverged(self._sent.unreadable)
        out: list[bytes] = []
        for event in split_events(events):
            if self.caught_up:
                out.append(self._renaming.rename(event))
            else:
                self._verify(event)
                if self.caught_up:
                    out += [self._renaming.rename(each) for each in self._held]
                    self._held.clear()
        return b"".join(out)

    def _verify(self, event: bytes) -> None:
        """Compare one event; hold what is new in it."""
        data = read_data(event)
        if not data:
            return
        self._renaming.learn(data)
        try:
            new = self._new_data(data)
        except UNREADABLE as error:
            raise Diverged(f"an event could not be read: {type(error).__name__}") from error
        if new == data:
            self._held.append(event)
        elif new:
            self._held.append(with_data(event, new))

    def _new_data(self, data: bytes) -> bytes:
        """Return the data of an event without what the client has; empty if it has all of it."""
        parts = self._dialect.read_parts(data)
        rests = [self._compare(part) for part in parts]
        self.caught_up = all(cursor.at_end for cursor in self._cursors.values())
        if not self.caught_up and any(
            rest is None and (part.ends or part.channel == STREAM)
            for part, rest in zip(parts, rests, strict=True)
        ):
            raise Diverged("the answer ended before it had caught up")
        if all(rest == "" for rest in rests):
            return b""
        if all(rest is None for rest in rests):
            return data
        if listed := [part.name for part in parts if part.listed]:
            raise Diverged(f"cannot align {listed[0]}")
        return _cut_event(data, parts, rests)

    def _compare(self, part: Part) -> str | None:
        """Return the new text of a part, "" if the client has all of it, None if it has none."""
        cursor = self._cursors.get(part.channel)
        return None if cursor is None else cursor.consume(part, self._ids)


class _Cursor:
    """Position up to which a channel has been confirmed."""

    def __init__(self, channel: Channel, segments: list[Segment]) -> None:
        self._channel = channel
        self._segments = segments
        self._position = 0
        self._offset = 0  # bytes, within a text

    @property
    def at_end(self) -> bool:
        return self._position == len(self._segments)

    def consume(self, part: Part, ids: dict[str, str]) -> str | None:
        """Confirm a part; see `Verification._compare`."""
        if self.at_end:
            return None
        segment = self._segments[self._position]
        if segment.kind != part.kind or (segment.text is None) != (part.text is None):
            raise self._difference(part)
        # IDs that are equal stand for the same and need no renaming.
        ids |= {new: old for new, old in zip(part.ids, segment.ids, strict=False) if new != old}
        if segment.text is None or part.text is None:
            self._position += 1
            return ""
        new = part.text.encode()
        left = len(segment.text) - self._offset
        if not segment.text.startswith(new[:left], self._offset):
            raise self._difference(part)
        if len(new) < left:
            self._offset += len(new)
            return ""
        self._position, self._offset = self._position + 1, 0
        if len(new) == left:
            return ""
        if not self.at_end:
            raise self._difference(part)
        return new[left:].decode()

    def _difference(self, part: Part) -> Diverged:
        channel = self._channel[0] if isinstance(self._channel, tuple) else self._channel
        where = "" if channel == STREAM else f" of choice {channel}"
        return Diverged(
            f"the answer differs in {part.name}{where}, in part {self._position + 1} "
            f"after {self._offset} bytes"
        )


def _cut_event(data: bytes, parts: Sequence[Part], rests: Sequence[str | None]) -> bytes:
    """Return an event's data with only the new part of its answer.

    `rests`: per part the text that is new, "" if the client has all of it, or None if it has none.
    """
    document = msgspec.json.decode(data)
    for part, rest in zip(parts, rests, strict=True):
        for place in part.places if rest is not None else ():
            _replace(document, place, rest or "")
    choices = document.get("choices")
    if isinstance(choices, list):
        new = {part.channel for part, rest in zip(parts, rests, strict=True) if rest != ""}
        document["choices"] = [choice for choice in choices if choice.get("index", 0) in new]
        for choice in document["choices"]:
            _drop_empty_calls(choice.get("delta") or {})
    return msgspec.json.encode(document)


def _replace(document: Any, place: Place, rest: str) -> None:
    """Set a text to its new part; remove a member that is not new, except a completion's text."""
    for key in place[:-1]:
        document = document.get(key) if isinstance(document, dict) else document[key]
        if document is None:
            return
    name = place[-1]
    if rest or name == "text":
        document[name] = rest
    else:
        document.pop(name, None)


def _drop_empty_calls(delta: dict[str, Any]) -> None:
    calls = delta.get("tool_calls")
    if not isinstance(calls, list):
        return
    delta["tool_calls"] = [call for call in calls if _has_content(call)]
    if not delta["tool_calls"]:
        del delta["tool_calls"]


def _has_content(call: dict[str, Any]) -> bool:
    return bool(call.get("function")) or call.keys() - {"index", "function"} != set()
