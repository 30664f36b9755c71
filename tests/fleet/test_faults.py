"""Redis and PostgreSQL stop, hang and come back while a gateway is under load."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.fleet.fleet import Member, chat, fleet
from tests.services import PostgresServer, RedisServer
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.services]

CLIENTS = 8
# What one request may wait for Redis here: far above what a busy machine adds by itself.
DEADLINE_S = 2.0
PLENTY = {"requests_per_minute": 10**9, "tokens_per_minute": 10**9, "concurrent_requests": 10**6}


@dataclass
class Load:
    """Responses to clients that send continuously: status and duration, by client."""

    answers: list[list[tuple[int, float]]] = field(default_factory=list)

    @property
    def statuses(self) -> Counter[int]:
        return Counter(status for answers in self.answers for status, _ in answers)

    async def more(self, status: int) -> None:
        """Return when every client has had this status once more."""
        before = [len(answers) for answers in self.answers]
        end = time.monotonic() + 60

        def since() -> list[Counter[int]]:
            told = zip(self.answers, before, strict=True)
            return [Counter(status for status, _ in answers[count:]) for answers, count in told]

        while not all(status in counts for counts in since()):
            assert time.monotonic() < end, f"no {status} for every client, but {since()}"
            await asyncio.sleep(0.02)

    def clear(self) -> None:
        for answers in self.answers:
            answers.clear()


@asynccontextmanager
async def load(member: Member, key: str) -> AsyncIterator[Load]:
    """Keep a gateway busy while the body runs."""
    found = Load([[] for _ in range(CLIENTS)])
    over = False

    async def ask(answers: list[tuple[int, float]]) -> None:
        headers = {"authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(headers=headers, timeout=60) as client:
            while not over:
                begun = time.monotonic()
                answer = await client.post(f"{member.url}/v1/chat/completions", json=chat(1))
                if answer.status_code >= 400:
                    assert answer.json()["error"]["code"] == "service_unavailable"
                    assert int(answer.headers["retry-after"]) >= 1
                answers.append((answer.status_code, time.monotonic() - begun))
                await asyncio.sleep(0.01)

    async with asyncio.TaskGroup() as group:
        for answers in found.answers:
            group.create_task(ask(answers))
        try:
            yield found
        finally:
            over = True


def sample(member: Member, name: str) -> float:
    """Return the value of a series without labels."""
    families = text_string_to_metric_families(member.metrics())
    return next(s.value for family in families for s in family.samples if s.name == name)


async def until_available(member: Member, available: bool) -> None:
    await wait_until(lambda: sample(member, "gateway_redis_available") == available, 60)


@pytest.mark.parametrize(("policy", "meanwhile"), [("local", 200), ("open", 200), ("closed", 503)])
@pytest.mark.parametrize("fault", ["hangs", "is restarted empty"])
async def test_redis_fails_under_load(
    tmp_path: Path,
    own_redis: RedisServer,
    postgres_server: PostgresServer,
    policy: str,
    meanwhile: int,
    fault: str,
) -> None:
    database = f"faults_{policy}_{fault.partition(' ')[0]}"
    sections: dict[str, Any] = {
        "state": {"redis_timeout_s": DEADLINE_S},
        "limits": {"redis_unavailable": policy},
    }
    with fleet(tmp_path, 1, own_redis, postgres_server, database, **sections) as found:
        (member,) = found.members
        key = found.key(**PLENTY)
        async with load(member, key) as seen:
            await seen.more(200)
            assert sample(member, "gateway_redis_available") == 1
            seen.clear()

            await asyncio.to_thread(own_redis.pause if fault == "hangs" else own_redis.stop)
            await until_available(member, available=False)
            await seen.more(meanwhile)
            await seen.more(meanwhile)
            assert set(seen.statuses) <= {200, meanwhile}
            for answers in seen.answers:
                # Whoever asked while nobody knew has waited; nobody has waited twice.
                assert sum(seconds >= DEADLINE_S for _, seconds in answers) <= 1

            await asyncio.to_thread(own_redis.resume if fault == "hangs" else own_redis.start)
            await until_available(member, available=True)
            await seen.more(200)  # a refusal from before may still have been on its way
            seen.clear()
            await seen.more(200)
            assert set(seen.statuses) == {200}
        assert sample(member, "gateway_redis_errors_total") >= 1
        lines = [line for line in member.said().splitlines() if "Redis" in line]
        of_limits = [line for line in lines if "load is" not in line]
        assert len(of_limits) == 2, lines  # it went, it came back
        assert "Traceback" not in member.said()


@pytest.mark.parametrize("fault", ["stops", "hangs"])
async def test_postgresql_fails_under_load(
    tmp_path: Path, redis_server: RedisServer, own_postgres: PostgresServer, fault: str
) -> None:
    state = {"redis_prefix": f"faults-postgres-{fault}"}
    with fleet(tmp_path, 1, redis_server, own_postgres, "faults", state=state) as found:
        (member,) = found.members
        known, unknown = found.key(**PLENTY), found.key(**PLENTY)
        async with load(member, known) as seen:
            await seen.more(200)
            await asyncio.to_thread(own_postgres.stop if fault == "stops" else own_postgres.pause)

            await seen.more(200)
            async with httpx.AsyncClient(timeout=60) as client:

                async def ask(key: str) -> httpx.Response:
                    headers = {"authorization": f"Bearer {key}"}
                    url = f"{member.url}/v1/chat/completions"
                    return await client.post(url, json=chat(1), headers=headers)

                refused = await ask(unknown)
                assert refused.status_code == 503
                assert refused.json()["error"]["code"] == "service_unavailable"
                await seen.more(200)
                assert set(seen.statuses) == {200}

                await asyncio.to_thread(
                    own_postgres.start if fault == "stops" else own_postgres.resume
                )
                async with asyncio.timeout(60):
                    while (await ask(unknown)).status_code != 200:
                        await asyncio.sleep(0.1)
            await seen.more(200)
        assert set(seen.statuses) == {200}
        answered = sum(seen.statuses.values())
        async with asyncio.timeout(60):
            while len(rows := await found.ledger(known)) < answered:
                await asyncio.sleep(0.1)
        assert len(rows) == answered  # nothing lost, nothing twice
        assert sample(member, "gateway_usage_records_lost_total") == 0
        assert "Traceback" not in member.said()
