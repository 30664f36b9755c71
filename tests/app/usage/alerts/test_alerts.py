"""Alerts over a real database, a real ledger and a receiver on a real socket."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import Any

import pytest
from sqlalchemy import update

from app.auth import Owner
from app.database import Database
from app.database.schema import budget_alerts
from app.errors import QuotaUsedUp
from app.settings import NO_LIMITS, AlertsSettings
from app.telemetry.metrics import Metrics
from app.usage.accounts import BudgetAccount
from app.usage.alerts import Alerts
from app.usage.alerts.alerts import MAX_WAITING
from app.usage.alerts.outbox import LEASE_MS, RETENTION_MS
from app.usage.budgets import Budgets
from app.usage.token_usage import Usage
from tests.app.usage.alerts.receiver import SECRET, Receiver
from tests.app.usage.records import Clock, Faulty, budgeted, ledger_for, record, rows
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

TEAM = Owner("research", NO_LIMITS, 1000, 10_000)


class Gateway:
    """The usage and alerts of one gateway."""

    def __init__(self, database: Database, receiver: Receiver, clock: Clock, **fields: Any) -> None:
        settings = AlertsSettings.model_validate(
            {"webhook_url": receiver.url, "webhook_secret": SECRET, **fields}
        )
        self.metrics = Metrics()
        self.ledger = ledger_for(database, clock=clock)
        self.alerts = Alerts(
            settings,
            database,
            self.metrics,
            lambda: self.ledger.written,
            clock=clock,
            chance=lambda: 0.0,
            check_s=0.01,
            poll_s=0.02,
            attempt_s=0.5,
        )
        self.budgets = Budgets(database, self.ledger, clock, self.alerts)

    async def spend(
        self,
        tokens: int,
        key_id: str = "key-1",
        *,
        daily: int | None = 1000,
        owner: Owner | None = None,
    ) -> None:
        """Have a request take so many tokens."""
        with closing(
            await self.budgets.reserve(budgeted(key_id, daily, None, owner=owner), 1)
        ) as held:
            held.settle(Usage(tokens, 0), "demo")
            name = "" if owner is None else owner.name
            self.ledger.end(*record(key_id=key_id, usage=Usage(tokens, 0), owner=name))

    def count(self, outcome: str) -> float | None:
        return self.metrics.registry.get_sample_value("gateway_alerts_total", {"outcome": outcome})

    async def until_count(self, outcome: str, count: int) -> None:
        await wait_until(lambda: self.count(outcome) == count)


@pytest.fixture
def clock() -> Clock:
    return Clock("2026-11-22T12:00:00")


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with Receiver() as receiver:
        yield receiver


@asynccontextmanager
async def running(
    database: Database, receiver: Receiver, clock: Clock, **fields: Any
) -> AsyncIterator[Gateway]:
    """A gateway as the lifespan runs and ends it."""
    gateway = Gateway(database, receiver, clock, **fields)
    tasks = [asyncio.create_task(one.run()) for one in (gateway.ledger, gateway.alerts)]
    try:
        yield gateway
    finally:
        await gateway.ledger.close()
        await gateway.budgets.close()
        await gateway.alerts.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def quiet() -> None:
    """Let so much time pass that what is to be sent has been."""
    await asyncio.sleep(0.4)


async def settled(database: Database, count: int) -> None:
    """Return when so many alerts are there, and none of them is due."""
    async with asyncio.timeout(20):
        while True:
            found = await rows(database, budget_alerts)
            if len(found) == count and all(row.due_ms is None for row in found):
                return
            await asyncio.sleep(0.01)


async def postponed(database: Database, clock: Clock) -> None:
    """Return when the one alert has the time of its next attempt; until then it has a lease."""
    async with asyncio.timeout(20):
        while True:
            ((due_ms,),) = [(row.due_ms,) for row in await rows(database, budget_alerts)]
            if due_ms > clock.now * 1000 and due_ms != int(clock.now * 1000) + LEASE_MS:
                return
            await asyncio.sleep(0.01)


async def test_each_share_of_each_budget_alerts_once(
    database: Faulty, receiver: Receiver, clock: Clock
) -> None:
    async with running(database, receiver, clock) as gateway:
        await gateway.spend(799)
        await gateway.spend(1)
        await receiver.until(1)
        for _ in range(3):
            await gateway.spend(50)
        await gateway.spend(50)
        await receiver.until(2)
        await settled(database, 2)
        assert receiver.messages == [("key-1", 0.8), ("key-1", 1.0)]
        assert all(one.signed_by(SECRET) for one in receiver.seen)
        assert receiver.seen[0].message["data"]["used_tokens"] == 800
        assert len({one.id for one in receiver.seen}) == 2
        assert gateway.count("delivered") == 2


async def test_owner_alert_when_its_keys_together_reach_a_share(
    database: Faulty, receiver: Receiver, clock: Clock
) -> None:
    async with running(database, receiver, clock) as gateway:
        await gateway.spend(500, "key-1", daily=None, owner=TEAM)
        await gateway.spend(400, "key-2", daily=10**6, owner=TEAM)
        await receiver.until(1)
        assert receiver.messages == [("research", 0.8)]
        assert receiver.seen[0].message["data"]["period"] == "day"


async def test_new_period_and_changed_budget_alert_again(
    database: Faulty, receiver: Receiver, clock: Clock
) -> None:
    async with running(database, receiver, clock, budget_shares=[0.5]) as gateway:
        await gateway.spend(600)
        await receiver.until(1)
        await gateway.spend(600, daily=2000)
        await receiver.until(2)
        clock.set("2026-11-23T12:00:00")
        await gateway.spend(1000, daily=2000)
        await receiver.until(3)
        found = [(one["starts_at"][:10], one["budget_tokens"]) for one in data(receiver)]
        assert found == [("2026-11-22", 1000), ("2026-11-22", 2000), ("2026-11-23", 2000)]


async def test_refusal_by_a_budget_alerts_once(
    database: Faulty, receiver: Receiver, clock: Clock
) -> None:
    async with running(database, receiver, clock, budget_shares=[]) as gateway:
        await gateway.spend(500, owner=TEAM)
        for tokens in (600, 700):
            with pytest.raises(QuotaUsedUp):
                await gateway.budgets.reserve(budgeted("key-1", 10**6, None, owner=TEAM), tokens)
        # Larger than the whole budget: it says nothing of what is used.
        with pytest.raises(QuotaUsedUp):
            await gateway.budgets.reserve(budgeted("key-9", 10, None), 11)
        await receiver.until(1)
        await quiet()
        assert receiver.messages == [("research", "refused")]


async def test_alert_belongs_to_the_day_of_the_request_not_of_the_check(
    database: Faulty, receiver: Receiver, clock: Clock
) -> None:
    clock.set("2026-11-22T23:59:59")
    async with running(database, receiver, clock, budget_shares=[0.8]) as gateway:
        await gateway.spend(1)
        database.down = True
        await gateway.spend(899)
        with pytest.raises(QuotaUsedUp):
            await gateway.budgets.reserve(budgeted("key-1", 1000, None), 600)
        clock.set("2026-11-23T00:00:01")
        database.down = False
        await receiver.until(2)
        found = sorted((one["starts_at"][:10], one["used_tokens"]) for one in data(receiver))
        assert found == [("2026-11-22", 900), ("2026-11-22", 900)]
        assert sorted(map(str, receiver.messages)) == ["('key-1', 'refused')", "('key-1', 0.8)"]
        # The next day's own refusal is another alert.
        await gateway.spend(500)
        with pytest.raises(QuotaUsedUp):
            await gateway.budgets.reserve(budgeted("key-1", 1000, None), 600)
        await receiver.until(3)
        assert data(receiver)[-1]["starts_at"][:10] == "2026-11-23"


async def test_gateways_and_restarts_share_one_alert(
    database: Faulty, receiver: Receiver, clock: Clock
) -> None:
    async with (
        running(database, receiver, clock) as one,
        running(database, receiver, clock) as other,
    ):
        await asyncio.gather(
            *(gateway.spend(45, owner=TEAM) for gateway in (one, other) for _ in range(10))
        )
        await receiver.until(2)  # the key's and the owner's
        await settled(database, 2)
    async with running(database, receiver, clock) as after:
        await after.spend(1, owner=TEAM)
        await quiet()
    assert sorted(receiver.messages) == [("key-1", 0.8), ("research", 0.8)]


async def test_concurrent_gateways_alert_whichever_commits_last(
    database: Faulty, receiver: Receiver, clock: Clock
) -> None:
    """Neither sees more than half of the spending before it writes its own."""
    async with (
        running(database, receiver, clock, budget_shares=[0.8]) as one,
        running(database, receiver, clock, budget_shares=[0.8]) as other,
    ):
        await asyncio.gather(one.spend(450), other.spend(450))
        await receiver.until(1)
        assert receiver.messages == [("key-1", 0.8)]


@pytest.mark.parametrize("fault", [500, 404, 302, None], ids=str)
async def test_failed_alert_is_retried_with_the_same_id_and_body(
    database: Faulty, receiver: Receiver, clock: Clock, fault: int | None
) -> None:
    receiver.statuses = [fault, fault]
    async with running(database, receiver, clock, budget_shares=[0.8]) as gateway:
        await gateway.spend(900)
        await gateway.until_count("failed", 1)
        await quiet()
        assert len(receiver.seen) == 1  # not before the pause is over
        for failed, pause_s in ((2, 5), (2, 10)):
            clock.now += pause_s + 0.1
            await receiver.until(failed)
            await gateway.until_count("failed", 2)
        await gateway.until_count("delivered", 1)
        await settled(database, 1)
    first, second, third = receiver.seen
    assert first.id == second.id == third.id
    assert first.body == second.body == third.body
    assert first.headers["webhook-timestamp"] < third.headers["webhook-timestamp"]
    assert all(one.signed_by(SECRET) for one in receiver.seen)


async def test_no_redirect_is_followed(database: Faulty, receiver: Receiver, clock: Clock) -> None:
    async with Receiver() as elsewhere:
        receiver.location, receiver.statuses = elsewhere.url, [307]
        async with running(database, receiver, clock) as gateway:
            await gateway.spend(900)
            await gateway.until_count("failed", 1)
        assert elsewhere.seen == []


async def test_alert_is_given_up_after_the_last_attempt(
    database: Faulty, receiver: Receiver, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.statuses = [500] * 99
    async with running(database, receiver, clock) as gateway:
        await gateway.spend(900)
        await gateway.until_count("failed", 1)
        await postponed(database, clock)
        async with database.write() as connection:
            await connection.execute(update(budget_alerts).values(attempts=19, due_ms=0))
        await gateway.until_count("given_up", 1)
        await settled(database, 1)
        clock.now += 7200
        await quiet()
        assert len(receiver.seen) == 2
    assert (
        "abandoned after 20 attempts: the receiver answered 500; key key-1 reached" in caplog.text
    )


async def test_undelivered_alert_is_sent_by_the_next_gateway(
    database: Faulty, receiver: Receiver, clock: Clock
) -> None:
    receiver.statuses = [None]
    async with running(database, receiver, clock) as gateway:
        await gateway.spend(900)
        await receiver.until(1)  # under way
    assert [row.due_ms for row in await rows(database, budget_alerts)] == [int(clock.now * 1000)]
    async with running(database, receiver, clock):
        await receiver.until(2)
        await settled(database, 1)
    assert receiver.seen[0].id == receiver.seen[1].id


async def test_spending_just_before_shutdown_alerts_after_the_restart(
    database: Faulty, receiver: Receiver, clock: Clock
) -> None:
    gateway = Gateway(database, receiver, clock)  # nothing runs behind its requests
    await gateway.spend(900)
    for part in (gateway.ledger, gateway.budgets, gateway.alerts):
        await part.close()
    assert receiver.seen == []
    async with running(database, receiver, clock):
        await receiver.until(1)


async def test_alert_claimed_by_a_killed_gateway_is_sent_when_its_lease_expires(
    database: Faulty, receiver: Receiver, clock: Clock
) -> None:
    dead = Gateway(database, receiver, clock)
    await dead.spend(900)
    for part in (dead.ledger, dead.budgets, dead.alerts):
        await part.close()
    now_ms = int(clock.now * 1000)
    (claimed,) = await dead.alerts._outbox.claim(now_ms, 9)
    assert await dead.alerts._outbox.claim(now_ms + LEASE_MS - 1, 9) == []
    async with running(database, receiver, clock):
        await quiet()
        assert receiver.seen == []
        clock.now += LEASE_MS / 1000
        await receiver.until(1)
    assert receiver.seen[0].id == claimed.id


async def test_database_outage_delays_alerts_and_not_requests(
    database: Faulty, receiver: Receiver, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(database, receiver, clock) as gateway:
        await gateway.spend(1)
        database.down = True
        await gateway.spend(900)
        await quiet()
        assert receiver.seen == []
        database.down = False
        await receiver.until(1)
    assert caplog.text.count("alerts wait: ") == 1


async def test_no_secret_is_in_the_log_or_in_a_representation(
    database: Faulty, receiver: Receiver, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    receiver.statuses = [500]
    async with running(database, receiver, clock) as gateway:
        await gateway.spend(900)
        await gateway.until_count("failed", 1)
        clock.now += 6
        await gateway.until_count("delivered", 1)
        shown = repr(gateway.alerts._webhook)
    assert "delivered: key key-1 reached 80 % of its daily budget of 1,000 tokens" in caplog.text
    assert shown == "<Webhook http://127.0.0.1>"
    for secret in ("a-secret-path", SECRET, SECRET[6:30]):
        assert secret not in caplog.text


async def test_zero_budget_and_missing_budget_do_not_alert(
    database: Faulty, receiver: Receiver, clock: Clock
) -> None:
    async with running(database, receiver, clock) as gateway:
        with pytest.raises(QuotaUsedUp):
            await gateway.spend(1, daily=0)
        await gateway.spend(10**9, "key-2", daily=None)
        await quiet()
    assert await rows(database, budget_alerts) == []


async def test_waiting_accounts_are_bounded(
    database: Faulty, receiver: Receiver, clock: Clock
) -> None:
    alerts = Gateway(database, receiver, clock).alerts
    for number in range(MAX_WAITING + 10):
        account = BudgetAccount("key", str(number), budgeted(str(number), 1))
        alerts.note(account, 1, "2026-11-22")
        alerts.note(account, 0, "2026-11-22", [("tokens", "day")])
    assert len(alerts._waiting) == MAX_WAITING


async def test_alerts_of_past_periods_are_deleted(
    database: Faulty, receiver: Receiver, clock: Clock
) -> None:
    async with running(database, receiver, clock) as gateway:
        await gateway.spend(900)
        await receiver.until(1)
        await settled(database, 1)
    clock.now += RETENTION_MS / 1000 + 1
    async with running(database, receiver, clock):
        await settled(database, 0)


def data(receiver: Receiver) -> list[Any]:
    return [one.message["data"] for one in receiver.seen]
