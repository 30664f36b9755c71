"""Series whose numbers are plain numbers. Everything happens on one loop, so nothing is locked.

prometheus-client names, checks and writes them; but its own counters take a lock and its
histograms walk their buckets, which for every request and chunk is more than what they measure.
"""

from bisect import bisect_left
from collections.abc import Iterator
from math import inf

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

Labels = tuple[str, ...]


class Counter(Collector):
    """A counter by its label values: `counter.values[labels] += 1`."""

    def __init__(
        self, registry: CollectorRegistry, name: str, text: str, labels: Labels = ()
    ) -> None:
        self._about = name, text, labels
        # Without labels there is one series, and it is there from the beginning.
        self.values: dict[Labels, float] = {} if labels else {(): 0}
        registry.register(self)

    def add(self, labels: Labels = (), amount: float = 1) -> None:
        """Count."""
        self.values[labels] = self.values.get(labels, 0) + amount

    def collect(self) -> Iterator[Metric]:
        name, text, labels = self._about
        family = CounterMetricFamily(name, text, labels=labels)
        for values, number in self.values.items():
            family.add_metric(values, number)
        yield family


class Gauge(Counter):
    """A counter that may fall."""

    def set(self, labels: Labels, value: float) -> None:
        """Set the value."""
        self.values[labels] = value

    def collect(self) -> Iterator[Metric]:
        name, text, labels = self._about
        family = GaugeMetricFamily(name, text, labels=labels)
        for values, number in self.values.items():
            family.add_metric(values, number)
        yield family


class Buckets:
    """One series of a histogram."""

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # not cumulative; the last is for above all bounds
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Record one value."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value


class Histogram(Collector):
    """A histogram by its label values."""

    def __init__(
        self,
        registry: CollectorRegistry,
        name: str,
        text: str,
        labels: Labels,
        bounds: tuple[float, ...],
    ) -> None:
        self._about = name, text, labels
        self._bounds = bounds
        self._series: dict[Labels, Buckets] = {}
        registry.register(self)

    def of(self, labels: Labels) -> Buckets:
        """Return the series with these label values; worth keeping where it is used often."""
        series = self._series.get(labels)
        if series is None:
            series = self._series[labels] = Buckets(self._bounds)
        return series

    def collect(self) -> Iterator[Metric]:
        name, text, labels = self._about
        family = HistogramMetricFamily(name, text, labels=labels)
        for values, series in self._series.items():
            total = 0
            buckets: list[tuple[str, float]] = []
            for bound, count in zip((*self._bounds, inf), series.counts, strict=True):
                total += count
                buckets.append(("+Inf" if bound == inf else str(float(bound)), total))
            family.add_metric(values, buckets, series.sum)
        yield family
