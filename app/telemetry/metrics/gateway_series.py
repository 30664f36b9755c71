"""Every Prometheus series of the gateway, each declared once, in one registry per application.

Labels are bounded: a model is a name of the configuration or "unknown", an endpoint a route of the
allow-list, a status one of HTTP's. Text that a client makes up never becomes a label.
"""

from importlib.metadata import version
from typing import Annotated

from prometheus_client import ProcessCollector

from app.telemetry.metrics.buckets import (
    DURATION_BUCKETS,
    GAP_BUCKETS,
    INTER_TOKEN_BUCKETS,
    LOAD_BUCKETS,
    OVERHEAD_BUCKETS,
    RATIO_BUCKETS,
    TTFT_BUCKETS,
)
from app.telemetry.metrics.engine_series import EngineSeries
from app.telemetry.metrics.series import Counter, Gauge, Histogram, Registry, create_series
from app.telemetry.request_record import UNKNOWN_MODEL, RequestRecord

# Cached tokens are part of the prompt tokens.
TOKEN_KINDS = ("prompt", "cached", "completion")
# The endpoint of a request that reached none: an unknown path, or not HTTP at all.
NO_ENDPOINT = "none"

# Labels `way` and `outcome` of interrupted streams. For `none`, the outcome is the reason why the
# stream could not go on; docs/continuation.md explains each.
CONTINUATION_OUTCOMES = {
    "replay": (
        "continued", "no_replica", "died_again", "refused", "disconnected", "finished", "unaligned",
        "second_thought",
    ),
    "verify": ("continued", "no_replica", "died_again", "refused", "disconnected", "diverged"),
    "none": (
        "died_again", "disconnected", "finished", "too_long", "tool_call", "second_thought",
        "bad_words", "beam_search", "echo", "endpoint", "forced_tool", "hidden_reasoning",
        "kv_transfer", "logprobs", "media", "other_field", "penalties", "seed", "several_choices",
        "stop", "stored", "structured_output", "thinking_budget", "truncation", "version",
    ),
}  # fmt: skip

_MODEL = ("model",)


# Completed requests that are counted at a time.
COMPLETED_AT_ONCE = 64


class Metrics:
    """The gateway's series, a table in the order of the page: kind, name, help text, labels.

    The rest of a row is the buckets of a histogram, or the values of a counter that start at 0.

    docs/metrics.md lists them with the same names, labels and help texts; a test compares both.
    """

    _info: Annotated[Gauge, "gateway_info", "1; the label is the gateway's version.", ("version",)]

    # Requests
    requests: Annotated[
        Counter,
        "gateway_requests_total",
        "Completed requests, by the status sent to the client; 499: the client disconnected.",
        ("model", "endpoint", "status"),
    ]
    request_duration: Annotated[
        Histogram,
        "gateway_request_duration_seconds",
        "Time from the request headers to the last byte of the response.",
        ("model", "endpoint"),
        DURATION_BUCKETS,
    ]
    time_to_first_token: Annotated[
        Histogram,
        "gateway_time_to_first_token_seconds",
        "Time from the request headers to the first body byte of a stream.",
        _MODEL,
        TTFT_BUCKETS,
    ]
    inter_token_latency: Annotated[
        Histogram,
        "gateway_inter_token_latency_seconds",
        "Time between two chunks of a stream, as they are sent to the client.",
        _MODEL,
        INTER_TOKEN_BUCKETS,
    ]
    overhead: Annotated[
        Histogram,
        "gateway_overhead_seconds",
        "The gateway's own time, from the parsed body to the first request to an engine of the "
        "requested model, queueing excluded.",
        _MODEL,
        OVERHEAD_BUCKETS,
    ]
    requests_in_flight: Annotated[
        Gauge, "gateway_requests_in_flight", "Admitted requests that have not completed.", _MODEL
    ]
    client_disconnects: Annotated[
        Counter,
        "gateway_client_disconnects_total",
        "Clients that disconnected before their response was complete.",
    ]
    retries: Annotated[
        Counter,
        "gateway_retries_total",
        "Requests retried on another replica, by the error of the previous one.",
        ("reason",),
    ]
    fallbacks: Annotated[
        Counter,
        "gateway_fallbacks_total",
        "Requests for a model that were passed to a fallback because no engine of the model "
        "could serve.",
        ("model", "fallback"),
    ]
    split_requests: Annotated[
        Counter,
        "gateway_split_requests_total",
        "Requests for a name that several models share, by the model that the split chose.",
        ("model", "target"),
    ]
    continuations: Annotated[
        Counter,
        "gateway_continuations_total",
        "Streams interrupted by their engine, by the way to continue them (replay, verify, "
        "none) and the outcome: continued, or the reason why not.",
        ("model", "way", "outcome"),
    ]
    continuation_gap: Annotated[
        Histogram,
        "gateway_continuation_gap_seconds",
        "Time from the interruption of a stream to its first new bytes from the next engine.",
        _MODEL,
        GAP_BUCKETS,
    ]
    tokens: Annotated[
        Counter,
        "gateway_tokens_total",
        "Tokens of completed requests: prompt, cached (part of prompt), completion.",
        ("model", "kind"),
    ]

    # Admission, limits and authentication
    queue_depth: Annotated[
        Gauge,
        "gateway_queue_depth",
        "Requests waiting for an engine, or for a model to load.",
        _MODEL,
    ]
    engines_wanted: Annotated[
        Gauge,
        "gateway_engines_wanted",
        "Engines that a model should have, where their number is scaled.",
        _MODEL,
    ]
    engine_concurrency_target: Annotated[
        Gauge,
        "gateway_engine_concurrency_target",
        "Requests that an engine gets at once, where queue.max_in_flight is auto.",
        ("model", "gateway_engine"),
    ]
    queue_limit: Annotated[
        Gauge,
        "gateway_queue_limit",
        "Maximum number of waiting requests: queue.max_waiting.",
        _MODEL,
    ]
    queue_fairness: Annotated[
        Gauge,
        "gateway_queue_fairness",
        "Jain's index of what keys that go on waiting were served in the last minute or two, by "
        "weight: 1 if all got the same, 1/n if one of n got everything.",
        _MODEL,
    ]
    queue_wait: Annotated[
        Histogram,
        "gateway_queue_wait_seconds",
        "Queueing time of requests that had to wait, timeouts included.",
        _MODEL,
        DURATION_BUCKETS,
    ]
    queue_wait_ratio: Annotated[
        Histogram,
        "gateway_queue_wait_ratio",
        "Queueing time of requests with a deadline, divided by the time that was expected when "
        "they came.",
        _MODEL,
        RATIO_BUCKETS,
    ]
    auth_failures: Annotated[
        Counter,
        "gateway_auth_failures_total",
        "Requests refused for their API key: missing, invalid.",
        ("reason",),
        ("missing", "invalid"),
    ]
    rate_limited: Annotated[
        Counter,
        "gateway_rate_limited_total",
        "Requests refused with 429, by limit: requests, tokens, concurrency, budget, body_bytes.",
        ("limit",),
        ("requests", "tokens", "concurrency", "budget", "body_bytes"),
    ]
    redis_errors: Annotated[
        Counter, "gateway_redis_errors_total", "Redis calls that failed or timed out."
    ]
    redis_available: Annotated[
        Gauge,
        "gateway_redis_available",
        "1 while limits are counted in Redis, 0 while its circuit breaker is open and "
        "limits.redis_unavailable applies; absent without Redis.",
    ]

    # Other gateways
    load_reports: Annotated[
        Counter,
        "gateway_load_reports_total",
        "Load reports of other gateways: received, lost (a gap in their sequence), invalid.",
        ("outcome",),
        ("received", "lost", "invalid"),
    ]
    load_sharing_available: Annotated[
        Gauge,
        "gateway_load_sharing_available",
        "1 while load reports arrive through Redis, 0 while this gateway routes by its own "
        "requests; absent without Redis.",
    ]
    load_sharing_gateways: Annotated[
        Gauge,
        "gateway_load_sharing_gateways",
        "Gateways that serve an engine of this one, itself included; absent without Redis.",
    ]
    engine_in_flight_elsewhere: Annotated[
        Gauge,
        "gateway_engine_in_flight_elsewhere",
        "Requests of other gateways that an engine is working on; absent without Redis, and "
        "for engines that this gateway runs.",
        ("model", "gateway_engine"),
    ]

    # Usage and budgets
    usage_records: Annotated[
        Counter,
        "gateway_usage_records_total",
        "Requests that reached an engine, one ledger record each: completed, refused (a 4xx of "
        "the engine), failed, disconnected, canceled.",
        ("outcome",),
        ("completed", "refused", "failed", "disconnected", "canceled"),
    ]
    usage_records_pending: Annotated[
        Gauge,
        "gateway_usage_records_pending",
        "Usage records in memory that are not yet in the database.",
    ]
    usage_records_lost: Annotated[
        Counter,
        "gateway_usage_records_lost_total",
        "Usage records dropped because the database was unavailable until the buffer was full.",
    ]
    ledger_errors: Annotated[
        Counter,
        "gateway_ledger_errors_total",
        "Failed writes of usage records; they are retried while that can help.",
    ]
    captures: Annotated[
        Counter,
        "gateway_captures_total",
        "Captures of requests: stored; not stored since memory was short (no_memory), since "
        "capture.total_bytes was used (no_room), or for a fault (failed).",
        ("outcome",),
        ("stored", "no_memory", "no_room", "failed"),
    ]
    budgets_nearly_used: Annotated[
        Gauge,
        "gateway_budgets_nearly_used",
        "Keys and owners active in the last minute that have used 90 % or more of a budget, "
        "exhausted ones included.",
        ("window",),
    ]
    budgets_exhausted: Annotated[
        Gauge,
        "gateway_budgets_exhausted",
        "Keys and owners active in the last minute that have used all of a budget; budgets of "
        "0 do not count.",
        ("window",),
    ]
    alerts: Annotated[
        Counter,
        "gateway_alerts_total",
        "Delivery attempts of alerts: delivered, failed (will be retried), given_up "
        "(the last of 20 attempts).",
        ("outcome",),
        ("delivered", "failed", "given_up"),
    ]
    backups: Annotated[
        Counter,
        "gateway_backups_total",
        "Backups of the database by its schedule: made, failed (tried again after 15 minutes).",
        ("outcome",),
        ("made", "failed"),
    ]

    # Engines and models
    engines: EngineSeries
    engine_load: Annotated[
        Histogram,
        "gateway_engine_load_seconds",
        "Time that the engines of a model took to start or to wake up.",
        _MODEL,
        LOAD_BUCKETS,
    ]
    engine_scrape_errors: Annotated[
        Counter,
        "gateway_engine_scrape_errors_total",
        "Scrapes of an engine for /metrics/engines that failed or were incomplete.",
        ("model", "gateway_engine"),
    ]
    discovered_servers: Annotated[
        Gauge,
        "gateway_discovered_servers",
        "Discovered servers of a model: listed by a source, and serving.",
        ("model", "state"),
    ]
    discovery_sources_failing: Annotated[
        Gauge,
        "gateway_discovery_sources_failing",
        "Sources of a model's discovered servers that cannot be read.",
        _MODEL,
    ]
    model_on_demand: Annotated[
        Gauge,
        "gateway_model_on_demand",
        "1 for a model whose engines start on request, 0 for a model that is always loaded.",
        _MODEL,
    ]
    model_evictions: Annotated[
        Counter,
        "gateway_model_evictions_total",
        "Unloaded on-demand models, by reason: idle, room (another model needed the memory), "
        "operator.",
        ("model", "reason"),
    ]

    # The process
    connections: Annotated[Gauge, "gateway_connections", "Open client connections."]
    connections_limit: Annotated[
        Gauge,
        "gateway_connections_limit",
        "Maximum number of client connections: server.max_connections.",
    ]
    tls_certificate_expiry: Annotated[
        Gauge,
        "gateway_tls_certificate_expiry_timestamp_seconds",
        "When the certificate of server.tls expires, as a Unix time.",
    ]
    tls_handshake_failures: Annotated[
        Counter,
        "gateway_tls_handshake_failures_total",
        "TLS connections that ended before a request: refused, timeout, protocol, closed.",
        ("reason",),
        ("refused", "timeout", "protocol", "closed"),
    ]
    event_loop_lag: Annotated[
        Gauge,
        "gateway_event_loop_lag_seconds",
        "Longest delay of a timer on the event loop in the last 15 to 30 s.",
    ]
    reloads: Annotated[
        Counter,
        "gateway_reloads_total",
        "Configuration reloads: done, partial (some models failed), invalid (nothing changed), "
        "failed (a fault of the gateway).",
        ("outcome",),
        ("done", "partial", "invalid", "failed"),
    ]
    log_lines_lost: Annotated[
        Counter, "gateway_log_lines_lost_total", "Log lines that did not reach their destination."
    ]
    trace_spans: Annotated[
        Counter,
        "gateway_trace_spans_total",
        "Trace spans: exported to the collector, or dropped because it was unavailable or the "
        "queue was full.",
        ("outcome",),
        ("exported", "dropped"),
    ]

    def __init__(self) -> None:
        self.registry = Registry()
        create_series(self, self.registry)
        ProcessCollector(registry=self.registry)
        self._info.set((version("vllm-gateway"),), 1)
        # By model, in the order of TOKEN_KINDS; copied to the series at a scrape.
        self._token_counts: dict[str, list[int]] = {}
        self._completed: list[RequestRecord] = []  # not counted yet
        self._histograms = [one for one in self.registry.series if isinstance(one, Histogram)]
        self.registry.before_scrape(self._set_tokens)

    def add_model(self, model: str) -> None:
        """Create the series of a model that are always on the page."""
        self.requests_in_flight.add((model,), 0)
        self.queue_depth.add((model,), 0)
        self._token_counts.setdefault(model, [0, 0, 0])
        # Interruptions are rare: without a 0 before it, an alert would not see the first.
        for way, outcomes in CONTINUATION_OUTCOMES.items():
            for outcome in outcomes:
                self.continuations.add((model, way, outcome), 0)

    def record_request(self, model: str, endpoint: str, status: int, seconds: float) -> None:
        """Record a completed request."""
        self.requests.add((model, endpoint, str(status)))
        self.request_duration.buckets((model, endpoint)).observe(seconds)

    def record(self, record: RequestRecord) -> None:
        """Record a completed request, with its outcome and tokens if it reached an engine."""
        self._completed.append(record)
        if len(self._completed) >= COMPLETED_AT_ONCE:
            self.count_completed()

    def count_completed(self) -> None:
        """Count the requests that were recorded; done before every read of their series."""
        completed, self._completed = self._completed, []
        requests, outcomes = self.requests.values, self.usage_records.values
        durations = self.request_duration.buckets
        for record in completed:
            model, endpoint = record.model, record.endpoint
            labels = (model, endpoint, str(record.status))
            requests[labels] = requests.get(labels, 0) + 1
            durations((model, endpoint)).observe(record.total_s)
            if record.engine is not None:
                outcomes[(record.outcome,)] += 1
                if (usage := record.usage) is not None:
                    tokens = self._token_counts.setdefault(model, [0, 0, 0])
                    tokens[0] += usage.prompt
                    tokens[1] += usage.cached
                    tokens[2] += usage.completion

    def count_observed(self) -> None:
        """Count the values of all histograms; done often, since no scrape may come."""
        for histogram in self._histograms:
            histogram.count()

    def record_refusal(self, status: int) -> None:
        """Record a request that was refused before its model and endpoint were known."""
        self.requests.add((UNKNOWN_MODEL, NO_ENDPOINT, str(status)))

    def completion_tokens_by_model(self) -> dict[str, int]:
        """Return the completion tokens of completed requests."""
        self.count_completed()
        return {model: counts[2] for model, counts in self._token_counts.items()}

    def _set_tokens(self) -> None:
        self.count_completed()
        for model, counts in self._token_counts.items():
            for kind, count in zip(TOKEN_KINDS, counts, strict=True):
                self.tokens.values[model, kind] = count

    def exposition(self) -> bytes:
        """Return the page of GET /metrics, in Prometheus's text format 0.0.4."""
        return self.registry.page()
