"""One discovered server of a model, from the time it is listed until it has drained.

    listed ──▶ begun ──READY──▶ joined ──not listed──▶ draining ──▶ ended
                 │                                     │
                 └──not listed──▶ ended                └──listed again──▶ begun

A server gets requests only while it has joined. With other settings a second engine begins, and
replaces the joined one when it is READY. A server that is no longer listed stays while no other
engine of the model is READY and new servers are checked for the first time: a list may be replaced
as a whole.

One task carries out the steps of a server one after the other, so that two never overlap: a server
that is listed again while it drains begins anew when that has ended.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from app.fleet.deployment import DeployedEngine, ModelDeployment
from app.fleet.engine_plan import EngineConfig
from app.fleet.fleet import Fleet
from engines.background_tasks import BackgroundTasks
from engines.base import ChangeNotifier, EngineState

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MemberTerms:
    """What the servers of one model share."""

    fleet: Fleet
    deployment: ModelDeployment
    # Notified of each change of a server and of its engine.
    changes: ChangeNotifier
    # Returns whether the servers that are not listed any more are still needed.
    needs_unlisted: Callable[[], bool]
    # End with the gateway at the latest.
    tasks: BackgroundTasks

    @property
    def is_current(self) -> bool:
        """False for a model that was removed, which takes the servers that have joined along."""
        return self.fleet.is_current(self.deployment)


class Member:
    """One server. `wanted` is what it should be: None, not to be there at all."""

    def __init__(self, terms: MemberTerms, name: str, wanted: EngineConfig) -> None:
        self.name = name
        self._terms = terms
        self._wanted: EngineConfig | None = wanted
        self._changes = ChangeNotifier()
        self._changes.forward_to(terms.changes)
        self._joined: DeployedEngine | None = None
        self._begun: DeployedEngine | None = None

    @property
    def wanted(self) -> EngineConfig | None:
        return self._wanted

    @property
    def serves(self) -> bool:
        """True if it stays and is READY."""
        joined = self._joined
        return (
            self._wanted is not None
            and joined is not None
            and joined.engine.state is EngineState.READY
        )

    @property
    def settled(self) -> bool:
        """True unless its first check is under way."""
        if self._joined is not None or self._wanted is None:
            return True
        return self._begun is not None and self._begun.engine.state is EngineState.FAILED

    @property
    def unused_reason(self) -> str | None:
        """Why it gets no requests although it is listed; None if it is an engine or not listed."""
        if self._wanted is None or self._joined is not None:
            return None
        if self._begun is None:
            return "its next check has not begun"
        return self._begun.engine.last_error or "its first check is under way"

    def want(self, config: EngineConfig | None) -> None:
        """Change what it should be; `run` carries it out."""
        if config != self._wanted:
            self._wanted = config
            self._changes.notify()

    async def run(self) -> None:
        """Carry out what is wanted, until it is to be gone and is."""
        while True:
            config, joined = self._wanted, self._joined
            if config is None:
                if joined is None:
                    return
                await self._terms.changes.wait_for(
                    lambda: self._wanted is not None or not self._terms.needs_unlisted()
                )
                if self._wanted is None:
                    await self._leave(joined)
            elif joined is None or joined.config != config:
                await self._join(config, joined)
            else:
                await self._changes.next()

    async def _join(self, config: EngineConfig, old: DeployedEngine | None) -> None:
        """Begin with a config's engine, and use it in place of `old` as soon as it is READY."""
        terms = self._terms
        [new] = terms.fleet.build(terms.deployment.name, (config,))
        engine = new.engine
        terms.deployment.want_adapters(engine)
        self._begun = new
        engine.changes.forward_to(self._changes)
        try:
            await terms.fleet.detached.begin(engine)
            await self._changes.wait_for(
                lambda: self._wanted != config or engine.state is EngineState.READY
            )
        finally:
            engine.changes.stop_forwarding(self._changes)
            self._begun = None
        if self._wanted != config or not terms.is_current:
            await terms.fleet.detached.retire(engine, terms.fleet.drain_s)  # it has no requests
            if not terms.is_current:
                # Without its model it is not wanted, which its owner is about to say.
                await self._changes.wait_for(lambda: self._wanted is None)
            return
        self._replace(old, new)
        self._joined = new
        self._log("joins")
        self._changes.notify()
        if old is not None:
            # Beside the next steps: the new engine may have to leave before the old one has ended.
            terms.tasks.start(self._retire(old), f"retire {self.name}")

    async def _leave(self, joined: DeployedEngine) -> None:
        terms = self._terms
        self._joined = None
        if not terms.is_current:
            return
        self._replace(joined, None)
        self._log("leaves")
        await self._retire(joined)

    def _replace(self, old: DeployedEngine | None, new: DeployedEngine | None) -> None:
        """Have requests use one engine in place of another; None: there is none."""
        fleet, deployment = self._terms.fleet, self._terms.deployment
        if old is not None:
            fleet.detached.add([old.engine])
            deployment.members.remove(old)
        if new is not None:
            fleet.detached.discard(new.engine)
            deployment.members.append(new)
            deployment.members.sort(key=lambda one: one.config.name)
        fleet.publish()

    async def _retire(self, server: DeployedEngine) -> None:
        """Drain an engine that requests do not use any more."""
        await self._terms.fleet.retire_replaced(self._terms.deployment, server, "its server leaves")

    def _log(self, verb: str) -> None:
        model = self._terms.deployment.name
        extra = {"engine": self.name, "model": model}
        log.info("engine %s %s model %s", self.name, verb, model, extra=extra)
