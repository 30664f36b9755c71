"""Waiting for conditions that the event loop or another process brings about."""

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE_S = 20.0  # a loaded machine may not run a process for seconds
_POLL_S = 0.002
_MAX_POLL_S = 0.01  # 500 looks a second are 4 % of a core

T = TypeVar("T")


async def wait_until(condition: Callable[[], T], timeout_s: float = PATIENCE_S) -> T:
    """Return the first true value of a condition; raise AssertionError after the timeout."""
    start = time.monotonic()
    while not (value := condition()):
        waited = time.monotonic() - start
        assert waited < timeout_s, _message(condition, timeout_s)
        await asyncio.sleep(min(max(_POLL_S, waited / 20), _MAX_POLL_S))
    return value


def poll_until(
    condition: Callable[[], T], timeout_s: float = PATIENCE_S, every_s: float = 10 * _POLL_S
) -> T:
    """Wait without an event loop, for a condition that takes longer to check."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, _message(condition, timeout_s)
        time.sleep(every_s)
    return value


async def run_pending_tasks(turns: int = 50) -> None:
    """Let the event loop turn so often that every task that can run has run."""
    for _ in range(turns):
        await asyncio.sleep(0)


def _message(condition: Callable[[], object], timeout_s: float) -> str:
    try:
        source = inspect.getsource(condition).strip()
    except (OSError, TypeError):  # not written in Python
        source = repr(condition)
    return f"not true within {timeout_s:g} s: {source}"
