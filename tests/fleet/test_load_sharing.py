"""Three gateways share the load and the slots of their engines, and one of them is killed."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.fleet.fleet import Fleet, Member, chat, fleet
from tests.services import PostgresServer, RedisServer
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.services]

ENGINES = 4
PER_ENGINE = 3  # 12 slots, four for each gateway


@pytest.fixture
def three(
    tmp_path: Path, redis_server: RedisServer, postgres_server: PostgresServer
) -> Iterator[Fleet]:
    name = f"sharing_{secrets.token_hex(4)}"
    with fleet(
        tmp_path,
        3,
        redis_server,
        postgres_server,
        name,
        engines=ENGINES,
        model={"queue": {"max_in_flight": PER_ENGINE, "timeout_s": 60}},
        state={"redis_prefix": name, "redis_timeout_s": 5},
    ) as found:
        yield found


def series(member: Member, name: str) -> list[float]:
    """Return the values of a series, by its labels."""
    families = text_string_to_metric_families(member.metrics())
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    samples.sort(key=lambda sample: sorted(sample.labels.items()))
    return [s.value for s in samples if s.labels.get("model") != "unknown"]


async def until_known(members: list[Member]) -> None:
    def known() -> bool:
        size = [float(len(members))]
        return all(series(m, "gateway_load_sharing_gateways") == size for m in members)

    await wait_until(known)


@asynccontextmanager
async def endless_streams(
    member: Member, key: str, count: int
) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Ask one gateway for streams that do not end; they end with the body."""
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(headers=headers, timeout=120) as client:

        async def stream() -> None:
            body = chat(100_000, pace_ms=50, stream=True)
            url = f"{member.url}/v1/chat/completions"
            async with client.stream("POST", url, json=body) as answer:
                async for _ in answer.aiter_raw():
                    pass

        tasks = [asyncio.create_task(stream()) for _ in range(count)]
        try:
            yield tasks
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def test_load_of_a_killed_gateway_expires_and_its_slots_are_taken_over(three: Fleet) -> None:
    key = three.key(concurrent_requests=100, tokens_per_minute=10**9, requests_per_minute=10**6)
    first, second, third = three.members
    await until_known(three.members)
    async with endless_streams(third, key, 4):
        await wait_until(lambda: series(third, "gateway_requests_in_flight") == [4])
        # One at each engine, which the others know.
        elsewhere = "gateway_engine_in_flight_elsewhere"
        await wait_until(lambda: series(first, elsewhere) == [1] * ENGINES)
        async with endless_streams(first, key, 12), endless_streams(second, key, 12):
            # A third of the slots each, however many wait.
            for member in (first, second):
                await wait_until(lambda: series(member, "gateway_queue_depth") == [8])  # noqa: B023
                assert series(member, "gateway_requests_in_flight") == [4]
            third.kill()
            for member in (first, second):
                await wait_until(lambda: series(member, "gateway_requests_in_flight") == [6])  # noqa: B023
                assert series(member, "gateway_load_sharing_gateways") == [2]
            # Without the four of the third, and with the six of the other.
            await wait_until(lambda: sum(series(first, elsewhere)) == 6)
            assert series(second, "gateway_queue_depth") == [6]
        for member in (first, second):
            assert "Traceback" not in member.said()


async def test_gateway_that_shuts_down_gives_its_slots_up(three: Fleet) -> None:
    first, _, third = three.members
    await until_known(three.members)
    third.process.terminate()
    await wait_until(lambda: series(first, "gateway_load_sharing_gateways") == [2])
    await wait_until(lambda: third.process.poll() is not None, 60)
    assert "Traceback" not in third.said()


async def test_gateway_sends_to_engines_that_others_left_idle(three: Fleet) -> None:
    key = three.key(concurrent_requests=100, tokens_per_minute=10**9, requests_per_minute=10**6)
    first, second, _ = three.members
    await until_known(three.members)
    elsewhere = "gateway_engine_in_flight_elsewhere"
    async with endless_streams(first, key, 2):
        await wait_until(lambda: sum(series(second, elsewhere)) == 2)
        async with endless_streams(second, key, 2):
            await wait_until(lambda: sum(series(first, elsewhere)) == 2)
            both = zip(series(first, elsewhere), series(second, elsewhere), strict=True)
            assert [a + b for a, b in both] == [1] * ENGINES
