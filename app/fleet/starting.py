"""Starts engines: one, or all that a model begins with."""

import asyncio
from collections.abc import Sequence
from math import inf

from app.fleet.deployment import DeployedEngine
from engines.base import Engine, EngineNotReady

# Timeout for a remote server to become READY.
REMOTE_START_S = 10.0


class NotStarted(Exception):
    """An engine failed to start; the message has its name and the reason."""


async def ensure_ready(engine: Engine) -> None:
    """Start an engine; return once it is READY. Raises EngineNotReady with its own reason."""
    # A managed engine has its own timeout, start_timeout_s, and knows why it failed.
    bound_s = inf if engine.capabilities.managed else REMOTE_START_S
    await engine.ensure_ready(asyncio.get_running_loop().time() + bound_s)


async def start_all(engines: Sequence[DeployedEngine]) -> None:
    """Start engines, which queue for their turns; all have settled when this returns.

    A remote server that does not respond stays as it is, FAILED, and is checked again and again, as
    at the start of a gateway. Raises NotStarted for other engines.
    """
    faults = await asyncio.gather(*map(start, engines), return_exceptions=True)
    for deployed, fault in zip(engines, faults, strict=True):
        tolerated = isinstance(fault, NotStarted) and not deployed.engine.capabilities.managed
        if isinstance(fault, BaseException) and not tolerated:
            raise fault


async def start(deployed: DeployedEngine) -> None:
    """Start an engine; return once it is READY. Raises NotStarted."""
    try:
        await ensure_ready(deployed.engine)
    except EngineNotReady as error:
        raise NotStarted(f"engine {deployed.config.name}: {error}") from None
