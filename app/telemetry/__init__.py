"""Metrics, logs and traces of the gateway, and the record of a completed request that feeds them.

`metrics` has every Prometheus series, `logs` the log and one access line per request, `traces` the
spans of requests for an OpenTelemetry collector. `RequestTimeline` has the moments of a request;
`RecentRequests` keeps those of the last requests, of which `request_phases` makes the phases.
"""

from app.telemetry.recent_requests import (
    MAX_KEPT,
    NO_RECORDER,
    RecentRequests,
    RequestRecorder,
    TracedRequests,
)
from app.telemetry.request_phases import RequestPhase, request_phases
from app.telemetry.request_record import UNKNOWN_MODEL, RequestRecord, Tokens
from app.telemetry.request_timeline import (
    LOAD_WAIT,
    NO_TIMELINE,
    QUEUE,
    RequestTimeline,
    Step,
)

__all__ = [
    "LOAD_WAIT",
    "MAX_KEPT",
    "NO_RECORDER",
    "NO_TIMELINE",
    "QUEUE",
    "UNKNOWN_MODEL",
    "RecentRequests",
    "RequestPhase",
    "RequestRecord",
    "RequestRecorder",
    "RequestTimeline",
    "Step",
    "Tokens",
    "TracedRequests",
    "request_phases",
]
