"""Finds the URLs of images in Anthropic's messages, in a body that arrives in pieces.

An image there has a `source` with a `url`; arguments of tools may have the same names, and no
engine fetches them. So the path of a name counts: messages, content (of tool results too), source,
url. Arrays on the way do not matter. Only brackets, colons and strings are read, of a body whose
syntax is known to be good, so an open string or object costs nothing to keep.
"""

import re

import msgspec

from app.errors import MediaNotAllowed

# More images than any request has; each is checked at once.
MAX_URLS = 2048
# Bytes of the longest name that matters, with every letter escaped.
_MAX_NAME = 8 * 6
_CONTENT = rb'[^"\\]*+(?>(?:\\.[^"\\]*+)*)'
_TOKEN = re.compile(rb'[\[\]{}:]|"(%b)("?)' % _CONTENT, re.DOTALL)
_rest_of_string = re.compile(rb'(%b)("?)' % _CONTENT, re.DOTALL)
_ROOT, _MESSAGES, _CONTENT_OF, _SOURCE, _URL, _ELSEWHERE = range(6)
_NEXT = {
    (_ROOT, "messages"): _MESSAGES,
    (_MESSAGES, "content"): _CONTENT_OF,
    (_CONTENT_OF, "content"): _CONTENT_OF,
    (_CONTENT_OF, "source"): _SOURCE,
    (_SOURCE, "url"): _URL,
}
_text = msgspec.json.Decoder(str)


class SourceUrls:
    """Finds the offsets after the names of URLs. Feed it what has valid syntax."""

    def __init__(self) -> None:
        self.found: list[int] = []
        self._offset = 0
        self._open: list[int] = []  # places of the open objects and arrays
        self._place = _ROOT  # of the next value
        self._string: bytes | None = None  # the beginning of an open string
        self._cut = b""  # a backslash whose character is in the next piece
        self._name = b""
        self._name_end = 0

    def feed(self, piece: bytes | memoryview) -> None:
        """Search more of the body. Raises MediaNotAllowed for more than MAX_URLS."""
        data = self._cut + piece
        origin, at = self._offset - len(self._cut), 0
        self._offset += len(piece)
        self._cut = b""
        if self._string is not None:
            found = _rest_of_string.match(data)
            assert found is not None  # it matches nothing, too
            at = found.end()
            self._read_string(self._string, found, data, origin)
            if self._string is not None:
                return
        for token in _TOKEN.finditer(data, at):
            match data[token.start()]:
                case 34:  # "
                    self._read_string(b"", token, data, origin)
                case 58:  # :
                    self._read_name()
                case 91 | 123:  # [ {
                    self._open.append(self._place)
                case _:
                    self._open.pop()
                    self._place = self._open[-1] if self._open else _ELSEWHERE

    def _read_string(self, begun: bytes, found: re.Match[bytes], data: bytes, origin: int) -> None:
        text, quote = found[1], found[2]
        whole = begun + text[: _MAX_NAME + 1 - len(begun)]
        if quote:
            self._string, self._name, self._name_end = None, whole, origin + found.end()
            if self._open:  # a value is read: the next one is an item, or has a name
                self._place = self._open[-1]
        else:
            self._string, self._cut = whole, data[found.end() :]

    def _read_name(self) -> None:
        place = _ELSEWHERE
        if self._open[-1] != _ELSEWHERE and len(self._name) <= _MAX_NAME:
            place = _NEXT.get((self._open[-1], _text.decode(b'"%b"' % self._name)), _ELSEWHERE)
        if place == _URL:
            self.found.append(self._name_end)
            if len(self.found) > MAX_URLS:
                raise MediaNotAllowed(f"the body has more than {MAX_URLS} addresses")
        self._place = place
