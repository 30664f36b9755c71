"""Incremental, bounded scanner for JSON bodies: syntax, bounds, and the spans of their members.

`msgspec` reads a body in one call that holds the interpreter until it returns, which takes seconds
for a large or dense one. This scanner reads the same body in windows with bounded work for each,
keeps no copy of a value, and stops at the first fault or bound. It accepts what
`msgspec.json.Decoder(dict[str, msgspec.Raw])` accepts, within the bounds, if strings are UTF-8 and
no two members of the body's own object have names that are equal but for their case.

**Syntax.** A short text, the prefix, stands for what has been read; with it, msgspec parses each
window (`json_window`).

**Brackets and counts.** With strings reduced to a quotation mark each and whitespace left out, a
text is its outline. The running sum of +1 and -1 for the brackets of an outline is the depth after
each; where it last rose from a depth, the bracket is open. Types need no attention here, for
msgspec rejects `[}`. Values are counted by characters of the outline that only they have.

**Members.** Only the body's own object is read token by token, after its syntax is known to be
good, and its members are few. A nested value ends at the bracket after which the depth is 1 again,
and that bracket is found in the text by its number.

    state          reads                                            then
    BETWEEN        `{` `,` `}`                                      BETWEEN
                   a name                                           BEFORE_VALUE
    BEFORE_VALUE   `:`                                              BEFORE_VALUE
                   a value that ends in the window                  BETWEEN
                   the beginning of an array, object or string      IN_VALUE
    IN_VALUE       on to the value's end, if it is in the window    BETWEEN

**Tokens cut by the end of a window.** The rest of a string is read as a run of characters, so its
length does not matter. A number, a literal, or a name of the body's own object is kept and read
again with the next window; their lengths are bounded (`MAX_NUMBER`, `MAX_NAME`).

The repetitions of the patterns are possessive: linear time on any input.
"""

import codecs
import enum
import re
from array import array
from itertools import accumulate

import msgspec

from app.request_body.json_faults import (
    NestedTooDeep,
    NotAnObject,
    NotJson,
    RepeatedMember,
    TokenTooLong,
    TooManyMembers,
    TooManyValues,
)
from app.request_body.json_strings import (
    WHITESPACE,
    cut_escape,
    end_of_content,
    end_of_match,
    outline_of,
    without_escapes,
)
from app.request_body.json_window import AFTER_BODY, Window, check_syntax, frame

# Longer pieces are read in windows of this size.
WINDOW = 64 * 1024
# At least WINDOW, so that only what the end of a window cuts must be measured. No program writes
# such a number: a float64 has at most 767 significant digits.
MAX_NUMBER = WINDOW
MAX_NAME = 1024
MAX_DEPTH = 254  # a depth is kept in a byte


class JsonBounds(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of a JSON body."""

    depth: int = 64  # nested arrays and objects, the body's own object included; at most MAX_DEPTH
    members: int = 256  # of the body's own object
    values: int = 100_000  # strings (names too), arrays, objects and literals anywhere
    numbers: int = 2_000_000  # anywhere; token IDs and embeddings are numbers

    def __post_init__(self) -> None:
        if not 1 <= self.depth <= MAX_DEPTH:
            raise ValueError(f"the bound of the depth must be 1 to {MAX_DEPTH}")


class Kind(enum.Enum):
    """Type of a JSON value."""

    STRING = enum.auto()
    NUMBER = enum.auto()
    ARRAY = enum.auto()
    OBJECT = enum.auto()
    LITERAL = enum.auto()  # true, false, null

    @staticmethod
    def of(first: int) -> "Kind":
        """Return the kind of a valid value by its first byte."""
        return _KINDS.get(first, Kind.NUMBER)


_KINDS = {
    ord('"'): Kind.STRING,
    ord("["): Kind.ARRAY,
    ord("{"): Kind.OBJECT,
    **dict.fromkeys(b"tfn", Kind.LITERAL),
}


class Member(msgspec.Struct):
    """A member of the body's own object. `body[start:end]` is its value."""

    name: str
    start: int
    end: int
    kind: Kind
    items: int = 0  # direct elements of an array, 0 for other values
    item_kind: Kind | None = None  # of an array's first element


class _State(enum.Enum):
    BETWEEN = enum.auto()
    BEFORE_VALUE = enum.auto()
    IN_VALUE = enum.auto()


_SCALAR = b"-+.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
# No literal has another one's first letter.
_FIRST_OF_VALUE = b'"[{tfn'
_NUMBERS = bytes.maketrans(b"-123456789[:", b"0000000000,,")

_scalar = re.compile(rb"[-+.0-9a-zA-Z]*+")
_between = re.compile(rb"[ \t\n\r{},]*+")
_before_value = re.compile(rb"[ \t\n\r:]*+")
_before_item = re.compile(rb"[ \t\n\r]*+")
_name = msgspec.json.Decoder(str)


class JsonScanner:
    """Reads one body. After a fault it must not be fed again."""

    def __init__(self, bounds: JsonBounds) -> None:
        self._bounds = bounds
        self._offset = 0  # of the first byte that was not fed
        self._rest = b""  # the last bytes fed: a token, or an escape, of which more may follow
        self._in_string = False
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._open = b""  # brackets, the body's own first
        self._prefix = b""  # see `json_window`; `{}` after the end of the body
        self._values = 0
        self._numbers = 0
        self._state = _State.BETWEEN
        self._members: list[Member] = []
        self._folded: set[str] = set()

    def feed(self, piece: bytes | memoryview) -> None:
        """Read the next bytes of the body. Raises JsonFault."""
        view = memoryview(piece)
        for start in range(0, len(view), WINDOW):
            window = bytes(view[start : start + WINDOW])
            self._check_utf8(window)
            text = self._rest + window
            origin = self._offset - len(self._rest)
            self._offset += len(window)
            in_scalar = not self._in_string and self._rest[:1] not in (b"", b'"')
            if in_scalar and not window.strip(_SCALAR):
                self._keep_scalar(text)  # a scalar that arrives byte by byte is not read each time
            else:
                self._read(text, origin)

    def finish(self) -> list[Member]:
        """Return the members in the order of the body. Raises JsonFault if it is not whole."""
        if self._prefix != AFTER_BODY or self._rest:
            raise NotJson(self._offset, "unexpected end")
        return self._members

    def _check_utf8(self, window: bytes) -> None:
        pending = len(self._utf8.getstate()[0])
        if not pending and window.isascii():
            return
        try:
            self._utf8.decode(window)
        except UnicodeDecodeError as error:
            raise NotJson(self._offset - pending + error.start, "invalid UTF-8") from None

    def _read(self, text: bytes, origin: int) -> None:
        start = 0
        if self._in_string:
            start = self._read_on_in_string(text, origin)
            if self._in_string:
                return
        elif not self._prefix and text.lstrip(WHITESPACE)[:1] not in (b"", b"{"):
            raise NotAnObject("the body must be a JSON object")
        if end_of_match(_scalar, text, start) - start > MAX_NUMBER:
            raise TokenTooLong("number", MAX_NUMBER)
        plain = without_escapes(text)
        end = self._cut(text, plain, start, origin)
        outline = outline_of(plain[start:end])
        brackets = outline.translate(None, _NOT_BRACKETS)
        depths = self._depths(brackets)
        if self._in_string:
            if depths[-1] == 1 and (outline or self._prefix)[-1:] in (b"{", b","):
                self._keep_name(text[end:])
            else:
                outline += b'"'
        if not outline:
            return
        open_before, prefix_before = self._open, self._prefix
        read = outline_of(prefix_before) + outline
        self._open = bytes(
            brackets[at] if (at := depths.rfind(level)) >= 0 else open_before[level]
            for level in range(depths[-1])
        )
        self._prefix, suffix = frame(self._open, read)
        suffix = b'""' * self._in_string + suffix
        check_syntax(prefix_before, text[start:end], suffix, origin + start)
        self._count(read, outline)
        window = Window(
            text=text,
            plain=plain,
            end=end,
            origin=origin,
            open_before=open_before,
            prefix_before=prefix_before,
            suffix=suffix,
            depths=depths,
            after_bracket=start,
        )
        self._read_members(window, start)
        if self._in_string and len(self._open) == 1:
            self._begin_member(text[end], origin + end)

    def _read_on_in_string(self, text: bytes, origin: int) -> int:
        """Return the end of the open string, or of the part of it that has arrived."""
        end = end_of_content(text)
        if text[end : end + 1] != b'"':
            self._rest = cut_escape(text, end, origin)
            return end
        self._in_string = False
        if len(self._open) == 1:
            self._end_member(origin + end + 1)
        return end + 1

    def _cut(self, text: bytes, plain: bytes, start: int, origin: int) -> int:
        """Return the end of what can be parsed, before an open string or a last scalar."""
        if plain.count(b'"', start) % 2:
            end = plain.rindex(b'"')
            begun = end + 1
            self._rest = cut_escape(text, begun + end_of_content(text[begun:]), origin)
            self._in_string = True
            return end
        end = start + len(text[start:].rstrip(_SCALAR))
        self._keep_scalar(text[end:])
        return end

    def _keep_scalar(self, begun: bytes) -> None:
        if len(begun) > MAX_NUMBER:
            raise TokenTooLong("number", MAX_NUMBER)
        self._rest = begun

    def _keep_name(self, begun: bytes) -> None:
        if len(begun) > MAX_NAME + 1:
            raise TokenTooLong("name", MAX_NAME)
        self._rest = begun
        self._in_string = False

    def _depths(self, brackets: bytes) -> bytes:
        """Return the depth before the first bracket and after each."""
        steps = array("b", brackets.translate(_STEPS))
        try:
            depths = bytes(accumulate(steps, initial=len(self._open)))
        except ValueError:  # over 255, or below 0: more brackets are closed than were opened
            levels = list(accumulate(steps, initial=len(self._open)))
            levels = levels[: levels.index(-1)] if -1 in levels else levels
            depths = bytes(min(level, 255) for level in levels)
        if depths.translate(None, bytes(range(self._bounds.depth + 1))):
            raise NestedTooDeep(f"the body is nested over {self._bounds.depth} levels deep")
        return depths

    def _count(self, read: bytes, outline: bytes) -> None:
        self._values += len(outline) - len(outline.translate(None, _FIRST_OF_VALUE))
        if self._values > self._bounds.values:
            raise TooManyValues(f"the body holds over {self._bounds.values} values")
        self._numbers += read.translate(_NUMBERS).count(b",0")  # a prefix has none
        if self._numbers > self._bounds.numbers:
            raise TooManyValues(f"the body holds over {self._bounds.numbers} numbers")

    def _read_members(self, window: Window, at: int) -> None:
        """Find names, values and items in a window whose syntax is known to be good."""
        text, end = window.text, window.end
        if self._state is _State.IN_VALUE:
            self._read_first_item(window, at)
        while at < end:
            match self._state:
                case _State.BETWEEN:
                    at = end_of_match(_between, text, at)
                    if at < end:
                        at = self._read_name(window, at)
                case _State.BEFORE_VALUE:
                    at = end_of_match(_before_value, text, at)
                    if at < end:
                        self._begin_member(text[at], window.origin + at)
                        at = self._read_value(window, at)
                case _State.IN_VALUE:
                    at = self._read_nested(window, at, len(window.open_before) - 1)

    def _read_name(self, window: Window, at: int) -> int:
        end = window.end_of_string(at)
        if end - at - 2 > MAX_NAME:
            raise TokenTooLong("name", MAX_NAME)
        if len(self._members) == self._bounds.members:
            raise TooManyMembers(f"the body has over {self._bounds.members} members")
        name = _name.decode(window.text[at:end])
        folded = name.casefold()
        if folded in self._folded:
            raise RepeatedMember(name)
        self._folded.add(folded)
        self._members.append(Member(name, 0, 0, Kind.LITERAL))
        self._state = _State.BEFORE_VALUE
        return end

    def _read_value(self, window: Window, at: int) -> int:
        match self._members[-1].kind:
            case Kind.ARRAY | Kind.OBJECT:
                return self._read_nested(window, at, 0)
            case Kind.STRING:
                at = window.end_of_string(at)
            case _:
                at = end_of_match(_scalar, window.text, at)
        self._end_member(window.origin + at)
        return at

    def _read_nested(self, window: Window, at: int, levels: int) -> int:
        """Read an array or object, of which `levels` brackets were opened before the window."""
        ended = window.end_of_nested()
        end = window.end if ended is None else ended
        if not levels:
            self._read_first_item(window, at + 1)
        member = self._members[-1]
        if member.kind is Kind.ARRAY:
            member.items += window.separators(at, end, levels, ended=ended is not None)
        if ended is not None:
            self._end_member(window.origin + end)
        return end

    def _read_first_item(self, window: Window, at: int) -> None:
        member = self._members[-1]
        if member.kind is Kind.ARRAY and member.item_kind is None:
            at = end_of_match(_before_item, window.text, at)
            if (first := window.text[at : at + 1]) not in (b"", b"]"):
                member.item_kind = Kind.of(first[0])
                member.items = 1

    def _begin_member(self, first: int, start: int) -> None:
        member = self._members[-1]
        member.kind, member.start = Kind.of(first), start
        self._state = _State.IN_VALUE

    def _end_member(self, end: int) -> None:
        self._members[-1].end = end
        self._state = _State.BETWEEN
