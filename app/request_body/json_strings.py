"""Text of JSON strings, which may end anywhere: within an escape, or between two of a pair.

Every unbounded repetition in a pattern is possessive or atomic: linear time on any input. Those of
groups are atomic, because re before Python 3.11.5 matches possessive ones wrongly.
"""

import re

import msgspec

from app.request_body.json_faults import LoneSurrogate, NotJson

WHITESPACE = b" \t\n\r"

_HEX = rb"[0-9a-fA-F]"
_ESCAPE = (
    rb'\\(?:["\\/bfnrt]|u(?:[0-9a-ce-fA-CE-F]%b{3}|[dD][0-7]%b{2}'
    rb"|[dD][89abAB]%b{2}\\u[dD][c-fC-F]%b{2}))" % ((_HEX,) * 4)
)
_CONTENT = rb'[^"\\\x00-\x1f]*+(?>(?:%b[^"\\\x00-\x1f]*+)*)' % _ESCAPE
_content = re.compile(_CONTENT)
# From a place in a string on, which may be within an escape, or between two of a pair.
_content_from_within = re.compile(
    rb'[^"\\\x00-\x1f]*+(?>(?:\\u[dD][c-fC-F]%b{2})?)%b' % (_HEX, _CONTENT)
)
_MAX_CUT = 11  # of two escapes for one character, without the last digit
_partial_escape = re.compile(
    rb"(?:\\(?:u(?:%b{0,3}|[dD][89abAB]%b{2}(?:\\(?:u(?:[dD](?:[c-fC-F]%b?)?)?)?)?)?)?)?"
    % ((_HEX,) * 3)
)
# The escape of one half of a pair without the other, where no backslash is escaped.
_lone_surrogate = re.compile(
    rb"\\u(?:[dD][89abAB]..(?!\\u[dD][c-fC-F])|[dD][c-fC-F](?<!\\u[dD][89abAB]..\\u[dD].))",
    re.DOTALL,
)
_document = msgspec.json.Decoder(msgspec.Raw)


def end_of_content(text: bytes) -> int:
    """Return the end of the part of a string that has arrived: a quote, a cut escape, a fault.

    msgspec reads it several times as fast as a pattern, which finds the fault where there is one.
    """
    end = without_escapes(text).find(b'"')
    if end < 0:
        end = _start_of_cut_escape(text)
    try:
        _document.decode(b'"%b"' % text[:end])
    except msgspec.DecodeError:
        return end_of_match(_content, text, 0)
    return end


def _start_of_cut_escape(text: bytes) -> int:
    """Return where valid text of a string has the escape that its end cuts; its end if none."""
    at = max(len(text) - _MAX_CUT, 0)
    backslashes = at - len(text[:at].rstrip(b"\\"))
    return end_of_match(_content_from_within, text, min(at + backslashes % 2, len(text)))


def cut_escape(text: bytes, at: int, origin: int) -> bytes:
    """Return the escape that the end of the text cuts, if any. Raises NotJson on anything else."""
    if not _partial_escape.fullmatch(text, at):
        if _lone_surrogate.match(text, at):
            raise LoneSurrogate(origin + at)
        raise NotJson(origin + at)
    return text[at:]


def find_lone_surrogate(text: bytes) -> int | None:
    """Return the offset of the first half of a surrogate pair without the other half, if any."""
    found = _lone_surrogate.search(text.replace(rb"\\", b"__"))
    return found.start() if found else None


def without_escapes(text: bytes) -> bytes:
    """Return a text of the same length in which each quotation mark begins or ends a string."""
    if b'\\"' not in text:
        return text
    return text.replace(b"\\\\", b"__").replace(b'\\"', b"__")


def outline_of(plain: bytes) -> bytes:
    """Return a text without escapes, its strings reduced to a quotation mark each."""
    return b'"'.join(plain.split(b'"')[::2]).translate(None, WHITESPACE)


def end_of_match(pattern: re.Pattern[bytes], text: bytes, at: int) -> int:
    """Return the end of a match at `at`, or `at` if there is none."""
    found = pattern.match(text, at)
    return found.end() if found else at
