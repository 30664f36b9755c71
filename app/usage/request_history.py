"""The requests that the ledger has stored, found by facts, by time and by duration.

The columns that say what a request used are read back into the `EndedRequest` of which
`app.usage.records` made the row.
"""

import time
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Any, Protocol

import msgspec
from sqlalchemy import (
    BigInteger,
    ColumnElement,
    CompoundSelect,
    Row,
    Select,
    UnaryExpression,
    and_,
    desc,
    func,
    literal_column,
    or_,
    select,
    union_all,
)

from app.database import Database, Lane
from app.database.schema import WEEK_MS, usage_records
from app.telemetry import GATEWAY_DIGITS, EndedRequest, RequestRecord, arrival_of, timeline_of_text
from app.usage.records import NO_ENGINE
from app.usage.token_usage import Usage

_COLUMNS = usage_records.c
DAY_S = 86_400
# Weeks of a search that PostgreSQL reads by the index of each: ten years.
MAX_WEEKS = 520


class Order(StrEnum):
    """What comes first in a list of requests."""

    LATEST = "latest"
    SLOWEST = "slowest"


class ModelNames(Protocol):
    """Names of models, and beginnings of names."""

    @property
    def names(self) -> frozenset[str]: ...
    @property
    def prefixes(self) -> tuple[str, ...]: ...
    def allows(self, model: str, /) -> bool: ...


class RequestFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Selects requests that have all of the given facts; None: any."""

    key_id: str | None = None
    owner: str | None = None  # of the key, when it was used
    served_by: ModelNames | None = None  # the model that served it is one of these
    model: str | None = None  # that served it, or that the client asked for
    request_id: str | None = None  # of the header x-request-id
    outcome: str | None = None
    statuses: range | None = None
    # Of those that have ended: from `since_s`, before `until_s`, in seconds since 1970.
    since_s: float | None = None
    until_s: float | None = None
    slower_than_s: float | None = None
    at_most_s: float | None = None

    def selects(self, record: RequestRecord, outcome: str, ended_at: float | None = None) -> bool:
        """Return whether a request is selected; `ended_at` is None for one in flight."""
        return (
            (self.key_id is None or self.key_id == record.key_id)
            and (self.owner is None or self.owner == record.owner)
            and (self.served_by is None or self.served_by.allows(record.model))
            and (self.model is None or self.model in (record.model, record.requested_model))
            and (self.request_id is None or self.request_id == record.request_id)
            and (self.statuses is None or record.status in self.statuses)
            and (self.outcome is None or self.outcome == outcome)
            and (self.slower_than_s is None or record.total_s > self.slower_than_s)
            and (self.at_most_s is None or record.total_s <= self.at_most_s)
            and (self.since_s is None or ended_at is None or ended_at >= self.since_s)
            and (self.until_s is None or ended_at is None or ended_at < self.until_s)
        )


class Place(msgspec.Struct, frozen=True, order=True):
    """The place of a request in a list, the highest first: what it is ordered by, and its ID."""

    rank: int  # the end in ms since 1970, or the duration in µs
    id: str

    @classmethod
    def of(cls, ended: EndedRequest, order: Order) -> "Place":
        if order is Order.SLOWEST:
            return cls(round(ended.record.total_s * 1e6), ended.id)
        return cls(int(ended.ended_at * 1000), ended.id)


class RequestHistory(msgspec.Struct, frozen=True):
    """Reads stored requests, of every gateway of the database."""

    database: Database

    async def list(
        self, chosen: RequestFilter, order: Order, after: Place | None, limit: int
    ) -> list[EndedRequest]:
        """Return the first `limit` requests behind a place. Raises DatabaseError."""
        rank = _COLUMNS.total_ms if order is Order.SLOWEST else _COLUMNS.at_ms
        conditions = list(_conditions(chosen))
        if after is not None:
            bound = after.rank / 1000 if order is Order.SLOWEST else after.rank
            same = and_(rank == bound, _COLUMNS.own_id < after.id)
            # The first condition is what an index serves.
            conditions += [rank <= bound, or_(rank < bound, same)]
        async with self.database.read(Lane.SEARCHES) as connection:
            ranked: tuple[UnaryExpression[Any], ...] = (desc(rank.name), desc("own_id"))
            page = select(usage_records).where(*conditions).order_by(*ranked).limit(limit)
            query: Select[Any] | CompoundSelect[Any] = page
            if order is Order.SLOWEST and self.database.dialect == "postgresql":
                oldest_ms = await connection.scalar(select(func.min(_COLUMNS.at_ms)))
                if periods := periods_of(int(oldest_ms or 0), chosen):
                    pages = union_all(*map(page.where, periods))
                    query = pages.order_by(*ranked).limit(limit)
            return [_ended(row) for row in await connection.execute(query)]

    async def durations(self, chosen: RequestFilter, limit: int) -> Sequence[float]:
        """Return the seconds that each of the latest requests took. Raises DatabaseError."""
        query = select(_COLUMNS.total_ms).where(and_(*_conditions(chosen)))
        query = query.order_by(_COLUMNS.at_ms.desc()).limit(limit)
        async with self.database.read(Lane.SEARCHES) as connection:
            return [total_ms / 1000 for total_ms in await connection.scalars(query)]

    async def find(self, own_id: str, chosen: RequestFilter) -> EndedRequest | None:
        """Return a request by its ID, if it is selected. Raises DatabaseError."""
        query = select(usage_records).where(_COLUMNS.own_id == own_id, *_conditions(chosen))
        async with self.database.read(Lane.PAGES) as connection:
            row = (await connection.execute(query.limit(1))).first()
        return None if row is None else _ended(row)


def periods_of(oldest_ms: int, chosen: RequestFilter) -> list[ColumnElement[bool]]:
    """Return conditions on the weeks of a search, of which each request meets one.

    PostgreSQL merges the pages of all weeks in the order of the index of each. So it reads the
    slowest of all weeks first, and of any number of rows no more than are in the page or are left
    out by the filter. Each week has an order and a limit of its own: without, it would read all of
    them and sort. What is older than MAX_WEEKS is one period: a machine without a clock writes
    requests of 1970.
    """
    since_ms = max(int((chosen.since_s or 0) * 1000), oldest_ms)
    # A day more than now, for clocks that differ.
    latest_s = time.time() + DAY_S
    until_ms = int(min(chosen.until_s or latest_s, latest_s) * 1000)
    last = until_ms // WEEK_MS
    first = max(since_ms // WEEK_MS, last - MAX_WEEKS)
    # A literal, since the index is on this very expression.
    week = literal_column(f"at_ms / {WEEK_MS}", BigInteger)
    periods = [week == literal_column(str(number)) for number in range(first, last + 1)]
    if first > since_ms // WEEK_MS:
        periods.append(_COLUMNS.at_ms < first * WEEK_MS)
    return periods


def _conditions(chosen: RequestFilter) -> Iterator[ColumnElement[bool]]:
    yield _COLUMNS.own_id.is_not(None)  # of a gateway of a previous version
    for name in ("key_id", "owner", "request_id", "outcome"):
        if (wanted := getattr(chosen, name)) is not None:
            yield _COLUMNS[name] == wanted
    if chosen.served_by is not None:
        yield or_(*_named(chosen.served_by))
    if chosen.model is not None:
        yield or_(_COLUMNS.model == chosen.model, _COLUMNS.requested_model == chosen.model)
    if chosen.statuses is not None:
        yield _COLUMNS.status.between(chosen.statuses.start, chosen.statuses.stop - 1)
    if chosen.since_s is not None:
        yield _COLUMNS.at_ms >= int(chosen.since_s * 1000)
    if chosen.until_s is not None:
        yield _COLUMNS.at_ms < int(chosen.until_s * 1000)
    if chosen.slower_than_s is not None:
        yield _COLUMNS.total_ms > chosen.slower_than_s * 1000
    if chosen.at_most_s is not None:
        yield _COLUMNS.total_ms <= chosen.at_most_s * 1000


def _named(models: ModelNames) -> Iterator[ColumnElement[bool]]:
    """Yield conditions of which the name of a model that is one of these meets one.

    Not LIKE: in SQLite that takes `Chat` for `chat`. A condition for each length, since SQLite
    bounds the depth of an expression.
    """
    yield _COLUMNS.model.in_(models.names)
    by_length: dict[int, list[str]] = {}
    for prefix in models.prefixes:
        by_length.setdefault(len(prefix), []).append(prefix)
    for length, prefixes in by_length.items():
        yield func.substr(_COLUMNS.model, 1, length).in_(prefixes)


def _ended(row: Row[Any]) -> EndedRequest:
    started = arrival_of(row.own_id)
    engine = None if row.engine == NO_ENGINE else row.engine
    usage = Usage(
        row.prompt_tokens,
        row.completion_tokens,
        row.cached_tokens,
        row.reasoning_tokens,
        bool(row.estimated),
    )
    record = RequestRecord(
        row.request_id,
        row.endpoint,
        "",  # not stored
        row.status,
        row.total_ms / 1000,
        row.key_id,
        row.model,
        engine,
        row.requested_model or row.model,
        _seconds(row.queue_ms),
        _seconds(row.ttft_ms),
        owner=row.owner,
        usage=None if engine is None else usage,
        fault=row.fault,
        error=row.error,
        client_wait_s=(row.client_wait_ms or 0.0) / 1000,
        continued=row.continued or 0,
        recomputed_tokens=row.recomputed_tokens or 0,
        not_continued=row.not_continued,
    )
    timeline = timeline_of_text(row.timeline, started)
    return EndedRequest(record, timeline, (row.at_ms + 0.5) / 1000, row.own_id[:GATEWAY_DIGITS])


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
