"""The gateway's series: complete, documented, initialized, read at a scrape."""

import re
import weakref
from pathlib import Path

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.continuation import REASONS, Way
from app.telemetry.metrics import CONTINUATION_OUTCOMES, Metrics
from app.telemetry.metrics.series import Counter, Histogram

DOCUMENT = Path(__file__).parents[4] / "docs" / "metrics.md"
ROW = re.compile(r"\| `([a-z_]+)` \| (counter|gauge|histogram) \| ([a-z_, ]*)\| ([^|]+) \|[^|]*\|")
# What Markdown adds to a help text: code quotes and the targets of links.
MARKUP = re.compile(r"`|\[|\]\([^)]*\)")

# Type, labels and help text.
Declaration = tuple[str, tuple[str, ...], str]


def documented() -> dict[str, Declaration]:
    """Return the declaration of every series in the table, by name."""
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| `")]
    matches = [ROW.fullmatch(row) for row in rows]
    assert all(matches), [row for row, match in zip(rows, matches, strict=True) if not match]
    found = {
        match[1]: (
            match[2],
            tuple(filter(None, match[3].strip().split(", "))),
            MARKUP.sub("", match[4]),
        )
        for match in matches
        if match
    }
    assert len(found) == len(rows), "a series is listed twice"
    return found


def test_documented_series_equal_the_declared_ones() -> None:
    registry = Metrics().registry
    ours = {s.name: (s.kind, s.labels, s.help_text) for s in registry.series}
    assert len(ours) > 30
    process = {
        family.name + ("_total" if family.type == "counter" else ""): (
            family.type,
            (),
            family.documentation,
        )
        for family in prometheus_client.ProcessCollector(registry=None).collect()
    }
    assert documented() == {**ours, **process}


def test_page_has_every_documented_series() -> None:
    page = Metrics().exposition().decode()
    names = {
        family.name + ("_total" if family.type == "counter" else "")
        for family in text_string_to_metric_families(page)
    }
    assert names == set(documented())


def test_duplicate_name_is_refused() -> None:
    registry = Metrics().registry
    for name in ("gateway_requests_total", "gateway_queue_depth", "process_open_fds"):
        with pytest.raises(ValueError, match=name):
            Counter(registry, name, "Some text.")


def test_counters_start_at_zero() -> None:
    metrics = Metrics()
    metrics.add_model("demo")
    value = metrics.registry.get_sample_value
    for kind in ("prompt", "cached", "completion"):
        assert value("gateway_tokens_total", {"model": "demo", "kind": kind}) == 0
    for outcome in ("completed", "refused", "failed", "disconnected", "canceled"):
        assert value("gateway_usage_records_total", {"outcome": outcome}) == 0
    assert value("gateway_requests_in_flight", {"model": "demo"}) == 0
    for way, outcomes in CONTINUATION_OUTCOMES.items():
        for outcome in outcomes:
            labels = {"model": "demo", "way": way, "outcome": outcome}
            assert value("gateway_continuations_total", labels) == 0


def test_every_reason_against_a_continuation_is_a_series_from_the_start() -> None:
    # Without a 0 before it, `increase()` does not see the first value of a series.
    assert set(CONTINUATION_OUTCOMES["none"]) >= REASONS
    assert {way.value for way in Way} == set(CONTINUATION_OUTCOMES)


def test_every_outcome_of_a_continuation_is_documented() -> None:
    text = DOCUMENT.with_name("continuation.md").read_text(encoding="utf-8")
    tables = "\n".join(line for line in text.splitlines() if line.startswith("|"))
    outcomes = {outcome for way in CONTINUATION_OUTCOMES.values() for outcome in way}
    assert outcomes - set(re.findall(r"`(\w+)`", tables)) == set()


def test_continuations_and_their_gaps_are_counted_by_model() -> None:
    metrics = Metrics()
    metrics.add_model("demo")
    metrics.continuations.add(("demo", "replay", "continued"))
    metrics.continuation_gap.observe(("demo",), 0.3)
    value = metrics.registry.get_sample_value
    labels = {"model": "demo", "way": "replay", "outcome": "continued"}
    assert value("gateway_continuations_total", labels) == 1
    gap = "gateway_continuation_gap_seconds_bucket"
    assert value(gap, {"model": "demo", "le": "0.25"}) == 0
    assert value(gap, {"model": "demo", "le": "0.5"}) == 1
    assert value(gap, {"model": "demo", "le": "300.0"}) == 1


def test_gauge_is_absent_until_it_is_set() -> None:
    value = Metrics().registry.get_sample_value
    assert value("gateway_redis_available") is None  # no alert without Redis
    assert value("gateway_connections") is None
    assert value("gateway_client_disconnects_total") == 0


class Value(float):
    """A value that can be referenced weakly."""


def test_values_of_histograms_that_are_not_scraped_take_no_memory() -> None:
    metrics = Metrics()
    kept = []
    for series in metrics.registry.series:
        if isinstance(series, Histogram):
            value = Value(0.5)
            kept.append(weakref.ref(value))
            series.observe(("demo",) * len(series.labels), value)
            del value
    assert kept
    metrics.count_observed()
    assert not [value for value in kept if value() is not None]
