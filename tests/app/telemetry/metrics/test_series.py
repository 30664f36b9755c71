"""Our series are rendered as prometheus-client renders its own."""

from math import inf, nan

import prometheus_client
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from app.telemetry.metrics.buckets import (
    DURATION_BUCKETS,
    INTER_TOKEN_BUCKETS,
    OVERHEAD_BUCKETS,
    TTFT_BUCKETS,
)
from app.telemetry.metrics.series import Buckets, Counter, Gauge, Histogram, Registry

BOUNDS = {
    "duration": DURATION_BUCKETS,
    "ttft": TTFT_BUCKETS,
    "overhead": OVERHEAD_BUCKETS,
    "inter_token": INTER_TOKEN_BUCKETS,
}
# Label values that need escaping.
LABEL = st.sampled_from(["demo", "", 'say "hi"', "a\\b", "a\nb", "100%d", "模型"])
ANY_LABEL = LABEL | st.text(max_size=20)


def exposition(registry: CollectorRegistry) -> list[str]:
    """Return the lines of a scrape, without creation times, which our series do not have."""
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if "_created" not in line]


def parsed(page: bytes) -> dict[str, tuple[str, str, list[Sample]]]:
    """Return what Prometheus parses of a page: type, help and samples by name."""
    families = text_string_to_metric_families(page.decode())
    return {f.name: (f.type, f.documentation, f.samples) for f in families}


class TestPage:
    @given(data=st.data())
    @settings(max_examples=60)
    def test_page_parses_like_the_page_of_prometheus_client(self, data: st.DataObject) -> None:
        registry = Registry()
        text = 'A "text" with \\ and\na second line.'
        counter = Counter(registry, "c_total", text, ("model", "kind"))
        gauge = Gauge(registry, "g", text, ("z", "a"))
        single = Counter(registry, "single_total", text)
        histogram = Histogram(registry, "h_seconds", text, ("model", "endpoint"), OVERHEAD_BUCKETS)
        number = st.integers(0, 2**60) | st.floats(0, 1e300)
        for _ in range(2):  # the second page is rendered from the cache
            for one, two, value in data.draw(
                st.lists(st.tuples(ANY_LABEL, ANY_LABEL, number), max_size=5)
            ):
                counter.add((one, two), value)
                gauge.set((one, two), -value)
                single.add((), value)
                histogram.buckets((one, two)).observe(value)
            assert parsed(registry.page()) == parsed(generate_latest(registry))

    def test_removed_series_leave_the_page_and_the_cache(self) -> None:
        registry = Registry()
        gauge = Gauge(registry, "g", "Some text.", ("model",))
        for number in range(50):
            gauge.values = {(str(number),): number}
            page = registry.page().decode()
            assert page.count("g{") == 1
            assert f'g{{model="{number}"}} {number}.0\n' in page
            assert len(gauge._heads) <= 2

    @pytest.mark.parametrize(
        ("value", "text"),
        [(inf, "+Inf"), (-inf, "-Inf"), (nan, "NaN"), (0.1, "0.1"), (1, "1.0"), (1e20, "1e+20")],
    )
    def test_numbers_are_formatted_as_go_parses_them(self, value: float, text: str) -> None:
        registry = Registry()
        Gauge(registry, "g", "Some text.").set((), value)
        assert registry.page().decode().endswith(f"\ng {text}\n")

    def test_page_includes_collectors_of_prometheus_client(self) -> None:
        registry = Registry()
        theirs = prometheus_client.Counter("theirs", "Some text.", registry=registry)
        theirs.inc()
        Counter(registry, "ours_total", "Some text.").add()
        assert b"theirs_total 1.0\n" in registry.page()
        assert b"ours_total 1.0\n" in registry.page()

    @pytest.mark.parametrize("name", ["x", "x_total", "h_bucket", "h"])
    def test_duplicate_name_is_refused(self, name: str) -> None:
        registry = Registry()
        Counter(registry, "x_total", "Some text.")
        Histogram(registry, "h", "Some text.", ("model",), (1, 2))
        with pytest.raises(ValueError, match="Duplicated"):
            Gauge(registry, name, "Some text.")
        assert registry.page().count(b"# TYPE") == 2


class TestCounter:
    @given(
        added=st.lists(st.tuples(LABEL, LABEL, st.integers(0, 2**40) | st.floats(0, 1e6))),
    )
    @settings(max_examples=50, deadline=None)
    def test_exposition_equals_the_clients(self, added: list[tuple[str, str, float]]) -> None:
        ours, theirs = CollectorRegistry(), CollectorRegistry()
        counter = Counter(ours, "x_total", "Some text.", ("model", "kind"))
        reference = prometheus_client.Counter("x", "Some text.", ("model", "kind"), registry=theirs)
        for model, kind, amount in added:
            counter.add((model, kind), amount)
            reference.labels(model, kind).inc(amount)
        assert exposition(ours) == exposition(theirs)

    def test_counter_without_labels_starts_at_zero(self) -> None:
        registry = CollectorRegistry()
        counter = Counter(registry, "x_total", "Some text.")
        assert registry.get_sample_value("x_total") == 0
        counter.add()
        counter.add(amount=2)
        assert registry.get_sample_value("x_total") == 3

    def test_counter_with_labels_is_absent_until_the_first_count(self) -> None:
        registry = CollectorRegistry()
        counter = Counter(registry, "x_total", "Some text.", ("model",))
        assert registry.get_sample_value("x_total", {"model": "demo"}) is None
        counter.add(("demo",), 0)
        assert registry.get_sample_value("x_total", {"model": "demo"}) == 0
        assert registry.get_sample_value("x_total", {"model": "other"}) is None

    def test_counters_do_not_share_values(self) -> None:
        registry = CollectorRegistry()
        one = Counter(registry, "one_total", "Some text.", ("model",))
        Counter(registry, "two_total", "Some text.", ("model",))
        one.add(("demo",))
        assert registry.get_sample_value("two_total", {"model": "demo"}) is None


class TestGauge:
    def test_gauge_can_decrease(self) -> None:
        registry = CollectorRegistry()
        gauge = Gauge(registry, "x", "Some text.", ("model",))
        gauge.add(("demo",))
        gauge.add(("demo",))
        gauge.add(("demo",), -1)
        assert exposition(registry) == [
            "# HELP x Some text.",
            "# TYPE x gauge",
            'x{model="demo"} 1.0',
        ]
        gauge.add(("demo",), -1)
        assert registry.get_sample_value("x", {"model": "demo"}) == 0


class TestHistogram:
    @pytest.mark.parametrize("name", BOUNDS)
    @given(data=st.data())
    @settings(max_examples=25, deadline=None)
    def test_exposition_equals_the_clients(self, name: str, data: st.DataObject) -> None:
        bounds = BOUNDS[name]
        # A value on a bound belongs to that bucket, not to the next one.
        value = st.floats(0, 1e4) | st.sampled_from([0.0, *bounds, bounds[-1] * 2])
        observed = data.draw(st.lists(st.tuples(LABEL, value), max_size=12))
        ours, theirs = CollectorRegistry(), CollectorRegistry()
        histogram = Histogram(ours, "x_seconds", "Some text.", ("model",), bounds)
        reference = prometheus_client.Histogram(
            "x_seconds", "Some text.", ("model",), registry=theirs, buckets=bounds
        )
        for model, seconds in observed:
            histogram.buckets((model,)).observe(seconds)
            reference.labels(model).observe(seconds)
        assert exposition(ours) == exposition(theirs)

    def test_cached_buckets_keep_counting(self) -> None:
        registry = CollectorRegistry()
        histogram = Histogram(registry, "x", "Some text.", ("model",), (1, 2))
        kept = histogram.buckets(("demo",))
        assert histogram.buckets(("demo",)) is kept
        kept.observe(1.5)
        assert registry.get_sample_value("x_count", {"model": "demo"}) == 1
        kept.observe(7)
        assert registry.get_sample_value("x_count", {"model": "demo"}) == 2
        assert registry.get_sample_value("x_sum", {"model": "demo"}) == 8.5

    def test_each_label_value_has_its_own_buckets(self) -> None:
        registry = CollectorRegistry()
        histogram = Histogram(registry, "x", "Some text.", ("model",), (1, 2))
        histogram.buckets(("one",)).observe(0.5)
        histogram.buckets(("two",)).observe(5)
        for model, in_first in [("one", 1), ("two", 0)]:
            labels = {"model": model, "le": "1.0"}
            assert registry.get_sample_value("x_bucket", labels) == in_first

    @pytest.mark.parametrize(
        ("value", "counts"),
        [
            (-1, [1, 0, 0]),
            (0, [1, 0, 0]),
            (1, [1, 0, 0]),
            (1.0000001, [0, 1, 0]),
            (2, [0, 1, 0]),
            (2.5, [0, 0, 1]),
            (float("inf"), [0, 0, 1]),
        ],
    )
    def test_bound_is_the_highest_value_of_its_bucket(
        self, value: float, counts: list[int]
    ) -> None:
        buckets = Buckets((1, 2))
        buckets.observe(value)
        assert buckets.counts == counts
        assert buckets.sum == value

    def test_values_are_counted_once_however_often_they_are_read(self) -> None:
        buckets = Buckets((1, 2))
        for value in (0.5, 1.5, 1.5):
            buckets.observe(value)
        buckets.count()
        assert (buckets.counts, buckets.sum) == ([1, 2, 0], 3.5)
        buckets.observe(4)
        assert (buckets.counts, buckets.sum) == ([1, 2, 1], 7.5)
