"""Traces of requests, through the real server with a fake engine."""

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext, SpanKind, StatusCode

from app.telemetry.traces.tracer import Tracer
from tests.app.raw import asking, connected, request
from tests.fakes.vllm import Fake
from tests.gateway import KEY, KEY_ID, Gateway, free_port, remote, running, settings_for
from tests.waiting import PATIENCE_S, wait_until

TRACE_ID, PARENT_ID = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
PARENT = f"00-{TRACE_ID:032x}-{PARENT_ID:016x}-01"
PROMPT, ANSWER = "a canary of a prompt", "hello"


class Traced:
    """A gateway and the spans of its requests."""

    def __init__(self, gateway: Gateway, tracer: Tracer, exporter: InMemorySpanExporter) -> None:
        self.gateway = gateway
        self._tracer = tracer
        self._exporter = exporter

    def everything(self) -> Sequence[ReadableSpan]:
        """Return every span there is; those of a request come together, when it has ended."""
        self._tracer.flush()
        return self._exporter.get_finished_spans()

    async def spans(self) -> dict[str, ReadableSpan]:
        """Return the spans of the one request that there was, by name, once they are there."""
        async with asyncio.timeout(PATIENCE_S):
            while not (found := self.everything()):
                await asyncio.sleep(0.002)
        spans = {span.name: span for span in found}
        assert len(spans) == len(found)
        return spans

    async def trace_with(self, name: str) -> dict[str, ReadableSpan]:
        """Return the trace that has a span of that name, once it is there."""
        await wait_until(lambda: name in {span.name for span in self.everything()})
        found = self.everything()
        [trace_id] = {place(span).trace_id for span in found if span.name == name}
        return {span.name: span for span in found if place(span).trace_id == trace_id}

    async def chat(self, *headers: tuple[str, str], **fields: Any) -> httpx.Response:
        body = {"model": "demo", "messages": [{"role": "user", "content": PROMPT}], **fields}
        return await self.gateway.client.post("/v1/chat/completions", json=body, headers=headers)


@asynccontextmanager
async def traced(
    tmp_path: Path,
    *urls: str,
    ratio: float = 1.0,
    launcher: Sequence[str] | None = None,
    limits: dict[str, Any] | None = None,
    **model: Any,
) -> AsyncIterator[Traced]:
    """Run a gateway; `limits` are those of its keys, `model` are settings of its model."""
    model = {"name": "demo", "engines": [remote(url) for url in urls], **model}
    settings = settings_for(model, run_dir=tmp_path, limits={"default": limits or {}})
    exporter = InMemorySpanExporter()
    tracer = Tracer(exporter, ratio, "memory")
    async with running(settings, launcher, tracer=tracer) as gateway:
        yield Traced(gateway, tracer, exporter)


def attributes_of(span: ReadableSpan) -> Mapping[str, Any]:
    assert span.attributes is not None
    return span.attributes


def place(span: ReadableSpan) -> SpanContext:
    context: SpanContext | None = span.context
    assert context is not None
    return context


def assert_tree(spans: Mapping[str, ReadableSpan], root: str) -> None:
    """Every span but the root is the root's child and within its time."""
    own = spans[root]
    assert own.kind is SpanKind.SERVER
    for span in spans.values():
        assert place(span).trace_id == place(own).trace_id
        assert span.start_time is not None
        assert span.end_time is not None
        assert own.start_time is not None
        assert own.end_time is not None
        assert own.start_time <= span.start_time <= span.end_time <= own.end_time
        if span is not own:
            assert span.parent is not None
            assert span.parent.span_id == place(own).span_id
    assert len({place(span).span_id for span in spans.values()}) == len(spans)


def in_order(spans: Mapping[str, ReadableSpan]) -> list[str]:
    """Return the names of the spans as they began; the root before its children."""
    return sorted(spans, key=lambda name: (spans[name].start_time, name != "chat demo"))


async def test_a_plain_request(fake: Fake, tmp_path: Path) -> None:
    async with traced(tmp_path, fake.url) as one:
        answer = await one.chat(("x-request-id", "abc"))
        spans = await one.spans()
    assert in_order(spans) == ["chat demo", "auth", "limits", "engine demo-0"]
    assert_tree(spans, "chat demo")
    root = attributes_of(spans["chat demo"])
    assert answer.status_code == 200
    key_id = root["gateway.key_id"]
    assert root == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "url.path": "/v1/chat/completions",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": "demo",
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gateway.request_id": "abc",
        "gateway.key_id": key_id,
        "gateway.engine": "demo-0",
    }
    assert key_id.startswith("key-")
    engine = spans["engine demo-0"]
    assert engine.kind is SpanKind.CLIENT
    assert attributes_of(engine)["http.response.status_code"] == 200
    assert "error.type" not in attributes_of(engine)
    assert {span.status.status_code for span in spans.values()} == {StatusCode.UNSET}


async def test_a_stream_and_its_first_token(fake: Fake, tmp_path: Path) -> None:
    async with traced(tmp_path, fake.url) as one:
        await one.chat(stream=True)
        spans = await one.spans()
    assert in_order(spans) == ["chat demo", "auth", "limits", "engine demo-0", "stream"]
    assert_tree(spans, "chat demo")
    [first] = spans["engine demo-0"].events
    assert first.name == "first_token"
    assert first.timestamp == spans["stream"].start_time
    waits = [
        attributes_of(spans[name])["gen_ai.response.time_to_first_chunk"]
        for name in ("engine demo-0", "chat demo")
    ]
    assert 0 < waits[0] < waits[1]  # the request's begins with its head
    assert attributes_of(spans["chat demo"])["gen_ai.usage.output_tokens"] == 2


@pytest.mark.parametrize(
    ("path", "name", "operation"),
    [
        ("/v1/completions", "text_completion demo", "text_completion"),
        ("/v1/messages", "chat demo", "chat"),
        ("/v1/embeddings", "embeddings demo", "embeddings"),
        ("/v1/rerank", "/v1/rerank", None),
    ],
)
async def test_the_span_has_the_name_of_its_operation(
    path: str, name: str, operation: str | None, fake: Fake, tmp_path: Path
) -> None:
    async with traced(tmp_path, fake.url) as one:
        await one.gateway.client.post(path, json={"model": "demo"})
        spans = await one.spans()
    assert_tree(spans, name)
    assert attributes_of(spans[name]).get("gen_ai.operation.name") == operation


async def test_stored_response_has_a_trace_without_its_id(fake: Fake, tmp_path: Path) -> None:
    fake.stored.add("resp_canary")
    async with traced(tmp_path, fake.url) as one:
        stored = one.gateway.state.stored_responses
        await stored.claim("resp_canary", KEY_ID, "demo", "demo-0")
        await one.gateway.client.get("/v1/responses/resp_canary")
        spans = await one.spans()
    assert set(spans) == {"/v1/responses/{id}", "auth", "limits", "engine demo-0"}
    assert_tree(spans, "/v1/responses/{id}")
    assert attributes_of(spans["/v1/responses/{id}"])["http.request.method"] == "GET"
    assert not any("canary" in span.to_json() for span in spans.values())
    assert fake.seen[-1].header("traceparent") is not None


class TestParents:
    async def test_trace_of_the_client_continues_at_the_engine(
        self, fake: Fake, tmp_path: Path
    ) -> None:
        async with traced(tmp_path, fake.url) as one:
            await one.chat(("traceparent", PARENT), ("tracestate", "a=1,b=2"))
            spans = await one.spans()
        root, engine = spans["chat demo"], spans["engine demo-0"]
        assert root.parent is not None
        assert (root.parent.trace_id, root.parent.span_id) == (TRACE_ID, PARENT_ID)
        assert root.parent.is_remote
        sent = f"00-{TRACE_ID:032x}-{place(engine).span_id:016x}-01"
        assert fake.seen[-1].header("traceparent") == sent
        assert fake.seen[-1].header("tracestate") == "a=1,b=2"
        assert [name for name, _ in fake.seen[-1].headers].count("traceparent") == 1

    async def test_invalid_trace_context_is_not_forwarded(self, fake: Fake, tmp_path: Path) -> None:
        async with traced(tmp_path, fake.url) as one:
            await one.chat(("traceparent", PARENT + "-more"), ("tracestate", "a=1"))
            spans = await one.spans()
        root, engine = place(spans["chat demo"]), place(spans["engine demo-0"])
        assert spans["chat demo"].parent is None
        sent = fake.seen[-1].header("traceparent")
        assert sent == f"00-{root.trace_id:032x}-{engine.span_id:016x}-01"
        assert fake.seen[-1].header("tracestate") is None

    async def test_unsampled_trace_has_no_spans_and_the_engine_gets_its_flag(
        self, fake: Fake, tmp_path: Path
    ) -> None:
        async with traced(tmp_path, fake.url, ratio=0.0) as one:
            await one.chat()
            sent = fake.seen[-1].header("traceparent")
            assert sent is not None
            assert sent.endswith("-00")
            await one.chat(("traceparent", PARENT[:-2] + "00"))
            sent = fake.seen[-1].header("traceparent")
            assert sent is not None
            assert sent.startswith(f"00-{TRACE_ID:032x}-")
            assert sent.endswith("-00")
            assert one.everything() == ()
            # A client that samples is heard whatever the ratio is.
            await one.chat(("traceparent", PARENT))
            assert place((await one.spans())["chat demo"]).trace_id == TRACE_ID


class TestFaults:
    @pytest.mark.parametrize(
        ("limits", "key", "model", "status", "names", "error"),
        [
            ({}, "sk-nobody-0123456789abcd", "demo", 401, ["chat", "auth"], "invalid_api_key"),
            ({}, KEY, "canary", 404, ["chat", "auth"], "model_not_found"),
            (
                {"concurrent_requests": 0}, KEY, "demo", 429, ["chat demo", "auth", "limits"],
                "rate_limit_exceeded",
            ),
        ],
    )  # fmt: skip
    async def test_refusal_ends_its_phase_and_is_no_failure(
        self,
        limits: dict[str, Any],
        key: str,
        model: str,
        status: int,
        names: list[str],
        error: str,
        fake: Fake,
        tmp_path: Path,
    ) -> None:
        async with traced(tmp_path, fake.url, limits=limits) as one:
            headers = {"authorization": f"Bearer {key}"}
            body = {"model": model}
            path = "/v1/chat/completions"
            answer = await one.gateway.client.post(path, json=body, headers=headers)
            spans = await one.spans()
        assert answer.status_code == status
        assert set(spans) == set(names)
        root = spans[names[0]]
        assert attributes_of(root)["http.response.status_code"] == status
        assert attributes_of(root)["error.type"] == error
        assert {span.status.status_code for span in spans.values()} == {StatusCode.UNSET}
        stopped = [name for name in names[1:] if "error.type" in attributes_of(spans[name])]
        assert stopped == ([] if status == 404 else names[-1:])
        assert not any("canary" in s.to_json() or "nobody" in s.to_json() for s in spans.values())

    async def test_each_attempt_has_a_span_with_its_fault(self, fake: Fake, tmp_path: Path) -> None:
        async with Fake() as gone, traced(tmp_path, gone.url, fake.url) as one:
            await gone.stop()
            # The replicas take turns, so one of the two requests is sent to the one that is gone.
            assert [(await one.chat()).status_code for _ in range(2)] == [200, 200]
            spans = await one.trace_with("engine demo-0")
        assert_tree(spans, "chat demo")
        lost, found = spans["engine demo-0"], spans["engine demo-1"]
        assert attributes_of(lost)["error.type"] == "EngineUnavailable"
        assert lost.status.status_code is StatusCode.ERROR
        assert "http.response.status_code" not in attributes_of(lost)
        assert attributes_of(found)["http.request.resend_count"] == 1
        assert attributes_of(found)["http.response.status_code"] == 200
        assert spans["chat demo"].status.status_code is StatusCode.UNSET
        sent = [seen.header("traceparent") or "" for seen in fake.seen]
        assert any(f"{place(found).span_id:016x}" in parent for parent in sent)

    async def test_failed_request_and_last_attempt_have_error_status(
        self, fake: Fake, tmp_path: Path
    ) -> None:
        async with traced(tmp_path, fake.url, fake.url) as one:
            answer = await one.chat(fake="close")
            spans = await one.spans()
        assert answer.status_code == 502
        engines = [spans["engine demo-0"], spans["engine demo-1"]]
        engines.sort(key=lambda span: span.start_time or 0)
        assert [attributes_of(span)["error.type"] for span in engines] == [
            "ClosedBeforeAnswer",
            "engine_failed",
        ]
        assert [span.status.status_code for span in engines] == [StatusCode.ERROR] * 2
        assert attributes_of(spans["chat demo"])["error.type"] == "engine_failed"
        assert spans["chat demo"].status.status_code is StatusCode.ERROR

    async def test_fallback_in_a_trace(self, tmp_path: Path) -> None:
        dead = remote(f"http://127.0.0.1:{free_port()}")
        demo = {"name": "demo", "engines": [dead], "fallbacks": ["other"]}
        exporter = InMemorySpanExporter()
        tracer = Tracer(exporter, 1.0, "memory")
        async with (
            Fake("other") as fake,
            running(
                settings_for(
                    demo, {"name": "other", "engines": [remote(fake.url)]}, run_dir=tmp_path
                ),
                tracer=tracer,
            ) as gateway,
        ):
            one = Traced(gateway, tracer, exporter)
            answer = await one.chat()
            spans = await one.spans()
        assert answer.status_code == 200
        assert_tree(spans, "chat demo")
        assert attributes_of(spans["chat demo"])["gen_ai.request.model"] == "demo"
        assert attributes_of(spans["chat demo"])["gen_ai.response.model"] == "other"
        assert spans["chat demo"].status.status_code is StatusCode.UNSET
        assert attributes_of(spans["engine demo-0"])["error.type"] == "engine_unavailable"
        assert spans["engine demo-0"].status.status_code is StatusCode.ERROR
        assert "error.type" not in attributes_of(spans["engine other-0"])

    async def test_truncated_stream_has_error_status(self, fake: Fake, tmp_path: Path) -> None:
        async with traced(tmp_path, fake.url) as one:
            assert "engine_failed" in (await one.chat(stream=True, fake="die_in_event")).text
            spans = await one.spans()
        assert_tree(spans, "chat demo")
        assert "stream" in spans
        for name in ("chat demo", "engine demo-0"):
            assert attributes_of(spans[name])["error.type"] == "answer_truncated"
            assert spans[name].status.status_code is StatusCode.ERROR
        assert attributes_of(spans["chat demo"])["http.response.status_code"] == 200
        assert attributes_of(spans["chat demo"])["gateway.usage_estimated"] is True

    async def test_error_response_of_an_engine_is_no_failure(
        self, fake: Fake, tmp_path: Path
    ) -> None:
        async with traced(tmp_path, fake.url) as one:
            await one.chat(max_tokens=-1)
            spans = await one.spans()
        assert attributes_of(spans["engine demo-0"])["error.type"] == "400"
        assert spans["engine demo-0"].status.status_code is StatusCode.ERROR
        assert spans["chat demo"].status.status_code is StatusCode.UNSET

    async def test_disconnect_during_prefill_in_a_trace(self, fake: Fake, tmp_path: Path) -> None:
        async with traced(tmp_path, fake.url) as one:
            async with connected(one.gateway) as client:
                client.writer.write(request(asking(fake="hang")))
                await fake.until_running()
            spans = await one.spans()
        root = spans["text_completion demo"]
        assert attributes_of(root)["http.response.status_code"] == 499
        for span in (root, spans["engine demo-0"]):
            assert attributes_of(span)["error.type"] == "client_disconnected"
            assert span.status.status_code is StatusCode.UNSET

    async def test_spans_contain_no_prompt_response_or_key(
        self, fake: Fake, tmp_path: Path
    ) -> None:
        async with traced(tmp_path, fake.url) as one:
            for fields in ({}, {"stream": True}, {"fake": "close"}, {"fake": "text:500"}):
                await one.chat(**fields)
            text = "".join(span.to_json() for span in one.everything())
        assert "chat demo" in text
        for secret in (PROMPT, ANSWER, KEY):
            assert secret not in text


class TestWaits:
    async def test_queued_request_has_a_queue_span(self, fake: Fake, tmp_path: Path) -> None:
        async with traced(tmp_path, fake.url, queue={"max_in_flight": 1}) as one:
            async with connected(one.gateway) as first:
                first.writer.write(request(asking(fake="hang")))
                await fake.until_running()
                waiting = asyncio.create_task(one.chat())
                await wait_until(lambda: one.gateway.state.admission.waiting)
            await waiting
            spans = await one.trace_with("queue")
        assert in_order(spans) == ["chat demo", "auth", "limits", "queue", "engine demo-0"]
        assert_tree(spans, "chat demo")

    async def test_refused_request_ends_in_the_queue_span(self, fake: Fake, tmp_path: Path) -> None:
        queue = {"max_in_flight": 1, "max_waiting": 0}
        async with (
            traced(tmp_path, fake.url, queue=queue) as one,
            connected(one.gateway) as first,
        ):
            first.writer.write(request(asking(fake="hang")))
            await fake.until_running()
            answer = await one.chat()
            spans = await one.spans()
        assert answer.status_code == 503
        assert set(spans) == {"chat demo", "auth", "limits", "queue"}
        for name in ("queue", "chat demo"):
            assert attributes_of(spans[name])["error.type"] == "engine_overloaded"
            assert spans[name].status.status_code is StatusCode.ERROR

    @pytest.mark.slow
    async def test_load_wait_in_a_trace(self, tmp_path: Path) -> None:
        launcher = (sys.executable, "-m", "tests.fakes.vllm")
        engine = {"kind": "process", "model": "m", "memory_gib": 1.0}
        async with traced(tmp_path, launcher=launcher, engines=[engine], load="on_demand") as one:
            await one.chat()
            spans = await one.spans()
        assert in_order(spans) == ["chat demo", "auth", "limits", "load_wait", "engine demo-0"]
        assert_tree(spans, "chat demo")
