"""OpenTelemetry: samples requests and exports their spans to a collector.

This module is imported only when traces are enabled. The spans of a request are created when it has
completed (`spans.py`) and are exported by the thread of the SDK's BatchSpanProcessor: the whole
trace, or nothing of it.
"""

import asyncio
import contextlib
import logging
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from app.telemetry.ended_request import EndedRequest
from app.telemetry.traces.request_trace import SAMPLED, RequestTrace
from app.telemetry.traces.spans import SpanMaker

log = logging.getLogger(__name__)

SERVICE = "vllm-gateway"
# About 1 kB each: three seconds of 500 requests per second, while a collector restarts.
MAX_QUEUED = 8192
BATCH = 512  # the SDK's own default
EXPORT_EVERY_S = 1.0
MAX_REASON_CHARS = 300
FLUSH_S = 2.0
# A traceparent of version 00 has 55 bytes; the propagator logs a warning above 512.
MAX_HEADER_BYTES = 512
# The random flag of W3C trace context, level 2, is forwarded unchanged.
_RANDOM_ID = 2
_PARENT, _STATE = b"traceparent", b"tracestate"


class Tracer:
    """Creates and exports the spans of requests. The lifespan calls `start` and `close`."""

    def __init__(self, exporter: SpanExporter, sample_ratio: float, where: str) -> None:
        """`where` names the collector in the log."""
        self._exporter = _Exporter(exporter, where)
        self._sampler = TraceIdRatioBased(sample_ratio)
        self._propagator = TraceContextTextMapPropagator()
        self._random = random.Random()  # noqa: S311 - ids must differ and need not be secret
        self._maker = SpanMaker(_resource(), InstrumentationScope(SERVICE, version(SERVICE)))
        self._processor: BatchSpanProcessor | None = None
        self._accepted = 0
        self._refused = 0

    def start(self) -> None:
        """Start exporting spans in a thread."""
        self._exporter.listen()
        self._processor = BatchSpanProcessor(
            self._exporter,
            max_queue_size=MAX_QUEUED,
            schedule_delay_millis=EXPORT_EVERY_S * 1000,
            max_export_batch_size=BATCH,
        )

    async def close(self) -> None:
        """Export the queued spans, for at most FLUSH_S."""
        processor, self._processor = self._processor, None
        if processor is None:
            return
        loop, sent = asyncio.get_running_loop(), asyncio.Event()

        def flush() -> None:
            processor.shutdown()  # type: ignore[no-untyped-call]
            with contextlib.suppress(RuntimeError):  # the loop is already closed
                loop.call_soon_threadsafe(sent.set)

        threading.Thread(target=flush, name="flush spans", daemon=True).start()
        try:
            async with asyncio.timeout(FLUSH_S):
                await sent.wait()
        except TimeoutError:
            self._exporter.shutdown()
            lost = self._accepted - self._exporter.exported - self._exporter.failed
            log.warning("traces: %d spans were not exported before shutdown", lost)

    def counts(self) -> tuple[int, int]:
        """Return how many spans were exported and how many were dropped."""
        return self._exporter.exported, self._exporter.failed + self._refused

    def flush(self) -> None:
        """Export the queued spans and wait for it."""
        if self._processor is not None:
            self._processor.force_flush()

    def begin(
        self, method: str, headers: Iterable[tuple[bytes, bytes]], started: float
    ) -> RequestTrace:
        """Return the trace of a request that began at `started` (perf_counter).

        It continues the client's trace and keeps the client's sampling decision. An invalid
        traceparent is ignored.
        """
        parents, states = [], []
        for name, value in headers:
            if name == _PARENT:
                parents.append(value)
            elif name == _STATE:
                states.append(value)
        parent = None
        if len(parents) == 1 and len(parents[0]) <= MAX_HEADER_BYTES:
            parent = self._extract(parents[0], states)
        if parent is None:
            trace_id, parent_id, state = self._id(128), None, ""
            flags = SAMPLED * self._sample(trace_id)
        else:
            trace_id, parent_id, state = (
                parent.trace_id, parent.span_id, parent.trace_state.to_header(),
            )  # fmt: skip
            flags = parent.trace_flags & (SAMPLED | _RANDOM_ID)
        return RequestTrace.of(trace_id, parent_id, flags, state, self._span_id, method, started)

    def end(self, ended: EndedRequest) -> None:
        """Make the spans of a request that has ended, if it is sampled."""
        timeline = ended.timeline
        if timeline.sampled_id is None or (processor := self._processor) is None:
            return
        assert isinstance(timeline, RequestTrace)  # of `begin`
        spans = list(self._maker.spans(ended.record, timeline))
        # The SDK's queue would drop the oldest spans of any trace when it is full, and say so each
        # time; it never is.
        if self._queued + len(spans) > MAX_QUEUED:
            self._refused += len(spans)
            return
        self._accepted += len(spans)
        for span in spans:
            processor.on_end(span)

    @property
    def _queued(self) -> int:
        """The number of spans that have not reached the exporter."""
        return self._accepted - self._exporter.taken

    def _sample(self, trace_id: int) -> bool:
        decision = self._sampler.should_sample(Context(), trace_id, "").decision
        return decision is Decision.RECORD_AND_SAMPLE

    def _extract(self, parent: bytes, states: list[bytes]) -> SpanContext | None:
        carrier: dict[str, str | list[str]] = {"traceparent": parent.decode("latin-1")}
        if sum(map(len, states)) + len(states) <= MAX_HEADER_BYTES:
            carrier["tracestate"] = [state.decode("latin-1") for state in states]
        context = get_current_span(self._propagator.extract(carrier, Context())).get_span_context()
        return context if context.is_valid else None

    def _id(self, bits: int) -> int:
        return self._random.getrandbits(bits) or 1  # 0 means none

    def _span_id(self) -> int:
        return self._id(64)


class _Exporter(SpanExporter):
    """Counts exported spans; logs once when the collector fails and once when it is back.

    `export` runs in the processor's thread, which alone writes the counts.
    """

    def __init__(self, inner: SpanExporter, where: str) -> None:
        self._inner = inner
        self._where = where
        self._failing = False
        self._over = False
        self._warnings = _WarningHandler(self._fault)
        # The logger is that of all exporters of the process: only lines of its own thread count.
        self._warnings.addFilter(lambda record: record.thread == self._thread)
        self._thread = 0
        self.taken = 0
        self.exported = 0
        self.failed = 0

    def listen(self) -> None:
        """Intercept the SDK's log of its exporter, which has a line for each failed batch."""
        logger = logging.getLogger(trace_exporter.__name__)
        logger.propagate = False
        logger.setLevel(logging.WARNING)
        logger.addHandler(self._warnings)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.taken += len(spans)
        self._thread = threading.get_ident()
        try:
            result = self._inner.export(spans)
        except Exception as error:  # noqa: BLE001 - whatever it is, the thread must go on
            self._fault(repr(error))
            result = SpanExportResult.FAILURE
        if result is SpanExportResult.SUCCESS:
            self.exported += len(spans)
            if self._failing:
                self._failing = False
                log.info("traces: %s accepts spans again", self._where)
        else:
            self.failed += len(spans)
            self._fault("the collector refused them")
        return result

    def shutdown(self) -> None:
        if not self._over:
            self._over = True
            self._inner.shutdown()
            logger = logging.getLogger(trace_exporter.__name__)
            logger.removeHandler(self._warnings)
            logger.setLevel(logging.CRITICAL)  # the thread may still be in its last attempt

    def _fault(self, reason: str) -> None:
        if not self._failing and not self._over:
            self._failing = True
            log.warning(
                "traces: %s accepts no spans; they are dropped and counted until it does: %s",
                self._where,
                reason[:MAX_REASON_CHARS],
            )


class _WarningHandler(logging.Handler):
    """Forwards records of level warning or above."""

    def __init__(self, callback: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._callback = callback

    def emit(self, record: logging.LogRecord) -> None:
        self._callback(record.getMessage())


def otlp_tracer(endpoint: str, sample_ratio: float) -> Tracer:
    """Return a tracer that sends OTLP over HTTP."""
    # It would log a client's tracestate and, if they are malformed, the headers with our key.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    url = urlsplit(endpoint)
    exporter = trace_exporter.OTLPSpanExporter(endpoint)
    return Tracer(exporter, sample_ratio, f"{url.scheme}://{url.netloc}")


def _resource() -> Resource:
    """Return the resource of OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES, else our name."""
    configured = Resource.create()
    ours: dict[str, str] = {}
    if str(configured.attributes[SERVICE_NAME]).startswith("unknown_service"):
        ours[SERVICE_NAME] = SERVICE
    if SERVICE_VERSION not in configured.attributes:
        ours[SERVICE_VERSION] = version(SERVICE)
    return configured.merge(Resource(ours))
