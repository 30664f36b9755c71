"""The requests in flight, and the working memory of each: the relay's facts and decisions."""

from collections.abc import Callable

import msgspec

from app.asgi import ClientExchange
from app.auth import UNAUTHENTICATED, Principal
from app.capture import CaptureRules, CaptureWriter, Transcript
from app.errors import InvalidApiKey
from app.relay.bindings import Binding
from app.relay.lost_engine import LostEngine
from app.request_body import Endpoint, ParsedBody
from app.routing import Prefill, ReportedTokens
from app.telemetry import UNKNOWN_MODEL, RequestRecord, RequestTimeline
from app.usage import StreamMeter, Usage

# On every answer that is captured.
CAPTURED_HEADER = (b"x-gateway-captured", b"true")
KEY_DISABLED = "this API key was disabled while its request was under way"


class RequestContext(msgspec.Struct, eq=False):
    """One request under way. Its own task writes it; others only read it."""

    exchange: ClientExchange
    endpoint: Endpoint
    timeline: RequestTimeline
    principal: Principal = UNAUTHENTICATED
    # What it has in common with other requests; None until its body is read.
    binding: Binding | None = None
    # The model of the engine below; the requested one where no engine was reached, or all failed.
    model: str = UNKNOWN_MODEL
    # The last engine that the request has reached, possibly of a fallback. From then on it costs
    # tokens and has a row in the ledger.
    engine: str | None = None
    requested_model: str | None = None  # the name or alias that the client sent, of a known model
    # The only engine that may serve it: the one that stores the response which it continues.
    pinned_engine: str | None = None
    # Tokens that a budget leaves for each answer of a request without an output limit.
    output_bound: int | None = None
    # When it has to be at an engine, by perf_counter; None: neither client nor key says.
    deadline: float | None = None
    # By model: engines that failed after they had been sent the request.
    deaths_by_model: dict[str, int] = {}
    # The engine that was lost in its last attempt; None: that failed otherwise.
    lost_engine: LostEngine | None = None
    queued_s: float | None = None  # None: it did not have to wait for an engine
    ttft_s: float | None = None
    # Its prompt at the engine, where the policy counts prompts; None once it has ended.
    prefill: Prefill | None = None
    # Takes what the engine reported, at the end, where the policy learns from it.
    on_end: Callable[[ReportedTokens | None], None] | None = None
    bytes_in: int = 0
    usage: Usage | None = None
    meter: StreamMeter | None = None  # of its stream, from whatever engines
    # Of its stream, as far as the client was sent it: the chunks of events.
    first_events: bytes = b""
    last_events: bytes = b""
    fault: str | None = None  # what went wrong
    error: str | None = None  # the kind of fault, one of a bounded number of words
    # Replaces the response's status: 499, or what the connection has sent to a faulty request.
    aborted_status: int | None = None
    client_gone: bool = False  # it left, or stopped reading, before its response was complete
    # It was canceled behind the last event of its stream: agents close the connection there.
    stream_ended: bool = False
    # How often a stream went on at another engine, the tokens that were computed again for that,
    # and the reason why it did not go on, one of a bounded number of words.
    continued: int = 0
    recomputed_tokens: int = 0
    not_continued: str | None = None
    capture: Transcript | None = None  # None: it is not captured

    @property
    def deaths(self) -> int:
        """The number of engines that failed after they had been sent the request."""
        return sum(self.deaths_by_model.values())

    @property
    def log_fields(self) -> dict[str, str | None]:
        """The fields by which log lines of this request are found."""
        name = self.exchange.request_id
        return {"request_id": name, "model": self.model, "engine": self.engine}

    def begin_capture(self, captures: CaptureWriter, rules: CaptureRules, body: ParsedBody) -> None:
        """Capture the request from now on, unless that has begun or is not chosen.

        A response whose headers have been sent is not captured: its client would not be told.
        """
        exchange = self.exchange
        if self.capture is not None or exchange.started:
            return
        content_type = exchange.header(b"content-type")
        transcript = captures.open(
            rules, self.principal, exchange.received_at, content_type, body.raw
        )
        if transcript is not None:
            self.capture = exchange.answer_copy = transcript
            exchange.extra_headers = [*exchange.extra_headers, CAPTURED_HEADER]

    def record(self, total_s: float) -> RequestRecord:
        """Return the facts of the request, as far as they are known `total_s` after its arrival."""
        exchange, principal = self.exchange, self.principal
        return RequestRecord(
            exchange.request_id,
            self.endpoint.label,
            exchange.method,
            self.aborted_status or exchange.status,
            total_s,
            principal.id,
            self.model,
            self.engine,
            self.requested_model,
            self.queued_s,
            self.ttft_s,
            owner=principal.owner_name,
            bytes_in=self.bytes_in,
            bytes_out=exchange.bytes_out,
            usage=self.usage,
            fault=self.fault,
            error=self.error,
            client_gone=self.client_gone,
            client_wait_s=exchange.client_wait_s,
            trace_id=self.timeline.sampled_id,
            continued=self.continued,
            recomputed_tokens=self.recomputed_tokens,
            not_continued=self.not_continued,
        )


class RequestsInFlight(set[RequestContext]):
    """The requests in flight, so that they can be listed, and ended from outside."""

    def of_key(self, key_id: str) -> list[RequestContext]:
        """Return the requests of a key."""
        return [request for request in self if request.principal.id == key_id]

    def end_requests(self, key_id: str) -> None:
        """End every request of a key that was disabled."""
        for request in self.of_key(key_id):
            request.exchange.cut(InvalidApiKey(KEY_DISABLED))
