"""The sections `metrics`, `traces` and `logs`."""

from pathlib import Path
from typing import Literal
from urllib.parse import urlunsplit

from pydantic import Field, field_validator

from app.settings.log_names import LogName
from app.settings.urls import split_http_url
from engines.spec import SpecModel

TRACES_PATH = "/v1/traces"
# More than the gateway has modules. Python keeps each logger for good.
MAX_LEVELS = 100


class MetricsSettings(SpecModel):
    """Prometheus metrics."""

    host: str = Field("127.0.0.1", description="Address of the separate metrics port.")
    port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Separate port for /metrics and /metrics/engines, which the main port then no "
        "longer serves; 0 picks a free port. Default: the main port serves them.",
    )


def collector_url(url: str) -> str:
    """Return the URL of a collector with its path. Raises ValueError, which does not repeat it."""
    parts = split_http_url(url, f"http://collector:4318{TRACES_PATH}")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError(
            "must hold no credentials, query or fragment; OTEL_EXPORTER_OTLP_HEADERS is for keys"
        )
    path = TRACES_PATH if parts.path in ("", "/") else parts.path
    return urlunsplit((parts.scheme, parts.netloc, path, "", ""))


class TracesSettings(SpecModel):
    """OpenTelemetry traces."""

    endpoint: str | None = Field(
        None,
        description="OTLP/HTTP collector that receives traces, such as "
        "http://collector:4318/v1/traces; the path defaults to /v1/traces. Headers for it are set "
        "in OTEL_EXPORTER_OTLP_HEADERS. Default: no traces.",
    )
    sample_ratio: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Share of requests that are traced. A request with a traceparent header is "
        "sampled as that header says.",
    )

    @field_validator("endpoint")
    @classmethod
    def _check_endpoint(cls, url: str | None) -> str | None:
        return None if url is None else collector_url(url)


LogLevel = Literal["debug", "info", "warning", "error"]


class LogSettings(SpecModel):
    """The gateway's own log."""

    format: Literal["auto", "json", "text"] = Field(
        "auto", description="Format of a line; auto: text on a terminal, JSON elsewhere."
    )
    level: LogLevel = Field("info", description="Lowest level that is logged.")
    levels: dict[LogName, LogLevel] = Field(
        {},
        max_length=MAX_LEVELS,
        description="Log levels by subsystem or library: relay, limits.redis, engines.supervisor, "
        "access, httpx…",
    )
    file: Path | None = Field(
        None,
        description="File that the log is appended to. It is reopened after log rotation moves it "
        "away. Default: standard error.",
    )
