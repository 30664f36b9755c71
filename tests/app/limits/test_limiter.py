"""Limits as the relay meets them, in memory and in a Redis that several gateways share."""

import asyncio
import contextlib
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator

import msgspec
import pytest
import redis

from app.auth import Owner
from app.errors import RateLimited
from app.limits.limiter import LEASE_S, LimitDecision, Limiter
from app.limits.redis_store import LeasedReading, RedisStore, ScriptConnection
from app.limits.terms import LimitRequest, terms_of
from app.settings import LimitSettings, LimitsSettings, StateSettings
from app.telemetry.metrics import Metrics
from tests.app.limits.asks import NONE, ask, limits, owned
from tests.app.limits.limiters import PATIENT_S, at_once, limiter_on, outcome, passes
from tests.services import RedisServer
from tests.waiting import run_pending_tasks

# Of so many a minute none comes back while a test runs, however busy the machine is: six seconds.
SLOW = 10


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[redis.Redis]:
    with redis.Redis(port=redis_server.port, decode_responses=True) as client:
        yield client


# Over either store


async def test_entering_raises_the_refusal(limiter: Limiter) -> None:
    limited = ask(limits(requests=1))
    with await limiter.decide(limited) as decision:
        assert decision.refusal is None
    refused = await limiter.decide(limited)
    with pytest.raises(RateLimited, match="1 request per minute") as caught, refused:
        pytest.fail("it was refused")
    assert caught.value.limit == "requests"
    assert caught.value.retry_after_s in range(51, 61)


async def test_passed_and_refused_requests_have_headers(limiter: Limiter) -> None:
    limited = ask(limits(requests=1, tokens=SLOW), tokens=4)
    for _ in range(2):
        headers = dict((await limiter.decide(limited)).headers)
        assert headers[b"x-ratelimit-remaining-requests"] == b"0"
        assert headers[b"x-ratelimit-limit-tokens"] == b"10"
        assert headers[b"x-ratelimit-remaining-tokens"] == b"6"


async def test_release_returns_slot_and_tokens_but_not_the_request(
    limiter: Limiter,
) -> None:
    limited = ask(limits(requests=2, tokens=100, concurrent=1), tokens=100)
    assert [await outcome(limiter, limited) for _ in range(3)] == [
        "passed",
        "passed",
        "rate_limit_exceeded",
    ]


async def test_tokens_that_were_used_stay_used(limiter: Limiter) -> None:
    limited = ask(limits(tokens=100), tokens=60)
    with await limiter.decide(limited) as decision:
        decision.used = 30
    assert await passes(limiter, limited)
    assert not await passes(limiter, limited)


async def test_more_tokens_than_were_reserved_are_owed(limiter: Limiter) -> None:
    limited = ask(limits(tokens=600), tokens=10)
    with await limiter.decide(limited) as decision:
        decision.used = 1210
    refusal = (await limiter.decide(limited)).refusal
    assert refusal is not None
    assert refusal.limit == "tokens"
    assert refusal.retry_after_s in range(52, 63)  # 610 too many and 10 to come, at ten a second


async def test_second_release_has_no_effect(limiter: Limiter) -> None:
    limited = ask(limits(concurrent=2))
    with await limiter.decide(limited) as decision:
        assert await passes(limiter, limited)
    with decision:
        pass
    assert [await passes(limiter, limited) for _ in range(2)] == [True, False]


async def test_refused_request_changes_no_counters(limiter: Limiter) -> None:
    limited = ask(limits(requests=5, tokens=50, concurrent=1), tokens=10)
    with await limiter.decide(limited):
        for _ in range(10):
            assert await outcome(limiter, limited) == "rate_limit_exceeded"
    assert await passes(limiter, limited)
    headers = dict((await limiter.decide(limited)).headers)
    assert headers[b"x-ratelimit-remaining-requests"] == b"3"


async def test_a_request_that_is_larger_than_the_limit_passes_alone(limiter: Limiter) -> None:
    huge, small = (ask(limits(tokens=60), tokens=tokens) for tokens in (600, 1))
    assert await passes(limiter, huge)
    refusal = (await limiter.decide(small)).refusal
    assert refusal is not None
    assert refusal.retry_after_s in range(531, 542)


async def test_huge_token_count_is_bounded(limiter: Limiter) -> None:
    limited = ask(limits(tokens=1), tokens=10**400)
    assert await outcome(limiter, limited) == "passed"
    assert await outcome(limiter, limited) == "passed"


async def test_zero_limit_admits_nothing(limiter: Limiter) -> None:
    for nothing in limits(requests=0), limits(tokens=0), limits(concurrent=0):
        refusal = (await limiter.decide(ask(nothing))).refusal
        assert refusal is not None
        assert refusal.retry_after_s is None


async def test_request_without_tokens_and_slot_passes_when_both_are_used_up(
    limiter: Limiter,
) -> None:
    key = limits(requests=10, tokens=10, concurrent=1)
    assert await passes(limiter, ask(key, tokens=1000))
    assert await passes(limiter, ask(key, tokens=0, concurrent=False))


async def test_unlimited_request_makes_no_call_and_has_no_headers(limiter: Limiter) -> None:
    decision = at_once(limiter, ask(NONE, NONE))
    assert decision.headers == []
    with decision:
        decision.used = 5


async def test_slot_is_released_however_the_request_ends(limiter: Limiter) -> None:
    limited = ask(limits(concurrent=1))
    with pytest.raises(ZeroDivisionError), await limiter.decide(limited):
        raise ZeroDivisionError
    with pytest.raises(asyncio.CancelledError), await limiter.decide(limited):
        raise asyncio.CancelledError
    assert await passes(limiter, limited)


@pytest.mark.parametrize(
    "shared", [owned(requests=3), owned(tokens=30), owned(concurrent=3)], ids=str
)
async def test_all_keys_of_an_owner_share_its_limits(limiter: Limiter, shared: Owner) -> None:
    one, other = (ask(limits(100, 1000, 100), owner=shared, key_id=name) for name in "ab")
    stranger = ask(limits(100, 1000, 100), owner=owned(9, 90, 9, name="ops"), key_id="c")
    assert [await passes(limiter, limited) for limited in (one, other, one)] == [True] * 3
    for limited in (one, other):
        refusal = (await limiter.decide(limited)).refusal
        assert refusal is not None
        assert refusal.message.startswith("the owner of this key may ")
    assert await passes(limiter, stranger)


async def test_refusal_by_the_owner_charges_neither_key_nor_model(limiter: Limiter) -> None:
    key, model = limits(5, 50, 5), limits(5, 50, 5)
    for full in owned(0), owned(tokens=0), owned(concurrent=0):
        assert await outcome(limiter, ask(key, model, owner=full)) == "rate_limit_exceeded"
    assert [await passes(limiter, ask(key, model)) for _ in range(6)] == [*[True] * 5, False]


async def test_refusal_by_key_or_model_does_not_charge_the_owner(limiter: Limiter) -> None:
    owner = owned(SLOW, 50, 5)
    for full in limits(0), limits(tokens=0), limits(concurrent=0):
        assert await outcome(limiter, ask(full, owner=owner)) == "rate_limit_exceeded"
        assert await outcome(limiter, ask(NONE, full, owner=owner)) == "rate_limit_exceeded"
    assert [await passes(limiter, ask(owner=owner)) for _ in range(6)] == [*[True] * 5, False]


@pytest.mark.parametrize("seed", range(5))
async def test_charges_of_key_owner_and_model_balance_however_requests_end(
    limiter: Limiter, seed: int
) -> None:
    """Every slot is released, and each bucket is charged the used tokens of its subject."""
    chance, used = random.Random(seed), Counter[str]()
    # Refills in the time of a test are a small part of what is used, and no bucket is ever full.
    ample, most = limits(None, 4000, 6), 4000
    teams = {key: owned(None, most, 9, name=f"team-{key in 'ab'}") for key in "abc"}
    began = time.monotonic()

    async def one() -> None:
        key, tokens = chance.choice("abc"), chance.randrange(60)
        limited = ask(ample, limits(None, most, 12), key_id=key, owner=teams[key], tokens=tokens)
        ended = contextlib.suppress(RateLimited, ZeroDivisionError)
        with ended, await limiter.decide(limited) as decision:
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
            took = chance.randrange(60)
            end = chance.randrange(4)
            if end == 0:
                raise ZeroDivisionError  # nothing was used
            if end == 1:
                decision.used = decision.terms.tokens
                took = tokens
            else:
                decision.used = took
            for place in f"key {key}", teams[key].name, "model":
                used[place] += took

    tasks = [asyncio.create_task(one()) for _ in range(150)]
    for task in chance.sample(tasks, 20):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

    async def left(limited: LimitRequest) -> int:
        headers = dict((await limiter.decide(limited)).headers)
        return int(headers[b"x-ratelimit-remaining-tokens"])

    for key in "abc":
        for place, limited in (
            (f"key {key}", ask(ample, tokens=0, key_id=key, concurrent=False)),
            (teams[key].name, ask(owner=teams[key], tokens=0, concurrent=False)),
            ("model", ask(NONE, limits(None, most, 12), tokens=0, concurrent=False)),
        ):
            remaining = await left(limited)
            refilled = (time.monotonic() - began) * most / 60 + 1
            assert most - used[place] <= remaining <= most - used[place] + refilled, place
    # With every slot back, as many as the limits say may be taken, and no more.
    full = ask(
        limits(None, None, 6), limits(None, None, 12), owner=owned(None, None, 9, name="team-True")
    )
    both = [msgspec.structs.replace(full, key_id=key) for key in "ab" for _ in range(6)]
    assert sum([await passes(limiter, limited) for limited in both]) == 9


# Over Redis


@pytest.mark.services
@pytest.mark.parametrize(
    "key", [limits(requests=5), limits(tokens=50), limits(concurrent=5)], ids=str
)
async def test_two_gateways_share_limits_exactly(
    redis_server: RedisServer, prefix: str, key: LimitSettings
) -> None:
    async with limiter_on(redis_server.url, prefix) as a, limiter_on(redis_server.url, prefix) as b:
        limited = ask(key, tokens=10)
        got = await asyncio.gather(*(passes(one, limited) for _ in range(50) for one in (a, b)))
    assert sum(got) == 5  # of so few a minute none comes back within twelve seconds


@pytest.mark.services
async def test_slot_released_by_a_gateway_is_available_to_another(
    redis_server: RedisServer, prefix: str
) -> None:
    limited = ask(limits(concurrent=1))
    async with limiter_on(redis_server.url, prefix) as a, limiter_on(redis_server.url, prefix) as b:
        for one, other in ((a, b), (b, a)) * 5:
            with await when_free(one, limited):
                assert not await passes(other, limited)


@pytest.mark.services
@pytest.mark.slow
async def test_only_slots_of_a_dead_gateway_expire(redis_server: RedisServer, prefix: str) -> None:
    """One gateway renews no more, as if it were killed; another keeps an older slot."""
    ours, theirs = (ask(limits(concurrent=1), key_id=name) for name in ("ours", "theirs"))
    dead = Limiter(LimitsSettings(), shared(redis_server, prefix), Metrics(), lease_s=1.5)
    async with limiter_on(redis_server.url, prefix, lease_s=1.5) as alive:
        with await alive.decide(ours):
            assert await passes(dead, theirs)
            assert not await passes(alive, theirs)
            with await when_free(alive, theirs):
                assert not await passes(alive, ours)
    await dead.close()


@pytest.mark.services
async def test_one_request_costs_one_call(
    redis_server: RedisServer, prefix: str, client: redis.Redis
) -> None:
    limited = ask(limits(10, 1000, 10))
    async with limiter_on(redis_server.url, prefix) as limiter:
        with await limiter.decide(limited):
            before = calls(client)
        # What that one gives back shares the call.
        assert await passes(limiter, limited)
        assert calls(client) - before == 1


@pytest.mark.services
async def test_concurrent_requests_share_calls(
    redis_server: RedisServer, prefix: str, client: redis.Redis
) -> None:
    limited = ask(limits(1000, None, 1000), limits(1000))
    async with limiter_on(redis_server.url, prefix) as limiter:
        before = calls(client)
        got = await asyncio.gather(*(outcome(limiter, limited) for _ in range(200)))
        assert Counter(got) == {"passed": 200}
        assert calls(client) - before <= 10


@pytest.mark.services
async def test_more_requests_than_one_call_holds_are_all_answered(
    redis_server: RedisServer, prefix: str
) -> None:
    async with limiter_on(redis_server.url, prefix) as limiter:
        limited = ask(limits(concurrent=700))  # a bucket would fill while they are asked
        got = await asyncio.gather(*(passes(limiter, limited) for _ in range(1000)))
    assert sum(got) == 700


@pytest.mark.services
async def test_pending_releases_are_sent_at_shutdown(
    redis_server: RedisServer, prefix: str
) -> None:
    limited = ask(limits(concurrent=9, tokens=SLOW), tokens=1)
    async with limiter_on(redis_server.url, prefix) as one:
        held = await one.decide(limited)
        with held:
            held.used = 3
    async with limiter_on(redis_server.url, prefix) as other:
        headers = dict((await other.decide(limited)).headers)
        assert headers[b"x-ratelimit-remaining-tokens"] == b"6"
        assert [await passes(other, limited) for _ in range(2)] == [True, True]


@pytest.mark.services
@pytest.mark.slow
async def test_every_redis_key_expires(
    redis_server: RedisServer, prefix: str, client: redis.Redis
) -> None:
    chance = random.Random(4)
    async with limiter_on(redis_server.url, prefix) as a, limiter_on(redis_server.url, prefix) as b:

        async def some(limiter: Limiter) -> None:
            for _ in range(20):
                limited = ask(
                    limits(*(chance.randrange(1, most) for most in (99, 999, 9))),
                    limits(chance.randrange(1, 999), None, chance.randrange(1, 99)),
                    tokens=chance.randrange(2000),
                    key_id=f"k{chance.randrange(9)}",
                    model_name=f"m{chance.randrange(3)}",
                )
                decision = await limiter.decide(limited)
                if decision.refusal is None:
                    with decision:
                        await asyncio.sleep(0)
                        decision.used = chance.randrange(3000)

        await asyncio.gather(*(some(one) for _ in range(10) for one in (a, b)))
        keys = list(client.scan_iter(f"{{{prefix}}}*"))
        assert len(keys) > 9
        assert [key for key in keys if client.pttl(key) < 0 and client.exists(key)] == []
    assert list(client.scan_iter(f"{{{prefix}}}:*:slots:*")) == []  # every slot was given back


# Cancelled while it waits


@pytest.mark.services
async def test_requests_canceled_while_redis_hangs_leave_no_slots(
    redis_server: RedisServer, prefix: str
) -> None:
    limited = ask(limits(1, 10, 1), limits(1, 10, 1))
    async with limiter_on(redis_server.url, prefix) as limiter:
        assert await passes(limiter, ask(limits(requests=1), key_id="first"))  # it connects
        redis_server.pause()
        try:
            under_way = asyncio.create_task(limiter.decide(limited))
            await run_pending_tasks(5)
            queued = asyncio.create_task(limiter.decide(limited))
            await run_pending_tasks(5)
            for task in under_way, queued:
                task.cancel()
            await asyncio.gather(under_way, queued, return_exceptions=True)
        finally:
            redis_server.resume()
        assert under_way.cancelled()
        assert queued.cancelled()
        assert await passes(limiter, limited)


class CancellingLink(ScriptConnection):
    """Cancels a task in the very moment in which its answer is there."""

    victim: asyncio.Task[LeasedReading] | None = None

    async def run(self, keys: list[bytes], argument: bytes, deadline: float) -> bytes:
        answer = await super().run(keys, argument, deadline)
        if self.victim is not None:
            asyncio.get_running_loop().call_soon(self.victim.cancel)
            self.victim = None
        return answer


@pytest.mark.services
async def test_request_canceled_as_its_decision_arrives_leaves_no_slot(
    redis_server: RedisServer, prefix: str
) -> None:
    terms = terms_of(ask(limits(1, 10, 1), limits(1, 10, 1)))
    link = CancellingLink(redis_server.url, PATIENT_S)
    store = RedisStore(
        link,
        prefix=prefix,
        burst_s=60.0,
        timeout_s=PATIENT_S,
        lease_s=LEASE_S,
        on_change=lambda reason: None,
        on_failure=lambda: None,
    )
    deciding = asyncio.create_task(store.decide(terms))
    link.victim = deciding
    await asyncio.gather(deciding, return_exceptions=True)
    assert deciding.cancelled()
    assert (await store.decide(terms)).reading.admitted
    await store.close()


@pytest.mark.slow
def test_redis_is_not_loaded_where_limits_are_counted_in_memory() -> None:
    code = "import sys, app.cli, app.server.run; print({'redis', 'hiredis'} & set(sys.modules))"
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert completed.stdout == "set()\n"


def shared(server: RedisServer, prefix: str) -> StateSettings:
    return StateSettings.model_validate(
        {"redis_url": server.url, "redis_prefix": prefix, "redis_timeout_s": PATIENT_S}
    )


def calls(client: redis.Redis) -> int:
    """Return how often the script has been run."""
    stats = client.info("commandstats")
    assert isinstance(stats, dict)
    number: int = stats.get("cmdstat_evalsha", {"calls": 0})["calls"]
    return number


async def when_free(limiter: Limiter, limited: LimitRequest) -> LimitDecision:
    """Return the first decision that is not a refusal."""
    async with asyncio.timeout(20):
        while (decision := await limiter.decide(limited)).refusal is not None:
            await asyncio.sleep(0.001)
    return decision
