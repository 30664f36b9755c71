"""Prometheus metrics: the gateway's own series, and the engines' pages merged into one.

`gateway_series` declares the series, `buckets` the bounds of histograms, `series` implements
counters, gauges and histograms, `scraped_values` has values read at a scrape, `engine_series` those
of engines, `merged_page` builds /metrics/engines, and `event_loop_lag` measures how late timers
fire.
"""

from app.telemetry.metrics.buckets import DURATION_BUCKETS, TTFT_BUCKETS
from app.telemetry.metrics.engine_series import EngineFigures
from app.telemetry.metrics.event_loop_lag import EventLoopLag
from app.telemetry.metrics.gateway_series import (
    CONTINUATION_OUTCOMES,
    NO_ENDPOINT,
    Metrics,
)
from app.telemetry.metrics.merged_page import TEXT_FORMAT, MalformedPage, MergedPage, MergeSteps
from app.telemetry.metrics.scraped_values import ScrapedValues
from app.telemetry.metrics.series import Buckets
from app.telemetry.metrics.totals import ModelTotals, Totals, read_model_totals, read_totals

__all__ = [
    "CONTINUATION_OUTCOMES",
    "DURATION_BUCKETS",
    "NO_ENDPOINT",
    "TEXT_FORMAT",
    "TTFT_BUCKETS",
    "Buckets",
    "EngineFigures",
    "EventLoopLag",
    "MalformedPage",
    "MergeSteps",
    "MergedPage",
    "Metrics",
    "ModelTotals",
    "ScrapedValues",
    "Totals",
    "read_model_totals",
    "read_totals",
]
