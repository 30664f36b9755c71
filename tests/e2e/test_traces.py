"""vLLM's own spans and ours in one trace, ours over HTTP and vLLM's over gRPC to one collector."""

from contextlib import ExitStack
from pathlib import Path

from tests.e2e.deployment import ENGINE, demo_model
from tests.fakes.collector import Collector
from tests.gateway import running, settings_for
from tests.services import CollectorServer

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
# OpenTelemetry's numbers for the kinds of span.
SERVER, CLIENT = 2, 3


async def test_vllms_span_is_the_child_of_the_gateways_in_the_clients_trace(tmp_path: Path) -> None:
    demo_model()
    with Collector() as backend, ExitStack() as stack:
        collector = CollectorServer(backend.url)
        stack.callback(collector.remove)
        collector.start()
        args = {**ENGINE["args"], "otlp-traces-endpoint": collector.grpc_url}
        model = {"name": "demo", "engines": [{**ENGINE, "args": args}]}
        settings = settings_for(model, run_dir=tmp_path, traces={"endpoint": collector.url})
        async with running(settings) as gateway:
            body = {
                "model": "demo",
                "messages": [{"role": "user", "content": "hi"}],
                "max_tokens": 8,
            }
            parent = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
            answer = await gateway.client.post("/v1/chat/completions", json=body, headers=parent)
            assert answer.status_code == 200, answer.text
        # The gateway has ended, and its engine with it: both have sent what they had.
        wanted = {"chat demo", "engine demo-0", "llm_request"}
        backend.until(lambda spans: wanted <= {span.name for span in spans})
        spans = {span.name: span for span in backend.spans if span.trace_id == TRACE_ID}
    root, asked, theirs = spans["chat demo"], spans["engine demo-0"], spans["llm_request"]
    assert (root.parent_id, root.kind) == (PARENT_ID, SERVER)
    assert (asked.parent_id, asked.kind) == (root.span_id, CLIENT)
    assert theirs.parent_id == asked.span_id
    assert asked.start_ns < theirs.start_ns
    assert asked.resource["service.name"] == "vllm-gateway"
    assert "vllm.instrumenting_module_name" in theirs.resource
    usage = answer.json()["usage"]
    assert root.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert theirs.attributes["gen_ai.usage.completion_tokens"] == usage["completion_tokens"]
