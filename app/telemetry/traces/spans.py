"""The spans of a request that has ended, made from its record and its trace.

Pure, and with `tracer.py` the home of OpenTelemetry: imported only where traces are on. Names and
attributes are those of its semantic conventions for HTTP servers and for generative AI (status:
development, opentelemetry-semantic-conventions 0.66b2), and `gateway.` where those have none. No
span holds anything of a prompt, a response or a key.
"""

from collections.abc import Iterator, Sequence

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from app.errors import RequestCanceled
from app.telemetry.request_record import NO_KEY, UNKNOWN_MODEL, RequestRecord
from app.telemetry.request_timeline import AUTH, Step
from app.telemetry.traces.request_trace import RequestTrace

# gen_ai.operation.name of the endpoints that have one.
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
# The conventions' list of providers has no vLLM, and lets such a one say its own name.
PROVIDER = "vllm"
_UNSET = Status(StatusCode.UNSET)
_ERROR = Status(StatusCode.ERROR)
_NO_STATE = TraceState()

Attributes = dict[str, str | int | float | bool]


class SpanMaker:
    """Makes the spans of requests; all have the same resource and scope."""

    def __init__(self, resource: Resource, scope: InstrumentationScope) -> None:
        self._resource = resource
        self._scope = scope

    def spans(self, record: RequestRecord, trace: RequestTrace) -> Iterator[ReadableSpan]:
        """Return the spans of a request, its own the last."""
        end = trace.started + record.total_s
        flags = TraceFlags(trace.flags)
        state = TraceState.from_header([trace.state]) if trace.state else _NO_STATE

        def context(span_id: int) -> SpanContext:
            return SpanContext(trace.trace_id, span_id, False, flags, state)

        def span(
            name: str,
            span_id: int,
            start: float,
            until: float | None = None,
            *,
            parent: SpanContext | None,
            kind: SpanKind = SpanKind.INTERNAL,
            attributes: Attributes,
            status: Status = _UNSET,
            events: Sequence[Event] = (),
        ) -> ReadableSpan:
            return ReadableSpan(
                name,
                context(span_id),
                parent,
                self._resource,
                attributes,
                events,
                kind=kind,
                status=status,
                start_time=trace.at_ns(start),
                end_time=trace.at_ns(end if until is None else until),
                instrumentation_scope=self._scope,
            )

        root = context(trace.span_id)
        steps = trace.steps()
        attempts = [step for step in steps if step.engine is not None]
        for phase in steps:
            if phase.engine is not None:
                continue
            own, status = _phase(phase, record)
            yield span(
                phase.name,
                trace.new_id(),
                phase.start,
                phase.end,
                parent=root,
                attributes=own,
                status=status,
            )
        first = None if record.ttft_s is None else trace.started + record.ttft_s
        for number, attempt in enumerate(attempts):
            is_last = attempt is attempts[-1]
            own, status = _attempt(attempt, number, trace.method, record if is_last else None)
            events = []
            if is_last and first is not None:
                own["gen_ai.response.time_to_first_chunk"] = first - attempt.start
                events.append(Event("first_token", timestamp=trace.at_ns(first)))
            yield span(
                f"engine {attempt.engine}",
                attempt.span_id,
                attempt.start,
                attempt.end,
                parent=root,
                kind=SpanKind.CLIENT,
                attributes=own,
                status=status,
                events=events,
            )
        if first is not None:
            yield span("stream", trace.new_id(), first, parent=root, attributes={})
        parent = None
        if trace.parent_id is not None:
            parent = SpanContext(trace.trace_id, trace.parent_id, True, flags, state)
        yield span(
            name_of(record, trace),
            trace.span_id,
            trace.started,
            parent=parent,
            kind=SpanKind.SERVER,
            attributes=_request(trace, record),
            status=Status(StatusCode.ERROR, record.fault) if _failed(record) else _UNSET,
        )


def name_of(record: RequestRecord, trace: RequestTrace) -> str:
    """Return the name of a request's span: its operation and model, or its endpoint."""
    operation = OPERATIONS.get(record.endpoint)
    if operation is None:
        return record.endpoint
    model = trace.requested_model or record.model
    return operation if model == UNKNOWN_MODEL else f"{operation} {model}"


def _failed(record: RequestRecord) -> bool:
    """Return whether a request failed; a 4xx, a disconnect and a cancellation are no failures."""
    if record.error == RequestCanceled.code:
        return False
    return record.status >= 500 or (record.error is not None and record.status < 400)


def _request(trace: RequestTrace, record: RequestRecord) -> Attributes:
    """Return the attributes of a request's own span."""
    own: Attributes = {
        "http.request.method": trace.method,
        "http.route": record.endpoint,
        "url.path": record.endpoint,  # of a bounded number, unlike the client's own
        "http.response.status_code": record.status,
        "gen_ai.provider.name": PROVIDER,
        "gateway.request_id": record.request_id,
        "gateway.key_id": record.key_id,
    }
    if (operation := OPERATIONS.get(record.endpoint)) is not None:
        own["gen_ai.operation.name"] = operation
    if record.model != UNKNOWN_MODEL:
        own["gen_ai.request.model"] = trace.requested_model or record.model
        if trace.requested_model not in (None, record.model):
            own["gen_ai.response.model"] = record.model
    if record.engine is not None:
        own["gateway.engine"] = record.engine
    if record.ttft_s is not None:
        own["gen_ai.response.time_to_first_chunk"] = record.ttft_s
    if (usage := record.usage) is not None:
        own["gen_ai.usage.input_tokens"] = usage.prompt
        own["gen_ai.usage.output_tokens"] = usage.completion
        own["gen_ai.usage.cache_read.input_tokens"] = usage.cached
        if usage.estimated:
            own["gateway.usage_estimated"] = True
    own |= _continuation(record)
    if record.error is not None:
        own["error.type"] = record.error
    return own


def _continuation(record: RequestRecord) -> Attributes:
    """Return the attributes that only an interrupted stream has."""
    own: Attributes = {}
    if record.continued:
        own["gateway.continued"] = record.continued
    if record.recomputed_tokens:
        own["gateway.recomputed_tokens"] = record.recomputed_tokens
    if record.not_continued is not None:
        own["gateway.not_continued"] = record.not_continued
    return own


def _phase(phase: Step, record: RequestRecord) -> tuple[Attributes, Status]:
    """Return attributes and status of a phase; the request's fault belongs to the open phase."""
    if phase.fault is not None:
        return {"error.type": phase.fault}, _ERROR
    known = phase.name == AUTH and record.key_id != NO_KEY
    if phase.end is not None or record.error is None or known:
        return {}, _UNSET
    return {"error.type": record.error}, _ERROR if _failed(record) else _UNSET


def _attempt(
    attempt: Step, number: int, method: str, ended: RequestRecord | None
) -> tuple[Attributes, Status]:
    """Return attributes and status of the span of an attempt, the `number`th from 0.

    `ended` is the record of the request whose last attempt it is.
    """
    own: Attributes = {"gateway.engine": attempt.engine or "", "http.request.method": method}
    if number:
        own["http.request.resend_count"] = number
    if attempt.status is not None:
        own["http.response.status_code"] = attempt.status
    if attempt.fault is not None:
        own["error.type"] = attempt.fault
    elif attempt.status is not None and attempt.status >= 400:
        own["error.type"] = str(attempt.status)
    elif ended is not None and ended.error is not None:
        own["error.type"] = ended.error
        return own, _ERROR if _failed(ended) else _UNSET
    else:
        return own, _UNSET
    return own, _ERROR
