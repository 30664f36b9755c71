"""Translates an engine's error between the dialects of OpenAI and Anthropic. Pure.

vLLM refuses some requests to /v1/messages in OpenAI's form, and a server that speaks Anthropic's
may stand behind an OpenAI path. The message is the engine's own.
"""

import msgspec

from app.errors import Dialect

ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}
MAX_BYTES = 64 * 1024


class _Error(msgspec.Struct):
    message: str | None = None
    type: str | None = None
    param: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error | None = None
    type: str | None = None
    message: str | None = None  # vLLM before 0.10 has no object around it


_error_body = msgspec.json.Decoder(_ErrorBody)


def translate_error(body: bytes, status: int, dialect: Dialect) -> bytes | None:
    """Return an engine's error object in a dialect; None: it is already, or is no error object."""
    if len(body) > MAX_BYTES:
        return None
    try:
        parsed = _error_body.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    anthropic = parsed.type == "error"
    message = parsed.error.message if parsed.error is not None else parsed.message
    if message is None or anthropic is (dialect is Dialect.ANTHROPIC):
        return None
    if dialect is Dialect.ANTHROPIC:
        fallback = "invalid_request_error" if status < 500 else "api_error"
        error = {"type": ANTHROPIC_TYPES.get(status, fallback), "message": message}
        return msgspec.json.encode({"type": "error", "error": error})
    kind = parsed.error.type if parsed.error is not None else None
    error_object = {"message": message, "type": kind, "param": None, "code": status}
    return msgspec.json.encode({"error": error_object})
