"""What an engine is sent of a client's request."""

import os

from app.relay.request_context import RequestContext
from engines.base import EngineRequest

# What an engine may see of a request's headers. Keys, cookies and addresses are not its business.
PASSED_ON_TRACED = frozenset({b"accept", b"anthropic-beta", b"anthropic-version"})
# Where traces are on, an engine is told of our span instead of the client's.
PASSED_ON = PASSED_ON_TRACED | {b"traceparent", b"tracestate"}
# vLLM's engines that schedule by priority read it from here, lower first.
PRIORITY_HEADER = b"x-vllm-priority"
_SUFFIX_BYTES = 8
_SUFFIXES_AT_ONCE = 512


class EngineIds:
    """Ids that engines know requests by: the request's own, and what nobody can guess behind it.

    vLLM ends and stores what a request makes under its id, so a client must not choose it alone.
    """

    def __init__(self) -> None:
        self._random = b""
        self._at = 0

    def next(self, request_id: str) -> str:
        """Return the id of a request at its engines."""
        if self._at == len(self._random):
            self._random = os.urandom(_SUFFIX_BYTES * _SUFFIXES_AT_ONCE)  # one call for many
            self._at = 0
        start = self._at
        self._at += _SUFFIX_BYTES
        return f"{request_id}-{self._random[start : self._at].hex()}"


def engine_request(
    request: RequestContext, body: bytes, engine_id: str, priority: int | None = None
) -> EngineRequest:
    """Return what an engine is sent of a request, with a body of its own.

    `priority` is for engines that schedule by it.
    """
    exchange = request.exchange
    target = exchange.path  # one of the allow-list's, so it needs no quoting
    if exchange.query:
        target += "?" + exchange.query.decode("latin-1")
    trace_headers = request.trace.headers()
    passed_on = PASSED_ON_TRACED if trace_headers else PASSED_ON
    # Of several types the one that the gateway went by; vLLM would go by another.
    headers = [
        (b"x-request-id", engine_id.encode()),
        (b"content-type", exchange.header(b"content-type")),
    ]
    if not headers[1][1]:
        headers.pop()
    headers += [pair for pair in exchange.headers if pair[0] in passed_on]
    if priority is not None:
        headers.append((PRIORITY_HEADER, b"%d" % priority))
    headers += trace_headers
    return EngineRequest(exchange.method, target, headers, body)
