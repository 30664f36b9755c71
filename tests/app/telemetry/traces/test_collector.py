"""The way of traces through a collector that is a process of its own, and may end at any time."""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

from app.telemetry.traces import tracer as tracing
from app.telemetry.traces.tracer import Tracer
from tests.app.raw import asking, connected, request
from tests.e2e.deployment import UNLIMITED
from tests.fakes.collector import Collector, Received, decoded
from tests.fakes.vllm import Fake
from tests.gateway import Gateway, remote, running, serving_demo, settings_for
from tests.services import CollectorServer
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.slow

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
# OpenTelemetry's numbers for the kinds of span.
INTERNAL, SERVER, CLIENT = 1, 2, 3
SPANS = 4  # of a plain request
CLIENTS = 4


@pytest.fixture
def backend() -> Iterator[Collector]:
    """Where the collector sends its spans on to."""
    with Collector() as collector:
        yield collector


@pytest.fixture
def collector(backend: Collector) -> Iterator[CollectorServer]:
    """A collector that is not started."""
    server = CollectorServer(backend.url)
    yield server
    server.remove()


class Noting(OTLPSpanExporter):
    """The exporter of production, and a note of what it was given."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint)
        self.given: list[ReadableSpan] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.given += spans
        return super().export(spans)


def by_id(spans: Sequence[Received]) -> list[Received]:
    return sorted(spans, key=lambda span: span.span_id)


def log_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the lines that the gateway had for its log on traces."""
    ours = [record for record in caplog.records if record.name == tracing.__name__]
    return [f"{record.levelname} {record.getMessage()}" for record in ours]


async def counts(gateway: Gateway) -> tuple[float, float]:
    """Return how many spans were exported and how many were dropped, by the metric."""
    exported, dropped = [
        await gateway.metric("gateway_trace_spans_total", outcome=outcome)
        for outcome in ("exported", "dropped")
    ]
    return exported, dropped


@pytest.mark.parametrize("compression", ["none", "gzip"])
async def test_spans_arrive_complete_and_unchanged(
    fake: Fake,
    backend: Collector,
    collector: CollectorServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    compression: str,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", compression)
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    collector.start()
    exporter = Noting(f"{collector.url}/v1/traces")
    tracer = Tracer(exporter, 1.0, collector.url)
    model = {"name": "demo", "engines": [remote(fake.url)], "queue": {"max_in_flight": 1}}
    async with running(settings_for(model, run_dir=tmp_path), tracer=tracer) as gateway:
        async with connected(gateway) as first:
            first.writer.write(request(asking(fake="hang")))
            await fake.until_running()
            waiting = asyncio.create_task(
                gateway.client.post(
                    "/v1/chat/completions",
                    json={"model": "demo", "messages": [], "stream": True},
                    headers=[
                        ("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-01"),
                        ("tracestate", "a=1,b=2"),
                        ("x-request-id", "abc"),
                    ],
                )
            )
            await wait_until(lambda: gateway.state.admission.waiting)
        assert (await waiting).status_code == 200
    count = len(exporter.given)
    assert tracer.counts() == (count, 0)
    backend.until(lambda spans: len(spans) >= count)
    # Flags, events, status, resource and scope are compared too.
    given = decoded(encode_spans(exporter.given).SerializeToString())
    assert by_id(backend.spans) == by_id(given)

    spans = {span.name: span for span in backend.spans if span.trace_id == TRACE_ID}
    root = spans.pop("chat demo")
    assert (root.parent_id, root.kind, root.state) == (PARENT_ID, SERVER, "a=1,b=2")
    assert {name: span.kind for name, span in spans.items()} == {
        "auth": INTERNAL,
        "limits": INTERNAL,
        "queue": INTERNAL,
        "engine demo-0": CLIENT,
        "stream": INTERNAL,
    }
    assert {span.parent_id for span in spans.values()} == {root.span_id}
    assert fake.seen[-1].header("traceparent") == (
        f"00-{TRACE_ID}-{spans['engine demo-0'].span_id}-01"
    )
    assert root.attributes.items() >= {
        ("http.route", "/v1/chat/completions"),
        ("http.response.status_code", 200),
        ("gen_ai.operation.name", "chat"),
        ("gen_ai.request.model", "demo"),
        ("gen_ai.usage.input_tokens", 3),
        ("gen_ai.usage.output_tokens", 2),
        ("gateway.request_id", "abc"),
        ("gateway.engine", "demo-0"),
    }
    assert root.attributes["gen_ai.response.time_to_first_chunk"] > 0
    assert [event.name for event in spans["engine demo-0"].whole.events] == ["first_token"]
    assert root.resource["service.name"] == "vllm-gateway"
    assert root.resource["deployment.environment.name"] == "test"


async def test_late_collector_receives_queued_spans(
    fake: Fake,
    backend: Collector,
    collector: CollectorServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(tracing, "EXPORT_EVERY_S", 0.01)
    caplog.set_level(logging.INFO)
    async with serving_demo(tmp_path, fake.url, traces={"endpoint": collector.url}) as gateway:
        assert (await gateway.chat()).status_code == 200
        await wait_until(lambda: log_lines(caplog))
        assert (await gateway.chat()).status_code == 200
        assert await counts(gateway) == (0, 0)
        await asyncio.to_thread(collector.start)
        await asyncio.to_thread(backend.until, lambda spans: len(spans) >= 2 * SPANS)
        await wait_until(lambda: len(log_lines(caplog)) > 1)
        async with asyncio.timeout(PATIENCE_S):  # counted after they were received
            while await counts(gateway) != (2 * SPANS, 0):
                await asyncio.sleep(0.01)
    lost, back = log_lines(caplog)
    assert lost.startswith(f"WARNING traces: {collector.url} accepts no spans; ")
    assert back == f"INFO traces: {collector.url} accepts spans again"
    assert len({span.span_id for span in backend.spans}) == len(backend.spans) == 2 * SPANS


@pytest.mark.parametrize("patience_s", ["10", "0.7"], ids=["what waits fills up", "batches fail"])
async def test_killed_collector_loses_only_counted_spans(
    fake: Fake,
    backend: Collector,
    collector: CollectorServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    patience_s: str,
) -> None:
    # The SDK tries again after a second, if it may take so long.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", patience_s)
    monkeypatch.setattr(tracing, "EXPORT_EVERY_S", 0.01)
    monkeypatch.setattr(tracing, "BATCH", 64)
    monkeypatch.setattr(tracing, "MAX_QUEUED", 256)
    caplog.set_level(logging.INFO)
    collector.start()
    enough = asyncio.Event()

    async def load() -> list[httpx.Response]:
        answers = []
        while not enough.is_set():
            answers.append(await gateway.chat())
        return answers

    async with serving_demo(
        tmp_path, fake.url, traces={"endpoint": collector.url}, limits={"default": UNLIMITED}
    ) as gateway:
        tracer = gateway.state.tracer
        assert tracer is not None
        clients = [asyncio.create_task(load()) for _ in range(CLIENTS)]
        await wait_until(lambda: backend.spans)
        collector.stop()  # with SIGKILL
        await wait_until(lambda: tracer.counts()[1] > 2 * tracing.BATCH)
        await asyncio.to_thread(collector.start)
        await wait_until(lambda: len(log_lines(caplog)) > 1)
        arrived = len(backend.spans)
        await wait_until(lambda: len(backend.spans) > arrived)
        enough.set()
        answers = [answer for client in clients for answer in await client]
    exported, dropped = tracer.counts()
    assert {answer.status_code for answer in answers} == {200}
    assert exported + dropped == SPANS * len(answers)
    assert exported > 0
    # One line when it is lost and one when it is back; a machine that is busy may lose it twice.
    lines = log_lines(caplog)
    lost = [
        line.startswith(f"WARNING traces: {collector.url} accepts no spans; ") for line in lines
    ]
    back = [line == f"INFO traces: {collector.url} accepts spans again" for line in lines]
    assert lost == [True, False] * (len(lines) // 2), lines
    assert back == [False, True] * (len(lines) // 2), lines
