"""Starts and stops engines, and replaces those of a model one at a time, with rollback.

`takeover` decides whether an engine and its successor can run at once; the order of the steps is
described there. `moves` says which streams of an engine go on elsewhere. This carries them out.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import inf

from app.fleet.deployment import BuildEngine, DeployedEngine, ModelDeployment, memory_gib
from app.fleet.engine_plan import EngineConfig, EnginePlan
from app.fleet.moves import (
    can_move_within,
    can_wait_for,
    is_refusing,
    moving_streams,
)
from app.fleet.takeover import OverlapCheck
from engines.base import Engine, EngineNotReady, EngineState

log = logging.getLogger(__name__)

# An engine has no requests in flight by now, so this covers only vLLM's teardown.
STOP_GRACE_S = 5.0
# Timeout for a remote server to become READY.
REMOTE_START_S = 10.0

# Requests of a replica are a plain integer, without an event: that would cost every request.
DRAIN_POLL_S = 0.05

# Returns whether a config's engine can start alongside an engine, as of now.
CheckOverlap = Callable[[DeployedEngine, EngineConfig], Awaitable[OverlapCheck]]
# States of an engine that was not requested to run. A model on demand leaves an engine FAILED
# after a failed load.
IDLE_STATES = frozenset({EngineState.STOPPED, EngineState.ASLEEP, EngineState.FAILED})


async def ensure_ready(engine: Engine) -> None:
    """Start an engine; return once it is READY. Raises EngineNotReady with its own reason."""
    # A managed engine has its own timeout, start_timeout_s, and knows why it failed.
    bound_s = inf if engine.capabilities.managed else REMOTE_START_S
    await engine.ensure_ready(asyncio.get_running_loop().time() + bound_s)


class NotStarted(Exception):
    """An engine failed to start; the message has its name and the reason."""


@dataclass(frozen=True, slots=True)
class ChangeTerms:
    """Options for carrying out a plan."""

    drain_s: float
    check_overlap: CheckOverlap
    start: bool  # new engines are started; otherwise they are only built
    wake: bool = False  # kept engines that are idle are started, too


class Fleet:
    """Starts and stops engines. `publish` is called whenever a model's engines have changed."""

    def __init__(self, build: BuildEngine, publish: Callable[[], None]) -> None:
        self._build = build
        self._publish = publish
        # Engines that belong to no model any more, or not yet.
        self._detached: set[Engine] = set()
        # GiB that engines which start alongside others are going to take.
        self._expected_gib: dict[Engine, float] = {}

    @property
    def uncounted_gib(self) -> float:
        """Memory of detached engines, and what starting engines are still going to take."""
        held = sum(memory_gib(engine) for engine in self._detached)
        return held + sum(
            max(gib - memory_gib(engine), 0.0) for engine, gib in self._expected_gib.items()
        )

    async def close(self) -> None:
        """Stop all detached engines."""
        await asyncio.gather(*(engine.stop(STOP_GRACE_S) for engine in self._detached))
        self._detached.clear()

    def detach(self, deployment: ModelDeployment) -> None:
        """Take over the engines of a model that left the catalogue, until `retire` stops each."""
        self._detached |= {deployed.engine for deployed in deployment.all_engines}

    async def retire(self, engine: Engine, drain_s: float) -> None:
        """Drain an engine for at most `drain_s` seconds, then stop it. Its streams do not move."""
        await self._stop_after(engine.drain(), engine, drain_s)

    async def _stop_after(self, drained: Awaitable[None], engine: Engine, drain_s: float) -> None:
        self._detached.add(engine)
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
        self._detached.discard(engine)

    def build(self, model: str, configs: Sequence[EngineConfig]) -> list[DeployedEngine]:
        """Return engines that are not started."""
        return [DeployedEngine(config, self._build(model, config)) for config in configs]

    async def start_all(self, engines: Sequence[DeployedEngine]) -> None:
        """Start engines, which queue for their turns; all have settled when this returns.

        Raises NotStarted.
        """
        faults = await asyncio.gather(*map(_start, engines), return_exceptions=True)
        for fault in faults:
            if isinstance(fault, BaseException):
                raise fault

    def add(
        self, deployment: ModelDeployment, configs: Sequence[EngineConfig]
    ) -> list[DeployedEngine]:
        """Add engines to a model and return them; they are not started."""
        added = self.build(deployment.name, configs)
        deployment.engines += added
        self._publish()
        return added

    # Discovered servers

    async def begin(self, server: DeployedEngine) -> None:
        """Start to check a server that no request sees yet; `retire` ends it."""
        self._detached.add(server.engine)
        with contextlib.suppress(EngineNotReady):
            await server.engine.ensure_ready(asyncio.get_running_loop().time())

    def join(
        self, deployment: ModelDeployment, server: DeployedEngine, old: DeployedEngine | None
    ) -> None:
        """Have requests use a server that has begun, in place of `old` where that is given."""
        self._detached.discard(server.engine)
        if old is not None:
            self._detached.add(old.engine)
            deployment.members.remove(old)
        deployment.members.append(server)
        deployment.members.sort(key=lambda one: one.config.name)
        self._publish()

    def leave(self, deployment: ModelDeployment, server: DeployedEngine) -> None:
        """Have no more requests use a server; `retire_server` ends it."""
        self._detached.add(server.engine)
        deployment.members.remove(server)
        self._publish()

    async def retire_server(
        self, deployment: ModelDeployment, server: DeployedEngine, drain_s: float
    ) -> None:
        """Drain a server that requests do not use any more, for at most `drain_s` seconds."""
        await self._retire_after(deployment, server, drain_s, "its server leaves")

    async def change(
        self, deployment: ModelDeployment, plan: EnginePlan, terms: ChangeTerms
    ) -> None:
        """Carry out a plan; kept engines are not touched.

        A successor with a name of its own starts alongside its predecessor unless
        `terms.check_overlap` reports an obstacle by now. Raises NotStarted after a rollback to the
        engines of before.
        """
        before = deployment.configs
        # Steps done or begun: the engine of before, and the one of after.
        steps: list[tuple[EngineConfig | None, EngineConfig | None]] = []
        try:
            for config in plan.removed:  # first: new engines may need their memory
                steps.append((config, None))
                await self.remove(deployment, config.name, terms.drain_s)
            for old, new in plan.replaced:
                steps.append((old, new))
                await self._replace(deployment, old.name, new, terms)
            steps += [(None, config) for config in plan.added]
            idle = [one for one in deployment.engines if one.engine.state in IDLE_STATES]
            added = self.add(deployment, plan.added)
            if terms.start:
                await self.start_all([*added, *(idle if terms.wake else ())])
        except NotStarted as error:
            faults = [str(error)]
            for was, now in reversed(steps):
                faults += await self._roll_back(deployment, was, now, terms)
            _sort(deployment, before)
            self._publish()
            raise NotStarted("; ".join(faults)) from None
        _sort(deployment, plan.after)
        self._publish()

    @asynccontextmanager
    async def moving_to_successors(
        self, deployment: ModelDeployment, plan: EnginePlan
    ) -> AsyncIterator[None]:
        """Move the streams of an on-demand model's replaced engines while the body unloads it.

        They wait for its load with the new engines, where `continuation_wait_s` allows for it.
        """
        async with AsyncExitStack() as stack:
            for was, now in plan.replaced:
                old = deployment.find(was.name)
                assert old is not None
                can_move = partial(can_wait_for, deployment, old, now, inf)
                moving = moving_streams(old.replica, can_move, "it is replaced")
                await stack.enter_async_context(moving)
            yield

    async def remove(self, deployment: ModelDeployment, name: str, drain_s: float) -> None:
        """Drain and stop an engine of a model, for at most `drain_s` seconds; its streams move."""
        deployed = deployment.find(name)
        assert deployed is not None
        replica = deployed.replica

        def can_move() -> bool:
            return is_refusing(replica) and can_move_within(deployment, deployed)

        async with moving_streams(replica, can_move, "it is removed"):
            await self.retire(deployed.engine, drain_s)
        deployment.engines.remove(deployed)
        self._publish()

    async def _replace(
        self, deployment: ModelDeployment, name: str, config: EngineConfig, terms: ChangeTerms
    ) -> None:
        """Replace the engine with a name by that of a config. Raises NotStarted."""
        old = deployment.find(name)
        assert old is not None
        if config.spec.kind == "remote":
            await self._replace_by_remote(deployment, old, config, terms.drain_s)
            return
        if terms.start and config.name != name and old.engine.state is EngineState.READY:
            overlap = await terms.check_overlap(old, config)
            if overlap.obstacle is None:
                await self._take_over(
                    deployment, old, config, overlap.need_gib or 0.0, terms.drain_s
                )
                return
            log.warning(
                "engine %s ends before %s starts: %s",
                name,
                config.name,
                overlap.obstacle,
                extra={"engine": name},
            )
        await self._retire_before(deployment, old, config, terms)
        [new] = self.build(deployment.name, (config,))
        deployment.engines[deployment.engines.index(old)] = new
        self._publish()
        if terms.start:
            await _start(new)

    async def _retire_before(
        self,
        deployment: ModelDeployment,
        old: DeployedEngine,
        config: EngineConfig,
        terms: ChangeTerms,
    ) -> None:
        """Drain and stop an engine that has to end before its successor starts."""
        loop, replica = asyncio.get_running_loop(), old.replica
        ends_at = loop.time() + terms.drain_s

        def can_move() -> bool:
            return is_refusing(replica) and (
                can_move_within(deployment, old)
                or (terms.start and can_wait_for(deployment, old, config, ends_at - loop.time()))
            )

        async with moving_streams(replica, can_move, "it is replaced"):
            await self.retire(old.engine, terms.drain_s)

    async def _replace_by_remote(
        self, deployment: ModelDeployment, old: DeployedEngine, config: EngineConfig, drain_s: float
    ) -> None:
        """Replace an engine by a remote server once that is READY; it needs no memory here.

        Raises NotStarted.
        """
        [new] = self.build(deployment.name, (config,))
        self._detached.add(new.engine)
        try:
            await _start(new)
        except NotStarted:
            await self.retire(new.engine, 0.0)
            raise
        self._detached.discard(new.engine)
        self._detached.add(old.engine)
        deployment.engines[deployment.engines.index(old)] = new
        self._publish()
        await self._retire_after(deployment, old, drain_s, "it is replaced")

    async def _take_over(
        self,
        deployment: ModelDeployment,
        old: DeployedEngine,
        config: EngineConfig,
        need_gib: float,
        drain_s: float,
    ) -> None:
        """Start an engine alongside another, which is retired when the new one is READY.

        Raises NotStarted; then the old one serves as before.
        """
        [new] = self.build(deployment.name, (config,))
        deployment.engines.insert(deployment.engines.index(old) + 1, new)
        deployment.successor = new
        self._expected_gib[new.engine] = need_gib
        self._publish()
        log.info(
            "engine %s starts alongside %s",
            new.engine.name,
            old.engine.name,
            extra={"engine": new.engine.name},
        )
        try:
            await _start(new)
        except NotStarted as error:
            del self._expected_gib[new.engine]
            deployment.engines.remove(new)
            deployment.successor = None
            self._publish()
            await self.retire(new.engine, 0.0)
            raise NotStarted(f"{error}; {old.engine.name} serves on") from None
        # No task switch from here to `_publish`: a READY engine is listed at every moment.
        self._detached.add(old.engine)
        deployment.engines.remove(old)
        deployment.successor = None
        self._publish()
        log.info(
            "engine %s has taken over from %s",
            new.engine.name,
            old.engine.name,
            extra={"engine": new.engine.name},
        )
        await self._retire_after(deployment, old, drain_s, "it is replaced")
        del self._expected_gib[new.engine]
        self._publish()  # memory is free, for which a model on demand may wait

    async def _retire_after(
        self, deployment: ModelDeployment, old: DeployedEngine, drain_s: float, why: str
    ) -> None:
        """Drain and stop an engine that has left the catalogue; `why` is for the log."""
        async with moving_streams(old.replica, lambda: can_move_within(deployment, old), why):
            await self._stop_after(_drain_replaced(old), old.engine, drain_s)

    async def _roll_back(
        self,
        deployment: ModelDeployment,
        was: EngineConfig | None,
        now: EngineConfig | None,
        terms: ChangeTerms,
    ) -> list[str]:
        """Undo one step; return what failed."""
        present = None if now is None else deployment.find(now.name)
        if was is not None and (old := deployment.find(was.name)) is not None and old.config is was:
            return []  # it still serves
        terms = replace(terms, start=True)
        try:
            if was is not None and present is not None:
                await self._replace(deployment, present.config.name, was, terms)
            elif was is not None:
                [again] = self.build(deployment.name, (was,))
                deployment.engines.append(again)
                self._publish()
                await _start(again)
            elif present is not None:
                await self.remove(deployment, present.config.name, terms.drain_s)
        except NotStarted as error:
            return [f"with its old settings, {error}"]
        return []


async def _drain_replaced(replaced: DeployedEngine) -> None:
    """Drain an engine that has left the catalogue.

    It refuses nothing before its last request: one that chose it just now may still be on its way.
    """
    while replaced.replica.in_flight:  # noqa: ASYNC110 - see DRAIN_POLL_S
        await asyncio.sleep(DRAIN_POLL_S)
    await replaced.engine.drain()


async def _start(deployed: DeployedEngine) -> None:
    try:
        await ensure_ready(deployed.engine)
    except EngineNotReady as error:
        raise NotStarted(f"engine {deployed.config.name}: {error}") from None


def _sort(deployment: ModelDeployment, configs: tuple[EngineConfig, ...]) -> None:
    order = {config.name: place for place, config in enumerate(configs)}
    # An engine that could not be rolled back has another name, and comes last.
    deployment.engines.sort(key=lambda one: order.get(one.config.name, len(order)))
