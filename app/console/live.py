"""Live regions of pages: rendered once a second for all open pages, and only while one is open.

A region is a part of a page under a name. Each viewer gets the regions that have changed since
its last event, as one event of a stream (Server-Sent Events). A viewer that reads slowly skips
states: it waits for its own socket, then gets what has changed meanwhile.

What a page shows is collected on the event loop, so that it belongs together, and rendered in a
thread. A fleet whose page takes long to render has it rendered less often.
"""

import asyncio
import contextlib
import json
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from functools import partial
from time import perf_counter
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.api import Right, error_response, still_allowed, wait_for_disconnect
from app.auth import AdminScope
from app.console.language import Language, current_language
from app.console.visitor import Visitor
from app.errors import ServiceUnavailable
from engines.base import ChangeNotifier

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
# The share of the time that one page may take to render, and what it may slow its page down to.
MAX_SHARE = 0.02
MAX_INTERVAL_S = 10.0
# Of one page. Each takes a connection, a task and a write for each change.
MAX_VIEWERS = 512
# Of one page, with one key: the others see it too, however many pages one key opens.
MAX_VIEWERS_PER_KEY = 256
# A viewer that is further behind gets all regions: those between share an event.
MAX_BEHIND = 8
# Regions that are gone, of which pages that are behind are told; the oldest are forgotten.
MAX_GONE = 1000
# A session is checked again as often as this.
CHECK_EVERY = 5
# For the end of a stream, when the gateway drains.
LAST_BYTES_S = 0.25
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
    (b"x-content-type-options", b"nosniff"),
]

Regions = Mapping[str, str]
# Renders what has been collected; it may run in a thread.
Render = Callable[[], Regions]


class LiveSource(Protocol):
    """The live regions of a page, which may depend on what a visitor may do."""

    def for_visitor(self, visitor: Visitor) -> "LivePage":
        """Return the live page that a visitor gets."""


class LivePage:
    """The live regions of one page, for all of its viewers.

    They are in the language of the first of them: there is a page for each language.
    """

    def __init__(
        self,
        collect: Callable[[], Render],
        interval_s: float = INTERVAL_S,
        bounded: Counter[str] | None = None,
    ) -> None:
        """`collect` runs on the event loop; what it returns renders each region, in a thread.

        `bounded` counts viewers by key, of this page in all languages: they share its bounds.
        """
        self._collect = collect
        self._interval_s = interval_s
        self.viewers = 0  # open pages
        self.bounded = Counter() if bounded is None else bounded
        self._task: asyncio.Task[None] | None = None
        self._tick = asyncio.Event()
        # The HTML of each region, and the tick since which it has been like this.
        self._regions: dict[str, tuple[int, str]] = {}
        self._now = 0  # the latest tick; 0: nothing is rendered yet
        # The newest event, by the tick since which it has the changes: most viewers share one.
        self._events: dict[int, bytes] = {}
        self._broken = False

    async def events(self, key_id: str) -> AsyncGenerator[bytes, None]:
        """Yield one event after each interval; a comment where no region has changed.

        Raises ServiceUnavailable when the page has too many viewers, in all or with this key.
        """
        bounded = self.bounded
        if bounded.total() >= MAX_VIEWERS or bounded[key_id] >= MAX_VIEWERS_PER_KEY:
            raise ServiceUnavailable("too many people look at this page; try again later")
        self.viewers += 1
        bounded[key_id] += 1
        try:
            if self._task is None:
                self._task = asyncio.create_task(self._run(), name="live regions")
            if not self._now:
                await self._tick.wait()
            seen = 0
            while True:
                event, seen = self._event_since(seen), self._now
                yield event
                if seen == self._now:
                    await self._tick.wait()
        finally:
            self.viewers -= 1
            bounded[key_id] -= 1
            bounded += Counter()  # drops keys without viewers
            if not self.viewers:
                self._stop()

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self._now = 0
        self._regions.clear()
        self._events.clear()

    async def _run(self) -> None:
        while True:
            began = perf_counter()
            try:
                self._update(await asyncio.to_thread(self._collect()))
                self._broken = False
            except Exception:
                if not self._broken:  # and not again every second
                    log.exception("live regions could not be rendered")
                self._broken = True
            self._tick.set()
            self._tick = asyncio.Event()
            took_s = perf_counter() - began
            await asyncio.sleep(max(self._interval_s, min(took_s / MAX_SHARE, MAX_INTERVAL_S)))

    def _update(self, regions: Regions) -> None:
        self._now += 1
        self._events.clear()
        gone = dict.fromkeys(self._regions.keys() - regions.keys(), "")
        for name, html in {**regions, **gone}.items():
            if name not in self._regions or self._regions[name][1] != html:
                self._regions[name] = (self._now, html)
        if len(gone) > MAX_GONE:
            for name in sorted(gone, key=lambda name: self._regions[name][0])[:-MAX_GONE]:
                del self._regions[name]

    def _event_since(self, seen: int) -> bytes:
        """Return the event with what has changed since a tick."""
        if seen < self._now - MAX_BEHIND:
            seen = 0
        event = self._events.get(seen)
        if event is None:
            changed = {name: html for name, (at, html) in self._regions.items() if at > seen}
            event = b": no change\n\n"
            if changed:
                event = b"event: regions\ndata: %b\n\n" % json.dumps(changed).encode()
            self._events[seen] = event
        return event


class LiveForAll:
    """The live regions of a page that is the same for all who see it, in each language."""

    def __init__(self, collect: Callable[[], Render]) -> None:
        self._collect = collect
        self._pages: dict[Language, LivePage] = {}
        self._viewers: Counter[str] = Counter()

    def for_visitor(self, visitor: Visitor) -> LivePage:
        """Return the page in the language of the request."""
        page = LivePage(self._collect, bounded=self._viewers)
        return self._pages.setdefault(current_language(), page)


class LiveByRight:
    """The live regions of a page that shows a visitor the models in its scope and what it may do.

    There is a page for all viewers of the same scope, rights and language, while it has any.
    """

    def __init__(
        self, right: Right, collect: Callable[[bool, Callable[[str], bool]], Render]
    ) -> None:
        """`collect` is given whether the viewers have the right, and which models they see."""
        self._right = right
        self._collect = collect
        self._pages: dict[tuple[bool, AdminScope, Language], LivePage] = {}

    def for_visitor(self, visitor: Visitor) -> LivePage:
        """Return the page of the visitors like this one."""
        self._pages = {shown: page for shown, page in self._pages.items() if page.viewers}
        may, scope = visitor.may(self._right), visitor.scope
        shown = may, scope, current_language()
        page = self._pages.get(shown)
        if page is None:
            same = (one.bounded for key, one in self._pages.items() if key[:2] == shown[:2])
            collect = partial(self._collect, may, scope.has_model)
            page = LivePage(collect, bounded=next(same, None))
            self._pages[shown] = page
        return page


class Drain:
    """The drain of the gateway, which ends all live pages at once: one task waits for it."""

    def __init__(self, draining: Callable[[], bool], changes: ChangeNotifier) -> None:
        """`changes` notifies when `draining` becomes true."""
        self._draining = draining
        self._changes = changes
        self._task: asyncio.Task[None] | None = None

    def begun(self) -> asyncio.Task[None]:
        """Return the task that ends when the drain begins. It is shared: never cancel it."""
        if self._task is None:
            waiting = self._changes.wait_for(self._draining)
            self._task = asyncio.create_task(waiting, name="drain of live pages")
        return self._task

    async def aclose(self) -> None:
        """End the wait."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


class LiveResponse(Response):
    """Sends the events of a live page until the client, the session or the gateway leaves."""

    def __init__(
        self,
        page: LivePage,
        key_id: str,
        check_session: Callable[[], Awaitable[object]],
        drain: Drain,
    ) -> None:
        """`check_session` raises GatewayError once the session has ended."""
        super().__init__()
        self._page = page
        self._key_id = key_id
        self._check_session = check_session
        self._drain = drain
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # uvicorn's send does not report a disconnect; receive does.
        sending = asyncio.create_task(self._send_events(scope, receive, send))
        disconnected = asyncio.create_task(wait_for_disconnect(receive))
        waits = {sending, disconnected, self._drain.begun()}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                await sending
                return
        finally:
            for task in (sending, disconnected):
                task.cancel()
            await asyncio.gather(sending, disconnected, return_exceptions=True)
        if self._started and disconnected.cancelled():
            # The gateway drains. A client that does not read is not waited for.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_BYTES_S):
                    await send({"type": "http.response.body", "body": b""})

    async def _send_events(self, scope: Scope, receive: Receive, send: Send) -> None:
        events = self._page.events(self._key_id)
        async with contextlib.aclosing(events):
            try:
                first = await anext(events)
            except ServiceUnavailable as error:
                await error_response(error, scope)(scope, receive, send)
                return
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            until_check = CHECK_EVERY
            async for event in events:
                until_check -= 1
                if until_check == 0:
                    until_check = CHECK_EVERY
                    if not await still_allowed(self._check_session):
                        break
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
