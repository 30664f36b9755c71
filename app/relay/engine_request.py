"""Builds the request that an engine gets from a client's request."""

import os

from app.relay.request_context import RequestContext
from engines.base import EngineRequest

# Request headers that are forwarded. Keys, cookies and addresses stay in the gateway.
_FORWARDED_TRACED = frozenset({b"accept", b"anthropic-beta", b"anthropic-version"})
# Where traces are on, the engine gets our span instead of the client's.
_FORWARDED = _FORWARDED_TRACED | {b"traceparent", b"tracestate"}
# vLLM with priority scheduling reads the priority here, lower first.
PRIORITY_HEADER = b"x-vllm-priority"
_SUFFIX_BYTES = 8
_SUFFIXES_AT_ONCE = 512


class EngineIds:
    """Makes the IDs of requests at engines: the request's own ID and an unguessable suffix.

    vLLM aborts requests and stores responses by this ID, so a client must not choose it alone.
    """

    def __init__(self) -> None:
        self._random = b""
        self._at = 0

    def next(self, request_id: str) -> str:
        """Return the ID of a request at its engines."""
        if self._at == len(self._random):
            self._random = os.urandom(_SUFFIX_BYTES * _SUFFIXES_AT_ONCE)  # one call for many
            self._at = 0
        start = self._at
        self._at += _SUFFIX_BYTES
        return f"{request_id}-{self._random[start : self._at].hex()}"


def build_engine_request(
    request: RequestContext, body: bytes, engine_id: str, priority: int | None = None
) -> EngineRequest:
    """Return the engine's request; `priority` is for engines that schedule by it."""
    exchange = request.exchange
    target = exchange.path  # on the allow-list, so it needs no quoting
    if exchange.query:
        target += "?" + exchange.query.decode("latin-1")
    trace_headers = request.timeline.trace_headers()
    forwarded = _FORWARDED_TRACED if trace_headers else _FORWARDED
    # Of several content types the one by which the gateway parsed; vLLM would take another.
    headers = [
        (b"x-request-id", engine_id.encode()),
        (b"content-type", exchange.header(b"content-type")),
    ]
    if not headers[1][1]:
        headers.pop()
    headers += [pair for pair in exchange.headers if pair[0] in forwarded]
    if priority is not None:
        headers.append((PRIORITY_HEADER, b"%d" % priority))
    headers += trace_headers
    return EngineRequest(exchange.method, target, headers, body)
