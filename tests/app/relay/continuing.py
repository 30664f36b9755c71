"""A gateway before several fake engines whose streams are interrupted, and what its clients get."""

import asyncio
import itertools
import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.sse import COMMENT
from app.telemetry import EndedRequest, RequestRecord
from tests.app.continuation.streams import assemble, split
from tests.app.raw import Answer, Client, connected, request
from tests.fakes.stream_faults import StreamFault
from tests.fakes.vllm import Fake
from tests.gateway import Gateway, remote, serving_demo
from tests.waiting import PATIENCE_S, wait_until

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
# Every token of a stream is a test of its own: more than 600 requests a minute.
UNLIMITED = {"default": {"requests_per_minute": 1_000_000}}
# The engine's part of a run, which a second request does not share.
_RUN = re.compile(rb'"(?:id":"[^"]*"|created":[0-9]+)')


@dataclass
class Stream:
    """What a client got, and the record of its request."""

    path: str
    answer: Answer
    record: RequestRecord

    @property
    def body(self) -> bytes:
        """Return its events without comments."""
        return b"".join(event for event in split(self.answer.body) if event != COMMENT)

    @property
    def bytes(self) -> bytes:
        """Return its events without what differs between two requests."""
        return without_run(self.body)

    @property
    def text(self) -> Any:
        """Return what a client puts together; asserts that it is of one run."""
        return assemble(self.path, self.body)

    @property
    def error(self) -> Any:
        """Return the error that ends it; None: there is none."""
        last = self.body.rstrip().rpartition(b"data: ")[2]
        return json.loads(last).get("error") if last.startswith(b"{") else None

    @property
    def tokens(self) -> tuple[int, int]:
        """Return the tokens of its record: prompt and completion."""
        usage = self.record.usage
        assert usage is not None
        return usage.prompt, usage.completion


def without_run(stream: bytes) -> bytes:
    """Return a stream without its ID and time."""
    return _RUN.sub(b"-", stream)


@dataclass
class Streams:
    """A gateway whose model `demo` has fake engines, and the streams that clients ask for."""

    gateway: Gateway
    fakes: Sequence[Fake]
    records: dict[str, RequestRecord] = field(default_factory=dict)
    _numbers: Any = field(default_factory=itertools.count)

    def fail(self, kind: str, after: int, times: int | None = 1) -> StreamFault:
        """Have streams fail after so many tokens, whichever engine they are at."""
        fault = StreamFault(kind, after, times)
        for fake in self.fakes:
            fake.stream_fault = fault
        return fault

    def heal(self) -> None:
        for fake in self.fakes:
            fake.stream_fault = None
            fake.widths, fake.pace_s = (1,), 0.0
            fake.seen.clear()

    async def ask(self, path: str = CHAT, say: str = "one two three", **fields: Any) -> Stream:
        """Return a stream that was read to its end."""
        async with self.asking(path, say, **fields) as (client, name):
            answer = await client.answer()
        assert answer.status == 200, answer.body
        await wait_until(lambda: name in self.records)
        return Stream(path, answer, self.records[name])

    @asynccontextmanager
    async def asking(
        self, path: str = CHAT, say: str = "one two three", key: bytes | None = None, **fields: Any
    ) -> AsyncIterator[tuple[Client, str]]:
        """Ask for a stream; its client leaves with the context. Yields the request's ID as well."""
        name = f"stream-{next(self._numbers)}"
        prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
        if path == COMPLETIONS:
            prompt = {"prompt": "hi"}
        elif path == RESPONSES:
            prompt = {"input": "hi", "store": False}
        for fake in self.fakes:  # not a field of the request, which would not be replayed
            fake.fault = f"say:{say}"
        body = {"model": "demo", "stream": True, **prompt, **fields}
        head = [b"x-request-id: " + name.encode(), *([key] if key else [])]
        async with connected(self.gateway) as client:
            raw = json.dumps(body).encode()
            client.send(request(raw, *head, path=path.encode(), key=key is None))
            yield client, name

    async def metric(self, way: str, outcome: str) -> float:
        labels = {"model": "demo", "way": way, "outcome": outcome}
        return await self.gateway.metric("gateway_continuations_total", **labels)

    def posts(self, path: str = CHAT) -> list[Any]:
        """Return the bodies that the engines were sent, in the order of the engines."""
        return [seen.json for fake in self.fakes for seen in fake.seen if seen.target == path]

    async def at_rest(self) -> None:
        """Return when nothing is under way; whatever a test did, nothing is left behind."""
        state = self.gateway.state
        await asyncio.wait_for(state.admission.wait_until_idle(), PATIENCE_S)
        await wait_until(lambda: not self.gateway.server.tasks)
        for fake in self.fakes:
            await fake.until_idle()
        for model in state.catalogue.models:
            assert [(r.in_flight, len(r.streams)) for r in model.replicas] == [
                (0, 0) for _ in model.replicas
            ]
        assert [queue.suspended for queue in state.admission._all()] == [0, 0]
        assert len(state.in_flight) == 0
        assert state.body_memory.held == 0


@asynccontextmanager
async def streaming(
    run_dir: Path,
    engines: int = 2,
    *,
    model: dict[str, Any] | None = None,
    timeouts: dict[str, float] | None = None,
    fakes: Sequence[Fake] = (),
    **sections: Any,
) -> AsyncIterator[Streams]:
    """Run a gateway before so many fakes, or those that are given; nothing is left at the end."""
    async with AsyncExitStack() as stack:
        # Each writes another time of creation, as two engines do.
        fakes = fakes or [Fake(names_ids=True, created=1_000 + n) for n in range(engines)]
        for fake in fakes:
            await stack.enter_async_context(fake)
        specs = [remote(fake.url, timeouts=timeouts or {}) for fake in fakes]
        settings = {"engines": specs, **(model or {})}
        gateway = await stack.enter_async_context(
            serving_demo(run_dir, model=settings, **{"limits": UNLIMITED, **sections})
        )
        streams = Streams(gateway, fakes)

        def note(_batch: object, ended: EndedRequest) -> None:
            streams.records[ended.record.request_id] = ended.record

        gateway.state.ledger.watch(note)
        yield streams
        await streams.at_rest()
