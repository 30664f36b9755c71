"""Sampling, trace context, and export of spans to a collector that may be unreachable."""

import asyncio
import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from typer.testing import CliRunner

from app.cli import app
from app.telemetry import EndedRequest, RequestRecord
from app.telemetry.traces import tracer as tracing
from app.telemetry.traces.request_trace import RequestTrace
from app.telemetry.traces.tracer import Tracer, otlp_tracer
from tests.e2e.deployment import write_config
from tests.fakes.collector import Collector
from tests.gateway import free_port, remote, running, settings_for
from tests.waiting import wait_until

TRACE_ID, PARENT_ID = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
PARENT = f"00-{TRACE_ID:032x}-{PARENT_ID:016x}-01".encode()
SPANS = 2  # of a request that got no further than its key


def tracer(ratio: float = 1.0) -> Tracer:
    return Tracer(InMemorySpanExporter(), ratio, "memory")


def begun(one: Tracer, *headers: tuple[bytes, bytes]) -> RequestTrace:
    """Return the trace of a request with these headers."""
    trace = one.begin("POST", headers, perf_counter())
    assert trace.sampled_id == (f"{trace.trace_id:032x}" if trace.sampled else None)
    return trace


def served(one: Tracer, count: int = 1) -> None:
    """Trace requests."""
    for _ in range(count):
        trace = one.begin("POST", [], perf_counter())
        record = RequestRecord("abc", "/v1/chat/completions", "POST", 401, 0.001)
        one.end(EndedRequest(record, trace, 1.0, "01234567"))


def log_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the lines that came to the log."""
    ours = [record for record in caplog.records if record.name == "app.telemetry.traces.tracer"]
    passed_on = [record for record in caplog.records if record not in ours]
    # pytest listens at the exporter's own logger too, whose records go no further.
    assert {record.name for record in passed_on} <= {trace_exporter.__name__}
    return [f"{record.levelname} {record.getMessage()}" for record in ours]


class TestContext:
    def test_a_clients_trace_is_continued(self) -> None:
        one = begun(tracer(), (b"traceparent", PARENT), (b"tracestate", b"a=1,b=2"))
        assert (one.trace_id, one.parent_id, one.state) == (TRACE_ID, PARENT_ID, "a=1,b=2")
        assert one.sampled

    @pytest.mark.parametrize(
        "headers",
        [
            [],
            [(b"traceparent", PARENT.upper())],
            [(b"traceparent", PARENT + b"-more")],
            [(b"traceparent", PARENT[:-1])],
            [(b"traceparent", b"00-%032x-%016x-01" % (0, PARENT_ID))],
            [(b"traceparent", b"00-%032x-%016x-01" % (TRACE_ID, 0))],
            [(b"traceparent", b"ff" + PARENT[2:])],
            [(b"traceparent", b"\xff" * 55)],
            [(b"traceparent", b"0" * 8192)],
            [(b"traceparent", PARENT), (b"traceparent", PARENT)],
            [(b"tracestate", b"a=1")],
        ],
    )
    def test_without_a_valid_traceparent_a_new_trace_begins(
        self, headers: list[tuple[bytes, bytes]]
    ) -> None:
        one = begun(tracer(), *headers, (b"tracestate", b"b=2"))
        assert one.parent_id is None
        assert one.trace_id not in (0, TRACE_ID)
        assert one.state == ""

    @given(parent=st.binary(max_size=80), state=st.binary(max_size=40))
    def test_engine_receives_well_formed_ids_whatever_the_client_sends(
        self, parent: bytes, state: bytes
    ) -> None:
        one = begun(tracer(), (b"traceparent", parent), (b"tracestate", state))
        one.begin_attempt("demo-0")
        received = dict(one.trace_headers())
        again = begun(tracer(), *received.items())
        assert (again.trace_id, again.parent_id) == (one.trace_id, one.steps()[-1].span_id)
        assert again.state == one.state

    def test_future_traceparent_version_is_read_as_version_00(self) -> None:
        assert begun(tracer(), (b"traceparent", b"01" + PARENT[2:] + b"-x")).trace_id == TRACE_ID

    @pytest.mark.parametrize(
        "states",
        [[b"not a state"], [b"a=1,a=2"], [b"x=" + b"y" * 600], [b"a=" + b"y" * 300] * 2],
    )
    def test_invalid_tracestate_is_dropped_silently(
        self, states: list[bytes], caplog: pytest.LogCaptureFixture
    ) -> None:
        one = otlp_tracer("http://127.0.0.1:1/v1/traces", 1.0)
        trace = begun(one, (b"traceparent", PARENT), *((b"tracestate", s) for s in states))
        assert (trace.trace_id, trace.state) == (TRACE_ID, "")
        assert log_lines(caplog) == []

    def test_each_engine_call_receives_its_own_span_id(self) -> None:
        one = begun(tracer(), (b"traceparent", PARENT))
        received = []
        for engine in ("a", "b"):
            one.begin_attempt(engine)
            received.append(dict(one.trace_headers())[b"traceparent"])
        spans = [b"%016x" % step.span_id for step in one.steps() if step.engine is not None]
        assert received == [b"00-%032x-%s-01" % (TRACE_ID, span) for span in spans]
        assert len({*spans, b"%016x" % PARENT_ID, b"%016x" % one.span_id}) == 4


class TestSampling:
    def test_sample_ratio_selects_a_share_of_requests(self) -> None:
        one = tracer(0.25)
        count = sum(begun(one).sampled for _ in range(2000))
        assert 400 < count < 600  # six standard deviations

    def test_two_gateways_sample_the_same_traces(self) -> None:
        one, other = tracer(0.5), tracer(0.5)
        traces = [begun(one).trace_id for _ in range(200)]
        assert [one._sample(t) for t in traces] == [other._sample(t) for t in traces]

    @pytest.mark.parametrize("flags", [b"00", b"01", b"02", b"03"])
    @pytest.mark.parametrize("ratio", [0.0, 1.0])
    def test_sampling_decision_of_the_client_applies(self, flags: bytes, ratio: float) -> None:
        one = begun(tracer(ratio), (b"traceparent", PARENT[:-2] + flags))
        assert one.sampled == (flags in (b"01", b"03"))
        one.begin_attempt("demo-0")
        assert dict(one.trace_headers())[b"traceparent"].endswith(flags)


class TestImport:
    @pytest.mark.slow
    def test_gateway_without_traces_does_not_import_opentelemetry(self, tmp_path: Path) -> None:
        # redis-py imports some of it where it finds it; of ours, any attempt would fail here.
        program = (
            "import sys\n"
            "sys.modules['opentelemetry'] = None\n"
            "from pathlib import Path\n"
            "from app.main import create_app\n"
            "from tests.gateway import remote, settings_for\n"
            "model = {'name': 'm', 'engines': [remote('http://h')]}\n"
            f"create_app(settings_for(model, run_dir=Path({str(tmp_path)!r})))\n"
            "print('app.telemetry.traces.tracer' in sys.modules)\n"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert (done.stdout, done.returncode) == ("False\n", 0), done.stderr

    def test_missing_packages_are_one_line_and_exit_code_2(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.delitem(sys.modules, "app.telemetry.traces.tracer")
        monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)
        monkeypatch.setenv("GATEWAY_TRACES__ENDPOINT", "http://h:4318")
        file = write_config(tmp_path, {"name": "m", "engines": [remote("http://h")]})
        result = CliRunner().invoke(app, ["check", "--config", str(file)])
        assert (result.exit_code, result.stdout) == (2, "")
        [line] = result.stderr.splitlines()
        assert line.startswith("vllm-gateway: traces.endpoint needs OpenTelemetry (opentelemetry.")
        assert line.endswith("install it with `pip install '.[traces]'` in a clone")


class Gate(InMemorySpanExporter):
    """An exporter that takes nothing before it is open."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.open.wait(10)
        return super().export(spans)


class TestExport:
    async def test_collector_receives_spans_and_service_attributes(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=canary")
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
        with Collector() as collector:
            one = otlp_tracer(f"{collector.url}/v1/traces", 1.0)
            one.start()
            served(one)
            await one.close()
            assert [span.name for span in collector.spans] == ["auth", "chat"]
            assert collector.headers[0]["x-key"] == "canary"
            resource = collector.spans[0].resource
        assert resource["service.name"] == "vllm-gateway"
        assert resource["deployment.environment.name"] == "test"
        assert one.counts() == (SPANS, 0)

    async def test_malformed_exporter_headers_are_not_shown(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "canary")
        otlp_tracer("http://127.0.0.1:1/v1/traces", 1.0)
        assert log_lines(caplog) == []

    async def test_service_name_can_be_set(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OTEL_SERVICE_NAME", "front")
        with Collector() as collector:
            one = otlp_tracer(f"{collector.url}/v1/traces", 1.0)
            one.start()
            served(one)
            await one.close()
            assert collector.spans[0].resource["service.name"] == "front"

    async def test_faults_are_told_once_and_counted_and_so_is_their_end(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)
        with Collector() as collector:
            one = otlp_tracer(f"{collector.url}/v1/traces", 1.0)
            one.start()
            for status in (404, 401, 200, 200, 400):
                collector.status = status
                served(one)
                await asyncio.to_thread(one.flush)
            await one.close()
        lost, back, again = log_lines(caplog)
        start = f"WARNING traces: {collector.url} accepts no spans; "
        assert lost.startswith(start)
        assert "404" in lost
        assert back == f"INFO traces: {collector.url} accepts spans again"
        assert again.startswith(start)
        assert one.counts() == (2 * SPANS, 3 * SPANS)

    async def test_a_port_that_nobody_listens_on_is_told_at_once_and_holds_nothing_up(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tracing, "EXPORT_EVERY_S", 0.01)
        monkeypatch.setattr(tracing, "FLUSH_S", 0.1)
        one = otlp_tracer(f"http://127.0.0.1:{free_port()}/v1/traces", 1.0)
        one.start()
        served(one)
        await wait_until(lambda: log_lines(caplog))
        await one.close()
        lost, over = log_lines(caplog)
        assert "accepts no spans; they are dropped and counted until it does: " in lost
        assert "refused" in lost
        assert over == "WARNING traces: 2 spans were not exported before shutdown"

    async def test_a_collector_that_never_answers_does_not_hold_up_the_end(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tracing, "FLUSH_S", 0.1)
        with socket.create_server(("127.0.0.1", 0)) as silent:
            one = otlp_tracer(f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces", 1.0)
            one.start()
            served(one)
            async with asyncio.timeout(5):  # the request itself may take ten
                await one.close()
        assert log_lines(caplog) == ["WARNING traces: 2 spans were not exported before shutdown"]
        assert one.counts()[0] == 0

    async def test_what_waits_is_bounded_and_what_is_dropped_is_whole_traces(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tracing, "MAX_QUEUED", 1023)
        monkeypatch.setattr(tracing, "FLUSH_S", 60.0)  # nothing is given up on a slow machine
        gate = Gate()
        one = Tracer(gate, 1.0, "memory")
        one.start()
        served(one, 1000)
        assert one.counts()[0] == 0
        gate.open.set()
        await one.close()
        exported, dropped = one.counts()
        assert exported + dropped == 1000 * SPANS
        # The bound, and a batch that was on its way to the exporter.
        assert 1022 <= exported <= 1022 + tracing.BATCH
        traces = [s.context.trace_id for s in gate.get_finished_spans() if s.context]
        assert len(traces) == exported == SPANS * len(set(traces))
        assert log_lines(caplog) == []

    async def test_a_gateway_sends_what_it_has_before_it_ends_and_counts_it(
        self, tmp_path: Path
    ) -> None:
        with Collector() as collector:
            model = {"name": "m", "engines": [remote(f"http://127.0.0.1:{free_port()}")]}
            traces = {"endpoint": collector.url}
            async with running(settings_for(model, run_dir=tmp_path, traces=traces)) as gateway:
                assert (await gateway.chat("m")).status_code == 503
                metrics = gateway.state.metrics
                assert await gateway.metric("gateway_trace_spans_total", outcome="dropped") == 0
            names = [span.name for span in collector.spans]
            exported = {"outcome": "exported"}
            count = metrics.registry.get_sample_value("gateway_trace_spans_total", exported)
            assert sorted(names) == ["auth", "chat m", "engine m-0", "limits"]
            assert count == len(names)

    async def test_a_request_that_ends_after_the_tracer_is_no_fault(self) -> None:
        one = tracer()
        one.start()
        await one.close()
        served(one)
        assert one.counts() == (0, 0)
        await one.close()
