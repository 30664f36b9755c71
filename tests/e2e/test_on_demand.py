"""Two models on demand in the memory of one: real vLLM makes way for a fake engine.

A cold request waits while vLLM downloads the model from ModelScope, which is a server of this
machine here, and is traced, by the gateway and by vLLM. The tests are in order: each begins where
the one before it ended.
"""

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.deployment import (
    ADMIN_KEY,
    ENGINE,
    START_S,
    Deployment,
    alive,
    demo_model,
    deployed,
    until_ready,
)
from tests.e2e.mixed_gateway import MIXED
from tests.fakes.collector import Collector
from tests.fakes.hub import FakeHub, serving_hub
from tests.fakes.modelscope import ModelScopeHandler
from tests.services import CollectorServer
from tests.waiting import poll_until

# vLLM's three processes take 2.7 GiB with this model.
FREED_MIB = 1000
PATIENCE_S = 180
WEIGHTS = "model.safetensors"
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
# OpenTelemetry's numbers for the kinds of span.
SERVER, CLIENT = 2, 3


@pytest.fixture(scope="module")
def backend() -> Iterator[Collector]:
    """What has the spans in the end."""
    with Collector() as running:
        yield running


@pytest.fixture(scope="module")
def hub() -> Iterator[FakeHub]:
    """ModelScope with the demo model; the download of its weights pauses until `go_on` is set."""
    hub = FakeHub(pause_after=1_000_000)
    hub.add_directory(demo_model())
    with serving_hub(hub, ModelScopeHandler):
        yield hub
        hub.go_on.set()


def from_modelscope(hub: FakeHub, cache: Path) -> dict[str, Any]:
    """Return what has an engine download its model from a hub."""
    variables = {
        "HF_HUB_OFFLINE": "0",
        "VLLM_USE_MODELSCOPE": True,
        "MODELSCOPE_ENDPOINT": hub.url,
        "MODELSCOPE_CACHE": str(cache),
    }
    return {"model": hub.repo, "env": {**ENGINE["env"], **variables}}


@pytest.fixture(scope="module")
def deployment(
    backend: Collector, hub: FakeHub, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """A gateway that is ready with no model loaded; its spans go over HTTP, vLLM's over gRPC."""
    with ExitStack() as stack:
        cache = tmp_path_factory.mktemp("cache")
        collector = CollectorServer(backend.url)
        stack.callback(collector.remove)
        collector.start()
        args = {**ENGINE["args"], "otlp-traces-endpoint": collector.grpc_url}
        engine = {**ENGINE, **from_modelscope(hub, cache), "args": args, "memory_gib": 3.0}
        fake = {"kind": "process", "model": "fake", "args": {"fake-start": "ok"}}
        models: list[dict[str, Any]] = [
            {"name": "one", "load": "on_demand", "engines": [engine]},
            # What it takes is not known before it has run.
            {"name": "two", "load": "on_demand", "idle_unload_s": 3, "engines": [fake]},
        ]
        # Only what a client wants to have traced.
        traces = {"ENDPOINT": collector.url, "SAMPLE_RATIO": "0"}
        running = stack.enter_context(
            deployed(
                tmp_path_factory.mktemp("gateway"),
                *models,
                command=MIXED,
                variables={f"GATEWAY_TRACES__{name}": value for name, value in traces.items()},
                memory_budget_gib=4.0,
            )
        )
        until_ready(running)
        yield running


def rss_mib(deployment: Deployment) -> float:
    """Return what the processes of the engines hold."""
    total = 0
    for process in deployment.family():
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total / 2**20


def ask(deployment: Deployment, model: str, **headers: str) -> httpx.Response:
    messages = [{"role": "user", "content": "Hello!"}]
    with deployment.client() as client:
        return client.post(
            "/v1/chat/completions",
            json={"model": model, "messages": messages, "max_tokens": 4},
            headers=headers,
            timeout=PATIENCE_S,
        )


def phase(deployment: Deployment, model: str) -> str:
    """Return the phase of the start of a model's engine."""
    with deployment.client(ADMIN_KEY) as client:
        rows = client.get("/admin/engines").json()["data"]
    [progress] = [row["progress"] for row in rows if row["name"] == f"{model}-0"]
    return str((progress or {}).get("phase"))


def starts(deployment: Deployment, engine: str) -> int:
    """Return how often an engine was started."""
    logs = (deployment.run_dir / engine).glob("engine.log*")
    return sum(
        log.read_text(errors="replace").count("Application startup complete") for log in logs
    )


def series(deployment: Deployment, beginning: str) -> list[str]:
    """Return the lines of /metrics that begin so."""
    text = httpx.get(f"{deployment.url}/metrics").text
    return [line for line in text.splitlines() if line.startswith(beginning)]


def test_cold_requests_wait_for_one_download_and_are_traced_by_vllm_as_well(
    deployment: Deployment, backend: Collector, hub: FakeHub
) -> None:
    assert "model  one (loads at the first request)" in deployment.said()
    assert httpx.get(f"{deployment.url}/ready").status_code == 200
    assert not deployment.family()

    traced = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
    with ThreadPoolExecutor(2) as threads:
        asked = threads.map(lambda sent: ask(deployment, "one", **sent), ({}, traced))
        try:
            downloading = re.compile(r"downloading \d\.\d of 1\.3 MiB")
            poll_until(lambda: downloading.fullmatch(phase(deployment, "one")), START_S)
        finally:
            hub.go_on.set()
        cold = list(asked)
    assert [answer.status_code for answer in cold] == [200, 200]
    contents = [answer.json()["choices"][0]["message"]["content"] for answer in cold]
    assert all(content.startswith("Hello!") for content in contents)
    assert starts(deployment, "one-0") == 1
    assert hub.downloads(WEIGHTS) == [""]

    # The gateway and vLLM send what they have every few seconds.
    wanted = {"chat one", "engine one-0", "llm_request"}
    backend.until(
        lambda spans: wanted <= {span.name for span in spans if span.trace_id == TRACE_ID}, 30
    )
    spans = {span.name: span for span in backend.spans if span.trace_id == TRACE_ID}
    root, sent, theirs = spans["chat one"], spans["engine one-0"], spans["llm_request"]
    assert (root.parent_id, root.kind) == (PARENT_ID, SERVER)
    assert (sent.parent_id, sent.kind) == (root.span_id, CLIENT)
    assert theirs.parent_id == sent.span_id
    assert sent.start_ns < theirs.start_ns
    assert sent.resource["service.name"] == "vllm-gateway"
    assert "vllm.instrumenting_module_name" in theirs.resource
    usage = cold[1].json()["usage"]
    assert root.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert theirs.attributes["gen_ai.usage.completion_tokens"] == usage["completion_tokens"]


def test_another_model_evicts_it_and_unloads_when_idle(
    deployment: Deployment, show: Callable[[str], None]
) -> None:
    first = deployment.family()
    before = rss_mib(deployment)
    notes = [f"one is loaded: RSS of its family {before:.0f} MiB"]

    assert ask(deployment, "two").status_code == 200
    assert not [process for process in first if alive(process)]
    evicted = series(deployment, "gateway_model_evictions_total{")
    assert evicted == ['gateway_model_evictions_total{model="one",reason="room"} 1.0']
    second = deployment.family()
    after = rss_mib(deployment)
    notes.append(f"two is loaded, one was evicted: {after:.0f} MiB")
    assert before - after > FREED_MIB

    poll_until(lambda: not any(alive(process) for process in second), 30)
    assert httpx.get(f"{deployment.url}/ready").status_code == 200
    notes += series(deployment, "gateway_engine_load_seconds_sum")
    assert deployment.terminate() == 0
    notes += [line for line in deployment.said().splitlines() if " model " in line]
    show("\n".join(notes))
