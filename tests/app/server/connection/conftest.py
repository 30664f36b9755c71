"""Fixtures for tests of tasks."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest


@pytest.fixture
async def reported() -> AsyncIterator[list[dict[str, Any]]]:
    """Contexts that the loop's exception handler was called with."""
    loop = asyncio.get_running_loop()
    contexts: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: contexts.append(context))
    yield contexts
    loop.set_exception_handler(None)
