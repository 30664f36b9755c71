"""Server-sent events (WHATWG HTML, section 9.2) as bytes: splits, reads and makes them. Pure."""

import re

from app.errors import Dialect

# Bytes of an incomplete event that are held back; events of vLLM are much smaller.
EVENT_BYTES = 1024 * 1024
# A line that clients ignore; proxies that close idle connections see traffic.
COMMENT = b": keep-alive\n\n"
# The end mark of a stream in OpenAI's dialect.
DONE = b"data: [DONE]\n\n"

# The last events of a stream, in any dialect. Lines cannot begin so inside of JSON.
_STREAM_END = re.compile(
    rb"^(?:data: ?\[DONE\]|event: ?(?:message_stop|speech\.audio\.done"
    rb"|response\.(?:completed|incomplete|failed))\r?$)",
    re.MULTILINE,
)
_EVENT_END = re.compile(rb"\r?\n\r?\n")


def whole_events(data: bytes, longest: int = EVENT_BYTES) -> tuple[bytes, bytes]:
    """Split bytes of a stream after the last complete event; return both parts.

    Lines end in LF, as vLLM writes them, or in CRLF, as other servers do. More bytes than `longest`
    without an end are no event, and are not held back.
    """
    if data[-2:] == b"\n\n":
        return data, b""
    end = max(
        (data.rfind(mark) + len(mark) for mark in (b"\n\n", b"\r\n\r\n") if mark in data), default=0
    )
    if end == 0 and len(data) > longest:
        return data, b""
    return data[:end], data[end:]


def ends_stream(events: bytes) -> bool:
    """Return whether the event that ends a stream is among these events."""
    return _STREAM_END.search(events) is not None


def split_events(events: bytes) -> list[bytes]:
    """Split bytes of a stream into its events, their ends included; no byte is lost."""
    if events.find(b"\r") < 0:  # `in` raises and clears an error inside (CPython 3.11)
        found = [event + b"\n\n" for event in events.split(b"\n\n")]
        last = found.pop()[:-2]
    else:
        found, start = [], 0
        for end in _EVENT_END.finditer(events):
            found.append(events[start : end.end()])
            start = end.end()
        last = events[start:]
    if last:
        found.append(last)
    return found


def read_data(event: bytes) -> bytes:
    """Return the data of an event (WHATWG HTML, 9.2.6); empty for a comment."""
    one_line = event.find(b"\n") >= len(event) - 2 and event.find(b"\r") < 0
    if one_line and event.startswith(b"data: "):
        return event[6:].rstrip()
    lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line[:5] == b"data:"]
    return b"\n".join(lines)


def with_data(event: bytes, data: bytes) -> bytes:
    """Return an event with other data, on one line; its other lines stay."""
    end = b"\r\n" if event.endswith(b"\r\n") else b"\n"
    lines = [line for line in event.splitlines() if line and line[:5] != b"data:"]
    return end.join([*lines, b"data: " + data, b"", b""])


def as_event(body: bytes, dialect: Dialect) -> bytes:
    """Return the JSON of an error as one server-sent event."""
    name = b"event: error\n" if dialect is Dialect.ANTHROPIC else b""
    return b"%sdata: %s\n\n" % (name, b" ".join(body.splitlines()))
