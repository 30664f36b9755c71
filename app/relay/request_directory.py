"""Finds requests, in flight or ended, and cancels those in flight.

A request is named here by an ID that the gateway makes: clients choose their request IDs, and
several requests may have the same one. Those that ended last are in memory, the others in the
ledger.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from time import perf_counter
from weakref import WeakValueDictionary

import msgspec

from app.database import DatabaseError
from app.deadline import deadline
from app.errors import RequestCanceled, ServiceUnavailable
from app.relay.request_context import RequestContext, RequestsInFlight
from app.telemetry import (
    EndedRequest,
    RecentRequests,
    RequestPhase,
    RequestRecord,
    RequestTimeline,
    made_id,
)
from app.telemetry import request_phases as phases_of
from app.usage import Order, Place, RequestFilter, RequestHistory

log = logging.getLogger(__name__)

IN_FLIGHT = "in_flight"
OUTCOMES = (IN_FLIGHT, "completed", "refused", "failed", "disconnected", "canceled")
CANCELED = "this request was canceled by an operator of the gateway"
SEARCHING = "another search of this key runs; wait for it, or ask for a shorter time"
# How long a search waits for another of its key.
SEARCH_WAIT_S = 1.0
CANCELED_BY_KEY = "this request was canceled with its own key"


class RequestView(msgspec.Struct, frozen=True):
    """A request, in flight or ended. The record of one in flight is that of this moment."""

    id: str
    record: RequestRecord
    timeline: RequestTimeline
    outcome: str  # one of OUTCOMES
    arrived_at: float  # in seconds since 1970
    # Tokens of the answer; of a stream in flight, an estimate. None: not known.
    answer_tokens: int | None

    @property
    def phases(self) -> list[RequestPhase]:
        """The phases, in seconds from the arrival."""
        return phases_of(self.record, self.timeline)


ALL_REQUESTS = RequestFilter()


class EndedList(msgspec.Struct, frozen=True):
    """A page of requests that have ended."""

    views: list[RequestView]
    # Behind which the next page begins; None: this is the last one.
    next: Place | None
    # False: the database did not answer in time, and only requests in memory are here.
    complete: bool = True


class RequestDirectory:
    """The requests that this gateway serves and has served."""

    def __init__(
        self,
        in_flight: RequestsInFlight,
        recent: RecentRequests,
        history: RequestHistory,
        gateway: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`gateway` is the name of this process in IDs."""
        self._in_flight = in_flight
        self._recent = recent
        self._history = history
        self._gateway = gateway
        self._clock = clock
        # By the key ID of who searches; a lock that nobody holds is gone.
        self._searching: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def in_flight(
        self, chosen: RequestFilter = ALL_REQUESTS, limit: int | None = None
    ) -> list[RequestView]:
        """Return requests in flight, the oldest first."""
        under_way = sorted(self._contexts(chosen.key_id), key=_arrival)
        views = map(self._view_now, under_way)
        return list(islice((v for v in views if chosen.selects(v.record, IN_FLIGHT)), limit))

    def answer_tokens(self) -> Counter[str]:
        """Return the tokens of the answers in flight by model: estimates."""
        found: Counter[str] = Counter()
        for request in self._in_flight:
            found[request.model] += _tokens_so_far(request) or 0
        return found

    def recent(
        self, chosen: RequestFilter = ALL_REQUESTS, limit: int | None = None
    ) -> list[RequestView]:
        """Return the requests in memory, those that this gateway ended last, the latest first."""
        return list(islice(map(_view_ended, self._chosen(chosen)), limit))

    def recent_durations(self, chosen: RequestFilter) -> list[float]:
        """Return the seconds that each request in memory took, of refused ones if they are chosen.

        A refusal takes no time: many would hide how long the others took.
        """
        return [
            ended.record.total_s
            for ended in self._chosen(chosen)
            if chosen.outcome or ended.record.outcome != "refused"
        ]

    async def stored_durations(
        self, asker: str, chosen: RequestFilter, limit: int
    ) -> Sequence[float]:
        """Return the seconds that each of the latest stored requests took.

        Empty while the database does not answer. `asker` as in `ended`. Raises ServiceUnavailable.
        """
        try:
            async with self._only_search_of(asker):
                return await self._history.durations(chosen, limit)
        except DatabaseError as error:
            log.warning("the durations of requests are not read: %s", error)
            return []

    async def answered_any(self) -> bool:
        """Return whether any request was answered, now or before. Raises DatabaseError."""
        for ended in self._recent:
            if ended.record.outcome == "completed":
                return True
        answered = RequestFilter(outcome="completed")
        return bool(await self._history.list(answered, Order.LATEST, None, 1))

    async def ended(
        self,
        asker: str,
        chosen: RequestFilter,
        limit: int,
        order: Order = Order.LATEST,
        after: Place | None = None,
    ) -> EndedList:
        """Return requests that have ended, of all gateways, in memory or stored, in an order.

        `asker` is the key ID of the caller, which has one search at a time: the database has few
        connections for them. Raises ServiceUnavailable.
        """
        found: dict[str, EndedRequest] = {}
        complete = True
        try:
            async with self._only_search_of(asker):
                stored = await self._history.list(chosen, order, after, limit + 1)
        except DatabaseError as error:
            log.warning("the history of requests is not read: %s", error)
            stored, complete = [], False
        for ended in chain(self._chosen(chosen), stored):
            if after is None or after > Place.of(ended, order):
                found.setdefault(ended.id, ended)
        first = sorted(found.values(), key=lambda one: Place.of(one, order), reverse=True)
        page, more = first[:limit], len(first) > limit
        following = Place.of(page[-1], order) if more else None
        return EndedList([_view_ended(one) for one in page], following, complete)

    @contextlib.asynccontextmanager
    async def _only_search_of(self, asker: str) -> AsyncIterator[None]:
        lock = self._searching.setdefault(asker, asyncio.Lock())
        try:
            async with deadline(asyncio.get_running_loop().time() + SEARCH_WAIT_S):
                await lock.acquire()
        except TimeoutError:
            raise ServiceUnavailable(SEARCHING) from None
        try:
            yield
        finally:
            lock.release()

    async def find(self, id_: str, chosen: RequestFilter = ALL_REQUESTS) -> RequestView | None:
        """Return a request by its ID here, if it is selected.

        Raises DatabaseError for one that is not in memory.
        """
        if (request := self._find_in_flight(id_, chosen)) is not None:
            return self._view_now(request)
        for ended in self._chosen(chosen):
            if ended.id == id_:
                return _view_ended(ended)
        stored = await self._history.find(id_, chosen)
        return None if stored is None else _view_ended(stored)

    def is_in_flight(self, id_: str, chosen: RequestFilter = ALL_REQUESTS) -> bool:
        """Return whether there is a request in flight with this ID here, if it is selected."""
        return self._find_in_flight(id_, chosen) is not None

    def cancel(self, id_: str, by: str, chosen: RequestFilter = ALL_REQUESTS) -> RequestView | None:
        """Cancel a request in flight by its ID here; return it as it was, None if there is none.

        `by` is the key ID of the caller, for the log; only a request that is selected is canceled.
        The client gets RequestCanceled: as a response, or in a stream as an event.
        """
        request = self._find_in_flight(id_, chosen)
        if request is None:
            return None
        view = self._view_now(request)
        owned = by == view.record.key_id
        log.info("request canceled by %s", by, extra=request.log_fields)
        request.exchange.cut(RequestCanceled(CANCELED_BY_KEY if owned else CANCELED))
        return view

    def _chosen(self, chosen: RequestFilter) -> Iterator[EndedRequest]:
        for ended in self._recent:
            if chosen.selects(ended.record, ended.record.outcome, ended.ended_at):
                yield ended

    def _contexts(self, key_id: str | None) -> Iterable[RequestContext]:
        return self._in_flight if key_id is None else self._in_flight.of_key(key_id)

    def _find_in_flight(self, id_: str, chosen: RequestFilter) -> RequestContext | None:
        for request in self._contexts(chosen.key_id):
            if made_id(self._gateway, _arrival(request)) == id_:
                return request if chosen.selects(_record_now(request), IN_FLIGHT) else None
        return None

    def _view_now(self, request: RequestContext) -> RequestView:
        record, name = _record_now(request), made_id(self._gateway, _arrival(request))
        arrived_at = self._clock() - record.total_s
        tokens = _tokens_so_far(request)
        return RequestView(name, record, request.timeline, IN_FLIGHT, arrived_at, tokens)


def _view_ended(ended: EndedRequest) -> RequestView:
    record = ended.record
    tokens = None if record.usage is None else record.usage.completion
    return RequestView(ended.id, record, ended.timeline, record.outcome, ended.arrived_at, tokens)


def _arrival(request: RequestContext) -> float:
    return request.exchange.received_at


def _record_now(request: RequestContext) -> RequestRecord:
    return request.record(perf_counter() - _arrival(request))


def _tokens_so_far(request: RequestContext) -> int | None:
    """Return the tokens that a stream has; None: the request has begun none."""
    meter, exchange = request.meter, request.exchange
    if meter is None:
        return None
    if not meter.events:
        return 0
    return meter.so_far(0, exchange.bytes_out - exchange.comment_bytes).completion
