"""Two months of requests and a week of load in the database of a gateway, for its pages."""

import math
import random
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import insert

from app.database.schema import load_minutes
from app.settings import PriceSettings
from app.telemetry import EndedRequest, RequestRecord, RequestTimeline
from app.telemetry.metrics.buckets import TTFT_BUCKETS
from app.telemetry.request_timeline import Step
from app.usage.records import DailySums, Price, rows_of
from app.usage.statements import add_sums, insert_records
from app.usage.token_usage import Usage
from tests.app.usage.records import opened

DAYS = 62
DAY_S = 86_400
MODELS = {"demo": 0.5, "qwen3-32b": 0.3, "gemma-3-12b": 0.2}
PRICES = {
    "demo": PriceSettings(prompt=0.1, completion=0.4),
    "qwen3-32b": PriceSettings(prompt=0.6, cached=0.1, completion=2.4),
    "gemma-3-12b": PriceSettings(prompt=0.2, completion=0.8),
}
GATEWAY = "01234567"
_BATCH = 512


async def store_past(database: Path, keys: Sequence[tuple[str, str]], now: float) -> None:
    """Write the past of keys, each an ID and its owner: requests to an hour ago, load to now."""
    draw = random.Random(7)
    prices = {name: Price.of(price) for name, price in PRICES.items()}
    requests = list(_requests(draw, keys, now))
    async with opened(f"sqlite+aiosqlite:///{database}") as opened_database:
        for number, first in enumerate(range(0, len(requests), _BATCH)):
            rows = rows_of(GATEWAY + GATEWAY, number, requests[first : first + _BATCH], prices)
            sums = DailySums()
            sums.add(rows)
            async with opened_database.write() as connection:
                await connection.run_sync(insert_records, rows)
                await connection.run_sync(add_sums, sums)
        minutes = list(_minutes(draw, now))
        async with opened_database.write() as connection:
            await connection.execute(insert(load_minutes), minutes)


def _requests(
    draw: random.Random, keys: Sequence[tuple[str, str]], now: float
) -> Iterator[EndedRequest]:
    number = 0
    for days in range(DAYS, -1, -1):
        day = now - days * DAY_S
        weekend = datetime.fromtimestamp(day, UTC).weekday() >= 5
        for _ in range(int((30 if weekend else 90) * (1.6 - days / DAYS))):
            number += 1
            at = day - draw.uniform(3600, DAY_S)
            yield _request(draw, number, at, draw.choice(keys))
    # Yesterday's slowest one waited behind a batch.
    yield _request(draw, number + 1, now - 0.8 * DAY_S, keys[0], queued_s=38.2)


def _request(
    draw: random.Random,
    number: int,
    at: float,
    key: tuple[str, str],
    queued_s: float | None = None,
) -> EndedRequest:
    [model] = draw.choices(list(MODELS), list(MODELS.values()))
    output = min(int(draw.lognormvariate(5, 0.8)) + 1, 700)
    ttft_s, decode_s = draw.lognormvariate(-1.2, 0.6), output / draw.uniform(30, 70)
    if queued_s is None and draw.random() < 0.15:
        queued_s = draw.uniform(0.2, 6)
    waited = queued_s or 0.0
    started = 1000.0 + number
    queue = None
    if queued_s is not None:
        queue = Step("queue", started, end=started + waited, position=draw.randrange(1, 40))
    asked = Step("attempt", started + waited, queue, engine=f"{model}-0", status=200)
    asked.answered = started + waited + ttft_s
    failed = draw.random() < 0.015
    record = RequestRecord(
        request_id=f"req-{number:05}",
        endpoint="chat_completions",
        method="POST",
        status=502 if failed else 200,
        total_s=waited + ttft_s + decode_s,
        key_id=key[0],
        model=model,
        engine=f"{model}-0",
        queued_s=queued_s,
        ttft_s=None if failed else waited + ttft_s,
        owner=key[1],
        usage=Usage(int(draw.lognormvariate(7.5, 0.8)), 0 if failed else output),
        fault=f"engine {model}-0 has closed the connection" if failed else None,
        error="engine_failed" if failed else None,
    )
    return EndedRequest(record, RequestTimeline(started, last=asked), at, GATEWAY)


def _minutes(draw: random.Random, now: float) -> Iterator[dict[str, object]]:
    for back in range(7 * 24 * 60, 1, -1):
        minute = int(now // 60) - back
        hour = minute / 60 % 24
        busy = max(0.05, math.sin((hour - 6) / 12 * math.pi)) * draw.uniform(0.7, 1.3)
        ttft = [0] * (len(TTFT_BUCKETS) + 1)
        for _ in range(int(busy * 20)):
            slow = draw.lognormvariate(-1.2, 0.7) * (1 + busy)
            ttft[sum(slow > bound for bound in TTFT_BUCKETS)] += 1
        yield {
            "minute": minute,
            "gateway": GATEWAY,
            "tokens": int(busy * 9000),
            "errors": int(draw.random() < 0.02) * draw.randrange(1, 5),
            "refused": int(draw.random() < 0.05) * draw.randrange(1, 9),
            "in_flight": int(busy * 9),
            "waiting": int(max(0, busy - 0.9) * 12),
            "ttft": ttft,
        }
