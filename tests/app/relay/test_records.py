"""Every end of a request in the relay: its records, and their number.

A request that reached an engine has one usage record, any other none; each has one access line and
is counted once.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from app.relay.request_context import RequestContext
from app.relay.request_handler import handle_request
from app.relay.services import RelayServices
from app.telemetry import RequestRecord
from tests.app.raw import Client, connected, request
from tests.fakes.vllm import Fake
from tests.gateway import KEY_ID, Gateway, remote, running, settings_for
from tests.waiting import PATIENCE_S, wait_until

CHAT = "/v1/chat/completions"
SUBJECT = "the-one"
NOWHERE = "http://127.0.0.1:9"  # the port of `discard`, without a listener
LAUNCHER = (sys.executable, "-m", "tests.fakes.vllm")


@dataclass
class Scene:
    """A gateway with the model `demo`, its fallback `small`, and a fake behind each."""

    gateway: Gateway
    demo: Fake
    small: Fake

    async def ask(self, body: bytes | None = None, **fields: Any) -> None:
        """Make the request in question, and read its answer, or what there is of it."""
        async with self.asking(body, **fields) as client:
            await client.answer()

    @asynccontextmanager
    async def asking(
        self,
        body: bytes | None = None,
        *,
        path: str = CHAT,
        method: bytes = b"POST",
        key: bool = True,
        **fields: Any,
    ) -> AsyncIterator[Client]:
        """Make the request in question; its client leaves with the context."""
        if body is None and method == b"POST":
            body = json.dumps({"model": "demo", **fields}).encode()
        head = b"x-request-id: " + SUBJECT.encode()
        async with connected(self.gateway) as client:
            client.send(request(body, head, method=method, path=path.encode(), key=key))
            yield client

    @asynccontextmanager
    async def busy(self, model: str) -> AsyncIterator[None]:
        """Hold the only place that a model has."""
        body = json.dumps({"model": model, "fake": "pace:20", "stream": True}).encode()
        fake = self.demo if model == "demo" else self.small
        fault, fake.fault = fake.fault, None
        async with connected(self.gateway) as holder:
            holder.send(request(body))
            await fake.until_running(timeout=PATIENCE_S)
            fake.fault = fault
            yield

    async def until_waiting(self) -> None:
        """Return when the request waits for room."""
        await wait_until(lambda: self.gateway.state.admission.waiting)


Happening = Callable[[Scene], Awaitable[None]]


@dataclass(frozen=True)
class Way:
    """One outcome and its record. Without an engine, none was reached."""

    happens: Happening
    status: int
    model: str = "demo"
    engine: str | None = None
    outcome: str | None = None
    settings: dict[str, Any] | None = None  # of the model demo
    small: dict[str, Any] | None = None  # of its fallback
    # What stands behind the model demo (see `playing`).
    engines: tuple[str, ...] = ("demo",)
    asked: str = "demo"  # what the client calls the model
    endpoint: str = CHAT


def asks(*, demo: str | None = None, small: str | None = None, **fields: Any) -> Happening:
    """The request is made and answered; `demo` and `small` are faults of those engines."""

    async def happens(scene: Scene) -> None:
        scene.demo.fault, scene.small.fault = demo, small
        await scene.ask(**fields)

    return happens


async def leaves_the_first_queue(scene: Scene) -> None:
    async with scene.busy("demo"), scene.asking():
        await scene.until_waiting()


async def leaves_the_first_engine(scene: Scene) -> None:
    scene.demo.fault = "hang"
    async with scene.asking():
        await scene.demo.until_running(timeout=PATIENCE_S)


async def leaves_in_mid_stream(scene: Scene) -> None:
    scene.demo.fault = "pace:20"
    async with scene.asking(stream=True) as client:
        await client.until(b"data: ")


async def leaves_the_second_engine(scene: Scene) -> None:
    scene.demo.fault, scene.small.fault = "dead", "hang"
    async with scene.asking():
        await scene.small.until_running(timeout=PATIENCE_S)


async def leaves_the_second_queue(scene: Scene) -> None:
    scene.demo.fault = "dead"
    async with scene.busy("small"), scene.asking():
        await scene.until_waiting()


async def waits_in_the_second_queue(scene: Scene) -> None:
    scene.demo.fault = "dead"
    async with scene.busy("small"):
        await scene.ask()


async def finds_the_first_queue_full(scene: Scene) -> None:
    scene.small.fault = "dead"
    async with scene.busy("demo"):
        await scene.ask()


async def finds_both_queues_full(scene: Scene) -> None:
    async with scene.busy("demo"), scene.busy("small"):
        await scene.ask()


async def fails_while_the_gateway_drains(scene: Scene) -> None:
    scene.demo.fault = "hang"
    async with scene.asking() as client:
        await scene.demo.until_running(timeout=PATIENCE_S)
        scene.gateway.state.admission.drain()
        await scene.demo.stop()
        assert (await client.answer()).code == "engine_failed"


async def comes_while_the_gateway_drains(scene: Scene) -> None:
    scene.gateway.state.admission.drain()
    await scene.ask()


async def is_cut_by_the_shutdown(scene: Scene) -> None:
    scene.demo.fault = "dead"
    async with scene.busy("small"):
        before = set(scene.gateway.server.tasks)
        async with scene.asking() as client:
            await scene.until_waiting()
            [waiting] = scene.gateway.server.tasks - before
            waiting.cancel()  # what uvicorn does with what the drain did not see end
            assert (await client.answer()).code == "engine_unavailable"


async def leaves_while_the_fallback_loads(scene: Scene) -> None:
    scene.demo.fault = "dead"
    async with scene.asking():
        await wait_until(lambda: scene.gateway.state.loader.waiting)


async def leaves_while_it_is_looked_for(scene: Scene) -> None:
    scene.demo.fault = "hang"
    async with scene.asking(method=b"GET", path="/v1/responses/resp_1"):
        await wait_until(lambda: any("/v1/responses" in seen.target for seen in scene.demo.seen))


NARROW = {"queue": {"max_in_flight": 1}}
FULL = {"queue": {"max_in_flight": 1, "max_waiting": 0}}
HASTY = {"queue": {"max_in_flight": 1, "timeout_s": 0.03}}
ALONE: dict[str, Any] = {"fallbacks": []}
STORED = "/v1/responses/{id}"

WAYS = {
    # Those that never get as far as an engine.
    "no key": Way(asks(key=False), 401, "unknown"),
    "another method": Way(asks(method=b"GET"), 405, "unknown"),
    "which methods": Way(asks(method=b"OPTIONS", key=False), 204, "unknown"),
    "not JSON": Way(asks(body=b"{"), 400, "unknown"),
    "no such model": Way(asks(model="nobody"), 404, "unknown"),
    "over a limit": Way(asks(), 429, settings={"limits": {"requests_per_minute": 0}}),
    "draining": Way(comes_while_the_gateway_drains, 503),
    "left the queue": Way(leaves_the_first_queue, 499, settings=NARROW),
    "queues full": Way(finds_both_queues_full, 503, settings=FULL, small=FULL),
    "nobody there": Way(asks(), 503, settings=ALONE, engines=("nobody", "nobody")),
    # Those that the first model's engine serves, or not.
    "served": Way(asks(), 200, engine="demo-0", outcome="completed"),
    "called by an alias": Way(
        asks(model="gpt"), 200, engine="demo-0", outcome="completed", asked="gpt"
    ),
    "streamed": Way(asks(stream=True), 200, engine="demo-0", outcome="completed"),
    "refused": Way(asks(max_tokens=-1), 400, engine="demo-0", outcome="refused"),
    "its own 500": Way(asks(demo="status:500"), 500, engine="demo-0", outcome="failed"),
    "died": Way(asks(demo="dead"), 502, engine="demo-0", outcome="failed", settings=ALONE),
    "too slow": Way(
        asks(demo="hang"), 504, engine="demo-0", outcome="failed", settings=ALONE,
        engines=("hasty",),
    ),
    "died in mid-stream": Way(
        asks(demo="die:1", stream=True), 200, engine="demo-0", outcome="failed"
    ),
    "left the engine": Way(leaves_the_first_engine, 499, engine="demo-0", outcome="disconnected"),
    "left in mid-stream": Way(leaves_in_mid_stream, 499, engine="demo-0", outcome="disconnected"),
    # Those that another replica is asked for.
    "died, then served": Way(
        asks(demo="dead"), 200, engine="demo-1", outcome="completed", engines=("demo", "small")
    ),
    "died twice": Way(
        asks(demo="dead", small="dead"), 502, engine="demo-1", outcome="failed", settings=ALONE,
        engines=("demo", "small"),
    ),
    "died, then nobody there": Way(
        asks(demo="dead"), 502, engine="demo-0", outcome="failed", settings=ALONE,
        engines=("demo", "nobody"),
    ),
    # Those that are handed on.
    "nobody there, fallback serves": Way(
        asks(), 200, "small", "small-0", "completed", engines=("nobody",)
    ),
    "fallback is not there": Way(
        asks(demo="dead"), 502, "demo", "demo-0", "failed",
        small={"engines": [remote(NOWHERE)]},
    ),
    "fallback serves": Way(asks(demo="dead"), 200, "small", "small-0", "completed"),
    "fallback serves for an alias": Way(
        asks(model="gpt", demo="dead"), 200, "small", "small-0", "completed", asked="gpt"
    ),
    "fallback dies": Way(asks(demo="dead", small="dead"), 502, "demo", "small-0", "failed"),
    "fallback dies in mid-stream": Way(
        asks(demo="dead", small="die:1", stream=True), 200, "small", "small-0", "failed"
    ),
    "left the fallback": Way(leaves_the_second_engine, 499, "small", "small-0", "disconnected"),
    "left the fallback's queue": Way(
        leaves_the_second_queue, 499, "demo", "demo-0", "disconnected", small=NARROW
    ),
    "fallback's queue full": Way(
        waits_in_the_second_queue, 502, "demo", "demo-0", "failed", small=FULL
    ),
    "fallback's queue slow": Way(
        waits_in_the_second_queue, 502, "demo", "demo-0", "failed", small=HASTY
    ),
    "fallback over its limit": Way(
        asks(demo="dead"), 502, "demo", "demo-0", "failed",
        small={"limits": {"requests_per_minute": 0}},
    ),
    "failed while draining": Way(
        fails_while_the_gateway_drains, 502, "demo", "demo-0", "failed"
    ),
    "cut by the shutdown": Way(
        is_cut_by_the_shutdown, 503, "demo", "demo-0", "failed", small=NARROW
    ),
    "overload, then death": Way(
        finds_the_first_queue_full, 503, "demo", "small-0", "failed", settings=FULL
    ),
    # Those for a thing that an engine keeps.
    "stored": Way(
        asks(method=b"GET", path="/v1/responses/resp_1"), 200, "demo", "demo-0", "completed",
        endpoint=STORED,
    ),
    "stored, and its engine is down": Way(
        asks(method=b"GET", path="/v1/responses/resp_1"), 503, "demo", engines=("nobody",),
        endpoint=STORED,
    ),
    "left while it is looked for": Way(
        leaves_while_it_is_looked_for, 499, "demo", "demo-0", "disconnected", endpoint=STORED
    ),
    "nobody's": Way(
        asks(method=b"GET", path="/v1/responses/resp_2"), 404, "unknown", endpoint=STORED
    ),
}  # fmt: skip


@asynccontextmanager
async def playing(tmp_path: Path, way: Way) -> AsyncIterator[Scene]:
    """Run the gateway of a way out."""
    async with AsyncExitStack() as stack:
        demo, small = [await stack.enter_async_context(Fake(n)) for n in ("demo", "small")]
        demo.stored = {"resp_1"}
        behind = {
            "demo": remote(demo.url),
            "small": remote(small.url, served_model_name="small"),
            "hasty": remote(demo.url, timeouts={"first_byte_s": 0.05}),
            "nobody": remote(NOWHERE),
        }
        models = [
            {
                "name": "demo",
                "aliases": ["gpt"],
                "fallbacks": ["small"],
                "policy": "round_robin",  # the first engine is asked first
                "engines": [behind[one] for one in way.engines],
                **(way.settings or {}),
            },
            {
                "name": "small",
                "engines": [behind["small"]],
                **(way.small or {}),
            },
        ]
        settings = settings_for(*models, run_dir=tmp_path)
        gateway = await stack.enter_async_context(running(settings, LAUNCHER))
        await gateway.state.stored_responses.claim("resp_1", KEY_ID, "demo", "demo-0")
        yield Scene(gateway, demo, small)


async def until_told(gateway: Gateway, capsys: pytest.CaptureFixture[str]) -> list[Any]:
    """Return the access lines of the request in question, once nothing is under way."""
    await asyncio.wait_for(gateway.state.admission.wait_until_idle(), PATIENCE_S)
    async with asyncio.timeout(PATIENCE_S):
        while not (lines := _lines(gateway, capsys)):
            await asyncio.sleep(0.002)
    return lines


async def check(scene: Scene, way: Way, capsys: pytest.CaptureFixture[str]) -> None:
    """Run a request to its outcome, and check its record."""
    gateway = scene.gateway
    records: list[RequestRecord] = []
    gateway.state.ledger.watch(lambda _batch, ended: records.append(ended.record))
    await way.happens(scene)
    [line] = await until_told(gateway, capsys)
    recorded = [
        (r.model, r.engine, r.status, r.outcome)
        for r in records
        if r.request_id == SUBJECT and r.engine is not None
    ]
    reached = [] if way.engine is None else [(way.model, way.engine, way.status, way.outcome)]
    assert recorded == reached
    assert (line["model"], line["engine"], line["status"]) == (way.model, way.engine, way.status)
    assert line.get("asked", way.model) == ("unknown" if way.model == "unknown" else way.asked)
    counted = [
        sample.labels
        for family in gateway.state.metrics.registry.collect()
        for sample in family.samples
        if sample.name == "gateway_requests_total" and sample.labels["endpoint"] == way.endpoint
        for _ in range(int(sample.value))
    ]
    labels = {"model": way.model, "endpoint": way.endpoint, "status": str(way.status)}
    assert counted == [labels]


def _lines(gateway: Gateway, capsys: pytest.CaptureFixture[str]) -> list[Any]:
    """Return the access lines of the request in question."""
    gateway.state.access.flush()
    lines = [one for one in capsys.readouterr().err.splitlines() if '"logger":"access"' in one]
    return [line for line in map(json.loads, lines) if line["request_id"] == SUBJECT]


@pytest.mark.parametrize("name", WAYS)
async def test_every_end_of_a_request_is_recorded_once(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    way = WAYS[name]
    async with playing(tmp_path, way) as scene:
        await check(scene, way, capsys)


async def test_facts_of_a_continuation_are_in_the_line_and_the_usage_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def handle(services: RelayServices, request: RequestContext) -> None:
        await handle_request(services, request)
        request.continued, request.recomputed_tokens = 1, 90
        request.not_continued = "died_again"

    monkeypatch.setattr("app.relay.relay.handle_request", handle)
    async with playing(tmp_path, WAYS["streamed"]) as scene:
        records: list[RequestRecord] = []
        scene.gateway.state.ledger.watch(lambda _batch, ended: records.append(ended.record))
        await scene.ask(stream=True)
        [line] = await until_told(scene.gateway, capsys)
    [record] = records
    facts = (1, 90, "died_again")
    assert (record.continued, record.recomputed_tokens, record.not_continued) == facts
    assert (line["continued"], line["recomputed_tokens"], line["not_continued"]) == facts


@pytest.mark.slow
async def test_disconnect_while_the_fallback_loads_is_recorded_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = tmp_path / "loaded"
    args = {"fake-load-until": str(loaded)}
    slow = {"kind": "process", "model": "m", "memory_gib": 1.0, "args": args}
    way = Way(
        leaves_while_the_fallback_loads, 499, "demo", "demo-0", "disconnected",
        small={"load": "on_demand", "engines": [slow]},
    )  # fmt: skip
    async with playing(tmp_path, way) as scene:
        await check(scene, way, capsys)
        loaded.touch()
