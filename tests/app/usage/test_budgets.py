"""Budgets over a real database, with the ledger that writes to it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing

import pytest

from app.auth import Owner
from app.database import Database
from app.errors import QuotaUsedUp, ServiceUnavailable
from app.settings import NO_LIMITS
from app.usage.accounts import FORGET_S, REFRESH_S, STALE_S
from app.usage.budgets import Budgets
from app.usage.ledger import Ledger
from app.usage.token_usage import Usage
from tests.app.usage.records import Clock, Faulty, budgeted, ledger_for, record


class Gateway:
    """The usage parts of one gateway."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self.ledger: Ledger = ledger_for(database, clock=clock)
        self.budgets = Budgets(database, self.ledger, clock)

    async def close(self) -> None:
        await self.ledger.close()
        await self.budgets.close()

    def spend(self, tokens: int, key_id: str = "key-1", owner: str = "") -> None:
        usage = Usage(tokens - tokens // 3, tokens // 3)
        self.ledger.end(*record(key_id=key_id, usage=usage, owner=owner))

    async def has_spent(self, today: int, month: int | None = None, key_id: str = "key-1") -> bool:
        """Return whether exactly this many tokens count: seven more fit, eight do not."""
        month = today if month is None else month
        return (
            await self.lets(key_id, today + 7, None, 7)
            and not await self.lets(key_id, today + 7, None, 8)
            and await self.lets(key_id, None, month + 7, 7)
            and not await self.lets(key_id, None, month + 7, 8)
        )

    async def lets(
        self,
        key_id: str,
        daily: int | None,
        monthly: int | None,
        tokens: int,
        owner: Owner | None = None,
    ) -> bool:
        try:
            with closing(
                await self.budgets.reserve(budgeted(key_id, daily, monthly, owner=owner), tokens)
            ):
                return True
        except QuotaUsedUp:
            return False


@pytest.fixture
def clock() -> Clock:
    return Clock()


@asynccontextmanager
async def running(database: Database, clock: Clock) -> AsyncIterator[Gateway]:
    gateway = Gateway(database, clock)
    try:
        yield gateway
    finally:
        await gateway.close()


async def read_again(gateway: Gateway, clock: Clock, key_id: str = "key-1") -> None:
    """Let so much time pass that the next request waits for the database."""
    clock.now += STALE_S
    with closing(await gateway.budgets.reserve(budgeted(key_id, None, None), 1)):
        pass


class TestOneGateway:
    async def test_a_record_counts_before_and_after_it_is_written(
        self, database: Faulty, clock: Clock
    ) -> None:
        async with running(database, clock) as gateway:
            assert await gateway.has_spent(0)
            gateway.spend(100)
            assert await gateway.has_spent(100)
            await read_again(gateway, clock)
            assert await gateway.has_spent(100)
            await gateway.ledger.close()
            assert await gateway.has_spent(100)
            await read_again(gateway, clock)
            assert await gateway.has_spent(100)

    async def test_usage_before_the_first_read_of_a_key_counts(
        self, database: Faulty, clock: Clock
    ) -> None:
        async with running(database, clock) as gateway:
            gateway.spend(100)
            gateway.spend(11, "key-2")
            assert await gateway.has_spent(100)
            assert await gateway.has_spent(11, key_id="key-2")

    @pytest.mark.slow
    async def test_usage_counts_exactly_once_while_batches_are_written(
        self, database: Faulty, clock: Clock
    ) -> None:
        async with running(database, clock) as gateway:
            task = asyncio.create_task(gateway.ledger.run())
            spent = 0
            for tokens in range(1, 1500):
                gateway.spend(tokens)
                spent += tokens
                if tokens % 50 == 0:
                    await asyncio.sleep(0.02)
                clock.now += REFRESH_S / 3
                assert await gateway.has_spent(spent)
            assert gateway.ledger.written > 2  # it was written meanwhile, not at the end
            await gateway.close()
            assert task.done()
            await read_again(gateway, clock)
            assert await gateway.has_spent(spent)

    async def test_reservation_holds_the_requests_maximum(
        self, database: Faulty, clock: Clock
    ) -> None:
        async with running(database, clock) as gateway:
            with closing(
                await gateway.budgets.reserve(budgeted("key-1", 100, None), 60)
            ) as reservation:
                assert await gateway.has_spent(60)
                reservation.settle(Usage(25, 0), "demo")
                assert await gateway.has_spent(25)
                gateway.spend(25)
            assert await gateway.has_spent(25)

    async def test_unsettled_reservation_is_fully_refunded(
        self, database: Faulty, clock: Clock
    ) -> None:
        async with running(database, clock) as gateway:
            reservation = await gateway.budgets.reserve(budgeted("key-1", 100, None), 60)
            with contextlib.suppress(ZeroDivisionError), closing(reservation):
                raise ZeroDivisionError
            assert await gateway.has_spent(0)

    async def test_late_settlement_releases_the_reservation(
        self, database: Faulty, clock: Clock
    ) -> None:
        async with running(database, clock) as gateway:
            with closing(
                await gateway.budgets.reserve(budgeted("key-1", 100, None), 60)
            ) as reservation:
                pass
            reservation.settle(Usage(30, 0), "demo")
            assert await gateway.has_spent(0)

    async def test_concurrent_requests_do_not_exceed_the_budget(
        self, database: Faulty, clock: Clock
    ) -> None:
        async with running(database, clock) as gateway:
            asked = [gateway.budgets.reserve(budgeted("key-1", 1000, None), 30) for _ in range(50)]
            answers = await asyncio.gather(*asked, return_exceptions=True)
            assert sum(not isinstance(answer, QuotaUsedUp) for answer in answers) == 33

    async def test_concurrent_first_requests_share_one_read(
        self, database: Faulty, clock: Clock
    ) -> None:
        async with running(database, clock) as gateway:
            asked = [gateway.budgets.reserve(budgeted("key-1", None, None), 1) for _ in range(50)]
            await asyncio.gather(*asked)
            assert database.reads == 1

    async def test_many_keys_are_read_in_few_statements(
        self, database: Faulty, clock: Clock
    ) -> None:
        async with running(database, clock) as gateway:
            for number in range(30):
                gateway.spend(number + 1, f"key-{number}")
            await gateway.ledger.close()
            keys = [f"key-{number}" for number in range(600)]
            await asyncio.gather(
                *(gateway.budgets.reserve(budgeted(key, 99, 99), 1) for key in keys)
            )
            assert database.reads == 2
            assert await gateway.has_spent(21, key_id="key-20") is False  # one more is held
            assert await gateway.has_spent(22, key_id="key-20")

    async def test_midnight_begins_a_day_and_the_first_a_month(
        self, database: Faulty, clock: Clock
    ) -> None:
        clock.set("2026-11-29T23:59:59")
        async with running(database, clock) as gateway:
            gateway.spend(100)
            assert await gateway.has_spent(100)
            clock.set("2026-11-30T00:00:00")
            assert await gateway.has_spent(0, 100)
            gateway.spend(20)
            await gateway.ledger.close()
            await read_again(gateway, clock)
            assert await gateway.has_spent(20, 120)
            clock.set("2026-12-01T00:00:00")
            assert await gateway.has_spent(0, 0)

    async def test_request_in_flight_at_midnight_counts_for_the_new_day(
        self, database: Faulty, clock: Clock
    ) -> None:
        clock.set("2026-11-30T23:59:59.9")
        async with running(database, clock) as gateway:
            with closing(await gateway.budgets.reserve(budgeted("key-1", 100, None), 60)):
                clock.set("2026-12-01T00:00:00")
                assert await gateway.has_spent(60, 60)

    @pytest.mark.parametrize(
        "key_id", ["'; DROP TABLE usage_daily; --", "%_*", "\0", "\ud800x", "ключ", "k" * 70, ""]
    )
    async def test_key_id_may_be_any_text(
        self, database: Faulty, clock: Clock, key_id: str
    ) -> None:
        async with running(database, clock) as gateway:
            gateway.spend(100, key_id)
            await gateway.ledger.close()
            assert await gateway.has_spent(100, key_id=key_id)
            assert await gateway.has_spent(0)


class TestWhatIsTold:
    """Return the values of gateway_budgets_nearly_used and gateway_budgets_exhausted."""

    async def test_nearly_used_and_exhausted_budgets_are_counted(
        self, database: Faulty, clock: Clock
    ) -> None:
        async with running(database, clock) as gateway:
            for number, (daily, monthly) in enumerate(
                [(100, None), (91, 1_000), (90, 100), (None, None), (0, 0)]
            ):
                key_id = f"key-{number}"
                await gateway.lets(key_id, daily, monthly, 1)
                gateway.spend(90, key_id)
            # Of 100, 91, 90 by day 90 are spent; of 1,000 and 100 by month.
            assert [*gateway.budgets.usage_levels()] == [("day", 3, 1), ("month", 1, 0)]

    async def test_reservations_in_flight_do_not_count_as_used(
        self, database: Faulty, clock: Clock
    ) -> None:
        async with running(database, clock) as gateway:
            with closing(await gateway.budgets.reserve(budgeted("key-1", 100, 100), 100)):
                assert [*gateway.budgets.usage_levels()] == [("day", 0, 0), ("month", 0, 0)]

    async def test_idle_key_does_not_count(self, database: Faulty, clock: Clock) -> None:
        async with running(database, clock) as gateway:
            await gateway.lets("key-1", 100, None, 1)
            gateway.spend(100)
            assert [*gateway.budgets.usage_levels()] == [("day", 1, 1), ("month", 0, 0)]
            clock.now += FORGET_S
            assert [*gateway.budgets.usage_levels()] == [("day", 0, 0), ("month", 0, 0)]


class TestSeveralGateways:
    async def test_spending_by_other_gateways_appears_after_a_read(
        self, database: Faulty, clock: Clock
    ) -> None:
        async with running(database, clock) as one, running(database, clock) as other:
            one.spend(100)
            assert await one.has_spent(100)
            other.spend(20)
            await other.ledger.close()
            await read_again(one, clock)
            assert await one.has_spent(120)
            await one.ledger.close()
            await read_again(one, clock)
            assert await one.has_spent(120)
            assert await other.has_spent(120)

    async def test_key_in_steady_use_is_refreshed_in_the_background(
        self, database: Faulty, clock: Clock
    ) -> None:
        async with running(database, clock) as one, running(database, clock) as other:
            assert await one.has_spent(0)
            other.spend(20)
            await other.ledger.close()
            clock.now += REFRESH_S
            assert await one.has_spent(0)  # nobody waits
            while database.reads < 2 or not await one.has_spent(20):
                await asyncio.sleep(0)


def research(daily: int | None = None, monthly: int | None = None) -> Owner:
    return Owner("research", NO_LIMITS, daily, monthly)


class TestOwners:
    async def owner_has_spent(self, gateway: Gateway, tokens: int) -> bool:
        """Return whether exactly this many of the owner's tokens count, today and this month."""
        return all(
            [
                await gateway.lets("any", None, None, amount, research(*budgets)) is lets
                for budgets in ((tokens + 7, None), (None, tokens + 7))
                for amount, lets in ((7, True), (8, False))
            ]
        )

    async def test_all_keys_of_an_owner_spend_its_budget(
        self, database: Faulty, clock: Clock
    ) -> None:
        async with running(database, clock) as gateway:
            gateway.spend(100, "key-1", "research")
            gateway.spend(20, "key-2", "research")
            gateway.spend(3000, "key-1", "ops")  # the same key, before or after it moved
            gateway.spend(3000, "key-3")
            assert await self.owner_has_spent(gateway, 120)
            await gateway.ledger.close()
            await read_again(gateway, clock)
            clock.now += STALE_S
            assert await self.owner_has_spent(gateway, 120)

    async def test_request_is_reserved_and_refunded_for_key_and_owner(
        self, database: Faulty, clock: Clock
    ) -> None:
        async with running(database, clock) as gateway:
            with closing(
                await gateway.budgets.reserve(budgeted("key-1", 100, None, owner=research(100)), 60)
            ) as held:
                assert await gateway.has_spent(60)
                assert await self.owner_has_spent(gateway, 60)
                held.settle(Usage(25, 0), "demo")
                assert await gateway.has_spent(25)
                assert await self.owner_has_spent(gateway, 25)
                gateway.spend(25, "key-1", "research")
            assert await gateway.has_spent(25)
            assert await self.owner_has_spent(gateway, 25)

    @pytest.mark.parametrize(("key", "owner"), [(59, 100), (100, 59)])
    async def test_refused_request_is_reserved_for_neither(
        self, database: Faulty, clock: Clock, key: int, owner: int
    ) -> None:
        async with running(database, clock) as gateway:
            assert not await gateway.lets("key-1", key, None, 60, research(owner))
            assert await gateway.has_spent(0)
            assert await self.owner_has_spent(gateway, 0)

    async def test_concurrent_reservations_exceed_neither_budget(
        self, database: Faulty, clock: Clock
    ) -> None:
        """The first of them waits for the database with both accounts unknown."""
        async with running(database, clock) as gateway:
            asked = [
                gateway.budgets.reserve(budgeted(f"key-{n % 2}", 50, None, owner=research(70)), 10)
                for n in range(20)
            ]
            answers = await asyncio.gather(*asked, return_exceptions=True)
            held = [one for one in answers if not isinstance(one, BaseException)]
            assert len(held) == 7
            assert all(isinstance(o, QuotaUsedUp) for o in answers if isinstance(o, BaseException))
            for one in held:
                one.close()
            assert await self.owner_has_spent(gateway, 0)

    async def test_refusal_names_the_budget_of_key_or_owner(
        self, database: Faulty, clock: Clock
    ) -> None:
        async with running(database, clock) as gateway:
            gateway.spend(60, "key-1", "research")
            for key, owner, words in (
                (100, 1000, "the daily budget of 100 tokens has 40 tokens left"),
                (
                    1000,
                    100,
                    "the daily budget of 100 tokens, which all keys of this key's owner share, "
                    "has 40 tokens left",
                ),
            ):
                with pytest.raises(QuotaUsedUp, match=words):
                    await gateway.budgets.reserve(
                        budgeted("key-1", key, None, owner=research(owner)), 50
                    )
            with pytest.raises(
                QuotaUsedUp, match=r"^the daily budget of the owner of this key is 0"
            ):
                await gateway.budgets.reserve(budgeted("key-1", None, None, owner=research(0)), 1)

    async def test_refusal_by_both_budgets_reports_the_longer_wait(
        self, database: Faulty, clock: Clock
    ) -> None:
        async with running(database, clock) as gateway:
            gateway.spend(60, "key-1", "research")
            for daily, monthly, owner in (
                (10**6, 100, research(100)),
                (100, None, research(None, 100)),
            ):
                with pytest.raises(QuotaUsedUp, match=r"until 2026-12-01") as caught:
                    await gateway.budgets.reserve(
                        budgeted("key-1", daily, monthly, owner=owner), 50
                    )
                assert caught.value.retry_after_s == 9 * 86400 + 43200

    async def test_request_without_max_tokens_gets_a_share_of_the_tighter_budget(
        self, database: Faulty, clock: Clock
    ) -> None:
        async with running(database, clock) as gateway:
            for key, owner in ((1000, 100), (100, 1000)):
                asked = gateway.budgets.reserve(
                    budgeted("key-1", key, None, owner=research(owner)), 20, (1, 900)
                )
                with closing(await asked) as held:
                    assert held.tokens == 50

    async def test_spending_by_other_gateways_and_before_a_restart_counts(
        self, database: Faulty, clock: Clock
    ) -> None:
        async with running(database, clock) as one, running(database, clock) as other:
            one.spend(100, "key-1", "research")
            assert await self.owner_has_spent(one, 100)
            other.spend(20, "key-2", "research")
            await other.ledger.close()
            clock.now += STALE_S
            assert await self.owner_has_spent(one, 120)
        async with running(database, clock) as after:
            assert await self.owner_has_spent(after, 120)

    async def test_owner_without_budgets_is_not_read(self, database: Faulty, clock: Clock) -> None:
        async with running(database, clock) as gateway:
            assert await gateway.lets("key-1", 100, None, 1, research())
            assert database.reads == 1
            clock.now += STALE_S
            assert await gateway.lets("key-1", 100, None, 1, research(5))
            assert database.reads == 3  # of both

    async def test_owners_near_the_end_of_a_budget_are_counted(
        self, database: Faulty, clock: Clock
    ) -> None:
        async with running(database, clock) as gateway:
            await gateway.lets("key-1", None, None, 1, research(100, 1000))
            gateway.spend(95, "key-1", "research")
            assert [*gateway.budgets.usage_levels()] == [("day", 1, 0), ("month", 0, 0)]
            clock.now += FORGET_S
            assert [*gateway.budgets.usage_levels()] == [("day", 0, 0), ("month", 0, 0)]

    async def test_outage_serves_known_owners_and_refuses_unknown_ones(
        self, database: Faulty, clock: Clock
    ) -> None:
        async with running(database, clock) as gateway:
            assert await self.owner_has_spent(gateway, 0)
            database.down = True
            clock.now += STALE_S
            gateway.spend(5, "key-1", "research")
            assert await self.owner_has_spent(gateway, 5)
            with pytest.raises(ServiceUnavailable):
                await gateway.lets("key-1", None, None, 1, Owner("ops", NO_LIMITS, 10))


class TestDatabaseDown:
    async def test_outage_serves_known_keys_with_their_last_read(
        self, database: Faulty, clock: Clock
    ) -> None:
        async with running(database, clock) as gateway:
            gateway.spend(100)
            assert await gateway.has_spent(100)
            database.down = True
            await read_again(gateway, clock)
            gateway.spend(5)
            assert await gateway.has_spent(105)
            database.down = False
            await gateway.ledger.close()
            await read_again(gateway, clock)
            assert await gateway.has_spent(105)

    async def test_outage_refuses_an_unread_key_until_recovery(
        self, database: Faulty, clock: Clock
    ) -> None:
        async with running(database, clock) as gateway:
            gateway.spend(100)
            database.down = True
            with pytest.raises(ServiceUnavailable, match="try again"):
                await gateway.budgets.reserve(budgeted("key-1", 1000, None), 1)
            database.down = False
            clock.now += REFRESH_S
            assert await gateway.has_spent(100)

    async def test_outage_does_not_cause_a_query_per_request(
        self, database: Faulty, clock: Clock
    ) -> None:
        async with running(database, clock) as gateway:
            database.down = True
            for _ in range(20):
                with pytest.raises(ServiceUnavailable):
                    await gateway.budgets.reserve(budgeted("key-1", 1000, None), 1)
            assert database.reads == 1

    async def test_unused_key_is_evicted(self, database: Faulty, clock: Clock) -> None:
        async with running(database, clock) as gateway:
            assert await gateway.has_spent(0)
            clock.now += FORGET_S
            assert await gateway.has_spent(0, key_id="key-2")
            database.down = True
            assert await gateway.has_spent(0, key_id="key-2")
            with pytest.raises(ServiceUnavailable):
                await gateway.has_spent(0)

    async def test_outage_evicts_no_key(self, database: Faulty, clock: Clock) -> None:
        async with running(database, clock) as gateway:
            assert await gateway.has_spent(0)
            database.down = True
            await read_again(gateway, clock)
            clock.now += FORGET_S
            with pytest.raises(ServiceUnavailable):
                await gateway.has_spent(0, key_id="key-2")
            assert await gateway.has_spent(0)

    async def test_unexpected_error_is_logged_once_and_recovers(
        self,
        database: Faulty,
        clock: Clock,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        async with running(database, clock) as gateway:
            with monkeypatch.context() as patch:
                patch.setattr(gateway.budgets.accounts, "_read", lambda *_: 1 / 0)
                for key_id in ("key-1", "key-2", "key-1"):
                    with pytest.raises(ServiceUnavailable, match="try again"):
                        await gateway.budgets.reserve(budgeted(key_id, 1000, None), 1)
            assert len([one for one in caplog.records if one.exc_info]) == 1
            clock.now += REFRESH_S
            assert await gateway.has_spent(0)
            assert await gateway.has_spent(0, key_id="key-2")
