"""Reads events that differ from an earlier one in their text only, without parsing them. Pure.

An engine writes thousands of chunks that are equal except for one string, and in `/v1/responses`
for a sequence number. An event that was parsed once becomes a template: bytes before the text, and
bytes after it. What stands between in another event has to be the body of a JSON string: an event
with several texts of one form has unescaped quotes there, and is no match.
"""

import re

import msgspec

from app.continuation.parts import Part

_NUMBER = b'"sequence_number":'
_STRING_BODY = re.compile(rb'(?:[^"\\]|\\.)*')


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
