"""Every Prometheus series of the gateway, in one registry that belongs to one application.

Labels are bounded: a model is one of the catalogue's names or "unknown", an endpoint one of the
allow-list's, a status one of HTTP's. Nothing that a client makes up becomes a label.
"""

from collections.abc import Callable, Iterable
from importlib.metadata import version

from prometheus_client import ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from app.telemetry.logs.access import UNKNOWN_MODEL, Tokens
from app.telemetry.metrics.engines import EngineFigures, EngineSeries
from app.telemetry.metrics.series import Buckets, Counter, Gauge, Histogram, Registry

# Cached tokens are part of the prompt's.
TOKEN_KINDS = ("prompt", "cached", "completion")
# The endpoint of a request that came to none: a path that is not there, or no HTTP at all.
NO_ENDPOINT = "none"

# A cached tokenize takes 2 ms, a long reasoning answer ten minutes.
DURATION_BUCKETS = (0.005, 0.025, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
# vLLM's own buckets for vllm:time_to_first_token_seconds, so that both can stand in one graph.
TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
# Ours alone: 50 µs when all is well, a millisecond when the loop is busy.
OVERHEAD_BUCKETS = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1)
# A tiny model on a warm machine is up in ten seconds, a large one from a network disk in an hour.
LOAD_BUCKETS = (0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280, 2560)
# vLLM's own buckets for vllm:inter_token_latency_seconds.
GAP_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip


class Metrics:
    """The gateway's series."""

    def __init__(self) -> None:
        self.registry = registry = Registry()
        info = Gauge(registry, "gateway_info", "1; the label tells what runs.", ("version",))
        info.set((version("vllm-gateway"),), 1)
        self._requests = Counter(
            registry,
            "gateway_requests",
            "Requests that ended, by the status the client was sent (499: it left first).",
            ("model", "endpoint", "status"),
        )
        self._duration = Histogram(
            registry,
            "gateway_request_duration_seconds",
            "From the request's head to the last byte of the answer.",
            ("model", "endpoint"),
            DURATION_BUCKETS,
        )
        self._ttft = Histogram(
            registry,
            "gateway_time_to_first_token_seconds",
            "From the request's head to the first byte of a streamed answer's body.",
            ("model",),
            TTFT_BUCKETS,
        )
        self._gaps = Histogram(
            registry,
            "gateway_inter_token_latency_seconds",
            "Between two pieces of a streamed answer, as they leave for the client.",
            ("model",),
            GAP_BUCKETS,
        )
        self._overhead = Histogram(
            registry,
            "gateway_overhead_seconds",
            "From the request's whole body to the moment the engine is asked.",
            ("model",),
            OVERHEAD_BUCKETS,
        )
        self._in_flight = Gauge(
            registry,
            "gateway_requests_in_flight",
            "Requests that were admitted and have not ended.",
            ("model",),
        )
        self._disconnects = Counter(
            registry,
            "gateway_client_disconnects",
            "Clients that left before their answer was whole.",
        )
        self._retries = Counter(
            registry,
            "gateway_retries",
            "Requests that were sent to another replica, by what went wrong with the one before.",
            ("reason",),
        )
        self._fallbacks = Counter(
            registry,
            "gateway_fallbacks",
            "Requests that were handed on to another model since none of the engines could serve.",
            ("model", "fallback"),
        )
        self._auth_failures = Counter(
            registry,
            "gateway_auth_failures",
            "Requests refused for their API key.",
            ("reason",),
        )
        self._tokens = Counter(
            registry,
            "gateway_tokens",
            "Tokens of the requests that ended; cached ones are part of the prompt's.",
            ("model", "kind"),
        )
        # By model, in the order of TOKEN_KINDS; the series is set when it is read.
        self._token_counts: dict[str, list[int]] = {}
        registry.before_scrape(self._set_tokens)
        self._trace_spans = Counter(
            registry,
            "gateway_trace_spans",
            "Spans that the collector of traces took, and spans that were dropped.",
            ("outcome",),
        )
        self._trace_spans.values = {("exported",): 0, ("dropped",): 0}
        self._usage_records = Counter(
            registry,
            "gateway_usage_records",
            "Requests that reached an engine, by how they ended.",
            ("outcome",),
        )
        self._usage_lost = Counter(
            registry,
            "gateway_usage_records_lost",
            "Usage records that the database did not take before the memory for them was full.",
        )
        self._rate_limited = Counter(
            registry,
            "gateway_rate_limited",
            "Requests refused with 429, by the limit that was reached.",
            ("limit",),
        )
        self._redis_errors = Counter(
            registry, "gateway_redis_errors", "Calls to Redis that failed or took too long."
        )
        self._redis_available = Gauge(
            registry,
            "gateway_redis_available",
            "1 while limits are counted in Redis, 0 while its circuit breaker is open.",
        )
        self._queue_depth = Gauge(
            registry, "gateway_queue_depth", "Requests that wait for an engine.", ("model",)
        )
        self._queue_wait = Histogram(
            registry,
            "gateway_queue_wait_seconds",
            "How long a request waited for an engine, if it had to.",
            ("model",),
            DURATION_BUCKETS,
        )
        self._engine_load = Histogram(
            registry,
            "gateway_engine_load_seconds",
            "How long the engines of a model took to start, or to wake.",
            ("model",),
            LOAD_BUCKETS,
        )
        self._scrape_errors = Counter(
            registry,
            "gateway_engine_scrape_errors",
            "Engines' own series that could not be had, or not all of them, for /metrics/engines.",
            ("model", "gateway_engine"),
        )
        self._evictions = Counter(
            registry,
            "gateway_model_evictions",
            "Models on demand that were unloaded: idle, to make room, or by an operator.",
            ("model", "reason"),
        )
        self._on_demand = Gauge(
            registry,
            "gateway_model_on_demand",
            "1 for a model whose engines start at a request, 0 for one that is always loaded.",
            ("model",),
        )
        self._queue_limit = Gauge(
            registry, "gateway_queue_limit", "Requests that may wait for an engine.", ("model",)
        )
        self._nearly_used = Gauge(
            registry,
            "gateway_budgets_nearly_used",
            "Keys and owners in use that have spent 90 % or more of a budget, or all of it.",
            ("window",),
        )
        self._exhausted = Gauge(
            registry,
            "gateway_budgets_exhausted",
            "Keys and owners in use that have spent all of a budget.",
            ("window",),
        )
        self._usage_pending = Gauge(
            registry,
            "gateway_usage_records_pending",
            "Usage records in memory that are not known to be in the database.",
        )
        self._ledger_errors = Counter(
            registry,
            "gateway_ledger_errors",
            "Writes of usage records that failed; they are repeated while that can help.",
        )
        self._alerts = Counter(
            registry,
            "gateway_alerts",
            "Attempts to deliver an alert on a budget, by their outcome.",
            ("outcome",),
        )
        self._reloads = Counter(
            registry,
            "gateway_reloads",
            "Reloads of the configuration, by how they ended.",
            ("outcome",),
        )
        self._connections = Gauge(
            registry, "gateway_connections", "Connections of clients that are open."
        )
        self._connections_limit = Gauge(
            registry, "gateway_connections_limit", "Connections of clients that may be open."
        )
        self._loop_lag = Gauge(
            registry,
            "gateway_event_loop_lag_seconds",
            "The longest that the event loop was late for a timer in the last 15 to 30 s.",
        )
        self._lines_lost = Counter(
            registry,
            "gateway_log_lines_lost",
            "Lines of the log that did not get where they belong: standard error took no more, or "
            "the file could not be written.",
        )
        self._engines = EngineSeries(registry)
        ProcessCollector(registry=registry)
        # A rate needs a value before the first count.
        for series, values in (
            (self._usage_records, ("completed", "refused", "failed", "disconnected")),
            (self._auth_failures, ("missing", "invalid")),
            (self._rate_limited, ("requests", "tokens", "concurrency", "budget", "body_bytes")),
            (self._reloads, ("done", "partial", "invalid", "failed")),
            (self._alerts, ("delivered", "failed", "given_up")),
        ):
            for value in values:
                series.add((value,), 0)

    def open_model(self, model: str) -> None:
        """Have the series of a model that are always there."""
        self._in_flight.add((model,), 0)
        self._queue_depth.add((model,), 0)
        self._token_counts.setdefault(model, [0, 0, 0])

    def request(self, model: str, endpoint: str, status: int, seconds: float) -> None:
        """Count a request that ended."""
        counts, labels = self._requests.values, (model, endpoint, str(status))
        counts[labels] = counts.get(labels, 0) + 1
        self._duration.of((model, endpoint)).observe(seconds)

    def refusal(self, status: int) -> None:
        """Count a request that was refused before anybody could tell what it was for."""
        self._requests.add((UNKNOWN_MODEL, NO_ENDPOINT, str(status)))

    def first_token(self, model: str, seconds: float) -> None:
        """Record the time to the first token of a stream."""
        self._ttft.of((model,)).observe(seconds)

    def gaps(self, model: str) -> Buckets:
        """Return where the time between two chunks of a model's streams is recorded."""
        return self._gaps.of((model,))

    def overhead(self, model: str, seconds: float) -> None:
        """Record what the gateway itself took before it asked an engine."""
        self._overhead.of((model,)).observe(seconds)

    def usage(self, model: str, outcome: str, tokens: Tokens | None) -> None:
        """Count how a request ended that reached an engine, and what it took, if tokens."""
        self._usage_records.values[(outcome,)] += 1
        if tokens is not None:
            counts = self._token_counts.get(model) or self._token_counts.setdefault(
                model, [0, 0, 0]
            )
            counts[0] += tokens.prompt
            counts[1] += tokens.cached
            counts[2] += tokens.completion

    def disconnect(self) -> None:
        """Count a client that left."""
        self._disconnects.add()

    def retry(self, reason: str) -> None:
        """Count a request that goes to another replica; `reason` is the name of an error class."""
        self._retries.add((reason,))

    def fallback(self, model: str, fallback: str) -> None:
        """Count a request for a model that another one is to serve."""
        self._fallbacks.add((model, fallback))

    def auth_failure(self, reason: str) -> None:
        """Count a request refused for its key: missing or invalid."""
        self._auth_failures.add((reason,))

    def usage_lost(self, records: int) -> None:
        """Count usage records that are lost."""
        self._usage_lost.add((), records)

    def rate_limited(self, limit: str) -> None:
        """Count a request refused with 429: `limit` says by which limit."""
        self._rate_limited.add((limit,))

    def redis_error(self) -> None:
        """Count a call to Redis that failed."""
        self._redis_errors.add()

    def redis_available(self, available: bool) -> None:
        """Record a change of the circuit breaker before Redis."""
        self._redis_available.set((), float(available))

    def queue_depth(self, model: str, change: int) -> None:
        """Count a request that begins to wait for an engine (1), or that waits no more (-1)."""
        self._queue_depth.add((model,), change)

    def queue_wait(self, model: str, seconds: float) -> None:
        """Record how long a request has waited."""
        self._queue_wait.of((model,)).observe(seconds)

    def engine_load(self, model: str, seconds: float) -> None:
        """Record how long a model took to load."""
        self._engine_load.of((model,)).observe(seconds)

    def eviction(self, model: str, reason: str) -> None:
        """Count a model that is unloaded: idle, room or operator."""
        self._evictions.add((model, reason))

    def ledger_error(self) -> None:
        """Count a write of usage records that failed."""
        self._ledger_errors.add()

    def alert(self, outcome: str) -> None:
        """Count an attempt to deliver an alert: delivered, failed, or given_up, the last one."""
        self._alerts.add((outcome,))

    def reload(self, outcome: str) -> None:
        """Count a reload: done, partial (some models could not), invalid or failed."""
        self._reloads.add((outcome,))

    def engine_scraped(self, model: str, engine: str, *, whole: bool) -> None:
        """Count an engine whose series were asked for; not `whole`: some or all are missing."""
        self._scrape_errors.add((model, engine), 0 if whole else 1)

    # What is read when somebody scrapes

    def watch_engines(
        self, read: Callable[[], Iterable[tuple[str, str, str]]], states: list[str]
    ) -> None:
        """Export the state of engines; `read` returns (model, engine, state) for each."""
        self._engines.watch_states(read, states)

    def watch_figures(self, read: Callable[[], Iterable[EngineFigures]]) -> None:
        """Export what is known of engines; `read` returns it for each."""
        self._engines.watch_figures(read)

    def watch_in_flight(self, read: Callable[[], Iterable[tuple[str, int]]]) -> None:
        """Export how many requests are under way; `read` returns that for each model."""

        def set_in_flight() -> None:
            self._in_flight.values = dict.fromkeys(self._in_flight.values, 0)
            for model, count in read():
                self._in_flight.add((model,), count)

        self.registry.before_scrape(set_in_flight)

    def _set_tokens(self) -> None:
        for model, counts in self._token_counts.items():
            for kind, count in zip(TOKEN_KINDS, counts, strict=True):
                self._tokens.values[model, kind] = count

    def watch_queues(self, read: Callable[[], Iterable[tuple[str, int]]]) -> None:
        """Export how many requests may wait; `read` returns that for each model."""

        def set_limits() -> None:
            self._queue_limit.values = {(model,): most for model, most in read()}

        self.registry.before_scrape(set_limits)

    def watch_budgets(self, read: Callable[[], Iterable[tuple[str, int, int]]]) -> None:
        """Export the budgets; `read` returns window, accounts near its end, and at its end."""

        def set_budgets() -> None:
            for window, near, at_end in read():
                self._nearly_used.set((window,), near)
                self._exhausted.set((window,), at_end)

        self.registry.before_scrape(set_budgets)

    def watch_ledger(self, pending: Callable[[], int]) -> None:
        """Export how many records wait to be written."""
        self.registry.before_scrape(lambda: self._usage_pending.set((), pending()))

    def watch_connections(self, opened: Callable[[], int], limit: int) -> None:
        """Export how many connections of clients are open, and how many may be."""
        self._connections_limit.set((), limit)
        self.registry.before_scrape(lambda: self._connections.set((), opened()))

    def watch_spans(self, read: Callable[[], tuple[int, int]]) -> None:
        """Export how many spans were exported and dropped; another thread counts what left."""

        def set_spans() -> None:
            exported, dropped = read()
            self._trace_spans.values = {("exported",): exported, ("dropped",): dropped}

        self.registry.before_scrape(set_spans)

    def watch_loop(self, lag_s: Callable[[], float]) -> None:
        """Export how late the event loop was."""
        self.registry.before_scrape(lambda: self._loop_lag.set((), lag_s()))

    def watch_log(self, lost: Callable[[], int]) -> None:
        """Export how many lines of the log were lost."""
        self.registry.before_scrape(lambda: self._lines_lost.values.update({(): lost()}))

    def watch_models(self, read: Callable[[], Iterable[tuple[str, bool]]]) -> None:
        """Export which models are on demand; `read` returns (model, on demand) for each."""

        def set_models() -> None:
            self._on_demand.values = {(model,): int(on_demand) for model, on_demand in read()}

        self.registry.before_scrape(set_models)

    def exposition(self) -> tuple[bytes, str]:
        """Return what GET /metrics answers: body and content type."""
        return self.registry.page(), CONTENT_TYPE_PLAIN_0_0_4
