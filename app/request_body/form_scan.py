"""Incremental, bounded scanner for multipart/form-data bodies (RFC 7578, RFC 2046).

vLLM reads forms with python-multipart through Starlette, byte by byte around delimiters: 15 MiB of
tiny parts take seconds. This scanner looks for delimiters with one search a window, keeps no value,
and stops at the first fault or bound. What it accepts, python-multipart reads with the same parts,
names and values.

A body is lines of bytes between delimiters:

    state      reads                                                        then
    BEGINNING  optional CRLF; `--boundary`                                  DELIMITED
    DELIMITED  CRLF                                                         HEADERS
               `--`                                                         EPILOGUE
    HEADERS    header lines up to an empty one                              DATA
    DATA       up to CRLF `--boundary`                                      DELIMITED
    EPILOGUE   up to `MAX_EPILOGUE` bytes of whitespace

The end of a window may cut a delimiter or a block of headers; those bytes are kept and read again
with the next window: at most a delimiter, or `FormBounds.part_header_bytes`.

Refused, although python-multipart accepts it, because another parser could read it otherwise:

- anything before the first delimiter but one CRLF; anything but whitespace after the last one
- `CRLF --boundary` within a value, that is, followed by neither CRLF nor `--`; padding after it
- a part that does not have exactly one Content-Disposition, or one other than form-data
- a Content-Disposition without a name, with a parameter twice, or with an extended one (`name*`)
- quotation marks, backslashes, control characters, percent-encoding and bytes that are not UTF-8
  in a name; all but percent-encoding in a file's name
- parameters that are neither a token nor a quoted string; whitespace around their `=`
- control characters in a header, and a Content-Transfer-Encoding that would change the value
- two parts named `model`, in any case
- a boundary of over 70 characters, or with characters that RFC 2046 does not allow
- a `charset` other than UTF-8 next to the boundary: Starlette decodes names and values with it
"""

import enum
import re
from typing import Final

import msgspec

# Longer pieces are read in windows of this size.
WINDOW = 64 * 1024
# RFC 2046, section 5.1.1.
MAX_BOUNDARY = 70
# Of a header, as in python-multipart, which takes 4,224 bytes.
MAX_HEADER_LINE = 4096
MAX_EPILOGUE = 1024
_MODEL: Final = "model"


class FormBounds(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of a form."""

    parts: int = 64
    part_header_bytes: int = 8 * 1024
    headers_per_part: int = 8  # python-multipart takes no more


class FormFault(ValueError):
    """A form that is refused. The message is one line for the client.

    FormFault
    ├── BadBoundary       of the request's Content-Type
    ├── NotMultipart      a delimiter is missing or misplaced, at byte `offset`
    ├── BadPartHeader     of the part that begins at byte `offset`
    ├── TooManyParts
    └── RepeatedModel
    """


class BadBoundary(FormFault):
    pass


class NotMultipart(FormFault):
    def __init__(self, offset: int, what: str) -> None:
        super().__init__(f"the multipart form is broken: {what} at byte {offset}")
        self.offset = offset


class BadPartHeader(FormFault):
    def __init__(self, offset: int, what: str) -> None:
        super().__init__(f"the part of the form at byte {offset} {what}")
        self.offset = offset


class TooManyParts(FormFault):
    def __init__(self, bound: int) -> None:
        super().__init__(f"the form has over {bound} parts")


class RepeatedModel(FormFault):
    def __init__(self) -> None:
        super().__init__("the form has two parts named model")


class Part(msgspec.Struct):
    """A part of a form. `body[start:end]` is its value."""

    name: str
    filename: bool  # it has one, so engines read it as a file
    start: int
    end: int


class _State(enum.Enum):
    BEGINNING = enum.auto()
    DELIMITED = enum.auto()
    HEADERS = enum.auto()
    DATA = enum.auto()
    EPILOGUE = enum.auto()


_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]++"
_QUOTED = rb'"[^"\\\x00-\x1f\x7f]*+"'
_BOUNDARY = rb"[0-9A-Za-z'()+_,\-./:=?]++"
_parameter = re.compile(rb"[ \t]*+;[ \t]*+(%b)=(%b|%b)" % (_TOKEN, _QUOTED, _TOKEN))
# Clients do not quote what RFC 2045 wants quoted, such as the `=` of `----=_Part_1`.
_type_parameter = re.compile(rb"[ \t]*+;[ \t]*+(%b)=(%b|%b)" % (_TOKEN, _QUOTED, _BOUNDARY))
_boundary = re.compile(rb"[0-9A-Za-z'()+_,\-./:=? ]*+(?<! )")
_header = re.compile(rb"(%b):([\t\x20-\x7e\x80-\xff]*+)" % _TOKEN)
_percent = re.compile("%[0-9A-Fa-f]{2}")


def boundary_of(content_type: bytes) -> bytes:
    """Return the boundary that a request's Content-Type names. Raises BadBoundary."""
    kind, parameters = _parse(content_type, _type_parameter)
    if kind != b"multipart/form-data" or parameters is None:
        raise BadBoundary("the content type of the form cannot be read")
    if parameters.get(b"charset", b"utf-8").lower() != b"utf-8":
        raise BadBoundary("the charset of a form must be utf-8")
    boundary = parameters.get(b"boundary", b"")
    if not boundary:
        raise BadBoundary("the multipart form names no boundary")
    if len(boundary) > MAX_BOUNDARY:
        raise BadBoundary(f"the boundary of the form has over {MAX_BOUNDARY} characters")
    if not _boundary.fullmatch(boundary):
        raise BadBoundary("the boundary of the form has characters that RFC 2046 does not allow")
    return boundary


def scan_form(content_type: bytes, body: bytes) -> list[Part] | None:
    """Return the parts of a whole form; None: it is none."""
    try:
        scanner = FormScanner(boundary_of(content_type), FormBounds())
        scanner.feed(body)
        return scanner.finish()
    except FormFault:
        return None


class FormScanner:
    """Reads one form. After a fault it must not be fed again."""

    def __init__(self, boundary: bytes, bounds: FormBounds) -> None:
        self._delimiter = b"\r\n--" + boundary
        self._bounds = bounds
        self._state = _State.BEGINNING
        self._rest = b""  # the last bytes fed, if more is needed to classify them
        self._offset = 0  # of the first byte that was not fed
        self._epilogue = 0
        self._parts: list[Part] = []
        self._has_model = False

    def feed(self, piece: bytes | memoryview) -> None:
        """Read the next bytes of the form. Raises FormFault."""
        view = memoryview(piece)
        for start in range(0, len(view), WINDOW):
            window = bytes(view[start : start + WINDOW])
            text = self._rest + window
            origin = self._offset - len(self._rest)
            self._offset += len(window)
            at = 0
            while (then := self._step(text, at, origin)) is not None:
                at = then
            self._rest = text[self._needed(text, at) :]

    def finish(self) -> list[Part]:
        """Return the parts in the order of the form. Raises FormFault if it is not whole."""
        if self._state is not _State.EPILOGUE:
            raise NotMultipart(self._offset, "unexpected end")
        return self._parts

    def _step(self, text: bytes, at: int, origin: int) -> int | None:
        """Read on from `at`. Return where the next state begins, or None if more is needed."""
        match self._state:
            case _State.BEGINNING:
                return self._read_beginning(text, origin)
            case _State.DELIMITED:
                return self._read_after_delimiter(text, at, origin)
            case _State.HEADERS:
                return self._read_headers(text, at, origin)
            case _State.DATA:
                return self._read_data(text, at, origin)
            case _State.EPILOGUE:
                self._read_epilogue(text, at, origin)
                return None

    def _needed(self, text: bytes, at: int) -> int:
        """Return the offset of the bytes that must be read again with the next window."""
        match self._state:
            case _State.DATA:  # a delimiter has no CR but its first byte
                begun = text.rfind(b"\r", max(at, len(text) - len(self._delimiter) + 1))
                return begun if begun >= 0 else len(text)
            case _State.EPILOGUE:
                return len(text)
            case _:
                return at

    def _read_beginning(self, text: bytes, origin: int) -> int | None:
        """Read the first delimiter, whose CRLF may be missing."""
        delimiter = self._delimiter if text.startswith(b"\r") else self._delimiter[2:]
        if text.startswith(delimiter):
            self._state = _State.DELIMITED
            return len(delimiter)
        if not delimiter.startswith(text):
            raise NotMultipart(origin, "it does not begin with its boundary")
        return None

    def _read_after_delimiter(self, text: bytes, at: int, origin: int) -> int | None:
        after = text[at : at + 2]
        if after == b"--":
            self._state = _State.EPILOGUE
            return at + 2
        if after == b"\r\n":
            if len(self._parts) == self._bounds.parts:
                raise TooManyParts(self._bounds.parts)
            self._state = _State.HEADERS
            return at
        if after in (b"", b"-", b"\r"):
            return None
        raise NotMultipart(origin + at, "neither a new line nor -- after its boundary")

    def _read_headers(self, text: bytes, at: int, origin: int) -> int | None:
        """Read the headers of a part, from the CRLF before them to the empty line after them."""
        longest = at + 2 + self._bounds.part_header_bytes
        end = text.find(b"\r\n\r\n", at, longest + 4)
        if end < 0:
            if len(text) < longest + 4:
                return None
            raise BadPartHeader(
                origin + at, f"has headers of over {self._bounds.part_header_bytes} bytes"
            )
        lines = text[at + 2 : end].split(b"\r\n") if end > at else []
        name, is_file = self._part_of(lines, origin + at)
        if name.casefold() == _MODEL:
            if self._has_model:
                raise RepeatedModel
            self._has_model = True
        self._parts.append(Part(name, is_file, origin + end + 4, 0))
        self._state = _State.DATA
        return end + 4

    def _part_of(self, lines: list[bytes], offset: int) -> tuple[str, bool]:
        """Return the name of a part, and whether it is a file."""
        if len(lines) > self._bounds.headers_per_part:
            raise BadPartHeader(offset, f"has over {self._bounds.headers_per_part} headers")
        disposition = None
        for line in lines:
            header = _header.fullmatch(line)
            if not header or len(line) > MAX_HEADER_LINE:
                raise BadPartHeader(offset, "has a header that cannot be read")
            name, value = header[1].lower(), header[2].strip(b" \t")
            if name == b"content-disposition":
                if disposition is not None:
                    raise BadPartHeader(offset, "has two Content-Disposition headers")
                disposition = value
            elif name == b"content-transfer-encoding" and value.lower() not in _AS_IT_IS:
                raise BadPartHeader(offset, "has a Content-Transfer-Encoding that is not supported")
        if disposition is None:
            raise BadPartHeader(offset, "has no Content-Disposition header")
        return _read_disposition(disposition, offset)

    def _read_data(self, text: bytes, at: int, origin: int) -> int | None:
        end = text.find(self._delimiter, at)
        if end >= 0:
            self._parts[-1].end = origin + end
            self._state = _State.DELIMITED
            return end + len(self._delimiter)
        return None

    def _read_epilogue(self, text: bytes, at: int, origin: int) -> None:
        self._epilogue += len(text) - at
        if text[at:].strip(b" \t\r\n"):
            raise NotMultipart(origin + at, "more after its last boundary")
        if self._epilogue > MAX_EPILOGUE:
            raise NotMultipart(origin + at, f"over {MAX_EPILOGUE} bytes after its last boundary")


_AS_IT_IS = (b"7bit", b"8bit", b"binary")


def _read_disposition(value: bytes, offset: int) -> tuple[str, bool]:
    kind, parameters = _parse(value, _parameter)
    if kind != b"form-data" or parameters is None:
        raise BadPartHeader(offset, "has a Content-Disposition that cannot be read")
    try:
        name = parameters.get(b"name", b"").decode()
        parameters.get(b"filename", b"").decode()
    except UnicodeDecodeError:
        raise BadPartHeader(offset, "has a name that is not UTF-8") from None
    if b"name" not in parameters:
        raise BadPartHeader(offset, "has no name")
    if _percent.search(name):
        raise BadPartHeader(offset, "has a name with percent-encoding")
    return name, b"filename" in parameters


def _parse(value: bytes, pattern: re.Pattern[bytes]) -> tuple[bytes, dict[bytes, bytes] | None]:
    """Return a header's value in lower case, and its parameters; None if they are ambiguous."""
    kind, _, _ = value.partition(b";")
    parameters: dict[bytes, bytes] = {}
    at = len(kind.rstrip(b" \t"))
    end = len(value.rstrip(b" \t"))
    while at < end:
        found = pattern.match(value, at, end)
        if not found:
            return b"", None
        name = found[1].lower()
        if name in parameters or b"*" in name:
            return b"", None
        parameters[name] = found[2].strip(b'"')
        at = found.end()
    return kind.strip(b" \t").lower(), parameters
