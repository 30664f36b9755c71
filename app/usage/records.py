"""Usage records as rows and as daily sums by owner, key and model. Pure.

A batch is written in one transaction. Its number and the gateway's random name form the IDs of its
rows, so a row has the same ID however often the batch is tried:

    gateway, 16 hex digits │ batch, 12 │ place in the batch, 4
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, date, datetime
from functools import lru_cache
from typing import Any

import msgspec

from app.database.schema import USAGE_SUMS
from app.money import NANO
from app.settings import PriceSettings
from app.telemetry import EndedRequest, Tokens, timeline_to_text
from app.usage.token_usage import Usage

# The columns have 64 bits. Sums beyond this are an engine's nonsense, and are clamped.
MAX_TOKENS = 2**53 - 1
MAX_COST = 2**60
MILLION = 1_000_000
SUM_LIMITS = {name: MAX_COST if name == "cost_nano" else MAX_TOKENS for name in USAGE_SUMS}
_NO_SUMS = (0,) * len(SUM_LIMITS)
_DAY_MS = 86_400_000
_EPOCH = date(1970, 1, 1).toordinal()
_NOTHING = Usage(0, 0)
_NULL = math.nan
# In a row of a request that failed before it reached an engine.
NO_ENGINE = ""


class Row(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One row of `usage_records`: its columns, in their order.

    Numbers in place of booleans and NULL, for which SQLite's driver takes ten times as long: both
    databases store NaN as NULL.
    """

    id: str
    at_ms: int
    request_id: str
    key_id: str
    model: str
    engine: str
    endpoint: str
    status: int
    outcome: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    estimated: int
    queue_ms: float
    ttft_ms: float
    total_ms: float
    cost_nano: int
    owner: str
    continued: float
    recomputed_tokens: float
    not_continued: str | float
    own_id: str
    requested_model: str | float
    error: str | float
    fault: str | float
    client_wait_ms: float
    timeline: str


class Price(msgspec.Struct, frozen=True):
    """The price of a million tokens, in 1/1,000,000,000 of the currency."""

    prompt: int
    cached: int
    completion: int

    @classmethod
    def of(cls, settings: PriceSettings) -> "Price":
        """Return a model's price."""
        each = (settings.prompt, settings.cached, settings.completion)
        return cls(*(round(price * NANO) for price in each))

    def cost(self, usage: Tokens) -> int:
        """Return the cost of a request, rounded."""
        fresh = usage.prompt - usage.cached
        cost = fresh * self.prompt + usage.cached * self.cached + usage.completion * self.completion
        cost = (cost + MILLION // 2) // MILLION
        return cost if 0 <= cost <= MAX_COST else min(max(cost, 0), MAX_COST)

    def most(self, prompt: int, output: int) -> int:
        """Return the highest cost of so many tokens, whichever of the prompt are cached."""
        cost = prompt * max(self.prompt, self.cached) + output * self.completion
        return -(-cost // MILLION)


def day_of(at_s: float) -> str:
    """Return the UTC day of a time as the database stores it."""
    return _day(int(at_s * 1000) // _DAY_MS)


def tokens_of(usage: Tokens | None) -> int:
    """Return the tokens charged to budgets: prompt, including cached tokens, and completion."""
    return 0 if usage is None else _count(usage.prompt) + _count(usage.completion)


def row_id(gateway: str, batch: int, place: int = 0) -> str:
    """Return the id of a row of `usage_records`."""
    return f"{gateway}{batch:012x}{_place(place)}"


def batch_of(row: str) -> int:
    """Return the batch number in the ID of a row."""
    return int(row[16:28], 16)


def rows_of(
    gateway: str,
    batch: int,
    requests: Iterable[EndedRequest],
    prices: Mapping[str, Price],
    place: int = 0,
) -> list[Row]:
    """Return the rows of `usage_records`; `place` is that of the first request in its batch."""
    rows: list[Row] = []
    first = f"{gateway}{batch:012x}"
    for number, ended in enumerate(requests, place):
        record = ended.record
        used = record.usage or _NOTHING
        key_id, model, engine, endpoint, owner = _names(
            record.key_id, record.model, record.engine or NO_ENGINE, record.endpoint, record.owner
        )
        price = prices.get(record.model)
        rows.append(Row(
            id=first + _place(number), at_ms=int(ended.ended_at * 1000),
            request_id=storable(record.request_id, 128), key_id=key_id, model=model, engine=engine,
            endpoint=endpoint, status=record.status, outcome=record.outcome,
            prompt_tokens=_count(used.prompt), cached_tokens=_count(used.cached),
            completion_tokens=_count(used.completion), reasoning_tokens=_count(used.reasoning),
            estimated=1 if used.estimated else 0,
            queue_ms=_NULL if record.queued_s is None else _ms(record.queued_s),
            ttft_ms=_NULL if record.ttft_s is None else _ms(record.ttft_s),
            total_ms=_ms(record.total_s, 0.0), cost_nano=0 if price is None else price.cost(used),
            owner=owner, continued=record.continued or _NULL,
            recomputed_tokens=_count(record.recomputed_tokens) or _NULL,
            not_continued=_text(record.not_continued, 32), own_id=ended.id,
            requested_model=_asked(record.requested_model, record.model),
            error=_text(record.error, 64), fault=_text(record.fault, 300),
            client_wait_ms=_ms(record.client_wait_s) if record.client_wait_s else _NULL,
            timeline=timeline_to_text(ended.timeline),
        ))  # fmt: skip
    return rows


class DailySums:
    """The sums of rows that are added to `usage_daily` and `usage_by_owner`."""

    def __init__(self) -> None:
        # By owner, day, key and model; the sums in the order of SUM_LIMITS.
        self._days: dict[tuple[str, str, str, str], list[int]] = {}

    def add(self, rows: Iterable[Row]) -> None:
        """Add rows to the sums, of requests that reached an engine."""
        for row in rows:
            if row.engine == NO_ENGINE:
                continue
            place = (row.owner, _day(row.at_ms // _DAY_MS), row.key_id, row.model)
            sums = self._days.setdefault(place, [0] * len(SUM_LIMITS))
            sums[0] += 1
            sums[1] += row.estimated
            sums[2] += row.prompt_tokens
            sums[3] += row.cached_tokens
            sums[4] += row.completion_tokens
            sums[5] += row.reasoning_tokens
            sums[6] += row.cost_nano

    # Rows are in the order of their primary key, so that two gateways cannot deadlock.

    def by_key(self) -> list[dict[str, Any]]:
        """Return the rows for `usage_daily`."""
        days: dict[tuple[str, ...], tuple[int, ...]] = {}
        for (_, *place), sums in self._days.items():
            # Several only if a key's owner changed within a batch.
            known = days.get(tuple(place), _NO_SUMS)
            days[tuple(place)] = tuple(map(int.__add__, known, sums))
        return _rows(("day", "key_id", "model"), days)

    def by_owner(self) -> list[dict[str, Any]]:
        """Return the rows for `usage_by_owner`; none for keys without an owner."""
        owned = {place: sums for place, sums in self._days.items() if place[0]}
        return _rows(("owner", "day", "key_id", "model"), owned)


def _rows(names: Sequence[str], days: Mapping[Any, Sequence[int]]) -> list[dict[str, Any]]:
    columns = (*names, *SUM_LIMITS)
    return [
        dict(zip(columns, (*place, *map(min, sums, SUM_LIMITS.values())), strict=True))
        for place, sums in sorted(days.items())
    ]


@lru_cache(maxsize=16)
def _day(number: int) -> str:
    return date.fromordinal(_EPOCH + number).isoformat()


def start_of(day: str) -> datetime:
    """Return the beginning of a UTC day."""
    return datetime.fromisoformat(day).replace(tzinfo=UTC)


def _asked(requested: str | None, model: str) -> str | float:
    return _NULL if requested is None or requested == model else storable(requested, 256)


def _text(value: str | None, longest: int) -> str | float:
    return _NULL if value is None else storable(value, longest)


def _count(tokens: int) -> int:
    return tokens if 0 <= tokens <= MAX_TOKENS else min(max(tokens, 0), MAX_TOKENS)


def storable(value: str, longest: int) -> str:
    """Return a text that both databases accept: no NUL, no lone surrogate, not too long."""
    if value.isascii() and "\0" not in value:
        return value[:longest]
    return value.encode(errors="replace").decode().replace("\0", "\ufffd")[:longest]


@lru_cache(maxsize=1024)  # as many as a batch has
def _place(number: int) -> str:
    return f"{number:04x}"


@lru_cache(maxsize=1024)  # keys, models, engines, endpoints and owners are few
def _names(key_id: str, model: str, engine: str, endpoint: str, owner: str) -> tuple[str, ...]:
    longest = (64, 256, 64, 64, 200)
    return tuple(map(storable, (key_id, model, engine, endpoint, owner), longest))


def _ms(seconds: float, otherwise: float = _NULL) -> float:
    """Return milliseconds in whole microseconds; `otherwise` for NaN and infinity."""
    # `round` to three places goes by way of text, for ten times as long.
    return round(seconds * 1_000_000) / 1000 if math.isfinite(seconds) else otherwise
