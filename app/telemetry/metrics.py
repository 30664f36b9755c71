"""Every Prometheus series of the gateway, in one registry that belongs to one application.

Labels are bounded: a model is one of the catalogue's names or "unknown", an endpoint one of the
allow-list's, a status one of HTTP's. Nothing that a client makes up becomes a label.
"""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

# A cached tokenize takes 2 ms, a long reasoning answer ten minutes.
DURATION_BUCKETS = (0.005, 0.025, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
# vLLM's own buckets for vllm:time_to_first_token_seconds, so that both can stand in one graph.
TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
# Ours alone: 50 µs when all is well, a millisecond when the loop is busy.
OVERHEAD_BUCKETS = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1)


class EngineStates(Collector):
    """gateway_engine_state, read when somebody scrapes: 1 for the state an engine is in."""

    def __init__(
        self, read: Callable[[], Iterable[tuple[str, str, str]]], states: list[str]
    ) -> None:
        self._read = read
        self._states = states

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "gateway_engine_state",
            "1 for the state that an engine is in, 0 for the others.",
            labels=("model", "gateway_engine", "state"),
        )
        for model, engine, current in self._read():
            for state in self._states:
                family.add_metric((model, engine, state), float(state == current))
        yield family


class Metrics:
    """The gateway's series. Label look-ups are done once per model, not once per request."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "gateway_requests",
            "Requests that ended, by the status the client was sent (499: it left first).",
            ("model", "endpoint", "status"),
            registry=self.registry,
        )
        self._duration = Histogram(
            "gateway_request_duration_seconds",
            "From the request's head to the last byte of the answer.",
            ("model", "endpoint"),
            buckets=DURATION_BUCKETS,
            registry=self.registry,
        )
        self._ttft = Histogram(
            "gateway_time_to_first_token_seconds",
            "From the request's head to the first byte of a streamed answer's body.",
            ("model",),
            buckets=TTFT_BUCKETS,
            registry=self.registry,
        )
        self._overhead = Histogram(
            "gateway_overhead_seconds",
            "From the request's whole body to the moment the engine is asked.",
            ("model",),
            buckets=OVERHEAD_BUCKETS,
            registry=self.registry,
        )
        self._in_flight = Gauge(
            "gateway_requests_in_flight",
            "Requests that were admitted and have not ended.",
            ("model",),
            registry=self.registry,
        )
        self._disconnects = Counter(
            "gateway_client_disconnects",
            "Clients that left before their answer was whole.",
            registry=self.registry,
        )
        self._retries = Counter(
            "gateway_retries",
            "Requests that were sent to another replica, by what went wrong with the one before.",
            ("reason",),
            registry=self.registry,
        )
        self._auth_failures = Counter(
            "gateway_auth_failures",
            "Requests refused for their API key.",
            ("reason",),
            registry=self.registry,
        )
        self._requests_by: dict[tuple[str, str, int], Counter] = {}
        self._duration_by: dict[tuple[str, str], Histogram] = {}
        self._ttft_by: dict[str, Histogram] = {}
        self._overhead_by: dict[str, Histogram] = {}
        self._in_flight_by: dict[str, Gauge] = {}

    def request(self, model: str, endpoint: str, status: int, seconds: float) -> None:
        """Count a request that ended."""
        counter = self._requests_by.get((model, endpoint, status))
        if counter is None:
            counter = self._requests.labels(model, endpoint, str(status))
            self._requests_by[model, endpoint, status] = counter
        counter.inc()
        duration = self._duration_by.get((model, endpoint))
        if duration is None:
            duration = self._duration_by[model, endpoint] = self._duration.labels(model, endpoint)
        duration.observe(seconds)

    def first_token(self, model: str, seconds: float) -> None:
        """Record the time to the first token of a stream."""
        histogram = self._ttft_by.get(model)
        if histogram is None:
            histogram = self._ttft_by[model] = self._ttft.labels(model)
        histogram.observe(seconds)

    def overhead(self, model: str, seconds: float) -> None:
        """Record what the gateway itself took before it asked an engine."""
        histogram = self._overhead_by.get(model)
        if histogram is None:
            histogram = self._overhead_by[model] = self._overhead.labels(model)
        histogram.observe(seconds)

    def in_flight(self, model: str) -> Gauge:
        """Return the gauge of a model's requests under way."""
        gauge = self._in_flight_by.get(model)
        if gauge is None:
            gauge = self._in_flight_by[model] = self._in_flight.labels(model)
        return gauge

    def disconnect(self) -> None:
        """Count a client that left."""
        self._disconnects.inc()

    def retry(self, reason: str) -> None:
        """Count a request that goes to another replica; `reason` is the name of an error class."""
        self._retries.labels(reason).inc()

    def auth_failure(self, reason: str) -> None:
        """Count a request refused for its key: missing or invalid."""
        self._auth_failures.labels(reason).inc()

    def watch_engines(
        self, read: Callable[[], Iterable[tuple[str, str, str]]], states: list[str]
    ) -> None:
        """Export the state of engines; `read` returns (model, engine, state) for each."""
        self.registry.register(EngineStates(read, states))

    def exposition(self) -> tuple[bytes, str]:
        """Return what GET /metrics answers: body and content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST
