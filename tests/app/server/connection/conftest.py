"""What tests of tasks share."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest


@pytest.fixture
async def reported() -> AsyncIterator[list[dict[str, Any]]]:
    """What the loop's exception handler was called with."""
    loop = asyncio.get_running_loop()
    told: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: told.append(context))
    yield told
    loop.set_exception_handler(None)
