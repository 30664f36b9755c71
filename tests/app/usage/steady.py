"""A process that adds a record every few milliseconds and prints when, until it is killed."""

import asyncio
import sys
import time

from tests.app.usage.records import ledger_for, opened, record

EVERY_S = 0.002


async def main(url: str) -> None:
    async with opened(url) as database:
        ledger = ledger_for(database)
        running = asyncio.create_task(ledger.run())
        number = 0
        while not running.done():
            ledger.end(*record(request_id=str(number)))
            print(f"{time.time()} {number}", flush=True)
            number += 1
            await asyncio.sleep(EVERY_S)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
