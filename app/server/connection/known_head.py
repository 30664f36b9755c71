"""The head of the previous request on a connection, by which the next one is read without a parser.

A client sends the same head with every request on a connection, except for the length of the body.
What the parser has accepted once means the same again, so the next request is read by comparing
bytes. Any other head, and a body that has not arrived whole, goes to the parser.
"""

from dataclasses import dataclass, field

from app.head_facts import HeadFacts
from app.server.connection.framing import content_length

HeaderList = list[tuple[bytes, bytes]]

# Larger heads are parsed each time: an idle connection keeps this one.
MAX_KNOWN_BYTES = 4096
_END = b"\r\n\r\n"
# llhttp has accepted the head, so no value contains a line break.
_LENGTH = b"\r\ncontent-length:"
# With one of these the bytes behind the head are not simply the body.
_CHANGING = frozenset({b"transfer-encoding", b"expect", b"upgrade"})


@dataclass(frozen=True, slots=True, repr=False)  # it holds a key
class KnownHead:
    """A head that the parser has accepted, with what it has read from it."""

    # The bytes around the digits of the body's length.
    before: bytes
    after: bytes
    method: str
    path: str
    query: bytes
    headers: HeaderList
    # The place of content-length in the headers.
    length_at: int
    facts: HeadFacts = field(default_factory=HeadFacts)

    @classmethod
    def of(
        cls, data: bytes, method: str, path: str, query: bytes, headers: HeaderList
    ) -> "KnownHead | None":
        """Return the head of one HTTP/1.1 request; None: it cannot be compared."""
        by_name = dict(headers)
        digits = by_name.get(b"content-length", b"")
        head = data[: data.find(_END) + len(_END)]
        # Around a request there may be blank lines.
        is_whole = len(data) - len(head) == content_length(digits)
        if not is_whole or len(head) > MAX_KNOWN_BYTES or not _CHANGING.isdisjoint(by_name):
            return None
        before, name, rest = head.lower().partition(_LENGTH)
        start = len(before) + len(name) + rest.find(digits)
        if _LENGTH in rest or not rest.lstrip(b" \t").startswith(digits + b"\r\n"):
            return None
        length_at = [name for name, _ in headers].index(b"content-length")
        after = head[start + len(digits) :]
        return cls(head[:start], after, method, path, query, headers, length_at)

    def read(self, data: bytes) -> tuple[HeaderList, bytes] | None:
        """Return the headers and the body of a request; None: it is not whole, or has another head.

        The caller has seen the whole previous request, so `data` begins with this one.
        """
        before = self.before
        if not data.startswith(before):
            return None
        length, after, body = data[len(before) :].partition(self.after)
        if not after or length != b"%d" % len(body):
            return None
        headers = [*self.headers]
        headers[self.length_at] = (b"content-length", length)
        return headers, body
