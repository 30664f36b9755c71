"""A gateway dies with everything it held; the others get it back."""

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.fleet.fleet import Fleet, chat, fleet
from tests.services import PostgresServer, RedisServer
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.services]

SLOTS = 20


@pytest.fixture
def two(
    tmp_path: Path, redis_server: RedisServer, postgres_server: PostgresServer
) -> Iterator[Fleet]:
    database = f"fleet_crash_{secrets.token_hex(4)}"
    state = {"redis_prefix": "crash", "redis_timeout_s": 5}
    with fleet(tmp_path, 2, redis_server, postgres_server, database, state=state) as found:
        yield found


async def test_slots_of_a_killed_gateway_are_released(
    two: Fleet, show: Callable[[str], None]
) -> None:
    key = two.key(concurrent_requests=SLOTS, tokens_per_minute=10**9, requests_per_minute=10**6)
    first, second = two.members
    endless = chat(100_000, pace_ms=50, stream=True)
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(headers=headers, timeout=120) as client:

        async def hold(url: str, begun: asyncio.Event) -> None:
            async with client.stream("POST", f"{url}/v1/chat/completions", json=endless) as answer:
                assert answer.status_code == 200
                begun.set()
                async for _ in answer.aiter_raw():
                    pass

        events = [asyncio.Event() for _ in range(SLOTS)]
        holders = [asyncio.create_task(hold(first.url, event)) for event in events]
        await asyncio.gather(*(event.wait() for event in events))

        refused = await client.post(f"{second.url}/v1/chat/completions", json=chat(1))
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert "concurrent requests" in refused.json()["error"]["message"]

        first.kill()
        killed = time.monotonic()
        lost = await asyncio.gather(*holders, return_exceptions=True)
        assert all(isinstance(one, httpx.HTTPError) for one in lost)

        async def again() -> None:
            """Hold a slot on the second one, as soon as it gives one."""
            while True:
                async with client.stream(
                    "POST", f"{second.url}/v1/chat/completions", json=endless
                ) as answer:
                    if answer.status_code == 200:
                        got.append(time.monotonic() - killed)
                        await everybody.wait()
                        return
                    assert answer.status_code == 429
                await asyncio.sleep(0.5)

        got: list[float] = []
        everybody = asyncio.Event()
        waiting = [asyncio.create_task(again()) for _ in range(SLOTS)]
        await wait_until(lambda: len(got) >= SLOTS, 90)
        over = await client.post(f"{second.url}/v1/chat/completions", json=chat(1))
        everybody.set()
        await asyncio.gather(*waiting)
    show(f"slots of a killed gateway: all {SLOTS} in use again {max(got):.1f} s after")
    assert over.status_code == 429


async def test_ledger_of_a_killed_gateway_lacks_the_last_second_at_most(two: Fleet) -> None:
    key = two.key(concurrent_requests=100, tokens_per_minute=10**9, requests_per_minute=10**6)
    first, second = two.members
    answered: list[tuple[float, str]] = []
    headers = {"authorization": f"Bearer {key}"}
    killed = asyncio.Event()
    async with httpx.AsyncClient(headers=headers, timeout=30) as client:

        async def ask(number: int) -> None:
            count = 0
            while not killed.is_set():
                request_id = f"crash-{number}-{count}"
                count += 1
                try:
                    answer = await client.post(
                        f"{first.url}/v1/chat/completions",
                        json=chat(2, pace_ms=1),
                        headers={"x-request-id": request_id},
                    )
                except httpx.HTTPError:
                    return
                assert answer.status_code == 200
                answered.append((time.time(), request_id))

        asking = [asyncio.create_task(ask(number)) for number in range(4)]
        await wait_until(lambda: sum(when < time.time() - 1 for when, _ in answered) > 100, 60)
        first.process.kill()
        at = time.time()
        killed.set()
        await asyncio.gather(*asking)
    kept = {row["request_id"] for row in await two.ledger(key)}
    old = {request_id for when, request_id in answered if when < at - 1}
    assert len(old) > 100
    assert old <= kept
    unseen = kept - {request_id for _, request_id in answered}
    assert len(unseen) <= len(asking)  # each client had one under way, which may have ended
    assert second.process.poll() is None
