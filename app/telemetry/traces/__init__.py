"""Traces: the ids of each request's spans, and the spans that go to a collector.

`request_trace` adds ids to a request's timeline; `tracer` and `spans` are the home of OpenTelemetry
and imported only where the configuration names a collector.
"""

from typing import TYPE_CHECKING

from app.settings import ConfigError, TracesSettings
from app.telemetry.traces.request_trace import RequestTrace

if TYPE_CHECKING:  # OpenTelemetry is imported only where traces are on
    from app.telemetry.traces.tracer import Tracer

__all__ = ["RequestTrace", "tracer_for"]


def tracer_for(settings: TracesSettings) -> "Tracer | None":
    """Return the tracer of a configuration; None: traces are off.

    Raises ConfigError where OpenTelemetry is not installed.
    """
    if settings.endpoint is None:
        return None
    try:
        from app.telemetry.traces.tracer import otlp_tracer
    except ModuleNotFoundError as error:
        raise ConfigError(
            [f"traces.endpoint needs OpenTelemetry ({error.name} is missing): install it with "
             "`pip install '.[traces]'` in a clone"]
        ) from None  # fmt: skip
    return otlp_tracer(settings.endpoint, settings.sample_ratio)
