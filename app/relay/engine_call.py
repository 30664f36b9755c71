"""A call of an engine: the request that it gets, how its response is read, and the result.

`model_request.py`, which chooses an engine, exchanges these values with `forward.py`. Forwarding is
independent of limits, queues and budgets; choosing never reads the response.
"""

import os

import msgspec

from app.asgi import ClientExchange, Headers
from app.continuation import Recording
from app.relay.reasoning_field import BothFieldsMeter
from app.relay.request_context import RequestContext
from app.request_body import (
    ABSENT,
    BATCH,
    CHAT,
    COMPLETIONS,
    JSON,
    BodyPlan,
    as_bool,
    is_form,
    is_json,
)
from app.usage import StreamMeter, Usage
from engines.base import EngineRequest

# Request headers that are forwarded. Keys, cookies and addresses stay in the gateway.
_FORWARDED_TRACED = frozenset({b"accept", b"anthropic-beta", b"anthropic-version"})
# Where traces are on, the engine gets our span instead of the client's.
_FORWARDED = _FORWARDED_TRACED | {b"traceparent", b"tracestate"}
# vLLM with priority scheduling reads the priority here, lower first.
PRIORITY_HEADER = b"x-vllm-priority"
# Members that ask for logprobs, and values that do not.
LOGPROBS = ("logprobs", "top_logprobs", "include")
NO_LOGPROBS = (*ABSENT, b"false")
# Endpoints whose responses have messages with a reasoning.
CHATS = (CHAT, BATCH)
# The header of a WAV file, as vllm-omni and most programs write it.
AUDIO_HEAD_BYTES = 44
_SUFFIX_BYTES = 8
_SUFFIXES_AT_ONCE = 512


class EngineCall(msgspec.Struct, frozen=True):
    """A request for one engine, and how its response is read."""

    request: EngineRequest
    plan: BodyPlan
    # Encoded header lines: the model's name, and the fields that were left out.
    model_line: bytes
    # The record by which the stream can go on at another engine; None: it cannot.
    recording: Recording | None = None
    # The engine's, of its latest stream.
    fingerprint: str | None = None
    # The client gets `reasoning_content` beside `reasoning`.
    both_fields: bool = False

    def meter(self, endpoint: str) -> StreamMeter:
        """Return a meter for the stream."""
        plan = self.plan
        kind = BothFieldsMeter if self.both_fields else StreamMeter
        return kind(
            withhold=plan.rewrite.withhold_usage,
            one_choice=plan.rewrite.one_choice,
            has_logprobs=any(plan.value(name) not in NO_LOGPROBS for name in LOGPROBS),
            hides_thoughts=as_bool(plan.value("include_reasoning")) is False,
            opens_without_token=endpoint != COMPLETIONS,
            fingerprint=self.fingerprint,
        )


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
    failed: bool = False  # it is a stream in which the engine reports its failure
    bytes_out: int = 0
    bytes_per_second: int = 0  # of speech, where its bytes tell how long it is
    # One for the whole stream, whatever engines it comes from.
    meter: StreamMeter | None = None


class EngineIds(msgspec.Struct, eq=False):
    """Makes the IDs of requests at engines: the request's own ID and an unguessable suffix.

    vLLM aborts requests and stores responses by this ID, so a client must not choose it alone.
    """

    suffixes: list[str] = []

    def next(self, request_id: str) -> str:
        """Return the ID of a request at its engines."""
        if not self.suffixes:
            random = os.urandom(_SUFFIX_BYTES * _SUFFIXES_AT_ONCE)  # one call for many
            self.suffixes = random.hex(",", _SUFFIX_BYTES).split(",")
        return f"{request_id}-{self.suffixes.pop()}"


def build_engine_request(
    request: RequestContext, body: bytes, engine_id: str, priority: int | None = None
) -> EngineRequest:
    """Return the engine's request; `priority` is for engines that schedule by it."""
    exchange = request.exchange
    target = exchange.path
    # The path is on the allow-list, so it needs no quoting.
    if exchange.query and not (request.endpoint.names_model and exchange.method == "GET"):
        target += "?" + exchange.query.decode("latin-1")
    trace_headers = request.timeline.trace_headers()
    headers = exchange.facts.engine_headers if body and not trace_headers else None
    if headers is None:
        headers = _forwarded_headers(exchange, has_body=bool(body), traced=bool(trace_headers))
        if body and not trace_headers:
            exchange.facts.engine_headers = headers
    headers = [(b"x-request-id", engine_id.encode()), *headers, *trace_headers]
    if priority is not None:
        headers.append((PRIORITY_HEADER, b"%d" % priority))
    return EngineRequest(exchange.method, target, headers, body)


def _forwarded_headers(exchange: ClientExchange, *, has_body: bool, traced: bool) -> Headers:
    """Return the headers of a request that its engine gets."""
    # Of several content types the one by which the gateway parsed; vLLM would take another. What
    # is no form was parsed as JSON: `curl -d` calls it a form of another kind.
    content_type = exchange.header(b"content-type")
    if has_body and not (is_json(content_type) or is_form(content_type)):
        content_type = JSON
    headers = [(b"content-type", content_type)] if content_type else []
    forwarded = _FORWARDED_TRACED if traced else _FORWARDED
    return headers + [pair for pair in exchange.headers if pair[0] in forwarded]
