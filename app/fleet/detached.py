"""Engines that belong to no model any more, or not yet: they drain and stop, or are checked."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Iterable

from app.fleet.deployment import DeployedEngine, ModelDeployment, memory_gib
from app.fleet.moves import can_move_within, moving_streams
from engines.base import Engine, EngineNotReady

log = logging.getLogger(__name__)

# An engine has no requests in flight by now, so this covers only vLLM's teardown.
STOP_GRACE_S = 5.0
# Requests of a replica are a plain integer, without an event: that would cost every request.
DRAIN_POLL_S = 0.05


class DetachedEngines:
    """Holds these engines until each has stopped or has joined a model, and counts their memory."""

    def __init__(self) -> None:
        self._engines: set[Engine] = set()
        # GiB that engines which start alongside others are going to take.
        self.expected_gib: dict[Engine, float] = {}

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self._engines)

    @property
    def uncounted_gib(self) -> float:
        """Memory of these engines, and what starting engines are still going to take."""
        held = sum(memory_gib(engine) for engine in self._engines)
        return held + sum(
            max(gib - memory_gib(engine), 0.0) for engine, gib in self.expected_gib.items()
        )

    def add(self, engines: Iterable[Engine]) -> None:
        """Take over engines that leave their model; `retire` or `retire_replaced` stops each."""
        self._engines.update(engines)

    def discard(self, engine: Engine) -> None:
        """Let go of an engine that joins a model."""
        self._engines.discard(engine)

    async def begin(self, server: Engine) -> None:
        """Start to check a server that no request sees yet; `retire` ends it."""
        self._engines.add(server)
        with contextlib.suppress(EngineNotReady):
            await server.ensure_ready(asyncio.get_running_loop().time())

    async def retire(self, engine: Engine, drain_s: float) -> None:
        """Drain an engine for at most `drain_s` seconds, then stop it. Its streams do not move."""
        await self._stop_after(engine.drain(), engine, drain_s)

    async def retire_replaced(
        self, deployment: ModelDeployment, old: DeployedEngine, drain_s: float, why: str
    ) -> None:
        """Drain and stop an engine that has left the catalogue; `why` is for the log."""
        async with moving_streams(old.replica, lambda: can_move_within(deployment, old), why):
            await self._stop_after(_drain_replaced(old), old.engine, drain_s)

    async def close(self) -> None:
        """Stop all of them."""
        await asyncio.gather(*(engine.stop(STOP_GRACE_S) for engine in self._engines))
        self._engines.clear()

    async def _stop_after(self, drained: Awaitable[None], engine: Engine, drain_s: float) -> None:
        self._engines.add(engine)
        try:
            async with asyncio.timeout(drain_s):
                await drained
        except TimeoutError:
            log.warning(
                "engine %s: requests did not end within %g s",
                engine.name,
                drain_s,
                extra={"engine": engine.name},
            )
        engine.retired = True
        await engine.stop(STOP_GRACE_S)
        self._engines.discard(engine)


async def _drain_replaced(replaced: DeployedEngine) -> None:
    """Drain an engine that has left the catalogue.

    It refuses nothing before its last request: one that chose it just now may still be on its way.
    """
    while replaced.replica.in_flight:  # noqa: ASYNC110 - see DRAIN_POLL_S
        await asyncio.sleep(DRAIN_POLL_S)
    await replaced.engine.drain()
