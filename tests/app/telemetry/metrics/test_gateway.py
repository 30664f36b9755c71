"""The gateway's series as a whole: what docs/metrics.md says of them, where they come from."""

import re
from pathlib import Path

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.telemetry.metrics.gateway import Metrics
from app.telemetry.metrics.series import Counter

DOCUMENT = Path(__file__).parents[4] / "docs" / "metrics.md"
ROW = re.compile(r"\| `([a-z_]+)` \| (counter|gauge|histogram) \| ([a-z_, ]*)\| ([^|]+) \|[^|]*\|")


def documented() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return type and labels of every series in the table, by name."""
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| `")]
    matches = [ROW.fullmatch(row) for row in rows]
    assert all(matches), [row for row, match in zip(rows, matches, strict=True) if not match]
    found = {m[1]: (m[2], tuple(filter(None, m[3].strip().split(", ")))) for m in matches if m}
    assert len(found) == len(rows), "a series is there twice"
    return found


def test_every_series_is_documented_with_its_type_and_labels() -> None:
    registry = Metrics().registry
    ours = {one.name: (one.kind, one.labels) for one in registry.series}
    assert len(ours) > 30
    process = {
        family.name + ("_total" if family.type == "counter" else ""): (family.type, ())
        for family in prometheus_client.ProcessCollector(registry=None).collect()
    }
    assert documented() == {**ours, **process}


def test_what_is_documented_is_on_the_page() -> None:
    page = Metrics().exposition()[0].decode()
    told = {
        family.name + ("_total" if family.type == "counter" else "")
        for family in text_string_to_metric_families(page)
    }
    assert told == set(documented())


def test_a_name_that_is_taken_is_an_error() -> None:
    registry = Metrics().registry
    for taken in ("gateway_requests", "gateway_queue_depth", "process_open_fds"):
        with pytest.raises(ValueError, match=taken):
            Counter(registry, taken, "Some text.")


def test_what_can_be_counted_is_there_before_it_is() -> None:
    metrics = Metrics()
    metrics.open_model("demo")
    value = metrics.registry.get_sample_value
    for kind in ("prompt", "cached", "completion"):
        assert value("gateway_tokens_total", {"model": "demo", "kind": kind}) == 0
    for outcome in ("completed", "refused", "failed", "disconnected"):
        assert value("gateway_usage_records_total", {"outcome": outcome}) == 0
    assert value("gateway_requests_in_flight", {"model": "demo"}) == 0


def test_a_gauge_that_nobody_set_is_not_there() -> None:
    value = Metrics().registry.get_sample_value
    assert value("gateway_redis_available") is None  # no alarm where there is no Redis
    assert value("gateway_connections") is None
    assert value("gateway_client_disconnects_total") == 0


def test_gauges_are_read_when_somebody_scrapes() -> None:
    metrics = Metrics()
    queues = {"demo": 256, "small": 8}
    pending, opened, lag_s, budgets = 5, 7, 0.25, [("day", 3, 1), ("month", 2, 0)]
    metrics.watch_queues(queues.items)
    metrics.watch_ledger(lambda: pending)
    metrics.watch_connections(lambda: opened, 4096)
    metrics.watch_loop(lambda: lag_s)
    metrics.watch_budgets(lambda: budgets)
    value = metrics.registry.get_sample_value
    assert value("gateway_queue_limit", {"model": "small"}) == 8
    assert value("gateway_usage_records_pending") == 5
    assert value("gateway_connections") == 7
    assert value("gateway_connections_limit") == 4096
    assert value("gateway_event_loop_lag_seconds") == 0.25
    assert value("gateway_budgets_nearly_used", {"window": "day"}) == 3
    assert value("gateway_budgets_exhausted", {"window": "day"}) == 1
    assert value("gateway_budgets_nearly_used", {"window": "month"}) == 2
    pending = opened = 0
    del queues["small"]
    assert value("gateway_usage_records_pending") == 0
    assert value("gateway_connections") == 0
    assert value("gateway_queue_limit", {"model": "small"}) is None


def test_models_on_demand_are_told_from_those_always_loaded() -> None:
    metrics = Metrics()
    metrics.watch_models(lambda: [("cold", True), ("demo", False)])
    value = metrics.registry.get_sample_value
    assert value("gateway_model_on_demand", {"model": "cold"}) == 1
    assert value("gateway_model_on_demand", {"model": "demo"}) == 0
