"""What a request costs in the ledger, and what of that its phases cost: CPU, and bytes on the disk.

The rows of the same requests are made and written as the gateway writes them, in batches into a
new SQLite database: with their history, and, in turn, without.
"""

import asyncio
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec

from app.database import Database, Lane
from app.telemetry import EndedRequest, RequestRecord, RequestTimeline
from app.usage import records
from app.usage.ledger import BATCH, GROUP
from app.usage.statements import add_sums, insert_records
from app.usage.token_usage import Usage
from bench.figures import estimate
from bench.report import Table, interval, number

PART = "ledger"
ROUNDS = 9
REQUESTS = 40_000
KEYS = 100
MILLION = 1_000_000
GATEWAY = "0123456789abcdef"


class Cost(msgspec.Struct, frozen=True):
    """Of one request: CPU of the whole process in µs, and bytes of the database."""

    cpu_us: float
    size: float


class _WithoutHistory(EndedRequest, frozen=True, gc=False):
    @property
    def id(self) -> Any:
        """The row's NULL."""
        return math.nan


def requests(count: int, *, history: bool) -> Iterator[EndedRequest]:
    """Yield requests as they end, one in three of which waited in a queue."""
    ended = EndedRequest if history else _WithoutHistory
    for i in range(count):
        start = 1000.0 + i * 0.01
        timeline = RequestTimeline(
            start, start + 0.0002, start + 0.0003, "demo-0", start + 0.001, 200
        )
        queued_s = 0.02 if i % 3 == 0 else None
        record = RequestRecord(
            f"{i:032x}", "/v1/chat/completions", "POST", 200, 1.5 + i % 7, f"{i % KEYS:016x}",
            "demo", "demo-0", "demo", queued_s, 0.08, owner=f"team {i % 10}",
            usage=Usage(400 + i % 50, 200, 300),
        )  # fmt: skip
        yield ended(record, timeline, 1_795_000_000.0 + i * 0.01, GATEWAY[:8])


def cost(file: Path, count: int, *, history: bool) -> Cost:
    """Write requests into a new database; return the cost of one. Raises DatabaseError."""
    cpu_s = asyncio.run(_write(file, count, history=history))
    return Cost(cpu_s / count * 1e6, file.stat().st_size / count)


async def _write(file: Path, count: int, *, history: bool) -> float:
    """Write requests; return the CPU seconds."""
    made = list(requests(count, history=history))
    database = Database(f"sqlite+aiosqlite:///{file}")
    await database.migrate()
    # NaN is NULL, and takes no time to make.
    plain = patch.object(records, "timeline_to_text", lambda _: math.nan)
    with nullcontext() if history else plain:
        began = time.process_time()
        for number_, place in enumerate(range(0, count, BATCH)):
            await _write_batch(database, number_, made[place : place + BATCH])
        spent_s = time.process_time() - began
    await database.close()  # the last connection writes the WAL into the file
    return spent_s


async def _write_batch(database: Database, batch: int, made: Sequence[EndedRequest]) -> None:
    """Do what `Ledger` does with a batch."""
    sums = records.DailySums()
    async with database.write(Lane.BACKGROUND) as connection:
        for place in range(0, len(made), GROUP):
            rows = records.rows_of(GATEWAY, batch, made[place : place + GROUP], {}, place)
            sums.add(rows)
            await connection.run_sync(insert_records, rows)
        await connection.run_sync(add_sums, sums)


def measure(*, quick: bool) -> Table:
    """Write with and without history in turn; return the table."""
    pairs: list[tuple[Cost, Cost]] = []
    for round_ in range(1 if quick else ROUNDS):
        found: dict[bool, Cost] = {}
        for history in (True, False) if round_ % 2 else (False, True):
            with tempfile.TemporaryDirectory() as home:
                file = Path(home) / "gateway.db"
                found[history] = cost(file, REQUESTS, history=history)
        pairs.append((found[True], found[False]))
    return table(pairs)


def table(pairs: Sequence[tuple[Cost, Cost]]) -> Table:
    """Return the table of costs with and without history."""

    def row(name: str, costs: Sequence[tuple[float, float]]) -> list[str]:
        cpu = estimate(cpu for cpu, _ in costs)
        size = estimate(size for _, size in costs)
        assert cpu is not None
        assert size is not None
        megabytes = size.median * MILLION / 1e6
        return [name, number(cpu.median, 1), interval(cpu, 1), number(megabytes, 0)]

    return Table(
        "Ledger",
        ["", "CPU µs per request", "interval", "MB per million requests"],
        [
            row("with phases", [(one.cpu_us, one.size) for one, _ in pairs]),
            row("without", [(other.cpu_us, other.size) for _, other in pairs]),
            row(
                "difference in each round",
                [(one.cpu_us - other.cpu_us, one.size - other.size) for one, other in pairs],
            ),
        ],
        f"{REQUESTS:,} requests a round, in batches of {BATCH:,} into a new SQLite database: the "
        "CPU of making and writing rows and daily sums, of all threads, and the file, indexes "
        "included. Phases are the timeline, the ID of a request and its index.",
    )
