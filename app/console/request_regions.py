"""The tables of requests in flight and ended, rendered at most once a second for each filter.

Pages ask for them every few seconds. What belongs together is collected on the event loop, which
changes it; the HTML is made in a thread.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from app.console.duration_histogram import DurationHistogram, duration_histogram
from app.console.key_names import KeyNames
from app.console.language import Language, current_language
from app.console.rendering import Renderer
from app.console.request_chips import REQUESTS, path_of
from app.console.requests_query import RequestsQuery
from app.relay import RequestDirectory, RequestView
from app.telemetry import RequestPhase
from app.usage import RequestFilter

IN_FLIGHT_ROWS = 200
ENDED_ROWS = 100
# Ended requests that a page begins with, as many as a window shows; its script asks for the others
# once these are painted.
FIRST_ROWS = 20
# Stored requests whose durations are read.
DURATIONS = 10_000
FRESH_S = 1.0

Html = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class RequestRows:
    """Requests at one moment, those in flight with their phases so far."""

    in_flight: Sequence[tuple[RequestView, Sequence[RequestPhase]]]
    ended: Sequence[RequestView]
    names: Mapping[str, str]  # of keys, by their IDs


class RequestRegions:
    """Renders the regions of the requests' page. `monotonic` is a clock in seconds."""

    def __init__(
        self,
        renderer: Renderer,
        requests: RequestDirectory,
        names: KeyNames,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._renderer = renderer
        self._requests = requests
        self._names = names
        self._monotonic = monotonic
        self._in_flight = renderer.macro("requests_regions.html", "in_flight")
        self._ended = renderer.macro("requests_regions.html", "ended")
        self._durations = renderer.macro("requests_regions.html", "durations")
        # By what is shown: the filter, the path below which a request is canceled, and the page, in
        # which language.
        self._rendered: dict[
            tuple[RequestFilter, str, str, Language], tuple[float, asyncio.Task[Html]]
        ] = {}

    async def rows(self, chosen: RequestFilter, ended_rows: int = ENDED_ROWS) -> RequestRows:
        """Return the requests that a filter selects, the newest of those that ended."""
        in_flight = [
            # A timeline is read here: its request's task changes it.
            (view, view.phases)
            for view in self._requests.in_flight(chosen, IN_FLIGHT_ROWS)
        ]
        ended = self._requests.recent(chosen, ended_rows)
        keys = {view.record.key_id for view in (*(view for view, _ in in_flight), *ended)}
        return RequestRows(in_flight, ended, await self._names.find(keys))

    async def history_rows(self, ended: Sequence[RequestView]) -> RequestRows:
        """Return stored requests as rows, without those in flight."""
        names = await self._names.find({view.record.key_id for view in ended})
        return RequestRows((), ended, names)

    def histogram(self, chosen: RequestFilter, page: str) -> DurationHistogram | None:
        """Return the durations of the requests in memory; `page` is the path of what is shown."""
        return duration_histogram(self._requests.recent_durations(chosen), page)

    async def stored_histogram(
        self, asker: str, chosen: RequestFilter, query: RequestsQuery
    ) -> DurationHistogram | None:
        """Return the durations of stored requests, whatever duration is chosen.

        `asker` is the key ID of the visitor. Raises ServiceUnavailable.
        """
        any_duration = msgspec.structs.replace(chosen, slower_than_s=None, at_most_s=None)
        found = await self._requests.stored_durations(asker, any_duration, DURATIONS)
        return duration_histogram(
            found,
            path_of(query, slower_than_s="", at_most_s=""),
            query.slower_than_s,
            query.at_most_s,
        )

    async def html(self, chosen: RequestFilter, cancel: str, page: str = REQUESTS) -> Html:
        """Return the HTML of each region, at most FRESH_S old; `page` is the path of the page.

        Two visitors share it only if they choose the same requests, may do the same, and read the
        same language.
        """
        now = self._monotonic()
        self._rendered = {
            shown: (until, task)
            for shown, (until, task) in self._rendered.items()
            if now < until or not task.done()
        }
        shown = chosen, cancel, page, current_language()
        _, rendering = self._rendered.get(shown, (0.0, None))
        if rendering is None:
            rendering = asyncio.create_task(
                self._render(chosen, cancel, page), name="render requests"
            )
            self._rendered[shown] = now + FRESH_S, rendering
        return await asyncio.shield(rendering)  # others may wait for it

    def outdate(self) -> None:
        """Have all regions rendered again: a request was canceled."""
        self._rendered.clear()

    async def _render(self, chosen: RequestFilter, cancel: str, page: str) -> Html:
        rows = await self.rows(chosen)
        durations = self.histogram(chosen, page)

        def render() -> Html:
            return {
                "in-flight": self._in_flight(rows.in_flight, rows.names, cancel),
                "ended": self._ended(rows.ended, rows.names),
                "durations": self._durations(durations),
            }

        return await self._renderer.in_thread(render)
