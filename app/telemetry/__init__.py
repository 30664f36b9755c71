"""Metrics, logs and traces: the gateway's view of itself for operators.

`metrics` has every Prometheus series, `logs` the log and one access line for each request, `traces`
the spans of requests for an OpenTelemetry collector.
"""
