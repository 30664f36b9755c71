"""The models on this machine, as a form lists them."""

import asyncio
import threading
from collections.abc import Iterable

import pytest

from app.console import local_models
from app.console.local_models import LocalModels
from app.settings import Settings
from engines.plan import LocalModel

FOUND = [LocalModel("/models/one", 1)]


async def test_the_disk_is_read_once_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    turn = threading.Lock()
    overlaps: list[bool] = []

    def read(known: Iterable[str]) -> list[LocalModel]:
        free = turn.acquire(blocking=False)
        overlaps.append(not free)
        threading.Event().wait(0.01)
        if free:
            turn.release()
        return FOUND

    monkeypatch.setattr(local_models, "local_models", read)
    remote = {"kind": "remote", "url": "http://127.0.0.1:1"}
    settings = Settings(models=[{"name": "m", "engines": [remote]}])
    models = LocalModels(lambda: settings)

    async def page() -> None:
        for _ in range(2):  # a form with a chosen model looks twice
            assert await models.find() == FOUND

    await asyncio.gather(*(page() for _ in range(3)))
    assert not any(overlaps)
    assert len(overlaps) < 6  # those who wait share what is found
