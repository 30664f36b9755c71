"""Metrics, logs and traces of the gateway, and the record of a completed request that feeds them.

`metrics` has every Prometheus series, `logs` the log and one access line per request, `traces` the
spans of requests for an OpenTelemetry collector.
"""

from app.telemetry.request_record import UNKNOWN_MODEL, RequestRecord, Tokens

__all__ = ["UNKNOWN_MODEL", "RequestRecord", "Tokens"]
