"""A reload of many models: how long it stops the event loop."""

import asyncio
import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.app.reload.gateways import run
from tests.gateway import remote

pytestmark = pytest.mark.slow
MODELS = 500


def models(count: int, limit: int) -> list[dict[str, Any]]:
    engines = [remote("http://127.0.0.1:9")]
    return [
        {
            "name": f"model-{number}",
            "aliases": [f"alias-{number}"],
            "engines": engines,
            "limits": {"requests_per_minute": limit},
        }
        for number in range(count)
    ]


class Turns:
    """The longest turn of the loop, which never sleeps meanwhile, in CPU time of its thread."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    def count(self, before_s: float) -> None:
        """Count the turn since a time of this thread, and the next one."""
        self.longest_s = max(self.longest_s, time.thread_time() - before_s)
        asyncio.get_running_loop().call_soon(self.count, time.thread_time())


@pytest.fixture
def frozen_heap() -> Iterator[None]:
    """The garbage collector as in production (`app/server/run.py`)."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 100)
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


@pytest.mark.usefixtures("frozen_heap")
async def test_reload_of_many_models_stops_the_loop_for_milliseconds(tmp_path: Path) -> None:
    async with run(tmp_path, *models(MODELS, 1)) as one:
        turns = Turns()
        turns.count(time.thread_time())
        for what, count, limit in (("change", MODELS, 2), ("change", MODELS, 3), ("leave", 20, 3)):
            one.file.write(*models(count, limit))
            await asyncio.sleep(0)
            turns.longest_s = 0.0
            assert (await one.reload())["ok"]
            print(f"{turns.longest_s * 1e3:.0f} ms: {MODELS} models {what}")
            assert turns.longest_s < 0.1
