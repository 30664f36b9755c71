"""Series whose values are read at each scrape."""

from app.telemetry.metrics import Metrics, ScrapedValues


def test_gauges_are_read_at_each_scrape() -> None:
    metrics = Metrics()
    values = ScrapedValues(metrics)
    queues = {"demo": 256, "small": 8}
    pending, opened, lag_s, budgets = 5, 7, 0.25, [("day", 3, 1), ("month", 2, 0)]
    values.watch_queues(queues.items)
    values.watch_ledger(lambda: pending)
    values.watch_connections(lambda: opened, 4096)
    values.watch_loop(lambda: lag_s)
    values.watch_budgets(lambda: budgets)
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


def test_models_on_demand_are_1_and_others_0() -> None:
    metrics = Metrics()
    values = ScrapedValues(metrics)
    values.watch_models(lambda: [("cold", True), ("demo", False)])
    value = metrics.registry.get_sample_value
    assert value("gateway_model_on_demand", {"model": "cold"}) == 1
    assert value("gateway_model_on_demand", {"model": "demo"}) == 0


def test_discovered_servers_are_counted_by_state() -> None:
    metrics = Metrics()
    values = ScrapedValues(metrics)
    counts = [("demo", 3, 2, 1), ("gone", 1, 1, 0)]
    values.watch_discovery(lambda: counts)
    value = metrics.registry.get_sample_value
    assert value("gateway_discovered_servers", {"model": "demo", "state": "listed"}) == 3
    assert value("gateway_discovered_servers", {"model": "demo", "state": "serving"}) == 2
    assert value("gateway_discovery_sources_failing", {"model": "demo"}) == 1
    assert value("gateway_discovery_sources_failing", {"model": "gone"}) == 0
    del counts[1]
    assert value("gateway_discovered_servers", {"model": "gone", "state": "listed"}) is None
