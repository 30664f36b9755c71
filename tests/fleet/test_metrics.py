"""Metrics of two gateways: together exactly the requests sent, and equal to the shared ledger."""

import asyncio
import random
import secrets
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.fleet.fleet import Fleet, Member, chat, fleet
from tests.services import PostgresServer, RedisServer

pytestmark = [pytest.mark.slow, pytest.mark.services]

REQUESTS = 500
CHAT = "/v1/chat/completions"
COUNTS = ("_total", "_count", "_sum", "_bucket")
# A series: its name, and its labels in order.
Place = tuple[str, tuple[tuple[str, str], ...]]


def counters(page: str) -> dict[Place, float]:
    """Return what may never fall."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if family.type in ("counter", "histogram") and sample.name.endswith(COUNTS)
    }


async def test_two_gateways_count_exactly_what_was_sent(
    tmp_path: Path,
    redis_server: RedisServer,
    postgres_server: PostgresServer,
    show: Callable[[str], None],
) -> None:
    state = {"redis_prefix": "metrics", "redis_timeout_s": 5}
    database = f"fleet_metrics_{secrets.token_hex(4)}"
    with fleet(tmp_path, 2, redis_server, postgres_server, database, state=state) as found:
        show(await count(found))


async def count(found: Fleet) -> str:
    """Send the requests, compare every count, and return what there is to show."""
    plenty = {"concurrent_requests": 100, "tokens_per_minute": 10**9, "requests_per_minute": 10**6}
    key = found.key(**plenty)
    dice = random.Random(1)
    statuses: Counter[tuple[str, str]] = Counter()  # (model, status)
    fallen: list[object] = []
    last: dict[int, dict[Place, float]] = {}
    scrapes = 0
    pages: list[dict[Place, float]] = []
    sent = asyncio.Event()

    async def scrape(client: httpx.AsyncClient, member: Member) -> dict[Place, float]:
        nonlocal scrapes
        scrapes += 1
        now = counters((await client.get(f"{member.url}/metrics")).text)
        before = last.get(member.port, {})
        fallen.extend(place for place in before if now.get(place, -1) < before[place])
        last[member.port] = now
        return now

    async def watch(client: httpx.AsyncClient, member: Member) -> None:
        while not sent.is_set():
            await scrape(client, member)
            await asyncio.sleep(0.3)

    async def ask(client: httpx.AsyncClient, turn: asyncio.Semaphore, number: int) -> None:
        member = found.members[number % 2]
        headers = {"authorization": f"Bearer {key}"}
        async with turn:
            match number % 10:
                case 0:
                    body = {"model": "nobody"}
                case 1:
                    body = chat(1)
                    headers = {"authorization": "Bearer sk-nobody-0123456789abcdef"}
                case 2:
                    body = chat(1) | {"fake": "status:500"}
                case tens:
                    body = chat(dice.randint(1, 5), stream=tens > 5)
            answer = await client.post(member.url + CHAT, json=body, headers=headers)
        model = "demo" if answer.status_code not in (401, 404) else "unknown"
        statuses[model, str(answer.status_code)] += 1

    def total(name: str, **labels: str) -> float:
        """Return the sum over both gateways, and over the labels that are not named."""
        return sum(
            value
            for page in pages
            for (of, place), value in page.items()
            if of == name and labels.items() <= dict(place).items()
        )

    async with httpx.AsyncClient(timeout=60) as client:
        watching = [asyncio.create_task(watch(client, member)) for member in found.members]
        turn = asyncio.Semaphore(16)
        await asyncio.gather(*(ask(client, turn, number) for number in range(REQUESTS)))
        reached = sum(n for (model, _), n in statuses.items() if model == "demo")
        async with asyncio.timeout(60):
            while len(rows := await found.ledger(key)) < reached:
                await asyncio.sleep(0.1)
        sent.set()
        await asyncio.gather(*watching)
        pages = [await scrape(client, member) for member in found.members]
        async with asyncio.timeout(60):  # a page that took long to make is served again for a while
            while total("gateway_requests_total", endpoint=CHAT) < REQUESTS:
                pages = [await scrape(client, member) for member in found.members]

    assert fallen == []
    assert sum(statuses.values()) == REQUESTS
    assert set(statuses) == {
        ("demo", "200"), ("demo", "500"), ("unknown", "401"), ("unknown", "404"),
    }  # fmt: skip
    for (model, status), n in statuses.items():
        labels = {"model": model, "status": status, "endpoint": CHAT}
        assert total("gateway_requests_total", **labels) == n, labels
    assert total("gateway_requests_total", endpoint=CHAT) == REQUESTS
    assert total("gateway_request_duration_seconds_count", endpoint=CHAT) == REQUESTS
    assert total("gateway_request_duration_seconds_bucket", endpoint=CHAT, le="+Inf") == REQUESTS
    assert total("gateway_overhead_seconds_count", model="demo") == reached
    streams = sum(n % 10 > 5 for n in range(REQUESTS))
    assert total("gateway_time_to_first_token_seconds_count", model="demo") == streams
    assert total("gateway_auth_failures_total", reason="invalid") == statuses["unknown", "401"]
    assert len(rows) == reached
    assert total("gateway_usage_records_total") == reached
    outcomes = Counter(row["outcome"] for row in rows)
    for outcome, n in outcomes.items():
        assert total("gateway_usage_records_total", outcome=outcome) == n
    for kind, column in (
        ("prompt", "prompt_tokens"),
        ("cached", "cached_tokens"),
        ("completion", "completion_tokens"),
    ):
        spent = sum(row[column] or 0 for row in rows)
        assert total("gateway_tokens_total", model="demo", kind=kind) == spent, kind
    assert total("gateway_tokens_total", kind="completion") > 0
    assert total("gateway_usage_records_lost_total") == 0
    assert all(page[("gateway_usage_records_total", (("outcome", "completed"),))] for page in pages)
    each = [
        sum(v for (name, place), v in page.items()
            if name == "gateway_requests_total" and ("endpoint", CHAT) in place)
        for page in pages
    ]  # fmt: skip
    return (
        f"counters of two gateways: {each[0]:g} + {each[1]:g} = {sum(each):g} requests, "
        f"{reached} in the ledger, {scrapes} scrapes, none of which saw a counter fall"
    )
