"""The engines of one model, and how they become others: one at a time, and back if that fails."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from app.residency.entry import OnDemand
from app.routing.affinity import PrefixAffinity, SessionAffinity
from app.routing.catalogue import Bounds, Model
from app.routing.policy import LeastLoaded, RoundRobin, SelectionPolicy
from app.routing.replica import Replica
from app.routing.slots import Plan, Slot, initial_slots
from app.settings import ModelSettings, Settings
from engines.base import Engine, EngineState, EngineUnavailable
from engines.process import ProcessEngine

log = logging.getLogger(__name__)

# vLLM has nothing in flight by now, so this is only the time it takes to tear down.
STOP_GRACE_S = 5.0
# How long a remote server is waited for.
REMOTE_START_S = 10.0

# Makes an engine that is not started: of which model, and under what name.
Build = Callable[[str, Slot], Replica]
POLICIES: Mapping[str, type[SelectionPolicy]] = {
    "least_loaded": LeastLoaded,
    "prefix": PrefixAffinity,
    "round_robin": RoundRobin,
    "session": SessionAffinity,
}
# States of an engine that nobody has asked to run.
# A model on demand leaves one FAILED whose load came to nothing.
IDLE = frozenset({EngineState.STOPPED, EngineState.ASLEEP, EngineState.FAILED})


async def start(slot: Slot, engine: Engine) -> None:
    """Return once an engine is READY. Raises EngineUnavailable with the engine's own reason."""
    remote = slot.spec.kind == "remote"
    # One of ours has its own bound, start_timeout_s, and knows why it failed.
    bound_s = REMOTE_START_S if remote else float("inf")
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
class Standing:
    """A model as it stands: the settings in force, and its engines."""

    settings: ModelSettings
    engines: list[Running]
    created: int = field(default_factory=lambda: int(time.time()))
    # What it has learned outlasts a reload that changes something else.
    _policy: SelectionPolicy = field(default_factory=LeastLoaded, init=False)

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
        engines = (one.engine for one in self.engines)
        return OnDemand(self.settings, tuple(e for e in engines if isinstance(e, ProcessEngine)))

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
            Bounds(
                settings.max_choices,
                settings.max_output_tokens,
                settings.max_sequences,
                settings.max_inputs,
            ),
            settings.limits,
            settings.load == "on_demand",
            self._policy,
            settings.fallbacks,
            settings.fields,
            settings.isolation,
            frozenset(settings.media.domains),
            settings.stores_responses,
            self.created,
            settings.load_wait_s,
            settings.queue.max_waiting,
        )


def stand(settings: Settings, build: Build) -> list[Standing]:
    """Return every model with its engines, none of them started."""
    slots = initial_slots(settings)
    return [
        Standing(model, [Running(slot, build(model.name, slot)) for slot in slots[model.name]])
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

    async def close(self) -> None:
        """End what no model has."""
        await asyncio.gather(*(engine.stop(STOP_GRACE_S) for engine in self._loose))
        self._loose.clear()

    def let_go(self, standing: Standing) -> None:
        """Note that a model's engines are in the catalogue no more; `retire` ends each."""
        self._loose |= {one.engine for one in standing.engines}

    async def retire(self, engine: Engine, drain_s: float) -> None:
        """Let the requests of an engine end, for `drain_s` seconds at most, and stop it."""
        self._loose.add(engine)
        try:
            async with asyncio.timeout(drain_s):
                await engine.drain()
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
        self, standing: Standing, plan: Plan, drain_s: float, *, wanted: bool, wake: bool
    ) -> None:
        """Carry out a plan; engines that are kept are not touched.

        `wanted`: those that come are started, else only made. `wake`: those that are kept and do
        not run are started, too. Raises NotStarted, with every engine of before in its place again.
        """
        before = standing.slots
        touched: list[str] = []
        try:
            for slot in plan.removed:  # first: what comes may need their memory
                touched.append(slot.name)
                await self._remove(standing, slot.name, drain_s)
            for old, new in plan.replaced:
                touched.append(new.name)
                await self._replace(standing, old.name, new, drain_s, wanted=wanted)
            touched += [slot.name for slot in plan.added]
            come = self.build(standing.name, plan.added)
            asleep = [one for one in standing.engines if wake and one.engine.state in IDLE]
            standing.engines += come
            self._publish()
            if wanted:
                await self.start_all([*come, *asleep])
        except NotStarted as error:
            faults = [str(error)]
            for name in reversed(touched):
                faults += await self._back(standing, before, name, drain_s)
            _sort(standing, before)
            self._publish()
            raise NotStarted("; ".join(faults)) from None
        _sort(standing, plan.after)
        self._publish()

    async def _remove(self, standing: Standing, name: str, drain_s: float) -> None:
        one = standing.find(name)
        assert one is not None
        await self.retire(one.engine, drain_s)
        standing.engines.remove(one)
        self._publish()

    async def _replace(
        self, standing: Standing, name: str, slot: Slot, drain_s: float, *, wanted: bool
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
            standing.engines[place] = new
            self._publish()
            await self.retire(old.engine, drain_s)
        else:
            await self.retire(old.engine, drain_s)
            [new] = self.build(standing.name, (slot,))
            standing.engines[place] = new
            self._publish()
            if wanted:
                await _started(new)

    async def _back(
        self, standing: Standing, before: tuple[Slot, ...], name: str, drain_s: float
    ) -> list[str]:
        """Bring an engine back to what it was; return what failed."""
        slot = next((slot for slot in before if slot.name == name), None)
        now = standing.find(name)
        if now is not None and now.slot is slot:
            return []  # it was not let go
        if now is not None:
            await self._remove(standing, name, drain_s)
        if slot is None:
            return []
        [again] = self.build(standing.name, (slot,))
        standing.engines.append(again)
        self._publish()
        try:
            await _started(again)
        except NotStarted as error:
            return [f"with its old settings, {error}"]
        return []


async def _started(one: Running) -> None:
    try:
        await start(one.slot, one.engine)
    except EngineUnavailable as error:
        raise NotStarted(f"engine {one.slot.name}: {error}") from None


def _sort(standing: Standing, slots: tuple[Slot, ...]) -> None:
    order = {slot.name: place for place, slot in enumerate(slots)}
    standing.engines.sort(key=lambda one: order[one.slot.name])
