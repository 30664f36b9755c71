"""Budgets in money over a real database, exact to a billionth of the currency."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import closing

import pytest

from app.auth import Owner
from app.errors import QuotaUsedUp
from app.money import NANO
from app.settings import NO_LIMITS, PriceSettings
from app.usage.accounts import STALE_S
from app.usage.token_usage import Usage
from tests.app.usage.records import Clock, Faulty, budgeted, record
from tests.app.usage.test_budgets import Gateway, running

# The prices of `demo` (tests/app/usage/records.py) in nano per token: a cached one is cheaper.
PROMPT, CACHED, COMPLETION = 2_000, 500, 8_000


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def gateway(database: Faulty, clock: Clock) -> AsyncIterator[Gateway]:
    async with running(database, clock) as one:
        one.ledger.reprice({"dear": PriceSettings(prompt=1.0, cached=3.0)}, 90, "EUR")
        yield one


async def fits(gateway: Gateway, daily: int, cost: int, owner: Owner | None = None) -> bool:
    """Return whether a request that may cost so many nano fits a daily budget of the key."""
    key = budgeted("key-1", daily_cost=daily, owner=owner)
    return await taken(gateway, key, cost)


async def taken(gateway: Gateway, key: object, cost: int) -> bool:
    gateway.ledger.reprice({"nano": PriceSettings(completion=0.001)}, 90, "EUR")
    try:
        with closing(await gateway.budgets.reserve(key, cost, model="nano")):  # type: ignore[arg-type]
            return True
    except QuotaUsedUp:
        return False


async def has_cost(gateway: Gateway, cost: int) -> bool:
    """Return whether exactly this much counts: one more nano fits, two do not."""
    return await fits(gateway, cost + 1, 1) and not await fits(gateway, cost + 1, 2)


def spend(gateway: Gateway, usage: Usage, model: str = "demo", owner: str = "") -> None:
    gateway.ledger.end(*record(usage=usage, model=model, owner=owner))


async def test_usage_counts_at_the_price_of_each_kind_of_token(gateway: Gateway) -> None:
    spend(gateway, Usage(10, 3, cached=4))
    assert await has_cost(gateway, 6 * PROMPT + 4 * CACHED + 3 * COMPLETION)
    spend(gateway, Usage(1000, 1000), "without a price")
    assert await has_cost(gateway, 6 * PROMPT + 4 * CACHED + 3 * COMPLETION)


async def test_a_price_far_below_a_billionth_for_a_token_is_exact(gateway: Gateway) -> None:
    gateway.ledger.reprice({"cheap": PriceSettings(prompt=0.0001, completion=0.01875)}, 90, "EUR")
    spend(gateway, Usage(1_000_000, 100), "cheap")
    spend(gateway, Usage(0, 1_000_000), "cheap")
    assert await has_cost(gateway, 100_000 + 1_875 + 18_750_000)


async def test_the_cheapest_request_reserves_something(gateway: Gateway) -> None:
    """Else a budget that is used up would let it in."""
    gateway.ledger.reprice({"cheap": PriceSettings(prompt=0.0001)}, 90, "EUR")
    with pytest.raises(QuotaUsedUp):
        await gateway.budgets.reserve(budgeted("key-1", daily_cost=0), 10, prompt=10, model="cheap")


async def test_reservation_is_the_highest_cost_and_settled_by_real_usage(
    gateway: Gateway,
) -> None:
    key = budgeted("key-1", daily_cost=NANO)
    with closing(await gateway.budgets.reserve(key, 150, prompt=100, model="demo")) as held:
        assert held.cost == 100 * PROMPT + 50 * COMPLETION
        assert await has_cost(gateway, held.cost)
        usage = Usage(80, 20, cached=80)
        held.settle(usage, "demo")
        assert await has_cost(gateway, 80 * CACHED + 20 * COMPLETION)
        spend(gateway, usage)
    assert await has_cost(gateway, 80 * CACHED + 20 * COMPLETION)
    # A model whose cached tokens cost more than others.
    with closing(await gateway.budgets.reserve(key, 150, prompt=100, model="dear")) as held:
        assert held.cost == 100 * 3_000


async def test_cost_of_other_gateways_and_before_a_restart_counts(
    database: Faulty, clock: Clock, gateway: Gateway
) -> None:
    async with running(database, clock) as other:
        spend(gateway, Usage(0, 1))
        assert await has_cost(gateway, COMPLETION)
        spend(other, Usage(0, 2))
        await other.ledger.close()
        clock.now += STALE_S
        assert await has_cost(gateway, 3 * COMPLETION)
        await gateway.ledger.close()
    async with running(database, clock) as after:
        assert await has_cost(after, 3 * COMPLETION)


async def test_concurrent_requests_exceed_neither_budget(gateway: Gateway) -> None:
    owner = Owner("research", NO_LIMITS, monthly_cost_nano=95 * COMPLETION)
    key = budgeted("key-1", 10**9, daily_cost=NANO, owner=owner)
    asked = [gateway.budgets.reserve(key, 10, model="demo") for _ in range(50)]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    assert sum(not isinstance(answer, QuotaUsedUp) for answer in answers) == 9


async def test_budget_in_tokens_and_budget_in_money_both_hold(gateway: Gateway) -> None:
    spend(gateway, Usage(0, 10))
    for tokens, cost, admitted in ((15, 15, True), (14, 15, False), (15, 14, False)):
        key = budgeted("key-1", tokens, daily_cost=cost * COMPLETION)
        reserved = gateway.budgets.reserve(key, 5, model="demo")
        (answer,) = await asyncio.gather(reserved, return_exceptions=True)
        assert isinstance(answer, QuotaUsedUp) is not admitted
        if not isinstance(answer, BaseException):
            answer.close()


async def test_a_used_up_budget_in_money_refuses_only_what_costs_something(
    gateway: Gateway,
) -> None:
    spend(gateway, Usage(0, 10))
    key = budgeted("key-1", daily_cost=COMPLETION)
    with closing(await gateway.budgets.reserve(key, 100, model="without a price")):
        pass
    with pytest.raises(QuotaUsedUp):
        await gateway.budgets.reserve(key, 100, model="demo")


async def test_request_without_max_tokens_gets_what_half_of_the_rest_pays(
    gateway: Gateway,
) -> None:
    key = budgeted("key-1", daily_cost=1_000 * COMPLETION)
    with closing(
        await gateway.budgets.reserve(key, 20, (11, 100_000), prompt=10, model="demo")
    ) as held:
        assert held.tokens == 10 + (500 * COMPLETION - 10 * PROMPT) // COMPLETION
        assert held.cost <= 500 * COMPLETION
    tight = budgeted("key-1", 100, daily_cost=1_000 * COMPLETION)
    with closing(
        await gateway.budgets.reserve(tight, 20, (11, 100_000), prompt=10, model="demo")
    ) as held:
        assert held.tokens == 50


async def test_a_dearer_fallback_is_covered_or_refused(gateway: Gateway) -> None:
    key = budgeted("key-1", daily_cost=10 * COMPLETION)
    with closing(await gateway.budgets.reserve(key, 100, model="without a price")) as held:
        assert held.cost == 0
        gateway.budgets.cover(held, prompt=0, output=8, model="demo")
        assert await has_cost(gateway, 8 * COMPLETION)
        with pytest.raises(QuotaUsedUp):
            gateway.budgets.cover(held, prompt=0, output=11, model="demo")
        gateway.budgets.cover(held, prompt=0, output=1, model="demo")
        assert held.cost == 8 * COMPLETION
    assert await has_cost(gateway, 0)


async def test_refusal_names_amounts_and_currency(gateway: Gateway) -> None:
    spend(gateway, Usage(0, 10_000))
    owner = Owner("research", NO_LIMITS, monthly_cost_nano=0)
    for key, message in (
        (
            budgeted("key-1", daily_cost=NANO // 10),
            "the daily cost budget of 0.10 EUR has 0.02 EUR left until 2026-11-22 00:00 UTC, and "
            "this request may cost 0.024 EUR; a lower max_tokens may let it through",
        ),
        (
            budgeted("key-1", owner=owner),
            "the monthly cost budget of the owner of this key is 0.00 EUR",
        ),
    ):
        with pytest.raises(QuotaUsedUp) as caught:
            await gateway.budgets.reserve(key, 3_000, model="demo")
        assert caught.value.message == message


async def test_nearly_used_and_exhausted_budgets_are_counted_once_an_account(
    gateway: Gateway,
) -> None:
    key = budgeted("key-1", 10, daily_cost=100 * COMPLETION, monthly_cost=NANO)
    with closing(await gateway.budgets.reserve(key, 1, model="demo")):
        pass
    spend(gateway, Usage(0, 95))
    assert [*gateway.budgets.usage_levels()] == [("day", 1, 1), ("month", 0, 0)]
