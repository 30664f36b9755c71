"""Metrics, logs and traces of the gateway, and the record of a completed request that feeds them.

`metrics` has every Prometheus series, `logs` the log and one access line per request, `traces` the
spans of requests for an OpenTelemetry collector. `RequestTimeline` has the moments of a request;
`RecentRequests` keeps those of the last requests, of which `request_phases` makes the phases.
"""

from app.telemetry.ended_request import GATEWAY_DIGITS, EndedRequest, arrival_of, made_id
from app.telemetry.recent_requests import (
    MAX_KEPT,
    RecentRequests,
    RequestRecorder,
    TracedRequests,
)
from app.telemetry.request_phases import RequestPhase, request_phases
from app.telemetry.request_record import (
    CLIENT_CLOSED_REQUEST,
    NO_KEY,
    UNKNOWN_MODEL,
    RequestRecord,
    Tokens,
)
from app.telemetry.request_timeline import (
    LOAD_WAIT,
    QUEUE,
    RequestTimeline,
    Step,
)
from app.telemetry.timeline_text import timeline_of_text, timeline_to_text

__all__ = [
    "CLIENT_CLOSED_REQUEST",
    "GATEWAY_DIGITS",
    "LOAD_WAIT",
    "MAX_KEPT",
    "NO_KEY",
    "QUEUE",
    "UNKNOWN_MODEL",
    "EndedRequest",
    "RecentRequests",
    "RequestPhase",
    "RequestRecord",
    "RequestRecorder",
    "RequestTimeline",
    "Step",
    "Tokens",
    "TracedRequests",
    "arrival_of",
    "made_id",
    "request_phases",
    "timeline_of_text",
    "timeline_to_text",
]
