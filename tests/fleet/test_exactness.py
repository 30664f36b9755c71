"""Two gateways, one Redis: together they admit what one bucket would, to the request.

The load is longer than a minute: a limit per minute that holds for one minute only proves nothing.
"""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.app.raw import Client, request
from tests.fleet.fleet import Fleet, chat, fleet
from tests.services import PostgresServer, RedisServer

pytestmark = [pytest.mark.slow, pytest.mark.services]

SECONDS = 75.0
CLIENTS = 8
REQUESTS_PER_MINUTE = 60
TOKENS_PER_MINUTE = 10_000
# The longest answer that a client asks for; with the prompt, the largest reservation.
LONGEST = 200


@pytest.fixture
def two(
    tmp_path: Path, redis_server: RedisServer, postgres_server: PostgresServer
) -> Iterator[Fleet]:
    database = "fleet_exactness"
    # Its keys in Redis are its own; a deadline for the whole machine being busy, not for Redis.
    state = {"redis_prefix": "exactness", "redis_timeout_s": 5}
    with fleet(tmp_path, 2, redis_server, postgres_server, database, state=state) as found:
        yield found


@dataclass
class Attempt:
    """One request that was let in, as its client saw it."""

    sent: float
    answered: float


class Caller:
    """A client of several gateways with a connection to each. httpx takes more CPU than they do."""

    def __init__(self, key: str) -> None:
        self._authorization = f"authorization: Bearer {key}".encode()
        self._open: dict[str, Client] = {}

    async def send(self, url: str, body: dict[str, Any]) -> Client:
        """Send a chat request; return the connection on which its answer comes."""
        if (client := self._open.get(url)) is None or client.reader.at_eof():
            place = urlsplit(url)
            client = Client(*await asyncio.open_connection(place.hostname, place.port))
            self._open[url] = client
        data, path = json.dumps(body).encode(), b"/v1/chat/completions"
        client.send(request(data, self._authorization, path=path, key=False))
        return client

    def leave(self, url: str) -> None:
        """Hang up."""
        self._open.pop(url).writer.close()

    def close(self) -> None:
        """Hang up everywhere."""
        for url in list(self._open):
            self.leave(url)


@asynccontextmanager
async def calling(key: str) -> AsyncIterator[Caller]:
    caller = Caller(key)
    try:
        yield caller
    finally:
        caller.close()


async def hammer(urls: list[str], key: str, number: int, found: list[Attempt]) -> float:
    """Ask as often as the gateways let us; return when the last request was sent."""
    begin = time.monotonic()
    over = False
    async with calling(key) as caller:
        while not over:
            sent = time.monotonic()
            over = sent - begin > SECONDS  # once more after the end: nothing is left in the bucket
            url = random.choice(urls)
            answer = await (await caller.send(url, chat(1))).answer()
            if answer.status == 200:
                found.append(Attempt(sent, time.monotonic()))
            else:
                assert answer.status == 429, answer.body
                assert int(answer.headers["retry-after"]) >= 1
                assert answer.headers["x-ratelimit-limit-requests"] == str(REQUESTS_PER_MINUTE)
                await asyncio.sleep(0.1 + number / 100)
    return sent


@dataclass
class Streams:
    """Results of the streaming clients."""

    whole: int = 0
    left: int = 0
    refused: int = 0
    first_refusal: float = float("inf")  # by the clock on the wall, as the ledger's times are


async def stream(urls: list[str], key: str, seed: int, seen: Streams) -> None:
    """Stream answers of random length for as long as the others hammer, leaving a third early."""
    dice = random.Random(seed)
    end = time.monotonic() + SECONDS
    async with calling(key) as caller:
        while time.monotonic() < end:
            tokens = dice.randint(20, LONGEST)
            leave_after = dice.randrange(tokens) if dice.random() < 1 / 3 else None
            body = chat(tokens, pace_ms=2, stream=True, max_tokens=LONGEST)
            url = dice.choice(urls)
            client = await caller.send(url, body)
            answer = await client.answer(head_only=True)
            if answer.status == 429:
                assert answer.headers["x-ratelimit-limit-tokens"] == str(TOKENS_PER_MINUTE)
                await client.reader.readexactly(int(answer.headers["content-length"]))
                seen.refused += 1
                seen.first_refusal = min(seen.first_refusal, time.time())
                await asyncio.sleep(dice.random() * 0.5)
                continue
            assert answer.status == 200
            if leave_after is None:
                await client.chunked()
                seen.whole += 1
                continue
            events = 0
            while (line := await client.reader.readline()) != b"0\r\n":
                assert line, "the stream does not end in order"
                events += line.startswith(b"data: ")
                if events > leave_after:
                    break
            seen.left += 1
            caller.leave(url)


def curve(seconds: float) -> float:
    """Return the tokens that a full bucket gives in so many seconds."""
    return TOKENS_PER_MINUTE * (1 + seconds / 60)


def most_in(records: list[tuple[float, float]], seconds: float, since: float = 0) -> float:
    """Return the most tokens that ended in any so many seconds from `since` on."""
    times = sorted((at, tokens) for at, tokens in records if at >= since)
    most = running = 0.0
    first = 0
    for at, tokens in times:
        running += tokens
        while times[first][0] <= at - seconds:
            running -= times[first][1]
            first += 1
        most = max(most, running)
    return most


async def test_two_gateways_admit_what_one_bucket_would(
    two: Fleet, show: Callable[[str], None]
) -> None:
    free = {"requests_per_minute": 10**9, "tokens_per_minute": 10**9, "concurrent_requests": 10**6}
    by_requests = two.key(**{**free, "requests_per_minute": REQUESTS_PER_MINUTE})
    by_tokens = two.key(**{**free, "tokens_per_minute": TOKENS_PER_MINUTE})
    urls = [member.url for member in two.members]
    admitted: list[Attempt] = []
    streams = Streams()
    async with asyncio.TaskGroup() as group:
        hammers = [
            group.create_task(hammer(urls, by_requests, n, admitted)) for n in range(CLIENTS)
        ]
        for n in range(8):
            group.create_task(stream(urls, by_tokens, n, streams))

    # A full bucket, and what ran in since the first request: as long as it was never full again,
    # which it was not, for somebody asked all the time.
    rate = REQUESTS_PER_MINUTE / 60
    first_sent = min(one.sent for one in admitted)
    first_answered = min(one.answered for one in admitted)
    last_sent = max(task.result() for task in hammers)
    last_answered = max(one.answered for one in admitted)
    least = REQUESTS_PER_MINUTE + rate * (last_sent - first_answered)
    most = REQUESTS_PER_MINUTE + rate * max(last_answered - first_sent, last_sent - first_sent)

    records: list[tuple[float, float]] = []
    count = streams.whole + streams.left
    async with asyncio.timeout(30):
        while len(records) < count:
            records = [
                (row["at_ms"] / 1000, row["prompt_tokens"] + row["completion_tokens"])
                for row in await two.ledger(by_tokens)
            ]
            await asyncio.sleep(0.2)
    reservation = LONGEST + 60  # the prompt's estimate is below 60
    begin = records[0][0]
    total = sum(tokens for _, tokens in records)
    span = records[-1][0] - begin
    # What the first filling let in has ended by then; from there on only what runs in is there.
    later = min(streams.first_refusal, begin + SECONDS / 2) + 5
    show(
        f"requests: {len(admitted)} admitted, exact curve {least:.1f} to {most:.1f}"
        f"\ntokens: {count} streams ({streams.left} left early, {streams.refused} refused), "
        f"{total:.0f} settled in {span:.1f} s, exact curve {curve(span):.0f}; most in any "
        f"minute with the first filling: {most_in(records, 60):.0f}, of later "
        f"ones: {most_in(records, 60, later):.0f}; largest reservation {reservation}"
    )
    assert least - 1 <= len(admitted) <= most + 1
    assert streams.left > count / 5
    for window in (1, 5, 20, 60, SECONDS):
        assert most_in(records, window) <= curve(window) + reservation
    # Refunds are given: without them, reserving LONGEST each time, far fewer would have run.
    assert total > 0.9 * curve(SECONDS)
