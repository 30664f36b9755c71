"""Incremental, bounded scanner for JSON bodies: syntax, bounds, and the spans of their members.

`msgspec` reads a body in one call that holds the interpreter until it returns, which takes seconds
for a large or dense one. This scanner reads the same body in pieces with bounded work for each,
keeps no copy of a value, and stops at the first fault or bound. It accepts what
`msgspec.json.Decoder(dict[str, msgspec.Raw])` accepts, within the bounds, if strings are UTF-8 and
no member of the body's own object is repeated.

Two readers share the work.

**The body's own object** has few members (`JsonBounds.members`) and is read token by token:

    state        ws  {           "            :      ,     }    [ or {   number, literal
    BODY         -   FIRST_NAME
    FIRST_NAME   -               COLON                     END
    NAME         -               COLON
    COLON        -                            VALUE
    VALUE        -               AFTER_VALUE                    NESTED   AFTER_VALUE
    NESTED       the second reader, until its brackets are closed: AFTER_VALUE
    AFTER_VALUE  -                                   NAME  END
    END          -

**Arrays and objects inside** may have millions of tokens, too many for a step of Python each. What
has been read of such a value, however long, matters to the rest of it only through its open
brackets and the last token. So a short text can stand for it, here called the stem: the open
brackets and one placeholder, as `[{"":` or `[[""`. Stem, new bytes and closing brackets together
are a small whole JSON document, valid exactly if the new bytes may follow what was read; msgspec
judges that document in C. The open brackets are found without a parser: with strings taken out, the
running sum of +1 and -1 for brackets is the depth at each, and the last bracket that led to a
depth is the open one. Types of brackets need no attention here: msgspec rejects `[}`.

Tokens cut by the end of a piece. A string is left open and read on as a run of characters, so its
length does not matter. A number or literal is kept and read again with the next piece, and so is a
name of the body's own object; both are bounded (`MAX_NUMBER`, `MAX_NAME`).

Every regular expression here is possessive in each repetition: linear time on any input.
"""

import codecs
import enum
import re
from array import array
from itertools import accumulate

import msgspec

# Longer pieces are read in windows of this size.
WINDOW = 64 * 1024
# Longer than any number that a program writes; a float64 has at most 1,075 significant digits.
MAX_NUMBER = 64 * 1024
MAX_NAME = 1024
MAX_DEPTH = 64
# Characters of a client's own text that an error message may repeat.
_SHOWN = 64


class JsonBounds(msgspec.Struct, frozen=True, kw_only=True):
    """What a JSON body may hold at most."""

    depth: int = 64  # nested arrays and objects, the body's own object included; at most MAX_DEPTH
    members: int = 256  # of the body's own object
    values: int = 100_000  # strings (names too), arrays, objects and literals anywhere
    numbers: int = 2_000_000  # anywhere; token ids and embeddings are numbers

    def __post_init__(self) -> None:
        if not 1 <= self.depth <= MAX_DEPTH:
            raise ValueError(f"the bound of the depth must be 1 to {MAX_DEPTH}")


class JsonFault(ValueError):
    """A body that is refused. The message is one line for the client.

    JsonFault
    ├── NotJson           a syntax error, at byte `offset`
    ├── NotAnObject
    ├── NestedTooDeep
    ├── TooManyMembers
    ├── TooManyValues     or numbers
    ├── TokenTooLong      a number, or a name of the body's own object
    └── RepeatedMember    `name`
    """


class NotJson(JsonFault):
    def __init__(self, offset: int, what: str = "syntax error") -> None:
        super().__init__(f"the body is not JSON: {what} at byte {offset}")
        self.offset = offset


class NotAnObject(JsonFault):
    def __init__(self) -> None:
        super().__init__("the body must be a JSON object")


class NestedTooDeep(JsonFault):
    def __init__(self, bound: int) -> None:
        super().__init__(f"the body is nested over {bound} levels deep")


class TooManyMembers(JsonFault):
    def __init__(self, bound: int) -> None:
        super().__init__(f"the body has over {bound} members")


class TooManyValues(JsonFault):
    def __init__(self, what: str, bound: int) -> None:
        super().__init__(f"the body holds over {bound} {what}")


class TokenTooLong(JsonFault):
    def __init__(self, what: str, bound: int) -> None:
        super().__init__(f"the body holds a {what} of over {bound} bytes")


class RepeatedMember(JsonFault):
    def __init__(self, name: str) -> None:
        shown = name if len(name) <= _SHOWN else name[: _SHOWN - 1] + "…"
        super().__init__(f"the member {msgspec.json.encode(shown).decode()} is repeated")
        self.name = name


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
    BODY = enum.auto()
    FIRST_NAME = enum.auto()
    NAME = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    NESTED = enum.auto()
    AFTER_VALUE = enum.auto()
    END = enum.auto()


# Tokens of one byte; strings, numbers, literals and nested values are read by methods.
_PUNCTUATION = {
    (_State.BODY, ord("{")): _State.FIRST_NAME,
    (_State.FIRST_NAME, ord("}")): _State.END,
    (_State.COLON, ord(":")): _State.VALUE,
    (_State.AFTER_VALUE, ord(",")): _State.NAME,
    (_State.AFTER_VALUE, ord("}")): _State.END,
}

_WS = b" \t\n\r"
_SCALAR = b"-+.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_HEX = rb"[0-9a-fA-F]"
_ESCAPE = (
    rb'\\(?:["\\/bfnrt]|u(?:[0-9a-ce-fA-CE-F]%b{3}|[dD][0-7]%b{2}'
    rb"|[dD][89abAB]%b{2}\\u[dD][c-fC-F]%b{2}))" % ((_HEX,) * 4)
)
_CONTENT = rb'[^"\\\x00-\x1f]*+(?:%b[^"\\\x00-\x1f]*+)*+' % _ESCAPE
_whitespace = re.compile(rb"[ \t\n\r]*+")
_content = re.compile(_CONTENT)
_strings = re.compile(rb'[^"]*+(?:"%b"[^"]*+)*+' % _CONTENT)
_partial_escape = re.compile(
    rb"(?:\\(?:u(?:%b{0,3}|[dD][89abAB]%b{2}(?:\\(?:u(?:[dD](?:[c-fC-F]%b?)?)?)?)?)?)?)?"
    % ((_HEX,) * 3)
)
_scalar = re.compile(rb"[-+.0-9a-zA-Z]*+")
_number = re.compile(rb"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?+(?:[eE][-+]?[0-9]++)?+")


# A run of anything but unmatched brackets, `levels` deep.
def _balanced(levels: int) -> bytes:
    flat = rb'[^"\[\]{}]*+(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"[^"\[\]{}]*+)*+'
    run = flat
    for _ in range(levels):
        run = rb"%b(?:[\[{]%b[\]}]%b)*+" % (flat, run, flat)
    return run


_run = re.compile(_balanced(MAX_DEPTH), re.DOTALL)
_nested = re.compile(rb"[\[{]%b[\]}]" % _balanced(MAX_DEPTH - 1), re.DOTALL)
_byte_of_error = re.compile(r"\(byte (\d+)\)")

_text = msgspec.json.Decoder(str)
_any = msgspec.json.Decoder(msgspec.Raw)
_elements = msgspec.json.Decoder(list[msgspec.Raw])


class JsonScanner:
    """Reads one body. After a fault it must not be fed again."""

    def __init__(self, bounds: JsonBounds) -> None:
        self._bounds = bounds
        self._state = _State.BODY
        self._in_string = False  # of the value that is being read, at its place or nested
        self._rest = b""  # a token that the end of the last piece has cut
        self._offset = 0  # of the first byte that is not read, `_rest` excluded
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._members: list[Member] = []
        self._folded: set[str] = set()
        self._nested: _Nested | None = None
        self._tally = _Tally(bounds)

    def feed(self, piece: bytes | memoryview) -> None:
        """Read the next bytes of the body. Raises JsonFault."""
        view = memoryview(piece)
        for start in range(0, len(view), WINDOW):
            self._read(bytes(view[start : start + WINDOW]))

    def finish(self) -> list[Member]:
        """Return the members in the order of the body. Raises JsonFault if it is not whole."""
        if self._state is not _State.END:
            raise NotJson(self._offset, "unexpected end")
        return self._members

    def _read(self, window: bytes) -> None:
        self._check_utf8(window)
        text = self._rest + window
        origin = self._offset - len(self._rest)
        self._rest = b""
        at: int | None = 0
        while at is not None and at < len(text):
            at = self._step(text, at, origin)
        self._offset += len(window)

    def _check_utf8(self, window: bytes) -> None:
        pending = len(self._utf8.getstate()[0])
        if not pending and window.isascii():
            return
        try:
            self._utf8.decode(window)
        except UnicodeDecodeError as error:
            raise NotJson(self._offset - pending + error.start, "invalid UTF-8") from None

    def _step(self, text: bytes, at: int, origin: int) -> int | None:
        """Read one token, or a run of them. Return where it ends, or None if `text` is used up."""
        if self._in_string:
            return self._read_on_in_string(text, at, origin)
        if self._state is _State.NESTED:
            return self._read_nested(text, at, origin)
        at = _end_of(_whitespace, text, at)
        if at == len(text):
            return None
        first = text[at]
        if following := _PUNCTUATION.get((self._state, first)):
            if self._state is _State.BODY:
                self._tally.add(values=1)
            self._state = following
            return at + 1
        match self._state:
            case _State.FIRST_NAME | _State.NAME if first == ord('"'):
                return self._read_name(text, at, origin)
            case _State.VALUE if first == ord('"'):
                self._begin(Kind.STRING, origin + at)
                self._tally.add(values=1)
                self._in_string = True
                return at + 1
            case _State.VALUE if first in b"[{":
                self._begin(Kind.of(first), origin + at)
                self._nested = _Nested(self._bounds, self._tally)
                self._state = _State.NESTED
                return at
            case _State.VALUE:
                return self._read_scalar(text, at, origin)
            case _State.BODY if first in b'"[-0123456789tfn':
                raise NotAnObject
        raise NotJson(origin + at)

    def _read_name(self, text: bytes, at: int, origin: int) -> int | None:
        end = _end_of(_content, text, at + 1)
        if end - at - 1 > MAX_NAME:
            raise TokenTooLong("name", MAX_NAME)
        if end == len(text) or text[end] != ord('"'):
            if not _partial_escape.fullmatch(text, end):
                raise NotJson(origin + end)
            self._rest = text[at:]
            return None
        if len(self._members) == self._bounds.members:
            raise TooManyMembers(self._bounds.members)
        name = _text.decode(text[at : end + 1])
        folded = name.casefold()
        if folded in self._folded:
            raise RepeatedMember(name)
        self._folded.add(folded)
        self._tally.add(values=1)
        self._members.append(Member(name, 0, 0, Kind.LITERAL))
        self._state = _State.COLON
        return end + 1

    def _read_scalar(self, text: bytes, at: int, origin: int) -> int | None:
        end = _end_of(_scalar, text, at)
        if end - at > MAX_NUMBER:
            raise TokenTooLong("number", MAX_NUMBER)
        if end == len(text):
            self._rest = text[at:]
            return None
        token = text[at:end]
        if token in (b"true", b"false", b"null"):
            self._begin(Kind.LITERAL, origin + at)
            self._tally.add(values=1)
        elif _number.fullmatch(token):
            self._begin(Kind.NUMBER, origin + at)
            self._tally.add(numbers=1)
        else:
            raise NotJson(origin + at)
        self._close(origin + end)
        return end

    def _read_on_in_string(self, text: bytes, at: int, origin: int) -> int | None:
        end = _end_of(_content, text, at)
        if end < len(text) and text[end] == ord('"'):
            self._in_string = False
            if self._state is _State.VALUE:
                self._close(origin + end + 1)
            return end + 1
        if not _partial_escape.fullmatch(text, end):
            raise NotJson(origin + end)
        self._rest = text[end:]
        return None

    def _read_nested(self, text: bytes, at: int, origin: int) -> int | None:
        nested = self._nested
        assert nested is not None
        try:
            end = nested.read(text, at)
        except _Malformed as error:
            raise NotJson(origin + error.at) from None
        if end is None:
            self._rest, self._in_string = nested.rest, nested.in_string
            return None
        member = self._members[-1]
        member.items, member.item_kind = nested.items, nested.item_kind
        self._nested = None
        self._close(origin + end)
        return end

    def _begin(self, kind: Kind, start: int) -> None:
        member = self._members[-1]
        member.kind, member.start = kind, start

    def _close(self, end: int) -> None:
        self._members[-1].end = end
        self._state = _State.AFTER_VALUE


class _Tally:
    """Values and numbers of a body so far."""

    def __init__(self, bounds: JsonBounds) -> None:
        self._bounds = bounds
        self._values = 0
        self._numbers = 0

    def add(self, *, values: int = 0, numbers: int = 0) -> None:
        self._values += values
        self._numbers += numbers
        if self._values > self._bounds.values:
            raise TooManyValues("values", self._bounds.values)
        if self._numbers > self._bounds.numbers:
            raise TooManyValues("numbers", self._bounds.numbers)


class _Malformed(Exception):
    def __init__(self, at: int) -> None:
        super().__init__(at)
        self.at = at


class _Nested:
    """Reads one array or object inside of the body's own object."""

    def __init__(self, bounds: JsonBounds, tally: _Tally) -> None:
        self.rest = b""
        self.in_string = False
        self.item_kind: Kind | None = None
        self._depth = bounds.depth
        self._tally = tally
        self._open = b""  # brackets, the outermost first
        self._stem = b""
        self._separators = 0  # commas between the elements of this array itself

    @property
    def items(self) -> int:
        return 0 if self.item_kind is None else self._separators + 1

    def read(self, text: bytes, at: int) -> int | None:
        """Return where the value ends, or None if it goes on after `text`."""
        if not self._open and (whole := _nested.match(text, at)):
            self._take(text[at : whole.end()], at, whole=True)
            return whole.end()
        self.rest, self.in_string = b"", False
        cut = _end_of(_strings, text, at)
        if cut < len(text):
            end_of_content = _end_of(_content, text, cut + 1)
            if not _partial_escape.fullmatch(text, end_of_content):
                raise _Malformed(end_of_content)
            self.rest, self.in_string = text[end_of_content:], True
        else:
            cut = at + len(text[at:].rstrip(_SCALAR))
            if max(len(text) - cut, _end_of(_scalar, text, at) - at) > MAX_NUMBER:
                raise TokenTooLong("number", MAX_NUMBER)
            self.rest = text[cut:]
        if self._take(text[at:cut], at):
            return None
        self.rest, self.in_string = b"", False
        end = self._find_end(text, at)
        self._take(text[at:end], at, whole=True)
        return end

    def _take(self, new: bytes, at: int, *, whole: bool = False) -> bool:
        """Judge and count bytes of this value. Return False, and do neither, if it ends in them.

        `whole`: the value ends where `new` ends.
        """
        outline = _outline(new) + b'"' * self.in_string
        brackets = outline.translate(None, _NOT_BRACKETS)
        depths = self._depths(brackets)
        if not whole and _OUTSIDE in depths[1:]:
            return False
        if depths.translate(None, bytes(range(self._depth + 1))):
            raise NestedTooDeep(self._depth)
        still_open = bytes(
            brackets[before] if (before := depths.rfind(level)) >= 0 else self._open[level - 1]
            for level in range(1, depths[-1])
        )
        read = _outline(self._stem) + outline
        stem, closing = _stem(still_open, read)
        self._judge(new, b'""' * self.in_string + closing, depths, outline, at)
        if self.item_kind is None and read[:1] == b"[" and read[1:2] not in (b"", b"]"):
            self.item_kind = Kind.of(read[1])
        self._tally.add(
            values=sum(map(outline.count, (b'"', b"[", b"{", b"t", b"f", b"n"))),
            numbers=sum(map(read.translate(_DIGITS).count, (b"[0", b",0", b":0"))),
        )
        self._open, self._stem = still_open, stem
        return True

    def _depths(self, brackets: bytes) -> bytes:
        """Return the depth before the first bracket and after each, up to the end of this value."""
        steps = array("b", brackets.translate(_STEPS))
        try:
            return bytes(accumulate(steps, initial=len(self._open) + 1))
        except ValueError:  # over 255, or below 0: the body ends in these bytes, and more follows
            depths = list(accumulate(steps, initial=len(self._open) + 1))
            end = depths.index(1, 1) if 1 in depths[1:] else len(depths)
            if max(depths[:end]) > self._depth:
                raise NestedTooDeep(self._depth) from None
            return bytes(depths[: end + 1])

    def _judge(self, new: bytes, closing: bytes, depths: bytes, outline: bytes, at: int) -> None:
        """Check the syntax, and count the separators of an array's own elements."""
        document = self._stem + new + closing
        is_array = document[:1] == b"["
        try:
            if not is_array or not depths.translate(None, b"\1\2"):
                _any.decode(document)
                self._separators += outline.count(b",") if is_array else 0
            else:
                elements = len(_elements.decode(document))
                self._separators += max(elements - 1, 0) - (self._stem == b'["",')
        except msgspec.DecodeError as error:
            found = _byte_of_error.search(str(error))
            read = int(found[1]) - len(self._stem) if found else len(new)
            raise _Malformed(at + min(max(read, 0), len(new))) from None

    def _find_end(self, text: bytes, at: int) -> int:
        for _ in range(len(self._open)):
            at = _end_of(_run, text, at)
            if text[at : at + 1] not in (b"]", b"}"):
                raise _Malformed(at)
            at += 1
        return at


# The depth outside of a member's value: the body's own object.
_OUTSIDE = 1
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = bytes(
    {ord("["): 1, ord("{"): 1, ord("]"): 255, ord("}"): 255}.get(c, c) for c in range(256)
)
_DIGITS = bytes(ord("0") if c in b"-0123456789" else c for c in range(256))
# By the innermost open bracket and the last token: what stands for all in it, and what may follow.
_STEMS = {
    b"[[": (b"[", b"]"),
    b"[,": (b'["",', b'""]'),
    b"[": (b'[""', b"]"),
    b"{{": (b"{", b"}"),
    b"{,": (b'{"":"",', b'"":""}'),
    b"{:": (b'{"":', b'""}'),
    b'{"': (b'{""', b':""}'),  # a name
    b"{": (b'{"":""', b"}"),
}


def _stem(still_open: bytes, read: bytes) -> tuple[bytes, bytes]:
    """Return the text that stands for what was read, and one that makes it whole."""
    if not still_open:
        return b"", b""
    *outer, inner = (still_open[i : i + 1] for i in range(len(still_open)))
    last = read[-1:]
    if last == b'"' and inner == b"{" and read[-2:-1] not in (b"{", b","):
        last = b""
    begun, ended = _STEMS.get(inner + last) or _STEMS[inner]
    before = b"".join(b"[" if bracket == b"[" else b'{"":' for bracket in outer)
    after = b"".join(b"]" if bracket == b"[" else b"}" for bracket in reversed(outer))
    return before + begun, ended + after


def _outline(text: bytes) -> bytes:
    """Return valid JSON without whitespace and with a quotation mark for each string."""
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    return b'"'.join(text.split(b'"')[::2]).translate(None, _WS)


def _end_of(pattern: re.Pattern[bytes], text: bytes, at: int) -> int:
    """Return the end of a match of a pattern that matches nothing as well."""
    found = pattern.match(text, at)
    return found.end() if found else at
