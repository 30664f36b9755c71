"""A window of a JSON body: its syntax, and where its nested values end.

What has been read of a body, however long, matters to the rest only through its open brackets and
the last token. So a short text can stand for it, here called the prefix: the open brackets and
placeholders, as `{"":[[` or `{"":{"":""`. Prefix, window and closing brackets (the suffix) together
are a small JSON document, which is valid exactly if the window may follow what was read, and
msgspec parses it in C, a window at a time.

    last token   prefix in an array, suffix    prefix in an object, suffix
    [ or {       [            ]                {           }
    ,            ["",         ""]              {"":"",     "":""}
    a name                                     {""         :""}
    :                                          {"":        ""}
    a value      [""          ]                {"":""      }
"""

import re

import msgspec

from app.request_body.json_faults import LoneSurrogate, NotJson
from app.request_body.json_strings import end_of_match, find_lone_surrogate

# This many brackets and the characters before each, in a text without escapes.
_brackets = [
    (count, re.compile(rb'(?>(?:[^"\[\]{}]*+(?>(?:"[^"]*+"[^"\[\]{}]*+)*)[\[\]{}]){%d})' % count))
    for count in (512, 64, 8, 1)
]
_byte_of_error = re.compile(r"\(byte (\d+)\)")
_document = msgspec.json.Decoder(msgspec.Raw)
_array = msgspec.json.Decoder(list[msgspec.Raw])


class Window(msgspec.Struct):
    """Bytes that were parsed, with the state of the body before and after them."""

    text: bytes
    plain: bytes  # `text` without escapes
    end: int  # of the parsed part of `text`
    origin: int  # of `text` in the body
    open_before: bytes
    prefix_before: bytes
    suffix: bytes
    depths: bytes  # before the first bracket and after each
    after_bracket: int  # an offset in `text`
    brackets: int = 0  # of the window, before that offset

    def end_of_string(self, at: int) -> int:
        """Return the offset after the string that begins at `at`."""
        return self.plain.index(b'"', at + 1) + 1

    def end_of_nested(self) -> int | None:
        """Return the next offset where an array or object of a member ends, or None."""
        before = self.depths.find(_END_OF_NESTED, self.brackets)
        if before < 0:
            return None
        missing = before + 1 - self.brackets
        for count, pattern in _brackets:
            while missing >= count:
                self.after_bracket = end_of_match(pattern, self.plain, self.after_bracket)
                missing -= count
        self.brackets = before + 1
        return self.after_bracket

    def separators(self, at: int, end: int, levels: int, *, ended: bool) -> int:
        """Return the number of commas between an array's own items in `text[at:end]`."""
        new = self.text[at:end]
        if levels < 2 and new.find(b"[", levels == 0) < 0 and b"{" not in new and b'"' not in new:
            return new.count(b",")
        prefix = self.prefix_before[len(b'{"":') :] if levels else b""
        items = _array.decode(prefix + new + (b"" if ended else self.suffix[: -len(b"}")]))
        return max(len(items) - 1, 0) - (prefix == b'["",')


# Depths where an array or object of the body's own object ends.
_END_OF_NESTED = b"\2\1"
AFTER_BODY = b"{}"
_FRAMES = {  # the table above, by the innermost bracket and the last token
    b"[[": (b"[", b"]"),
    b"[,": (b'["",', b'""]'),
    b"[": (b'[""', b"]"),
    b"{{": (b"{", b"}"),
    b"{,": (b'{"":"",', b'"":""}'),
    b'{"': (b'{""', b':""}'),
    b"{:": (b'{"":', b'""}'),
    b"{": (b'{"":""', b"}"),
}


def frame(still_open: bytes, read: bytes) -> tuple[bytes, bytes]:
    """Return the text that stands for the bytes read so far, and the text that closes it."""
    if not still_open:
        return AFTER_BODY if read else b"", b""
    *outer, inner = (still_open[at : at + 1] for at in range(len(still_open)))
    last = read[-1:]
    if last == b'"' and read[-2:-1] not in (b"{", b","):
        last = b""  # a value, or a name without a comma before it, which msgspec will see
    begun, ended = _FRAMES.get(inner + last) or _FRAMES[inner]
    before = b"".join(b"[" if bracket == b"[" else b'{"":' for bracket in outer)
    after = b"".join(b"]" if bracket == b"[" else b"}" for bracket in reversed(outer))
    return before + begun, ended + after


def check_syntax(prefix: bytes, new: bytes, suffix: bytes, offset: int) -> None:
    """Raise NotJson unless `new`, at `offset`, may follow what `prefix` stands for."""
    try:
        _document.decode(prefix + new + suffix)
    except msgspec.DecodeError as error:
        if (at := find_lone_surrogate(new)) is not None:
            raise LoneSurrogate(offset + at) from None
        found = _byte_of_error.search(str(error))
        at = int(found[1]) - len(prefix) if found else len(new)
        raise NotJson(offset + min(max(at, 0), len(new))) from None
