"""A collector of traces: it takes OTLP over HTTP and decodes it with OpenTelemetry's protobuf."""

import gzip
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

PATIENCE_S = 10.0


@dataclass(frozen=True)
class Received:
    """One span as it arrived; ids in hexadecimal, "" for no parent."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    resource: dict[str, Any]
    state: str
    scope: str
    whole: Span  # all of it, flags and events too


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionResetError):  # the sender was killed
            super().handle_error(request, client_address)


class Collector:
    """Listens on a free port in threads of its own; a context manager."""

    def __init__(self) -> None:
        self.spans: list[Received] = []
        self.headers: list[dict[str, str]] = []
        self.status = 200  # what it answers from now on
        self._arrived = threading.Condition()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                status = collector._take(
                    self.path, {k.lower(): v for k, v in self.headers.items()}, body
                )
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(status)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def until(
        self, condition: Callable[[list[Received]], bool], timeout: float = PATIENCE_S
    ) -> None:
        """Return when a condition holds of what has arrived, or raise AssertionError."""
        deadline = time.monotonic() + timeout
        with self._arrived:
            while not condition(self.spans):
                left = deadline - time.monotonic()
                assert self._arrived.wait(max(left, 0.0)) or left > 0, self.spans

    def _take(self, path: str, headers: dict[str, str], body: bytes) -> int:
        if path != "/v1/traces" or headers["content-type"] != "application/x-protobuf":
            return 404
        with self._arrived:
            self.headers.append(headers)
            if headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            if self.status == 200:
                self.spans += decoded(body)
            self._arrived.notify_all()
            return self.status


def decoded(body: bytes) -> list[Received]:
    """Return the spans of an export request."""
    request = ExportTraceServiceRequest.FromString(body)
    return [
        Received(
            span.name,
            span.trace_id.hex(),
            span.span_id.hex(),
            span.parent_span_id.hex(),
            span.kind,
            span.start_time_unix_nano,
            span.end_time_unix_nano,
            _members(span.attributes),
            _members(resource.resource.attributes),
            span.trace_state,
            f"{scope.scope.name} {scope.scope.version}",
            span,
        )
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def _members(pairs: "Any") -> dict[str, Any]:
    def value(pair: KeyValue) -> Any:
        kind = pair.value.WhichOneof("value")
        return getattr(pair.value, kind) if kind else None

    return {pair.key: value(pair) for pair in pairs}
