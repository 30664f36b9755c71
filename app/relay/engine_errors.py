"""An engine's own errors, translated into the dialect of OpenAI or Anthropic.

vLLM's errors look like OpenAI's, but their `type` is a Python class and their `code` the status.
"""

import re

import msgspec

from app.errors import Dialect

# vLLM's words for a missing member of the body's own object.
_MISSING = re.compile(
    rb"('type': 'missing', 'loc': 'body\.[^'.]{1,256}', 'msg': '[^']{1,256}', 'input': '<dict of )"
    rb"[0-9]+( items>')"
)

# Anthropic's API reference, "Errors".
ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    500: "api_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_KNOWN_TYPES = {*ANTHROPIC_TYPES.values(), "authentication_error", "permission_error"}
# OpenAI's API reference; an error with any other type is not in its dialect.
_OPENAI_TYPES = {
    "invalid_request_error", "rate_limit_error", "insufficient_quota", "server_error",
    "authentication_error", "permission_error", "not_found_error",
}  # fmt: skip
# vLLM 0.32's words for a prompt that is too long (renderers/params.py, input_processor.py,
# serve/utils/api_utils.py), and those of earlier versions.
_TOO_LONG = tuple(
    re.compile(pattern)
    for pattern in (
        r"maximum context length is (?P<most>\d+) tokens\. However, your (?:prompt|request) "
        r"(?:contains|has) (?:at least )?(?P<tokens>\d+) input tokens",
        r"maximum context length is (?P<most>\d+) tokens\. However, you requested "
        r"(?P<tokens>\d+) tokens",
        r"maximum context length is (?P<most>\d+) tokens\. However, your prompt contains "
        r"\d+ characters",
        r"\(length (?P<tokens>\d+)\) is longer than the maximum model length of (?P<most>\d+)",
        r"Input length \((?P<tokens>\d+)\) exceeds model's maximum context length "
        r"\((?P<most>\d+)\)",
    )
)
# An error object has a few hundred bytes.
ERROR_BYTES = 64 * 1024


class ErrorObject(msgspec.Struct):
    """An error as engines write it."""

    message: str | None = None
    type: str | None = None
    param: str | None = None
    code: str | int | None = None


class _ErrorBody(msgspec.Struct):
    error: ErrorObject | None = None
    type: str | None = None
    message: str | None = None  # vLLM before 0.10 has no object around it


_error_body = msgspec.json.Decoder(_ErrorBody)


def read_error(body: bytes) -> _ErrorBody | None:
    """Return the error in an engine's response; None: there is none that can be read."""
    try:
        return _error_body.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def describe_too_long(message: str) -> str | None:
    """Return vLLM's error for a prompt that is too long in Anthropic's words; None: it is another.

    Claude Code makes its conversation shorter at these words alone. Where vLLM counted characters
    only, the tokens are one more than fit.
    """
    for pattern in _TOO_LONG:
        if found := pattern.search(message):
            most = int(found["most"])
            tokens = found.groupdict().get("tokens") or most + 1
            return f"prompt is too long: {tokens} tokens > {most} maximum"
    return None


def with_own_count(body: bytes, members: int) -> bytes:
    """Return vLLM's error for a missing field with the number of members that the client sent.

    vLLM counts those of the request as it got it, with what the gateway has added.
    """
    return body if len(body) > ERROR_BYTES else _MISSING.sub(rb"\g<1>%d\2" % members, body)


def translate_error(body: bytes, status: int, dialect: Dialect) -> bytes | None:
    """Return an engine's error object in a dialect; None: it is already, or is no error object.

    vLLM refuses some requests to /v1/messages in OpenAI's form, and a server that speaks
    Anthropic's may stand behind an OpenAI path. The message and the name of the parameter are the
    engine's own, except where a prompt is too long for an Anthropic client.
    """
    parsed = None if len(body) > ERROR_BYTES else read_error(body)
    if parsed is None:
        return None
    error_object = parsed.error or ErrorObject(parsed.message)
    message, kind, anthropic = error_object.message, error_object.type, parsed.type == "error"
    if message is None:
        return None
    if dialect is Dialect.ANTHROPIC:
        too_long = describe_too_long(message)
        if anthropic and kind in _KNOWN_TYPES and too_long is None:
            return None
        fallback = "invalid_request_error" if status < 500 else "api_error"
        kind = ANTHROPIC_TYPES.get(status, fallback)
        error = {"type": kind, "message": too_long or message}
        return msgspec.json.encode({"type": "error", "error": error})
    if not anthropic and kind in _OPENAI_TYPES and not isinstance(error_object.code, int):
        return None
    code = error_object.code if isinstance(error_object.code, str) else None
    if code is None and describe_too_long(message) is not None:
        code = "context_length_exceeded"
    told = {
        "message": message,
        "type": _openai_type(status),
        "param": error_object.param,
        "code": code,
    }
    return msgspec.json.encode({"error": told})


def _openai_type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"
