"""The engines of one model, and how they become others: one at a time, and back if that fails.

`takeover.py` has the two ways in which one makes way for another; this carries them out.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from app.fleet.slots import Plan, Slot
from app.reload.takeover import Prospect
from app.residency.entry import OnDemand
from app.routing import POLICIES, Bounds, Model, Replica, SelectionPolicy
from app.settings import ModelSettings, Settings
from engines.base import Engine, EngineNotReady, EngineState

log = logging.getLogger(__name__)

# vLLM has nothing in flight by now, so this is only the time it takes to tear down.
STOP_GRACE_S = 5.0
# How long a remote server is waited for.
REMOTE_START_S = 10.0

# A replica counts its requests as a plain integer: an event would cost every request something.
DRAIN_POLL_S = 0.05

# Makes an engine that is not started: of which model, and under what name.
Build = Callable[[str, Slot], Replica]
# Tells whether another engine can start beside one, at this moment.
Ask = Callable[["Running", Slot], Awaitable[Prospect]]
# States of an engine that nobody has asked to run.
# A model on demand leaves one FAILED whose load came to nothing.
IDLE = frozenset({EngineState.STOPPED, EngineState.ASLEEP, EngineState.FAILED})


async def start(engine: Engine) -> None:
    """Return once an engine is READY. Raises EngineNotReady with the engine's own reason."""
    # One of ours has its own bound, start_timeout_s, and knows why it failed.
    bound_s = inf if engine.capabilities.managed else REMOTE_START_S
    await engine.ensure_ready(asyncio.get_running_loop().time() + bound_s)


@dataclass(slots=True, eq=False)
class Running:
    """An engine and what it was made from."""

    slot: Slot
    replica: Replica

    @property
    def engine(self) -> Engine:
        return self.replica.engine


@dataclass(slots=True, eq=False)
class ModelDeployment:
    """A model as it stands: the settings in force, and its engines."""

    settings: ModelSettings
    engines: list[Running]
    created: int = field(default_factory=lambda: int(time.time()))
    # Starts beside the engine that it replaces. Requests and operators see it; the keeper, which
    # loads and unloads, does not before it has taken over.
    coming: Running | None = None
    # Kept across reloads that do not change it, with all that it has learned.
    _policy: SelectionPolicy | None = field(default=None, init=False)

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def slots(self) -> tuple[Slot, ...]:
        return tuple(one.slot for one in self.engines)

    def find(self, name: str) -> Running | None:
        """Return the engine of a name."""
        return next((one for one in self.engines if one.slot.name == name), None)

    def on_demand(self) -> OnDemand | None:
        """Return the model as the keeper has it, None for one that is always loaded."""
        if self.settings.load == "eager":
            return None
        engines = (one.engine for one in self.engines if one is not self.coming)
        return OnDemand(self.settings, tuple(e for e in engines if e.capabilities.unloadable))

    def model(self) -> Model:
        """Return the model as the catalogue has it."""
        settings = self.settings
        policy = POLICIES[settings.policy]
        if type(self._policy) is not policy:
            self._policy = policy()
        return Model(
            settings.name,
            settings.aliases,
            tuple(one.replica for one in self.engines),
            bounds=Bounds(
                settings.max_choices,
                settings.max_output_tokens,
                settings.max_sequences,
                settings.max_inputs,
            ),
            limits=settings.limits,
            on_demand=settings.load == "on_demand",
            policy=self._policy,
            fallbacks=settings.fallbacks,
            fields=settings.fields,
            isolation=settings.isolation,
            media_domains=frozenset(settings.media.domains),
            stores_responses=settings.stores_responses,
            created=self.created,
            load_wait_s=settings.load_wait_s,
            max_waiting=settings.queue.max_waiting,
        )


def stand(
    settings: Settings, slots: Mapping[str, Sequence[Slot]], build: Build
) -> list[ModelDeployment]:
    """Return every model with its engines, none of them started."""
    return [
        ModelDeployment(
            model, [Running(slot, build(model.name, slot)) for slot in slots[model.name]]
        )
        for model in settings.models
    ]


class NotStarted(Exception):
    """An engine did not start; the text names it and says why."""


class Fleet:
    """Ends and starts engines. `publish` is called whenever a model's engines have changed."""

    def __init__(self, build: Build, publish: Callable[[], None]) -> None:
        self._build = build
        self._publish = publish
        # Engines that are in no model any more, or not yet.
        self._loose: set[Engine] = set()
        # Engines that start beside others, with the GiB that each is going to take.
        self._expected: dict[Engine, float] = {}

    @property
    def uncounted_gib(self) -> float:
        """Memory that engines hold which no model has, and that those which start will take."""
        held = sum(memory_gib(engine) for engine in self._loose)
        return held + sum(
            max(gib - memory_gib(engine), 0.0) for engine, gib in self._expected.items()
        )

    async def close(self) -> None:
        """End what no model has."""
        await asyncio.gather(*(engine.stop(STOP_GRACE_S) for engine in self._loose))
        self._loose.clear()

    def let_go(self, standing: ModelDeployment) -> None:
        """Note that a model's engines are in the catalogue no more; `retire` ends each."""
        self._loose |= {one.engine for one in standing.engines}

    async def retire(self, engine: Engine, drain_s: float) -> None:
        """Let the requests of an engine end, for `drain_s` seconds at most, and stop it."""
        await self._stop_after(engine.drain(), engine, drain_s)

    async def _stop_after(self, drained: Awaitable[None], engine: Engine, drain_s: float) -> None:
        self._loose.add(engine)
        try:
            async with asyncio.timeout(drain_s):
                await drained
        except TimeoutError:
            log.warning("engine %s: requests did not end in %g s", engine.name, drain_s)
        await engine.stop(STOP_GRACE_S)
        self._loose.discard(engine)

    def build(self, model: str, slots: tuple[Slot, ...]) -> list[Running]:
        """Return engines that are not started."""
        return [Running(slot, self._build(model, slot)) for slot in slots]

    async def start_all(self, engines: Sequence[Running]) -> None:
        """Start engines, which take turns. Raises NotStarted, once all have settled."""
        faults = await asyncio.gather(*map(_started, engines), return_exceptions=True)
        for fault in faults:
            if isinstance(fault, BaseException):
                raise fault

    async def change(
        self,
        standing: ModelDeployment,
        plan: Plan,
        drain_s: float,
        *,
        wanted: bool,
        wake: bool,
        ask: Ask,
    ) -> None:
        """Carry out a plan; engines that are kept are not touched.

        `wanted`: those that come are started, else only made. `wake`: those that are kept and do
        not run are started, too. A successor with a name of its own starts beside its predecessor
        unless `ask` says that it cannot by now. Raises NotStarted, with every engine of before in
        its place again.
        """
        before = standing.slots
        # What is done, or begun: an engine, and the one in its place.
        touched: list[tuple[Slot | None, Slot | None]] = []
        try:
            for slot in plan.removed:  # first: what comes may need their memory
                touched.append((slot, None))
                await self._remove(standing, slot.name, drain_s)
            for old, new in plan.replaced:
                touched.append((old, new))
                await self._replace(standing, old.name, new, drain_s, wanted=wanted, ask=ask)
            touched += [(None, slot) for slot in plan.added]
            come = self.build(standing.name, plan.added)
            asleep = [one for one in standing.engines if wake and one.engine.state in IDLE]
            standing.engines += come
            self._publish()
            if wanted:
                await self.start_all([*come, *asleep])
        except NotStarted as error:
            faults = [str(error)]
            for was, now in reversed(touched):
                faults += await self._back(standing, was, now, drain_s, ask)
            _sort(standing, before)
            self._publish()
            raise NotStarted("; ".join(faults)) from None
        _sort(standing, plan.after)
        self._publish()

    async def _remove(self, standing: ModelDeployment, name: str, drain_s: float) -> None:
        one = standing.find(name)
        assert one is not None
        await self.retire(one.engine, drain_s)
        standing.engines.remove(one)
        self._publish()

    async def _replace(
        self,
        standing: ModelDeployment,
        name: str,
        slot: Slot,
        drain_s: float,
        *,
        wanted: bool,
        ask: Ask,
    ) -> None:
        """Put another engine in the place of one. Raises NotStarted.

        A remote server takes nothing that the old engine must give back first, so it is asked
        before that is let go.
        """
        old = standing.find(name)
        assert old is not None
        place = standing.engines.index(old)
        if slot.spec.kind == "remote":
            [new] = self.build(standing.name, (slot,))
            self._loose.add(new.engine)
            try:
                await _started(new)
            except NotStarted:
                await self.retire(new.engine, 0.0)
                raise
            self._loose.discard(new.engine)
            self._loose.add(old.engine)
            standing.engines[place] = new
            self._publish()
            await self._stop_after(_drained(old), old.engine, drain_s)
        elif wanted and slot.name != name and old.engine.state is EngineState.READY:
            prospect = await ask(old, slot)
            if prospect.obstacle is None:
                await self._take_over(standing, old, slot, prospect.need_gib or 0.0, drain_s)
            else:
                told = (name, slot.name, prospect.obstacle)
                log.warning("engine %s ends before %s starts: %s", *told)
                await self._replace_in_place(standing, old, slot, drain_s, wanted=wanted)
        else:
            await self._replace_in_place(standing, old, slot, drain_s, wanted=wanted)

    async def _replace_in_place(
        self, standing: ModelDeployment, old: Running, slot: Slot, drain_s: float, *, wanted: bool
    ) -> None:
        """End an engine, then start another in its place. Raises NotStarted."""
        await self.retire(old.engine, drain_s)
        [new] = self.build(standing.name, (slot,))
        standing.engines[standing.engines.index(old)] = new
        self._publish()
        if wanted:
            await _started(new)

    async def _take_over(
        self, standing: ModelDeployment, old: Running, slot: Slot, need_gib: float, drain_s: float
    ) -> None:
        """Start an engine beside another, which ends when the new one is READY.

        Raises NotStarted; then the old one serves as before.
        """
        [new] = self.build(standing.name, (slot,))
        standing.engines.insert(standing.engines.index(old) + 1, new)
        standing.coming = new
        self._expected[new.engine] = need_gib
        self._publish()
        log.info("engine %s starts beside %s", new.engine.name, old.engine.name)
        try:
            await _started(new)
        except NotStarted as error:
            del self._expected[new.engine]
            standing.engines.remove(new)
            standing.coming = None
            self._publish()
            await self.retire(new.engine, 0.0)
            raise NotStarted(f"{error}; {old.engine.name} serves on") from None
        # From here to `_publish` nothing else runs: there is no moment without a READY engine.
        self._loose.add(old.engine)
        standing.engines.remove(old)
        standing.coming = None
        self._publish()
        log.info("engine %s has taken over from %s", new.engine.name, old.engine.name)
        await self._stop_after(_drained(old), old.engine, drain_s)
        del self._expected[new.engine]
        self._publish()  # memory is free, for which a model on demand may wait

    async def _back(
        self,
        standing: ModelDeployment,
        was: Slot | None,
        now: Slot | None,
        drain_s: float,
        ask: Ask,
    ) -> list[str]:
        """Bring an engine back to what it was; return what failed."""
        there = None if now is None else standing.find(now.name)
        if was is not None and (old := standing.find(was.name)) is not None and old.slot is was:
            return []  # it was not let go
        try:
            if was is not None and there is not None:
                await self._replace(standing, there.slot.name, was, drain_s, wanted=True, ask=ask)
            elif was is not None:
                [again] = self.build(standing.name, (was,))
                standing.engines.append(again)
                self._publish()
                await _started(again)
            elif there is not None:
                await self._remove(standing, there.slot.name, drain_s)
        except NotStarted as error:
            return [f"with its old settings, {error}"]
        return []


async def _drained(replaced: Running) -> None:
    """Return when an engine that is in the catalogue no more has no request.

    It refuses none before: one that chose it an instant ago may not have reached it yet.
    """
    while replaced.replica.in_flight:  # noqa: ASYNC110 - see DRAIN_POLL_S
        await asyncio.sleep(DRAIN_POLL_S)
    await replaced.engine.drain()


async def _started(one: Running) -> None:
    try:
        await start(one.engine)
    except EngineNotReady as error:
        raise NotStarted(f"engine {one.slot.name}: {error}") from None


def _sort(standing: ModelDeployment, slots: tuple[Slot, ...]) -> None:
    order = {slot.name: place for place, slot in enumerate(slots)}
    # One that could not be brought back to what it was has another name, and stands last.
    standing.engines.sort(key=lambda one: order.get(one.slot.name, len(order)))


def memory_gib(engine: Engine) -> float:
    """Return the GiB that an engine of this machine takes, as far as that is known."""
    return engine.memory_gib or 0.0
