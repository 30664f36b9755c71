"""A call of an engine: the request that it gets, how its response is read, and the result.

`model_request.py`, which chooses an engine, exchanges these values with `forward.py`. Forwarding is
independent of limits, queues and budgets; choosing never reads the response.
"""

import os

import msgspec

from app.continuation import Recording
from app.relay.request_context import RequestContext
from app.usage import StreamMeter, Usage
from engines.base import EngineRequest

# Request headers that are forwarded. Keys, cookies and addresses stay in the gateway.
_FORWARDED_TRACED = frozenset({b"accept", b"anthropic-beta", b"anthropic-version"})
# Where traces are on, the engine gets our span instead of the client's.
_FORWARDED = _FORWARDED_TRACED | {b"traceparent", b"tracestate"}
# vLLM with priority scheduling reads the priority here, lower first.
PRIORITY_HEADER = b"x-vllm-priority"
_SUFFIX_BYTES = 8
_SUFFIXES_AT_ONCE = 512


class EngineCall(msgspec.Struct, frozen=True):
    """A request for one engine, and how its response is read."""

    request: EngineRequest
    # Estimated tokens of the prompt, for a response that does not report them.
    prompt: int = 0
    # See `app.usage.stream_meter.StreamMeter`.
    withhold_usage: bool = False
    one_choice: bool = True
    has_logprobs: bool = False
    hides_thoughts: bool = False
    opens_without_token: bool = True
    fingerprint: str | None = None
    # The client asked for bytes without their metadata.
    withhold_metadata: bool = False
    # Number of members that the client sent.
    members: int = 0
    # Encoded header line that names the model.
    model_line: bytes = b""
    # The record by which the stream can go on at another engine; None: it cannot.
    recording: Recording | None = None

    def meter(self) -> StreamMeter:
        """Return a meter for the stream."""
        meter = StreamMeter(
            withhold=self.withhold_usage,
            one_choice=self.one_choice,
            has_logprobs=self.has_logprobs,
            hides_thoughts=self.hides_thoughts,
            opens_without_token=self.opens_without_token,
        )
        meter.fingerprint = self.fingerprint
        return meter


class CallResult(msgspec.Struct):
    """Result of an engine call, updated while it runs; valid whenever forwarding ends."""

    # The engine's; None: it did not answer. After a keep-alive comment the client has another.
    status: int | None = None
    usage: Usage | None = None  # as the engine reported it
    events: int = 0  # 0 unless it is a stream
    partial_usage: Usage | None = None  # the estimate for a stream that did not end
    fingerprint: str | None = None
    started: bool = False  # a part of the response has been sent to the client
    complete: bool = False  # all of it has
    bytes_out: int = 0
    # One for the whole stream, whatever engines it comes from.
    meter: StreamMeter | None = None


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
