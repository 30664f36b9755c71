"""Live regions: rendered once for all viewers, and only while there is one."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import pytest

from app.console import live
from app.console.live import LivePage
from app.errors import ServiceUnavailable
from tests.waiting import wait_until

FAST_S = 0.001


class Source:
    """Regions that a test changes."""

    def __init__(self) -> None:
        self.regions = {"a": "1", "b": "1"}
        self.rendered = 0
        self.fault: Exception | None = None

    def render(self) -> dict[str, str]:
        self.rendered += 1
        if self.fault is not None:
            raise self.fault
        return dict(self.regions)


@contextlib.asynccontextmanager
async def viewing(page: LivePage) -> AsyncIterator[AsyncIterator[bytes]]:
    events = page.events()
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
    async with viewing(LivePage(source.render, FAST_S)) as events:
        assert await next_change(events) == {"a": "1", "b": "1"}
        source.regions["b"] = "2"
        assert await next_change(events) == {"b": "2"}


async def test_a_slow_viewer_gets_all_that_changed_in_one_event() -> None:
    source = Source()
    page = LivePage(source.render, FAST_S)
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
    page = LivePage(source.render, FAST_S)
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
    page = LivePage(source.render, 3600)
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(50):
            events = await stack.enter_async_context(viewing(page))
            await next_change(events)
        assert page.viewers == 50
    assert source.rendered == 1


async def test_a_fault_of_one_rendering_ends_no_page(caplog: pytest.LogCaptureFixture) -> None:
    source = Source()
    async with viewing(LivePage(source.render, FAST_S)) as events:
        await next_change(events)
        source.fault = ValueError("deliberate")
        rendered = source.rendered
        await wait_until(lambda: source.rendered > rendered)
        source.fault = None
        source.regions["a"] = "2"
        assert await next_change(events) == {"a": "2"}
    assert "live regions could not be rendered" in caplog.text


async def test_viewers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_VIEWERS", 1)
    page = LivePage(Source().render, FAST_S)
    async with viewing(page) as first:
        await next_change(first)
        async with viewing(page) as second:
            with pytest.raises(ServiceUnavailable):
                await anext(second)
        assert page.viewers == 1
    async with viewing(page) as third:
        assert await next_change(third)
