"""Attributes of a request's span that few requests have."""

from typing import Any

import msgspec
import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from app.telemetry import RequestRecord
from app.telemetry.traces.spans import SpanMaker
from app.telemetry.traces.tracer import Tracer

RECORD = RequestRecord("abc", "/v1/chat/completions", "POST", 200, 0.1)


def attributes(record: RequestRecord) -> dict[str, Any]:
    """Return the attributes of the request's own span."""
    trace = Tracer(InMemorySpanExporter(), 1.0, "memory").begin("POST", [], 0.0)
    *_, own = SpanMaker(Resource({}), InstrumentationScope("test")).spans(record, trace)
    return dict(own.attributes or {})


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, {}),
        (
            {"continued": 1, "recomputed_tokens": 90},
            {"gateway.continued": 1, "gateway.recomputed_tokens": 90},
        ),
        ({"not_continued": "stop"}, {"gateway.not_continued": "stop"}),
    ],
)
def test_interrupted_stream_has_continuation_attributes(
    facts: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = attributes(msgspec.structs.replace(RECORD, **facts))
    names = ("gateway.continued", "gateway.recomputed_tokens", "gateway.not_continued")
    assert {name: found[name] for name in names if name in found} == expected
