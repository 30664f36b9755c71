"""Gateways that share their load through a real Redis."""

import asyncio
import contextlib
import logging
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
import redis.asyncio

from app.admission import Admission
from app.routing import Catalogue, Model, Replica
from app.settings import QueueSettings, StateSettings
from app.sharing.load_sharing import load_sharing_on
from app.sharing.report import LoadReport, State, decode, encode, engine_key, sign, verify
from app.telemetry.metrics import Metrics
from tests.app.routing.fakes import FakeEngine
from tests.services import RedisServer
from tests.waiting import run_pending_tasks, wait_until

pytestmark = [pytest.mark.services, pytest.mark.slow]

URL = "http://gpu-box:8000"
KEY = engine_key(f"{URL} 1", "demo")
SECRET = b"of the database"


class Gateway:
    """The parts of a gateway that share load."""

    def __init__(self, redis_url: str, prefix: str, urls: tuple[str | None, ...] = (URL,)) -> None:
        self.metrics = Metrics()
        self.replicas = [
            Replica(FakeEngine(f"demo-{n}", shared_id=url), "demo") for n, url in enumerate(urls)
        ]
        self.catalogue = Catalogue([Model("demo", (), tuple(self.replicas))])
        self.admission = Admission(
            self.metrics,
            {"demo": QueueSettings(max_in_flight=4)},
            self.catalogue.count_slots,
            self.catalogue.changes,
        )
        state = StateSettings.model_validate({"redis_url": redis_url, "redis_prefix": prefix})
        sharing = load_sharing_on(
            state, self.catalogue, self.metrics, self.draining, lambda: SECRET
        )
        assert sharing is not None
        self.sharing = sharing
        self.task: asyncio.Task[None] | None = None
        self.looks = 0  # at the load

    def draining(self) -> bool:
        self.looks += 1
        return self.admission.draining

    @property
    def replica(self) -> Replica:
        return self.replicas[0]

    def start(self) -> None:
        self.task = asyncio.create_task(self.sharing.run())

    async def kill(self) -> None:
        """End it as a crash would: without a goodbye."""
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait({self.task})
            self.task = None

    def metric(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)

    def reports(self, outcome: str) -> float:
        value = self.metric("gateway_load_reports_total", outcome=outcome)
        assert value is not None
        return value


@asynccontextmanager
async def running(
    server: RedisServer, count: int, urls: tuple[str | None, ...] = (URL,)
) -> AsyncIterator[list[Gateway]]:
    """Gateways that know each other."""
    prefix = secrets.token_hex(8)
    found = [Gateway(server.url, prefix, urls) for _ in range(count)]
    try:
        for one in found:
            one.start()
        if any(urls):
            await wait_until(lambda: all(one.replica.division[0] == count for one in found))
            await wait_until(lambda: all(available(one) for one in found))
        yield found
    finally:
        for one in found:
            await one.kill()
            with contextlib.suppress(Exception):
                await one.sharing.close()


def available(one: Gateway) -> bool:
    return one.metric("gateway_load_sharing_available") == 1


def channel(one: Gateway) -> bytes:
    return one.sharing._channel


async def publish(server: RedisServer, one: Gateway, *messages: bytes) -> None:
    async with redis.asyncio.Redis(port=server.port) as client:
        for message in messages:
            await client.publish(channel(one), message)


def signed(report: LoadReport) -> bytes:
    return sign(encode(report), SECRET)


async def test_gateways_see_each_others_requests(redis_server: RedisServer) -> None:
    async with running(redis_server, 3) as (one, two, three):
        one.replica.in_flight, two.replica.in_flight = 3, 4
        await wait_until(lambda: three.replica.elsewhere == 7)
        await wait_until(lambda: one.replica.elsewhere == 4)
        assert three.replica.in_flight * three.replica.weight + three.replica.offset == 7
        assert sorted(g.replica.division for g in (one, two, three)) == [(3, 0), (3, 1), (3, 2)]
        assert three.metric("gateway_load_sharing_gateways") == 3
        labels = {"model": "demo", "gateway_engine": "demo-0"}
        assert three.metric("gateway_engine_in_flight_elsewhere", **labels) == 7
        one.replica.in_flight = 0
        await wait_until(lambda: three.replica.elsewhere == 4)


async def test_engines_that_a_gateway_runs_are_not_shared(redis_server: RedisServer) -> None:
    async with running(redis_server, 2, (URL, None)) as (one, two):
        for replica in one.replicas:
            replica.in_flight = 2
        await wait_until(lambda: two.replica.elsewhere == 2)
        assert two.replicas[1].elsewhere == 0
        assert two.catalogue.count_slots("demo", 4) == 2 + 4


async def test_a_gateway_without_shared_engines_opens_no_connection(
    own_redis: RedisServer,
) -> None:
    async with running(own_redis, 1, (None,)) as (one,):
        looked = one.looks
        await wait_until(lambda: one.looks > looked + 1)
        async with redis.asyncio.Redis(port=own_redis.port) as client:
            assert len(await client.client_list()) == 1
        assert one.metric("gateway_load_sharing_gateways") == 1


async def test_killed_gateways_load_expires_and_its_slots_are_taken_over(
    redis_server: RedisServer,
) -> None:
    async with running(redis_server, 2) as (one, two):
        two.replica.in_flight = 5
        await wait_until(lambda: one.replica.elsewhere == 5)
        permits = [one.admission.try_acquire("demo") for _ in range(3)]
        assert [permit is not None for permit in permits] == [True, True, False]
        waiting = asyncio.create_task(one.admission.acquire("demo", "key"))
        await two.kill()
        permit = await asyncio.wait_for(waiting, 20)
        assert permit.waited_s is not None
        assert one.replica.elsewhere == 0
        assert one.catalogue.count_slots("demo", 4) == 4


async def test_gateway_that_leaves_is_forgotten_at_once(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.sharing.gateways.SILENCE_S", 3600.0)
    async with running(redis_server, 2) as (one, two):
        two.replica.in_flight = 5
        await wait_until(lambda: one.replica.elsewhere == 5)
        await two.kill()
        await two.sharing.close()
        await wait_until(lambda: one.replica.division == (1, 0))  # the silence is not over
        assert one.replica.elsewhere == 0


async def test_draining_gateway_gives_its_slots_up_and_still_counts(
    redis_server: RedisServer,
) -> None:
    async with running(redis_server, 2) as (one, two):
        two.replica.in_flight = 5
        two.admission.drain()
        await wait_until(lambda: one.replica.division == (1, 0) and one.replica.elsewhere == 5)


async def test_gateway_that_is_stopped_at_any_moment_leaves_no_connection(
    own_redis: RedisServer,
) -> None:
    for turns in (*range(30), *range(30, 200, 10)):
        one = Gateway(own_redis.url, "prefix")
        one.start()
        await run_pending_tasks(turns)
        await one.kill()
        await one.sharing.close()
        assert len(asyncio.all_tasks()) == 1
    async with redis.asyncio.Redis(port=own_redis.port) as client:
        await wait_until_closed(client)


async def wait_until_closed(client: redis.asyncio.Redis) -> None:
    """Return when no other connection to Redis is open."""
    while len(await client.client_list()) > 1:
        await asyncio.sleep(0.01)


async def test_models_of_a_reload_are_shared(redis_server: RedisServer) -> None:
    async with running(redis_server, 2) as (one, two):
        added = [
            Replica(FakeEngine("demo-1", shared_id="http://new:1"), "demo", in_flight=n)
            for n in (1, 2)
        ]
        for gateway, replica in zip((one, two), added, strict=True):
            gateway.catalogue.replace([Model("demo", (), (gateway.replica, replica))])
        await wait_until(lambda: [replica.elsewhere for replica in added] == [2, 1])
        await wait_until(lambda: {replica.division[0] for replica in added} == {2})


@pytest.mark.parametrize("fault", ["stop", "pause"])
async def test_without_redis_each_gateway_goes_on_alone(
    own_redis: RedisServer, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "app.sharing")
    async with running(own_redis, 2) as (one, two):
        two.replica.in_flight = 5
        await wait_until(lambda: one.replica.elsewhere == 5)
        caplog.clear()
        getattr(own_redis, fault)()
        await wait_until(lambda: one.replica.elsewhere == 0)
        await wait_until(lambda: not available(one) and not available(two))
        assert one.replica.division[0] == 2, "the target is not exceeded meanwhile"
        assert one.catalogue.count_slots("demo", 4) == 2
        two.replica.in_flight = 1
        await asyncio.to_thread(own_redis.start if fault == "stop" else own_redis.resume)
        await wait_until(lambda: available(one) and available(two))
        await wait_until(lambda: one.replica.elsewhere == 1)
        assert one.replica.division[0] == 2
        levels = [r.levelname for r in caplog.records if "Redis at" in r.getMessage()]
        assert sorted(levels) == ["ERROR", "ERROR", "INFO", "INFO"]  # once for each gateway


async def test_gateway_starts_without_redis(own_redis: RedisServer) -> None:
    own_redis.stop()
    one = Gateway(own_redis.url, "prefix")
    one.start()
    await wait_until(lambda: not available(one))
    assert one.catalogue.count_slots("demo", 4) == 4
    own_redis.start()
    await wait_until(lambda: available(one))
    await one.kill()
    await one.sharing.close()


async def test_hostile_messages_change_nothing(redis_server: RedisServer) -> None:
    async with running(redis_server, 2) as (one, two):
        two.replica.in_flight = 5
        await wait_until(lambda: one.replica.elsewhere == 5)
        forged = [1, "0" * 16, "serving", 1]
        messages = [
            b"",
            b"\x00" * 100,
            b"[" * 100_000,
            msgspec.json.encode([*forged, {KEY: -5}]),
            msgspec.json.encode([*forged, {KEY: 10**12}]),
            msgspec.json.encode([*forged, {f"{n:016x}": 1 for n in range(5000)}]),
            msgspec.json.encode([2, *forged[1:], {KEY: 1}]),
        ]
        unknown = msgspec.json.encode([*forged, {"0" * 16: 9}])
        sent = [sign(message, SECRET) for message in (*messages, unknown)]
        await publish(redis_server, one, *messages, *sent)
        await wait_until(lambda: one.reports("invalid") == 2 * len(messages))
        assert one.replica.elsewhere == 5
        assert one.replica.division[0] == 2
        assert one.metric("gateway_load_sharing_gateways") == 2


async def test_forged_gateways_are_bounded_and_forgotten(redis_server: RedisServer) -> None:
    async with running(redis_server, 1) as (one,):
        forged = [
            signed(LoadReport(1, f"{n:016x}", State.SERVING, 1, {KEY: 100_000})) for n in range(100)
        ]
        await publish(redis_server, one, *forged)
        await wait_until(lambda: one.reports("invalid") == 36)
        await wait_until(lambda: one.replica.division[0] == 65)
        assert one.catalogue.count_slots("demo", 4) == 1, "at least one, whatever others say"
        await wait_until(lambda: one.replica.division == (1, 0) and one.replica.elsewhere == 0)


@pytest.mark.parametrize("knows_secret", [False, True])
async def test_gateways_of_a_flood_are_forgotten_once_it_ends(
    redis_server: RedisServer,
    knows_secret: bool,
    caplog: pytest.LogCaptureFixture,
    show: Callable[[str], None],
) -> None:
    """What waits in Redis is not read for minutes as if it were new."""
    async with running(redis_server, 1) as (one,):
        secret = SECRET if knows_secret else b"another"
        async with (
            redis.asyncio.Redis(port=redis_server.port) as client,
            client.pipeline(transaction=False) as pipeline,
        ):
            for n in range(100_000):
                report = LoadReport(1, f"{n % 63:016x}", State.SERVING, n, {KEY: 9})
                pipeline.publish(channel(one), sign(encode(report), secret))
            await pipeline.execute()
        assert one.sharing.gateways == 1 or knows_secret
        began = asyncio.get_running_loop().time()
        await wait_until(lambda: one.sharing.gateways == 1)
        await wait_until(lambda: available(one) and one.replica.division == (1, 0))
        took_s = asyncio.get_running_loop().time() - began
        assert took_s < 10
        await wait_until(lambda: "load reports flood" in caplog.text)
        assert ("gateways that share engines share a database" in caplog.text) != knows_secret
        show(f"forged gateways counted for {took_s:.1f} s after 100,000 reports")


async def test_huge_message_costs_the_connection_and_no_memory(own_redis: RedisServer) -> None:
    async with running(own_redis, 2) as (one, two):
        await publish(own_redis, one, b"x" * (40 * 2**20))  # beyond Redis' bound for subscribers
        two.replica.in_flight = 5
        await wait_until(lambda: one.replica.elsewhere == 5)
        await wait_until(lambda: available(one))


async def test_flood_of_messages_leaves_the_event_loop_free(redis_server: RedisServer) -> None:
    async with running(redis_server, 1) as (one,):
        async with (
            redis.asyncio.Redis(port=redis_server.port) as client,
            client.pipeline(transaction=False) as pipeline,
        ):
            for _ in range(20_000):
                pipeline.publish(channel(one), b"flood")
            await pipeline.execute()
        await wait_until(lambda: one.reports("invalid") >= 1000)
        assert one.reports("invalid") < 20_000


async def test_event_loop_turns_between_two_reports(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report of a thousand engines takes milliseconds, and whoever may publish can send many."""
    async with running(redis_server, 1) as (one,):
        turn, turns = 0, []
        receive = one.sharing.receive

        def note(message: bytes, now: float) -> None:
            turns.append(turn)
            receive(message, now)

        async def count() -> None:
            nonlocal turn
            while True:
                turn += 1
                await asyncio.sleep(0)

        monkeypatch.setattr(one.sharing, "receive", note)
        counting = asyncio.create_task(count())
        async with (
            redis.asyncio.Redis(port=redis_server.port) as client,
            client.pipeline(transaction=False) as pipeline,
        ):
            for _ in range(500):
                pipeline.publish(channel(one), b"flood")
            await pipeline.execute()
        await wait_until(lambda: len(turns) >= 500)
        counting.cancel()
        assert len(set(turns)) == len(turns)


async def test_costly_reports_are_bounded_in_time(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.sharing.load_sharing.MAX_BUSY_S_PER_S", 1e-9)
    pauses = []
    async with running(redis_server, 1) as (one,):
        sleep = asyncio.sleep

        async def note(seconds: float) -> None:
            pauses.append(seconds)
            await sleep(0)

        monkeypatch.setattr("app.sharing.load_sharing.asyncio.sleep", note)
        for _ in range(400):  # a pause drops what waits
            await publish(redis_server, one, *[b"flood"] * 20)
            if pauses.count(1) >= 20:
                break
            await sleep(0.05)
        monkeypatch.undo()
    assert pauses.count(1) >= 20


async def test_flood_of_joins_and_goodbyes_wakes_waiting_requests_seldom(
    redis_server: RedisServer,
) -> None:
    async with running(redis_server, 1) as (one,):
        wakes = 0

        def count(_: object) -> None:
            nonlocal wakes
            wakes += 1
            one.catalogue.changes.next().add_done_callback(count)

        one.catalogue.changes.next().add_done_callback(count)
        looked, received = one.looks, one.reports("received")
        states = (State.SERVING, State.LEFT)
        forged = [signed(LoadReport(1, "0" * 16, states[n % 2], n, {KEY: 0})) for n in range(900)]
        await publish(redis_server, one, *forged)
        await wait_until(lambda: one.reports("received") >= received + 900)
        assert wakes <= one.looks - looked + 1


async def test_replayed_reports_change_the_id_once(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever reads the channel can send a report again, or make one with any ID."""
    async with running(redis_server, 2) as (one, two):
        await wait_until(lambda: one.sharing.id and two.replica.division[0] == 2)
        first, seen = one.sharing.id, one.reports("invalid")
        for sequence in range(20):
            forged = signed(LoadReport(1, one.sharing.id, State.SERVING, sequence, {KEY: 50_000}))
            await publish(redis_server, one, forged)
            # Later ones with its first ID would be reports of another gateway.
            await wait_until(lambda: one.sharing.id != first)
        await wait_until(lambda: one.reports("invalid") >= seen + 19)
        warnings = [m for m in caplog.messages if "has the ID of this one" in m]
        assert len(warnings) == 1
        assert one.replica.elsewhere == 0


@pytest.mark.parametrize("part", ["read", "publish"])
async def test_unhandled_exception_ends_nothing(
    redis_server: RedisServer,
    part: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("app.sharing.load_sharing.RETRY_S", 0.05)
    async with running(redis_server, 2) as (one, two):

        async def fail(*_: object) -> None:
            raise RuntimeError("a bug")

        connection = one.sharing._subscription if part == "read" else one.sharing._connection
        with monkeypatch.context() as patch:
            patch.setattr(connection, part, fail)
            await wait_until(lambda: "unhandled exception while load is shared" in caplog.text)
        two.replica.in_flight, one.replica.in_flight = 5, 3
        await wait_until(lambda: one.replica.elsewhere == 5 and two.replica.elsewhere == 3)


async def test_gateway_takes_another_id_when_its_own_is_used(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(redis_server, 3) as (one, two, three):
        two.sharing._gateways.rename(one.sharing.id)
        same = one.sharing.id
        await wait_until(lambda: len({g.sharing.id for g in (one, two, three)}) == 3)
        assert any("has the ID of this one" in record.getMessage() for record in caplog.records)
        assert same != one.sharing.id or same != two.sharing.id
        divisions = [(3, 0), (3, 1), (3, 2)]
        await wait_until(lambda: sorted(g.replica.division for g in (one, two, three)) == divisions)


async def test_reports_have_no_address_of_an_engine(redis_server: RedisServer) -> None:
    prefix = secrets.token_hex(8)
    one = Gateway(redis_server.url, prefix)
    async with redis.asyncio.Redis(port=redis_server.port) as client, client.pubsub() as listener:
        await listener.subscribe(channel(one))
        one.start()
        messages = []
        async for message in listener.listen():
            if message["type"] == "message":
                messages.append(message["data"])
            if len(messages) == 3:
                break
    await one.kill()
    await one.sharing.close()
    assert all(b"gpu-box" not in message and b"demo" not in message for message in messages)
    assert [decode(verify(message, SECRET)).engines for message in messages] == [{KEY: 0}] * 3
    assert [decode(verify(message, SECRET)).sequence for message in messages] == [1, 2, 3]


def test_without_redis_url_there_is_none_and_no_redis_is_imported() -> None:
    code = (
        "import sys; from app.settings import StateSettings"
        "; from app.sharing import load_sharing_on"
        "; assert load_sharing_on(StateSettings(), None, None, None, None) is None"
        "; assert 'redis' not in sys.modules and 'app.redis.connection' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
