"""Series whose values are not counted, but read at each scrape."""

from collections.abc import Callable, Iterable

from app.telemetry.metrics.gateway_series import Metrics
from app.telemetry.metrics.series import Gauge


class ScrapedValues:
    """Reads the values of series where they are, before each page."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._before_scrape = metrics.registry.before_scrape

    def watch_in_flight(self, read: Callable[[], Iterable[tuple[str, int]]]) -> None:
        """Export the requests in flight; `read` returns (model, requests) pairs."""
        gauge = self._metrics.requests_in_flight

        def set_in_flight() -> None:
            gauge.values = dict.fromkeys(gauge.values, 0)
            for model, count in read():
                gauge.add((model,), count)

        self._before_scrape(set_in_flight)

    def watch_queues(self, read: Callable[[], Iterable[tuple[str, int]]]) -> None:
        """Export the queue limits; `read` returns (model, limit) pairs."""
        self._watch_models(self._metrics.queue_limit, read)

    def watch_fairness(self, read: Callable[[], Iterable[tuple[str, float]]]) -> None:
        """Export how evenly keys are served; `read` returns (model, index) pairs."""

        def set_values() -> None:
            self._metrics.queue_fairness.values = {(model,): index for model, index in read()}

        self._before_scrape(set_values)

    def watch_scaling(self, read: Callable[[], Iterable[tuple[str, int]]]) -> None:
        """Export what scaling has decided; `read` returns (model, number of engines) pairs."""
        self._watch_models(self._metrics.engines_wanted, read)

    def watch_concurrency(self, read: Callable[[], Iterable[tuple[str, str, int]]]) -> None:
        """Export the targets that were found; `read` returns (model, engine, requests)."""

        def set_values() -> None:
            self._metrics.engine_concurrency_target.values = {
                (model, engine): target for model, engine, target in read()
            }

        self._before_scrape(set_values)

    def watch_models(self, read: Callable[[], Iterable[tuple[str, bool]]]) -> None:
        """Export which models are on demand; `read` returns (model, on demand) pairs."""
        self._watch_models(self._metrics.model_on_demand, read)

    def watch_discovery(self, read: Callable[[], Iterable[tuple[str, int, int, int]]]) -> None:
        """Export what is discovered.

        `read` returns for each model its name, servers listed and serving, and failing sources.
        """

        def set_values() -> None:
            counts = list(read())
            self._metrics.discovered_servers.values = {
                (model, state): number
                for model, listed, serving, _ in counts
                for state, number in (("listed", listed), ("serving", serving))
            }
            self._metrics.discovery_sources_failing.values = {
                (model,): failing for model, _, _, failing in counts
            }

        self._before_scrape(set_values)

    def watch_budgets(self, read: Callable[[], Iterable[tuple[str, int, int]]]) -> None:
        """Export the budgets; `read` returns (window, nearly used, exhausted) for each window."""

        def set_budgets() -> None:
            for window, nearly_used, exhausted in read():
                self._metrics.budgets_nearly_used.set((window,), nearly_used)
                self._metrics.budgets_exhausted.set((window,), exhausted)

        self._before_scrape(set_budgets)

    def watch_load_sharing(
        self,
        gateways: Callable[[], int],
        elsewhere: Callable[[], Iterable[tuple[str, str, int]]],
        available: Callable[[], bool],
    ) -> None:
        """Export what other gateways report; `elsewhere` returns (model, engine, requests)."""

        def set_load() -> None:
            self._metrics.load_sharing_gateways.set((), gateways())
            self._metrics.load_sharing_available.set((), available())
            self._metrics.engine_in_flight_elsewhere.values = {
                (model, engine): count for model, engine, count in elsewhere()
            }

        self._before_scrape(set_load)

    def watch_ledger(self, pending: Callable[[], int]) -> None:
        """Export the number of usage records that are not yet in the database."""
        self._before_scrape(lambda: self._metrics.usage_records_pending.set((), pending()))

    def watch_connections(self, count_open: Callable[[], int], limit: int) -> None:
        """Export the open client connections and their maximum."""
        self._metrics.connections_limit.set((), limit)
        self._before_scrape(lambda: self._metrics.connections.set((), count_open()))

    def watch_certificate(self, read: Callable[[], float]) -> None:
        """Export when the certificate expires; `read` returns a Unix time."""
        self._before_scrape(lambda: self._metrics.tls_certificate_expiry.set((), read()))

    def watch_spans(self, read: Callable[[], tuple[int, int]]) -> None:
        """Export the trace spans, counted in another thread; `read` returns exported, dropped."""

        def set_spans() -> None:
            exported, dropped = read()
            self._metrics.trace_spans.values = {("exported",): exported, ("dropped",): dropped}

        self._before_scrape(set_spans)

    def watch_loop(self, lag_s: Callable[[], float]) -> None:
        """Export the lag of the event loop."""
        self._before_scrape(lambda: self._metrics.event_loop_lag.set((), lag_s()))

    def watch_log(self, lost: Callable[[], int]) -> None:
        """Export the number of lost log lines, counted in another thread."""
        self._before_scrape(lambda: self._metrics.log_lines_lost.values.update({(): lost()}))

    def _watch_models(self, gauge: Gauge, read: Callable[[], Iterable[tuple[str, int]]]) -> None:
        def set_values() -> None:
            gauge.values = {(model,): int(value) for model, value in read()}

        self._before_scrape(set_values)
