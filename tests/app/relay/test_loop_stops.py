"""The longest stop of the event loop by one large body, at every JSON endpoint.

A stop is the CPU time of one turn of the gateway's loop, so other programs do not count.
"""

import asyncio
import http.client
import math
import selectors
import threading
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from app.api.data_plane import ENDPOINTS
from app.request_body.body import QUICK_BYTES
from tests.app.relay.body_shapes import ADDRESSES, Shape, search
from tests.fakes.vllm import Fake, Seen
from tests.gateway import KEY, serving_demo

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

MIB = 1024 * 1024
PATHS = sorted(path for path in ENDPOINTS if "audio" not in path)
NO_LIMITS = {"default": {"requests_per_minute": None, "tokens_per_minute": None}}
LARGEST = 31 * MIB
# Members of which the model's rules read a nested field.
RULED = ("metadata", "response_format", "unknown")
SEED, TRIES = 1, 200


class Unread(Fake):
    """An engine that does not look at the bodies: it would take as long as the gateway."""

    def _parse(self, request: Seen) -> dict[str, Any]:
        self.seen.clear()
        text = "hi"
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "prompt": text,
        }


class Turns(selectors.DefaultSelector):
    """Waits for a loop's events, and measures the turns between."""

    def __init__(self) -> None:
        super().__init__()
        self.longest_s = 0.0
        self._began = math.inf

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.longest_s = max(self.longest_s, time.thread_time() - self._began)
        try:
            return super().select(timeout)
        finally:
            self._began = time.thread_time()


class Stops:
    """The longest turn of a gateway's loop, and the gateway's port."""

    def __init__(self) -> None:
        self.turns = Turns()
        self.port = 0
        self.of_plain_text: dict[int, float] = {}  # milliseconds by the body's size
        # Not uvloop, which measures its turns only if it is kept from sleeping.
        self.loop = asyncio.SelectorEventLoop(self.turns)
        self.done = asyncio.Event()

    def send(self, shape: Shape, size: int) -> tuple[int, float]:
        """Send a body; return the status, and the longest stop meanwhile in milliseconds."""
        body = shape.encoded(size)
        self.turns.longest_s = 0.0
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        headers = {"authorization": f"Bearer {KEY}", "content-encoding": shape.coding}
        connection.request("POST", shape.path, body, headers)
        response = connection.getresponse()
        response.read()
        connection.close()
        return response.status, self.turns.longest_s * 1e3


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stops(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stops]:
    """A gateway in a thread and loop of its own, whose turns are measured."""
    ready, stops = threading.Event(), Stops()
    rules = {"max": {f"{place}.a.x": 1 for place in RULED}}
    model = {"media": {"domains": ["good.example"]}, "fields": rules}
    run_dir = tmp_path_factory.mktemp("gateway")

    async def serve(url: str) -> None:
        async with serving_demo(run_dir, url, model=model, limits=NO_LIMITS) as gateway:
            stops.port = gateway.port
            ready.set()
            await stops.done.wait()

    def run(url: str) -> None:
        with asyncio.Runner(loop_factory=lambda: stops.loop) as runner:
            runner.run(serve(url))

    async with Unread() as fake:
        thread = threading.Thread(target=run, args=(fake.url,))
        thread.start()
        try:
            assert await asyncio.to_thread(ready.wait, 60)
            yield stops
        finally:
            stops.loop.call_soon_threadsafe(stops.done.set)
            await asyncio.to_thread(thread.join, 60)


# The worst that searches have found, before and after mends.
NESTED = Shape(
    "", layer="tool_result", depth=29, unit=b"\\n", address=ADDRESSES[6], addresses=1
)  # 3.9 s: each level was parsed
WORST = (
    NESTED,
    msgspec.structs.replace(NESTED, unit=b"\\u0041"),
    Shape("", unit=rb"\ud83d\ude00", address=ADDRESSES[2], addresses=1020, tail=rb"\""),
    Shape("", place="query", address=ADDRESSES[4], addresses=1020, tail=rb"\u0041", stream=True),
    Shape("", place="return_token_ids", unit=b"\\u0041", stream=True),
    Shape("", "metadata", "source", 29, unit=b'"",', address=ADDRESSES[4], addresses=1000),
    Shape("", place="response_format", layer="object", depth=29, unit=b'{"":0},', stream=True),
    Shape("", unit=b"\\u0041", coding="gzip"),
    Shape("", "messages", "tool_result", 29, b"\\n", coding="zstd"),
)  # fmt: skip
PLAIN = Shape("/v1/chat/completions")
# They have rules for media of their own; the bodies of the others go the same way.
WITH_MEDIA = ("/v1/messages", "/v1/chat/completions")


def at(path: str) -> list[Shape]:
    """Return all of the worst for a path with media; each other path has every third."""
    shapes = WORST if path in WITH_MEDIA else WORST[PATHS.index(path) % 3 :: 3]
    return [msgspec.structs.replace(shape, path=path) for shape in shapes]


def send_all(stops: Stops, shapes: Iterable[Shape], size: int) -> None:
    """Send bodies, print the longest stops, and compare them with that of plain text."""
    if size not in stops.of_plain_text:
        _, stops.of_plain_text[size] = stops.send(PLAIN, size)
    plain_ms = stops.of_plain_text[size]
    print(f"\n{plain_ms:7.1f} ms: plain text of {size // MIB} MiB")
    for shape in shapes:
        status, stop_ms = stops.send(shape, size)
        print(f"{stop_ms:7.1f} ms: {status}, {shape}")
        assert stop_ms < 60 + 3 * plain_ms, shape


async def test_no_large_body_stops_the_loop(stops: Stops) -> None:
    """Where a stop that does not grow with the body stands out; below are all of the paths."""
    await asyncio.to_thread(send_all, stops, at(PLAIN.path), 8 * MIB)


@pytest.mark.parametrize("path", PATHS)
async def test_no_body_of_the_largest_size_stops_the_loop(stops: Stops, path: str) -> None:
    await asyncio.to_thread(send_all, stops, at(path), LARGEST)


@pytest.mark.parametrize("size", [60_000, QUICK_BYTES - 1000, 2 * MIB])
async def test_search_finds_no_body_that_stops_the_loop(stops: Stops, size: int) -> None:
    """Prints the worst, which belong into WORST."""

    def stop_of(shape: Shape) -> float:
        return stops.send(shape, size)[1]

    def run() -> None:
        for stop_ms, shape in search(stop_of, PATHS, seed=SEED, tries=TRIES):
            print(f"{stop_ms:.1f} ms of {size}: {shape}")
            assert stop_ms < 100

    await asyncio.to_thread(run)
