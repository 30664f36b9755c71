"""Server-sent events (WHATWG HTML, section 9.2), as far as the relay needs them. Pure."""

from app.errors import Dialect, GatewayError

# Bytes of an incomplete event that are held back; events of vLLM are much smaller.
EVENT_BYTES = 1024 * 1024
# A line that clients ignore; proxies that close idle connections see traffic.
COMMENT = b": keep-alive\n\n"
# The end mark of a stream in OpenAI's dialect.
DONE = b"data: [DONE]\n\n"


def whole_events(data: bytes) -> tuple[bytes, bytes]:
    """Split bytes of a stream after the last complete event; return both parts.

    Lines end in LF, as vLLM writes them, or in CRLF, as other servers do.
    """
    if data[-2:] == b"\n\n":
        return data, b""
    end = max(
        (data.rfind(mark) + len(mark) for mark in (b"\n\n", b"\r\n\r\n") if mark in data), default=0
    )
    if end == 0 and len(data) > EVENT_BYTES:
        return data, b""
    return data[:end], data[end:]


def error_event(error: GatewayError, dialect: Dialect) -> bytes:
    """Return an error as one server-sent event."""
    return as_event(error.body(dialect), dialect)


def as_event(body: bytes, dialect: Dialect) -> bytes:
    """Return the JSON of an error as one server-sent event."""
    name = b"event: error\n" if dialect is Dialect.ANTHROPIC else b""
    return b"%sdata: %s\n\n" % (name, b" ".join(body.splitlines()))
