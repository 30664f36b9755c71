"""The history of requests in the ledger: the slowest of many weeks."""

import time
from typing import Any

import pytest

from app.database import Database
from app.telemetry.metrics import Metrics
from app.usage import Order, Place, RequestFilter, RequestHistory
from app.usage.ledger import Ledger
from app.usage.request_history import MAX_WEEKS, periods_of
from tests.app.usage.records import record

DAY_S = 86_400
NOW_S = 1_790_000_000.0


async def stored(database: Database, *ended: tuple[float, float]) -> None:
    """Store requests, each with its age in days and its duration."""
    for number, (age_days, total_s) in enumerate(ended):
        ledger = Ledger(database, Metrics(), {}, 400, clock=lambda: NOW_S - age_days * DAY_S)  # noqa: B023 - called in this round
        name = f"{age_days:g} days"
        status = 500 if number % 2 else 200
        ledger.end(*record(request_id=name, total_s=total_s, status=status))
        await ledger.close()


async def names(
    history: RequestHistory, after: Place | None = None, limit: int = 100, **facts: Any
) -> list[str]:
    chosen = RequestFilter(**facts)
    found = await history.list(chosen, Order.SLOWEST, after, limit)
    return [one.record.request_id for one in found]


@pytest.fixture
async def history(database: Database) -> RequestHistory:
    await stored(database, (1, 5.0), (20, 7.0), (60, 9.0), (61, 6.0), (300, 8.0))
    return RequestHistory(database)


async def test_the_slowest_of_all_weeks_come_first(history: RequestHistory) -> None:
    assert await names(history) == ["60 days", "300 days", "20 days", "61 days", "1 days"]
    assert await names(history, limit=2) == ["60 days", "300 days"]


def test_a_request_of_a_machine_without_a_clock_makes_no_query_of_thousands_of_weeks() -> None:
    periods = periods_of(1000, RequestFilter())  # of 1970
    assert len(periods) == MAX_WEEKS + 2
    assert str(periods[-1]).startswith("usage_records.at_ms < ")  # and it is found
    assert len(periods_of(1000, RequestFilter(since_s=time.time() - 7 * DAY_S))) <= 3
    assert len(periods_of(int((time.time() - 70 * DAY_S) * 1000), RequestFilter())) <= 12


async def test_the_slowest_are_found_within_a_time_and_by_facts(history: RequestHistory) -> None:
    since = NOW_S - 100 * DAY_S
    assert await names(history, since_s=since) == ["60 days", "20 days", "61 days", "1 days"]
    until = NOW_S - 10 * DAY_S
    assert await names(history, since_s=since, until_s=until) == ["60 days", "20 days", "61 days"]
    assert await names(history, statuses=range(500, 600)) == ["20 days", "61 days"]
    assert await names(history, slower_than_s=7.5) == ["60 days", "300 days"]
    assert await names(history, key_id="nobody") == []


async def test_a_page_goes_on_behind_the_one_before(history: RequestHistory) -> None:
    [*_, last] = await history.list(RequestFilter(), Order.SLOWEST, None, 2)
    after = Place.of(last, Order.SLOWEST)
    assert await names(history, after) == ["20 days", "61 days", "1 days"]
