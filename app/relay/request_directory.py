"""Finds requests, in flight or ended, and cancels those in flight.

A request is named here by an ID that the gateway makes, its time of arrival: clients choose their
request IDs, and several requests may have the same one. IDs of requests before a restart name none
after it.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from time import perf_counter

import msgspec

from app.errors import RequestCanceled
from app.relay.relay import outcome
from app.relay.request_context import RequestContext, RequestsInFlight
from app.telemetry import RecentRequests, RequestPhase, RequestRecord, RequestTimeline
from app.telemetry import request_phases as phases_of

log = logging.getLogger(__name__)

IN_FLIGHT = "in_flight"
OUTCOMES = (IN_FLIGHT, "completed", "refused", "failed", "disconnected", "canceled")
CANCELED = "this request was canceled by an operator of the gateway"
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
        """The phases, in seconds from the arrival; empty with the console disabled."""
        return phases_of(self.record, self.timeline)


class RequestFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Selects requests that have all of the given facts; None: any."""

    key_id: str | None = None
    model: str | None = None  # that served it, or that the client asked for
    request_id: str | None = None  # of the header x-request-id
    outcome: str | None = None  # one of OUTCOMES
    statuses: range | None = None

    def selects(self, record: RequestRecord, ended: str) -> bool:
        """Return whether a request is selected; `ended` is its outcome."""
        return (
            (self.key_id is None or self.key_id == record.key_id)
            and (self.model is None or self.model in (record.model, record.requested_model))
            and (self.request_id is None or self.request_id == record.request_id)
            and (self.statuses is None or record.status in self.statuses)
            and (self.outcome is None or self.outcome == ended)
        )


ALL_REQUESTS = RequestFilter()


class RequestDirectory:
    """The requests that this gateway serves and has served."""

    def __init__(
        self,
        in_flight: RequestsInFlight,
        recent: RecentRequests | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`recent` is None where the console is disabled: no ended request is known then."""
        self._in_flight = in_flight
        self._recent = recent
        self._clock = clock

    def in_flight(
        self, chosen: RequestFilter = ALL_REQUESTS, limit: int | None = None
    ) -> list[RequestView]:
        """Return requests in flight, the oldest first."""
        under_way = sorted(self._contexts(chosen.key_id), key=_arrival)
        records = ((_record_now(request), request) for request in under_way)
        found = (
            self._view_now(record, request)
            for record, request in records
            if chosen.selects(record, IN_FLIGHT)
        )
        return list(islice(found, limit))

    @property
    def answer_tokens(self) -> int:
        """Tokens of all answers in flight: an estimate."""
        return sum(_tokens_so_far(request) or 0 for request in self._in_flight)

    def ended(
        self, chosen: RequestFilter = ALL_REQUESTS, limit: int | None = None
    ) -> list[RequestView]:
        """Return requests that have ended, the latest first."""
        return list(islice(self._ended(chosen), limit))

    def find(self, id_: str, key_id: str | None = None) -> RequestView | None:
        """Return a request by its ID here; with `key_id`, only one of that key."""
        if (request := self._find_in_flight(id_, key_id)) is not None:
            return self._view_now(_record_now(request), request)
        for record, timeline in self._recent or ():
            if made_id(timeline.started) == id_ and key_id in (None, record.key_id):
                return self._view_ended(record, timeline)
        return None

    def cancel(self, id_: str, by: str, key_id: str | None = None) -> RequestView | None:
        """Cancel a request in flight by its ID here; return it as it was, None if there is none.

        `by` is the key ID of the caller, for the log; with `key_id`, only a request of that key is
        canceled. The client gets RequestCanceled: as a response, or in a stream as an event.
        """
        request = self._find_in_flight(id_, key_id)
        if request is None:
            return None
        view = self._view_now(_record_now(request), request)
        owned = by == view.record.key_id
        log.info("request canceled by %s", by, extra=request.log_fields)
        request.exchange.cut(RequestCanceled(CANCELED_BY_KEY if owned else CANCELED))
        return view

    def _ended(self, chosen: RequestFilter) -> Iterator[RequestView]:
        for record, timeline in self._recent or ():
            if chosen.selects(record, outcome(record)):
                yield self._view_ended(record, timeline)

    def _contexts(self, key_id: str | None) -> Iterable[RequestContext]:
        return self._in_flight if key_id is None else self._in_flight.of_key(key_id)

    def _find_in_flight(self, id_: str, key_id: str | None) -> RequestContext | None:
        for request in self._contexts(key_id):
            if made_id(_arrival(request)) == id_:
                return request
        return None

    def _view_now(self, record: RequestRecord, request: RequestContext) -> RequestView:
        name = made_id(_arrival(request))
        arrived_at = self._clock() - record.total_s
        tokens = _tokens_so_far(request)
        return RequestView(name, record, request.timeline, IN_FLIGHT, arrived_at, tokens)

    def _view_ended(self, record: RequestRecord, timeline: RequestTimeline) -> RequestView:
        name = made_id(timeline.started)
        arrived_at = self._clock() - (perf_counter() - timeline.started)
        tokens = None if record.usage is None else record.usage.completion
        return RequestView(name, record, timeline, outcome(record), arrived_at, tokens)


def made_id(arrival: float) -> str:
    """Return the ID of a request that arrived then, by perf_counter."""
    return f"{int(arrival * 1e9):x}"


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
