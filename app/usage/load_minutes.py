"""What happened in each minute of the last days, of every gateway of a database.

A row takes about 100 bytes; a gateway writes 1,440 a day.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import Select, select

from app.database import Database, Lane, delete_before, dialect_insert
from app.database.schema import load_minutes

KEPT_S = 8 * 86_400
# Rows that are read at a time: building them blocks the event loop.
ROWS = 500


class LoadMinute(msgspec.Struct, frozen=True):
    """The sums of a minute, and the requests at its end."""

    minute: int  # since 1970
    tokens: int  # of answers
    errors: int
    refused: int
    in_flight: int
    waiting: int
    # Streams by their time to first token, as `app.telemetry.metrics.Totals` has them.
    ttft: tuple[int, ...]

    def plus(self, other: "LoadMinute") -> "LoadMinute":
        """Return the sum of the same minute at two gateways."""
        longest = max(len(self.ttft), len(other.ttft))
        counts = (one.ttft + (0,) * (longest - len(one.ttft)) for one in (self, other))
        return LoadMinute(
            self.minute,
            self.tokens + other.tokens,
            self.errors + other.errors,
            self.refused + other.refused,
            self.in_flight + other.in_flight,
            self.waiting + other.waiting,
            tuple(map(int.__add__, *counts)),
        )


@dataclass(frozen=True, slots=True)
class LoadMinutes:
    """Writes the minutes of one gateway, and reads those of all. Methods raise DatabaseError."""

    database: Database
    gateway: str  # the name of this process
    clock: Callable[[], float] = time.time

    async def write(self, minute: LoadMinute) -> None:
        """Store a minute; the first that is written stays, should the clock have gone back."""
        row = {**msgspec.structs.asdict(minute), "gateway": self.gateway}
        insert = dialect_insert(load_minutes, self.database.dialect).values(row)
        async with self.database.write(Lane.PAGES) as connection:
            await connection.execute(insert.on_conflict_do_nothing())

    async def read(self, since_s: float) -> Sequence[LoadMinute]:
        """Return the minutes since a time, in order, each the sum of all gateways."""
        sums: dict[int, LoadMinute] = {}
        async with self.database.read(Lane.PAGES) as connection:
            options = {"yield_per": ROWS}
            result = await connection.stream(_minutes_since(since_s), execution_options=options)
            async for rows in result.partitions():
                _add(rows, sums)
                await asyncio.sleep(0)
        return list(sums.values())

    async def read_few(self, since_s: float, until_s: float) -> Sequence[LoadMinute]:
        """Return the minutes between two times, an hour apart at most, in one short query."""
        sums: dict[int, LoadMinute] = {}
        some = _minutes_since(since_s).where(load_minutes.c.minute <= int(until_s // 60))
        rows = await self.database.fetch(some, Lane.PAGES)
        for start in range(0, len(rows), ROWS):
            _add(rows[start : start + ROWS], sums)
            await asyncio.sleep(0)
        return list(sums.values())

    async def delete_old(self) -> int:
        """Delete minutes that are too old; return the number of rows."""
        table = load_minutes.c
        before = int((self.clock() - KEPT_S) // 60)
        return await delete_before(self.database, table.minute, table.minute, before)


def _minutes_since(since_s: float) -> Select[Any]:
    columns = [load_minutes.c[name] for name in LoadMinute.__struct_fields__]
    since = load_minutes.c.minute >= int(since_s // 60)
    return select(*columns).where(since).order_by(load_minutes.c.minute)


def _add(rows: Sequence[Any], sums: dict[int, LoadMinute]) -> None:
    """Add rows to the sums of their minutes."""
    for *counts, ttft in rows:
        one = LoadMinute(*(*counts, tuple(ttft)))
        known = sums.get(one.minute)
        sums[one.minute] = one if known is None else known.plus(one)
