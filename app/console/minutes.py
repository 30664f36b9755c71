"""The minutes of this gateway, stored as they end, and charts of the hours before now.

The charts of the last hour are made from readings every ten seconds, which begin with the process
(`history.py`); those of longer times, and of the hour before the process began, from stored
minutes, of all gateways of the database.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby, zip_longest

from app.console.history import (
    INTERVAL_S,
    SPAN_S,
    History,
    Reading,
    Sample,
    quantile,
    tokens_between,
)
from app.database import DatabaseError
from app.telemetry.metrics import TTFT_BUCKETS
from app.usage import LoadMinute, LoadMinutes

log = logging.getLogger(__name__)

MINUTE_S = 60
# About as many points as the chart of an hour has.
MAX_POINTS = 360


class MinuteRecorder:
    """Stores each minute once it has ended. `clock` is wall time in seconds."""

    def __init__(
        self, history: History, minutes: LoadMinutes, clock: Callable[[], float] = time.time
    ) -> None:
        self._history = history
        self._minutes = minutes
        self._clock = clock

    async def run(self) -> None:
        """Store minutes until canceled. One that the database cannot take is left out."""
        before = self._history.now()
        try:
            self._history.earlier = await self._hour_before(before)
        except DatabaseError as error:
            log.debug("the charts begin with this process: %s", error)
        while True:
            minute = int(self._clock() // MINUTE_S)
            await asyncio.sleep(MINUTE_S - self._clock() % MINUTE_S)
            now = self._history.now()
            try:
                await self._minutes.write(minute_between(before, now, minute))
                if minute % 60 == 0:
                    await self._minutes.delete_old()
            except DatabaseError as error:
                log.debug("the minute is not stored: %s", error)
            before = now

    async def _hour_before(self, first: Reading) -> list[Sample]:
        """Return the stored hour before a reading, by its clock. Raises DatabaseError."""
        now = self._clock()
        stored = samples_of_minutes(await self._minutes.read_few(now - SPAN_S, now), step=1)
        # Each minute as so many samples that they are connected as those of readings are.
        backs = [back * INTERVAL_S for back in reversed(range(int(MINUTE_S / INTERVAL_S)))]
        return [
            replace(sample, at=first.at + sample.at - back - now)
            for sample in stored
            if sample.at <= now  # another gateway's clock may be ahead
            for back in backs
        ]


def minute_between(before: Reading, now: Reading, minute: int) -> LoadMinute:
    """Return what happened between two readings, as the minute with this number."""
    old, new = before.totals, now.totals
    return LoadMinute(
        minute,
        tokens=tokens_between(before, now),
        errors=new.errors - old.errors,
        refused=new.refused - old.refused,
        in_flight=now.load.in_flight,
        waiting=new.waiting,
        ttft=tuple(b - a for a, b in zip(old.ttft, new.ttft, strict=True)),
    )


def step_of(span_s: float) -> int:
    """Return how many minutes each sample of a time holds."""
    return max(1, round(span_s / MINUTE_S / MAX_POINTS))


def samples_of_minutes(minutes: Sequence[LoadMinute], step: int) -> list[Sample]:
    """Return a sample for each `step` minutes of which there is one, in order."""
    samples: list[Sample] = []
    for number, found in groupby(minutes, lambda one: one.minute // step):
        each = list(found)
        counts = [sum(column) for column in zip_longest(*(one.ttft for one in each), fillvalue=0)]
        samples.append(
            Sample(
                at=(number + 1) * step * MINUTE_S,
                tokens_per_s=sum(one.tokens for one in each) / (len(each) * MINUTE_S),
                in_flight=max(one.in_flight for one in each),
                waiting=max(one.waiting for one in each),
                ttft_p50=quantile(0.5, TTFT_BUCKETS, counts),
                ttft_p95=quantile(0.95, TTFT_BUCKETS, counts),
                errors_per_min=sum(one.errors for one in each) / len(each),
                refused_per_min=sum(one.refused for one in each) / len(each),
            )
        )
    return samples
