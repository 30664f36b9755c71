"""Live regions: rendered once for all viewers, and only while there is one."""

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator
from functools import partial

import pytest
from starlette.types import Message

from app.api import Right
from app.auth import Principal, Role
from app.console import live
from app.console.language import Language, in_language
from app.console.live import (
    Drain,
    LiveByRight,
    LiveForAll,
    LivePage,
    LiveResponse,
    LiveSource,
    Render,
)
from app.console.visitor import Visitor
from app.errors import InvalidApiKey, ServiceUnavailable
from app.settings import NO_LIMITS
from engines.base import ChangeNotifier
from tests.waiting import wait_until

FAST_S = 0.001


class Source:
    """Regions that a test changes."""

    def __init__(self) -> None:
        self.regions = {"a": "1", "b": "1"}
        self.rendered = 0
        self.fault: Exception | None = None

    def collect(self) -> Render:
        """Return what renders the regions as they are now."""
        return partial(self._render, dict(self.regions))

    def _render(self, regions: dict[str, str]) -> dict[str, str]:
        self.rendered += 1
        if self.fault is not None:
            raise self.fault
        return regions


@contextlib.asynccontextmanager
async def viewing(page: LivePage, key_id: str = "key") -> AsyncIterator[AsyncIterator[bytes]]:
    events = page.events(key_id)
    async with contextlib.aclosing(events):
        yield events


async def next_change(events: AsyncIterator[bytes]) -> dict[str, str]:
    """Return the regions of the next event that has any."""
    async for event in events:
        if event.startswith(b"event: regions\ndata: "):
            found: dict[str, str] = json.loads(event.split(b"data: ", 1)[1])
            return found
    raise AssertionError("no event with regions")


async def test_the_first_event_has_all_regions_and_later_ones_what_changed() -> None:
    source = Source()
    async with viewing(LivePage(source.collect, FAST_S)) as events:
        assert await next_change(events) == {"a": "1", "b": "1"}
        source.regions["b"] = "2"
        assert await next_change(events) == {"b": "2"}


async def test_a_slow_viewer_gets_all_that_changed_in_one_event() -> None:
    source = Source()
    page = LivePage(source.collect, FAST_S)
    async with viewing(page) as slow, viewing(page) as fast:
        assert await next_change(slow) == {"a": "1", "b": "1"}
        assert await next_change(fast) == {"a": "1", "b": "1"}
        source.regions["a"] = "2"
        assert await next_change(fast) == {"a": "2"}
        source.regions["b"] = "3"
        assert await next_change(fast) == {"b": "3"}
        assert await next_change(slow) == {"a": "2", "b": "3"}


async def test_nothing_is_rendered_without_a_viewer() -> None:
    source = Source()
    page = LivePage(source.collect, FAST_S)
    assert source.rendered == 0
    async with viewing(page) as events:
        await next_change(events)
        assert page.viewers == 1
    assert page.viewers == 0
    rendered = source.rendered
    await asyncio.sleep(10 * FAST_S)
    assert source.rendered == rendered


async def test_all_viewers_share_one_rendering() -> None:
    source = Source()
    page = LivePage(source.collect, 3600)
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(50):
            events = await stack.enter_async_context(viewing(page))
            await next_change(events)
        assert page.viewers == 50
    assert source.rendered == 1


async def test_a_fault_of_one_rendering_ends_no_page(caplog: pytest.LogCaptureFixture) -> None:
    source = Source()
    async with viewing(LivePage(source.collect, FAST_S)) as events:
        await next_change(events)
        source.fault = ValueError("deliberate")
        rendered = source.rendered
        await wait_until(lambda: source.rendered > rendered)
        source.fault = None
        source.regions["a"] = "2"
        assert await next_change(events) == {"a": "2"}
    assert "live regions could not be rendered" in caplog.text


async def test_a_page_that_stays_broken_is_logged_once_and_recovers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = Source()
    source.fault = ValueError("deliberate")
    async with viewing(LivePage(source.collect, FAST_S)) as events:
        assert (await anext(events)).startswith(b":")
        await wait_until(lambda: source.rendered > 3)
        assert caplog.text.count("live regions could not be rendered") == 1
        source.fault = None
        assert await next_change(events) == {"a": "1", "b": "1"}


async def test_a_region_that_is_no_more_becomes_empty() -> None:
    source = Source()
    page = LivePage(source.collect, FAST_S)
    async with viewing(page) as events:
        await next_change(events)
        del source.regions["a"]
        assert await next_change(events) == {"a": ""}
    async with viewing(page) as events:
        assert await next_change(events) == {"b": "1"}


async def test_viewers_far_behind_share_one_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_BEHIND", 1)
    source = Source()
    page = LivePage(source.collect, FAST_S)
    async with viewing(page) as slow, viewing(page) as fast:
        await next_change(slow)
        for number in range(3):
            source.regions["a"] = f"new {number}"
            while (await next_change(fast)).get("a") != f"new {number}":
                pass
        assert await next_change(slow) == {"a": "new 2", "b": "1"}


async def test_a_page_that_is_slow_to_render_is_rendered_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []
    moments = iter(range(0, 1000, 100))  # a rendering takes 100 s by this clock
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        waits.append(seconds)
        await sleep(0)

    monkeypatch.setattr(live, "perf_counter", lambda: next(moments))
    monkeypatch.setattr("app.console.live.asyncio.sleep", note)
    async with viewing(LivePage(Source().collect, FAST_S)) as events:
        await next_change(events)
        await wait_until(lambda: bool(waits))
    assert waits[0] == live.MAX_INTERVAL_S


async def test_nothing_is_rendered_on_the_event_loop() -> None:
    threads: list[int] = []

    def render() -> dict[str, str]:
        threads.append(threading.get_ident())
        return {"a": "1"}

    async with viewing(LivePage(lambda: render, FAST_S)) as events:
        await next_change(events)
    assert threading.get_ident() not in threads


async def test_viewers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_VIEWERS", 1)
    page = LivePage(Source().collect, FAST_S)
    async with viewing(page) as first:
        await next_change(first)
        async with viewing(page) as second:
            with pytest.raises(ServiceUnavailable):
                await anext(second)
        assert page.viewers == 1
    async with viewing(page) as third:
        assert await next_change(third)


async def test_one_key_cannot_take_the_places_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_VIEWERS_PER_KEY", 1)
    page = LivePage(Source().collect, FAST_S)
    async with viewing(page) as first, viewing(page) as second, viewing(page, "other") as third:
        await next_change(first)
        with pytest.raises(ServiceUnavailable):
            await anext(second)
        assert await next_change(third)
    assert page.viewers == 0


@pytest.mark.parametrize("by_right", [False, True])
async def test_languages_share_the_places_of_a_page(
    monkeypatch: pytest.MonkeyPatch, by_right: bool
) -> None:
    monkeypatch.setattr(live, "MAX_VIEWERS_PER_KEY", 1)
    collect = Source().collect
    pages: LiveSource = LiveForAll(collect)
    if by_right:
        pages = LiveByRight(Right.ENGINES_WRITE, lambda may, sees: collect())
    visitor = Visitor(Principal("root", Role.ADMIN, NO_LIMITS), "")
    async with viewing(pages.for_visitor(visitor)) as first:
        await next_change(first)
        with in_language(Language.CHINESE):
            chinese = pages.for_visitor(visitor)
        async with viewing(chinese) as second, viewing(chinese, "other") as third:
            with pytest.raises(ServiceUnavailable):
                await anext(second)
            assert await next_change(third)
    assert chinese.viewers == 0
    async with viewing(chinese) as fourth:
        assert await next_change(fourth)


class Client:
    """A client that reads a live page through ASGI, at once unless a test stops it."""

    def __init__(self, page: LivePage) -> None:
        self.page = page
        self.sent: list[Message] = []
        self.fault: Exception | None = None
        self.checks = 0
        self.changes = ChangeNotifier()
        self.draining = False
        self.gone = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()
        drain = Drain(lambda: self.draining, self.changes)
        response = LiveResponse(page, "key", self._check_session, drain)
        scope = {"type": "http", "path": "/console/api/events/overview"}
        self.task = asyncio.create_task(response(scope, self._receive, self._send))

    @property
    def ended(self) -> bool:
        return bool(self.sent) and self.sent[-1].get("more_body") is False

    def begin_drain(self) -> None:
        self.draining = True
        self.changes.notify()

    async def _check_session(self) -> None:
        self.checks += 1
        if self.fault is not None:
            raise self.fault

    async def _receive(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        await self.reads.wait()
        self.sent.append({"more_body": False, **message} if "body" in message else message)


async def test_a_session_that_ends_in_mid_stream_ends_the_stream() -> None:
    client = Client(LivePage(Source().collect, FAST_S))
    await wait_until(lambda: client.checks > 1)
    assert not client.ended
    client.fault = InvalidApiKey("the API key is disabled")
    await client.task
    assert client.ended
    assert client.page.viewers == 0


async def test_a_database_that_is_away_ends_no_stream() -> None:
    client = Client(LivePage(Source().collect, FAST_S))
    client.fault = ServiceUnavailable("away")
    await wait_until(lambda: client.checks > 2)
    assert not client.task.done()
    client.gone.set()
    await client.task


async def test_a_gateway_that_drains_ends_its_streams_at_once() -> None:
    client = Client(LivePage(Source().collect, 3600))
    await wait_until(lambda: len(client.sent) > 1)
    client.begin_drain()
    await client.task
    assert client.ended
    assert client.page.viewers == 0


async def test_a_drain_does_not_wait_for_a_client_that_does_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "LAST_BYTES_S", 0.0)
    client = Client(LivePage(Source().collect, FAST_S))
    await wait_until(lambda: len(client.sent) > 1)
    client.reads.clear()
    client.begin_drain()
    await client.task
    assert client.page.viewers == 0


async def test_a_client_that_leaves_while_nothing_can_be_sent_frees_its_place() -> None:
    client = Client(LivePage(Source().collect, FAST_S))
    await wait_until(lambda: len(client.sent) > 1)
    client.reads.clear()
    client.gone.set()
    await client.task
    assert client.page.viewers == 0


@pytest.mark.parametrize("steps", range(12))
async def test_canceled_at_any_await_a_stream_leaves_nothing_behind(steps: int) -> None:
    client = Client(LivePage(Source().collect, FAST_S))
    for _ in range(steps):
        await asyncio.sleep(0)
    client.task.cancel()
    await asyncio.gather(client.task, return_exceptions=True)
    assert client.page.viewers == 0
    names = {task.get_name() for task in asyncio.all_tasks() if not task.cancelling()}
    assert "live regions" not in names
