"""Requests while Redis is stopped, hangs, loses its data, refuses writes or is unreachable."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import redis

from app.limits.limiter import LEASE_S, Limiter
from app.limits.redis_store import MAX_BATCH, LeasedReading, RedisStore, ScriptConnection
from app.limits.terms import terms_of
from app.redis import RedisUnavailable
from app.telemetry.metrics import Metrics
from tests.app.limits.asks import ask, limits
from tests.app.limits.limiters import PATIENT_S, at_once, limiter_on, metric, outcome, passes
from tests.gateway import free_port
from tests.services import RedisServer
from tests.waiting import run_pending_tasks, wait_until

pytestmark = [pytest.mark.services, pytest.mark.slow]

ANY = ask(limits(10**6, 10**9, 10**6))
POLICIES = ["local", "open", "closed"]
# What a request meets while Redis does not answer.
MEANWHILE = {"local": "passed", "open": "passed", "closed": "service_unavailable"}


def store_on(link: ScriptConnection, on_change: Callable[[str | None], None]) -> RedisStore:
    return RedisStore(
        link,
        prefix="test",
        burst_s=60,
        timeout_s=PATIENT_S,
        lease_s=LEASE_S,
        on_change=on_change,
        on_failure=lambda: None,
    )


@dataclass
class Gateway:
    """A limiter and its log."""

    limiter: Limiter
    metrics: Metrics
    caplog: pytest.LogCaptureFixture

    @property
    def available(self) -> bool:
        return metric(self.metrics, "gateway_redis_available") == 1

    @property
    def errors(self) -> int:
        return int(metric(self.metrics, "gateway_redis_errors_total"))

    @property
    def log(self) -> list[str]:
        return [
            record.getMessage()
            for record in self.caplog.records
            if record.name.startswith("app.limits")
        ]

    async def lost(self) -> None:
        """Return when it is known that Redis does not answer."""
        await wait_until(lambda: not self.available)

    async def found(self) -> None:
        """Return when it is known that Redis answers."""
        await wait_until(lambda: self.available)


@dataclass
class Load:
    """Sequential requests of several clients, until `stop`."""

    limiter: Limiter
    outcomes: Counter[str] = field(default_factory=Counter)
    going: bool = True

    async def client(self) -> None:
        while self.going:
            self.outcomes[await outcome(self.limiter, ANY)] += 1
            await asyncio.sleep(0.001)

    async def sees(self, kind: str) -> None:
        """Return when a good number of requests from now on have ended in one way."""
        enough = self.outcomes[kind] + 50
        await wait_until(lambda: self.outcomes[kind] >= enough)


@asynccontextmanager
async def gateway_on(
    url: str,
    caplog: pytest.LogCaptureFixture,
    *,
    policy: str = "closed",
    timeout_s: float = 0.5,
) -> AsyncIterator[Gateway]:
    caplog.set_level(logging.INFO)
    metrics = Metrics()
    async with limiter_on(url, policy=policy, timeout_s=timeout_s, metrics=metrics) as limiter:
        yield Gateway(limiter, metrics, caplog)


@asynccontextmanager
async def loaded(limiter: Limiter) -> AsyncIterator[Load]:
    load = Load(limiter)
    async with asyncio.TaskGroup() as clients:
        for _ in range(20):
            clients.create_task(load.client())
        try:
            await load.sees("passed")
            yield load
        finally:
            load.going = False


def slots(own_redis: RedisServer) -> dict[str, int]:
    """Return how many slots are taken, by key."""
    with redis.Redis(port=own_redis.port, decode_responses=True) as client:
        keys = list(client.scan_iter("*:slots:*"))
        return {key: taken for key in keys if (taken := client.zcard(key))}


async def test_busy_event_loop_at_the_deadline_is_not_a_redis_timeout(
    own_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with gateway_on(own_redis.url, caplog, timeout_s=1.0) as gateway:
        assert await outcome(gateway.limiter, ANY) == "passed"
        own_redis.pause()
        asked = asyncio.create_task(outcome(gateway.limiter, ANY))
        await run_pending_tasks(5)  # it is on its way
        own_redis.resume()
        time.sleep(1.1)  # Redis answers while the loop is blocked
        assert await asked == "passed"
        assert gateway.available


# Under load


@pytest.mark.parametrize("policy", POLICIES)
async def test_limits_recover_after_redis_restarts_empty(
    own_redis: RedisServer, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with gateway_on(own_redis.url, caplog, policy=policy) as gateway:
        async with loaded(gateway.limiter) as load:
            own_redis.stop()
            await gateway.lost()
            await load.sees(MEANWHILE[policy])
            await asyncio.to_thread(own_redis.start)
            await gateway.found()
            await load.sees("passed")
        assert set(load.outcomes) == {"passed", MEANWHILE[policy]}
        await wait_until(lambda: not slots(own_redis))
    assert len(gateway.log) == 2
    assert " unavailable: " in gateway.log[0]
    assert (
        gateway.log[1]
        == f"Redis at 127.0.0.1:{own_redis.port} is available; limits are counted there"
    )


@pytest.mark.parametrize("policy", POLICIES)
async def test_limits_recover_after_redis_hangs(
    own_redis: RedisServer, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Redis executes what it received before the hang afterwards; no slot may leak."""
    async with gateway_on(own_redis.url, caplog, policy=policy) as gateway:
        async with loaded(gateway.limiter) as load:
            own_redis.pause()
            await gateway.lost()
            await load.sees(MEANWHILE[policy])
            own_redis.resume()
            await gateway.found()
            await load.sees("passed")
        assert set(load.outcomes) == {"passed", MEANWHILE[policy]}
        await wait_until(lambda: not slots(own_redis))
    assert len(gateway.log) == 2
    assert "no answer within 0.5 s" in gateway.log[0]


async def test_redis_restart_under_load(
    own_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with gateway_on(own_redis.url, caplog) as gateway:
        async with loaded(gateway.limiter) as load:
            for _ in range(3):
                own_redis.stop()
                await asyncio.to_thread(own_redis.start)
                await gateway.found()
                await load.sees("passed")
        assert set(load.outcomes) <= {"passed", "service_unavailable"}
        await wait_until(lambda: not slots(own_redis))


# What the policies are


async def test_local_mode_applies_the_same_limits_in_memory(
    own_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    own_redis.stop()
    async with gateway_on(own_redis.url, caplog, policy="local") as gateway:
        request = ask(limits(requests=2))
        assert [await passes(gateway.limiter, request) for _ in range(3)] == [True, True, False]
        headers = dict((await gateway.limiter.decide(request)).headers)
        assert headers[b"x-ratelimit-limit-requests"] == b"2"
    assert gateway.log[0].endswith("; this gateway counts limits for itself until it is available")


async def test_open_mode_has_no_limits_and_no_headers(
    own_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    own_redis.stop()
    async with gateway_on(own_redis.url, caplog, policy="open") as gateway:
        for _ in range(3):
            decision = await gateway.limiter.decide(ask(limits(requests=1, concurrent=1)))
            assert (decision.refusal, decision.headers) == (None, [])
    assert gateway.log[0].endswith("; limits are not enforced until it is available")


async def test_closed_mode_is_503_except_for_unlimited_requests(
    own_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    own_redis.stop()
    async with gateway_on(own_redis.url, caplog, policy="closed") as gateway:
        assert await outcome(gateway.limiter, ANY) == "service_unavailable"
        assert await outcome(gateway.limiter, ask()) == "passed"
    assert gateway.log[0].endswith("; requests are refused until it is available")


# What a hang costs


async def test_redis_hang_costs_one_timeout_then_fails_fast(
    own_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with gateway_on(own_redis.url, caplog, policy="local") as gateway:
        assert await passes(gateway.limiter, ANY)
        own_redis.pause()
        first = asyncio.create_task(passes(gateway.limiter, ANY))
        await run_pending_tasks(5)  # the call is under way
        others = [asyncio.create_task(passes(gateway.limiter, ANY)) for _ in range(20)]
        assert all(await asyncio.gather(first, *others))
        assert gateway.errors == 1  # one call failed, and all were answered by that
        assert at_once(gateway.limiter, ANY).refusal is None


async def test_gateway_shuts_down_while_redis_hangs(
    own_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with gateway_on(own_redis.url, caplog, policy="local") as gateway:
        with await gateway.limiter.decide(ANY):
            own_redis.pause()


# What was decided before a fault is settled after it


async def test_slot_granted_by_redis_is_released_in_redis(
    own_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    request = ask(limits(tokens=100, concurrent=1), tokens=60)
    async with gateway_on(own_redis.url, caplog, policy="local") as gateway:
        with await gateway.limiter.decide(request) as decision:
            own_redis.pause()
            assert await passes(gateway.limiter, request)  # by this gateway's own count
            decision.used = 40
        own_redis.resume()
        await gateway.found()
        after = await gateway.limiter.decide(request)
        assert after.refusal is None
        # 100 less 40 and 60, and what a second or more has refilled.
        assert int(dict(after.headers)[b"x-ratelimit-remaining-tokens"]) < 20


async def test_slot_granted_locally_is_released_locally(
    own_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    request = ask(limits(concurrent=1))
    async with gateway_on(own_redis.url, caplog, policy="local") as gateway:
        own_redis.pause()
        with await gateway.limiter.decide(request):
            own_redis.resume()
            await gateway.found()
            assert await passes(gateway.limiter, request)
        assert not await passes(gateway.limiter, request)  # Redis's slot is still taken
        own_redis.stop()
        assert await passes(gateway.limiter, request)  # the one here is not


async def test_slots_in_use_are_restored_in_an_empty_redis(
    own_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    request = ask(limits(concurrent=1))
    async with gateway_on(own_redis.url, caplog) as gateway:
        with await gateway.limiter.decide(request):
            own_redis.stop()
            assert await outcome(gateway.limiter, request) == "service_unavailable"
            await asyncio.to_thread(own_redis.start)
            await gateway.found()
            assert await outcome(gateway.limiter, request) == "rate_limit_exceeded"
        assert await outcome(gateway.limiter, request) == "passed"


async def test_request_during_slot_restoration_waits_for_its_end(
    own_redis: RedisServer,
) -> None:
    """They are more than one call may hold."""
    held = 2 * MAX_BATCH + 1
    terms = terms_of(ask(limits(concurrent=held)))
    asked: list[asyncio.Task[LeasedReading]] = []

    def changed(reason: str | None) -> None:
        if reason is None:
            asked.append(asyncio.create_task(store.decide(terms)))

    link = ScriptConnection(own_redis.url, PATIENT_S)
    store = store_on(link, changed)
    running = asyncio.create_task(store.run())
    try:
        for _ in range(held):
            assert (await store.decide(terms)).reading.admitted
        own_redis.stop()
        with pytest.raises(RedisUnavailable):
            await store.decide(terms)
        await asyncio.to_thread(own_redis.start)
        await wait_until(lambda: bool(asked))
        assert (await asked[0]).reading.admitted == 0
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await store.close()


# Faults without a failed request


async def test_redis_restart_while_idle_fails_no_request(
    own_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with gateway_on(own_redis.url, caplog, timeout_s=10) as gateway:
        for _ in range(3):
            assert await outcome(gateway.limiter, ANY) == "passed"
            await wait_until(lambda: not slots(own_redis))
            own_redis.stop()
            await asyncio.to_thread(own_redis.start)
        assert await outcome(gateway.limiter, ANY) == "passed"
        assert (gateway.errors, gateway.log) == (0, [])


async def test_cut_connection_or_flushed_script_fails_no_request(
    own_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with gateway_on(own_redis.url, caplog, timeout_s=10) as gateway:
        with redis.Redis(port=own_redis.port) as client:
            assert await outcome(gateway.limiter, ANY) == "passed"
            client.script_flush()
            assert await outcome(gateway.limiter, ANY) == "passed"
            client.client_kill_filter(_type="normal", skipme=True)
            assert await outcome(gateway.limiter, ANY) == "passed"
        assert (gateway.errors, gateway.log) == (0, [])


# What makes it unusable


async def test_read_only_redis_is_unavailable_until_it_accepts_writes(
    own_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with gateway_on(own_redis.url, caplog) as gateway:
        with redis.Redis(port=own_redis.port) as client:
            client.config_set("maxmemory", 1)
            assert await outcome(gateway.limiter, ANY) == "service_unavailable"
            client.config_set("maxmemory", 0)
        await gateway.found()
        assert await outcome(gateway.limiter, ANY) == "passed"
    assert "used memory" in gateway.log[0]


async def test_wrong_password_is_reported_without_showing_it(
    own_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    with redis.Redis(port=own_redis.port) as client:
        client.config_set("requirepass", "right")
    for given, reason in ("", "Authentication required"), (":canary@", "invalid username-password"):
        url = f"redis://{given}127.0.0.1:{own_redis.port}/0"
        async with gateway_on(url, caplog, timeout_s=10) as gateway:
            assert await outcome(gateway.limiter, ANY) == "service_unavailable"
        assert len(gateway.log) == 1
        assert reason in gateway.log[0]
        assert "canary" not in f"{gateway.log}{gateway.limiter!r}"
        caplog.clear()
    url = f"redis://:right@127.0.0.1:{own_redis.port}/1"
    async with gateway_on(url, caplog, timeout_s=10) as gateway:
        assert await outcome(gateway.limiter, ANY) == "passed"


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("redis://:canary@127.0.0.1:{port}/0", "Redis at 127.0.0.1:{port} is unavailable: "),
        (
            "redis://:canary@gateway.invalid:6379/0",
            "Redis at gateway.invalid:6379 is unavailable: ",
        ),
        ("redis://me:can/ary@127.0.0.1:6379/0", "state.redis_url cannot be read"),
        ("redis://:canary@127.0.0.1:6379/0?nothing=1", "has an unknown option"),
        ("unix:///nowhere/redis.sock", "Redis at /nowhere/redis.sock is unavailable: "),
    ],
)
async def test_unreachable_url_is_reported_without_its_password(
    url: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    async with gateway_on(url.format(port=port), caplog) as gateway:
        assert await outcome(gateway.limiter, ANY) == "service_unavailable"
    assert len(gateway.log) == 1
    assert reason.format(port=port) in gateway.log[0]
    assert "ary" not in gateway.log[0]


class _BrokenLink(ScriptConnection):
    """Fails as no Redis would."""

    async def run(self, keys: list[bytes], argument: bytes, deadline: float) -> bytes:
        raise ZeroDivisionError


async def test_internal_error_fails_all_waiting_requests(caplog: pytest.LogCaptureFixture) -> None:
    reasons: list[str | None] = []
    link = _BrokenLink("redis://127.0.0.1", 10)
    store = store_on(link, reasons.append)
    with pytest.raises(RedisUnavailable):
        await store.decide(terms_of(ANY))
    assert reasons == ["internal error"]
    assert "unhandled exception in a call to Redis" in caplog.text
    await store.close()


async def test_a_server_that_is_not_redis_is_unavailable(caplog: pytest.LogCaptureFixture) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    port = free_port()
    serving = await asyncio.start_server(answer, "127.0.0.1", port)
    async with serving, gateway_on(f"redis://127.0.0.1:{port}", caplog) as gateway:
        assert await outcome(gateway.limiter, ANY) == "service_unavailable"
    assert len(gateway.log) == 1
