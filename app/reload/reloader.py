"""A new configuration for a gateway that runs: read, compared, applied; never half of a model.

First everything is read and checked, so that a fault in the file touches nothing. Then models go,
models change, one after the other, and models come. An engine that changes starts beside the one
that it replaces where both fit (`takeover.py`). A model whose new engine does not start has its old
engines and all of its old settings when the report is made; the others are not affected.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from app.auth.authenticator import Authenticator
from app.errors import Conflict, GatewayError, InvalidConfiguration
from app.fleet.builder import Builder, Placed, Slots
from app.fleet.fleet import IDLE, Ask, Fleet, ModelDeployment, NotStarted, Running, memory_gib
from app.fleet.preflight import preflight
from app.fleet.slots import Plan, Slot, plan
from app.relay.services import RelayBounds, RelayServices, memory_bounds
from app.reload.choice import Seats, choose
from app.reload.difference import Addition, Difference, ModelChange, applied, difference
from app.reload.report import ModelReport, Outcome, Report
from app.reload.takeover import Machine, Present, Prospect, prospect
from app.settings import ConfigError, ModelSettings, Settings
from app.telemetry.logs.levels import Levels
from app.usage.ledger import Ledger
from engines.base import EngineState
from engines.gpu.accelerator import AcceleratorError, Device
from engines.gpu.host_memory import available_gib
from engines.process.engine import LauncherMissing, vllm_runs_on_cpu

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Adjustable:
    """What goes by settings and can be given others."""

    rooms: RelayServices
    authenticator: Authenticator
    ledger: Ledger
    levels: Levels


def _outcome(task: asyncio.Task[Report], fault: BaseException | None) -> str:
    """Return how a reload ended, as gateway_reloads_total has it."""
    if fault is None:
        return "done" if task.result().ok else "partial"
    return "invalid" if isinstance(fault, InvalidConfiguration) else "failed"


def _present(one: Running) -> Present:
    """Return what is known of an engine. It blocks."""
    engine = one.engine
    serves = engine.state is EngineState.READY
    return Present(serves, engine.memory_gib, engine.last_start_s())


class Reloader:
    """Owns the settings in force and the engines of every model."""

    def __init__(
        self,
        settings: Settings,
        standing: Sequence[ModelDeployment],
        adjustable: Adjustable,
        *,
        source: Callable[[], Settings],
        builder: Builder,
        settled: asyncio.Event,
    ) -> None:
        """`source` reads the configuration again and raises ConfigError; it may block.

        `settled` is set when the engines that start with the gateway have.
        """
        self._settings = settings
        self._standing = {one.name: one for one in standing}
        self._adjustable = adjustable
        self._rooms = adjustable.rooms
        self._source = source
        self._settled = settled
        self._builder = builder
        self._fleet = Fleet(builder, self._publish)
        self._turn = asyncio.Lock()
        # Models on demand whose engines are being replaced: nobody may load those meanwhile.
        self._rebuilt: set[str] = set()
        self._tasks: set[asyncio.Task[Report]] = set()
        # For the threads of those tasks, which the end of the process waits for.
        self._closed = threading.Event()

    @property
    def settings(self) -> Settings:
        """What the gateway goes by; of a change that was undone, what was before."""
        return self._settings

    @property
    def uncounted_gib(self) -> float:
        """Memory of engines that come or go, and that no model accounts for."""
        return self._fleet.uncounted_gib

    async def reload(self, *, dry_run: bool = False, wait: bool = False) -> Report:
        """Read the configuration and apply what differs; return what was done.

        A caller that is cancelled does not stop it. While another reload is under way, or the
        gateway still starts, it waits if `wait`, else it raises Conflict, as it does when the
        gateway ends. Raises InvalidConfiguration. Nothing was changed in either case.
        """
        if self._rooms.admission.draining:
            raise Conflict("the gateway is shutting down")
        if not wait and self._tasks:
            raise Conflict("a reload is under way; try again when it has ended")
        if not wait and not self._settled.is_set():
            raise Conflict("the gateway still starts its engines; try again when it has")
        task = asyncio.create_task(self._in_turn(dry_run), name="reload")
        self._tasks.add(task)
        task.add_done_callback(partial(self._ended, dry_run))
        return await asyncio.shield(task)

    async def stop(self) -> None:
        """Break off what is under way; engines that belong to no model end what they have."""
        self._closed.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def close(self) -> None:
        """Break off what is under way, and end the engines that belong to no model."""
        await self.stop()
        await self._fleet.close()

    def _ended(self, dry_run: bool, task: asyncio.Task[Report]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            fault = task.exception()  # perhaps nobody waits for it any more
            if not dry_run:
                self._rooms.metrics.reloads.add((_outcome(task, fault),))

    async def _in_turn(self, dry_run: bool) -> Report:
        async with self._turn:
            await self._settled.wait()
            new = await self._read()
            running = {name: one.slots for name, one in self._standing.items()}
            found = difference(self._settings, new, running)
            found, placed = await asyncio.to_thread(self._planned, found)
            lines = tuple(found.lines())
            if dry_run or not found:
                return Report(dry_run, lines)
            self._builder.use(placed)
            self._builder.withhold(new.key_variables)
            for line in lines:
                log.info("reload: %s", line)
            try:
                reports = await self._apply(found)
            finally:
                self._note(new)
            for report in reports:
                log.log(logging.INFO if report.done else logging.ERROR, "reload: %s", report)
            return Report(False, lines, reports)

    async def _read(self) -> Settings:
        """Return the new settings. Raises InvalidConfiguration."""
        try:
            return await asyncio.to_thread(self._source)
        except ConfigError as error:
            raise InvalidConfiguration("\n".join(error.faults)) from None

    def _planned(self, found: Difference) -> tuple[Difference, Placed]:
        """Return how engines make way, and the GPUs of what is to be started. It blocks.

        Raises InvalidConfiguration where something plainly cannot be started.
        """
        starts = [slot for _, slot in found.starts()]
        ahead = preflight(found.new, starts, self._builder, self._closed)
        faults = list(ahead.faults)
        for note in ahead.notes:
            log.warning("reload: %s", note)
        try:
            for model, slot in found.starts():
                self._fleet.build(model, (slot,))
        except LauncherMissing as error:
            faults.append(str(error))
        placed: Placed = ()
        try:
            found, placed = self._with_ways(found)
        except ConfigError as error:
            faults += error.faults
        if faults:
            raise InvalidConfiguration("\n".join(dict.fromkeys(faults)))
        return found, placed

    def _with_ways(self, found: Difference) -> tuple[Difference, Placed]:
        """Return how each engine makes way, and the GPUs of all. Raises ConfigError."""
        slots = [(one.settings, one.slots) for one in self._standing.values()]
        seats = Seats.of(slots, self._builder.placements(slots))
        machine = self._machine(found.new.server.memory_budget_gib)
        engines = (one for standing in self._standing.values() for one in standing.engines)
        present = {one.slot.name: _present(one) for one in engines}
        chosen, beside = choose(found, seats, machine, present)
        with contextlib.suppress(ConfigError):
            placed = self._builder.place(self._slots_after(chosen), beside)
            where = {slot.name: placement for slot, placement in placed}
            if all(where[name] == placement for name, placement in beside.items()):
                return chosen, placed
        # Both fit, but not with what else comes.
        crowded = "no memory for both, with what the configuration adds"
        chosen, _ = choose(found, seats, machine, present, hindrance=crowded)
        return chosen, self._builder.place(self._slots_after(chosen))

    def _machine(self, budget_gib: float | None) -> Machine:
        """Return what engines share now. It blocks."""
        try:
            devices: Sequence[Device] | None = self._builder.devices()
        except AcceleratorError:
            devices = None
        if budget_gib is not None:
            budget_gib -= self._taken_gib()
        free_gib = available_gib()
        if free_gib is not None:
            free_gib = max(free_gib - self._starting_gib(), 0.0)
        return Machine(devices, vllm_runs_on_cpu(), free_gib, budget_gib)

    def _starting_gib(self) -> float:
        """Return the GiB that engines take, for all that is known, which are loading.

        How much of it they have taken already is not known.
        """
        engines = (one.engine for standing in self._standing.values() for one in standing.engines)
        return sum(memory_gib(e) for e in engines if e.state is EngineState.STARTING)

    def _taken_gib(self) -> float:
        """Return the GiB that nothing else may take of server.memory_budget_gib now.

        That is what is loaded, and at least as much as the largest model on demand takes beside
        those that are always loaded: else it could not be loaded until the other has gone.
        """
        fixed = loaded = largest = 0.0
        for one in self._standing.values():
            taken = sum(memory_gib(e.engine) for e in one.engines if e.engine.state not in IDLE)
            if one.settings.load == "eager":
                fixed += taken
            else:
                loaded += taken
                largest = max(largest, sum(memory_gib(each.engine) for each in one.engines))
        return fixed + max(loaded, largest) + self._fleet.uncounted_gib

    async def _prospect(self, old: Running, new: Slot) -> Prospect:
        """Return whether an engine can start beside another at this moment."""
        budget_gib = self._settings.server.memory_budget_gib
        machine = await asyncio.to_thread(self._machine, budget_gib)
        return prospect(old.slot, new, _present(old), machine)

    def _slots_after(self, found: Difference) -> Slots:
        """Return what every model has for engines once all is applied."""
        after = {
            name: (one.settings, one.slots)
            for name, one in self._standing.items()
            if name not in found.removed
        }
        after |= {c.new.name: (c.new, c.plan.after) for c in found.changed if c.needs_engines}
        after |= {a.model.name: (a.model, a.slots) for a in found.added if not a.fixed}
        return list(after.values())

    # Applying

    async def _apply(self, found: Difference) -> tuple[ModelReport, ...]:
        self._settings = applied(self._settings, found.new)
        if found.applied:
            self._apply_sections()
        gone = [self._standing.pop(name) for name in found.removed]
        for one in gone:
            self._fleet.let_go(one)
        reports = [ModelReport(one.name, Outcome.REMOVED) for one in gone]
        moved = [change for change in found.changed if not change.needs_engines]
        self._take_over(moved)
        await asyncio.gather(*map(self._end, gone))
        for change in found.changed:
            if change.needs_engines:
                if (fault := await self._change(change)) is not None:
                    reports.append(ModelReport(change.new.name, Outcome.ROLLED_BACK, fault))
                else:
                    moved.append(change)
                    self._take_over(moved)
        for addition in found.added:
            if not addition.fixed:
                fault = await self._add(addition)
                outcome = Outcome.ADDED if fault is None else Outcome.NOT_ADDED
                reports.append(ModelReport(addition.model.name, outcome, fault))
        for change in moved:
            reason = self._withheld(change.new)
            reports.append(ModelReport(change.new.name, Outcome.CHANGED, reason))
        return tuple(reports)

    def _apply_sections(self) -> None:
        settings, its = self._settings, self._adjustable
        its.rooms.bounds = RelayBounds.of(settings)
        its.rooms.body_memory.bounds = memory_bounds(settings)
        its.authenticator.replace(settings.api_keys, settings.admin_key, settings.limits.default)
        its.levels.replace(settings.logs)
        its.ledger.reprice({}, settings.usage.retention_days)

    def _take_over(self, moved: Sequence[ModelChange]) -> None:
        """Go by the new settings of models, but for aliases that others still have.

        Twice, since one may give up an alias that another one before it takes.
        """
        for change in (*moved, *moved):
            standing = self._standing[change.new.name]
            others = self._names_of_others(standing)
            aliases = tuple(alias for alias in change.new.aliases if alias not in others)
            standing.settings = change.effective.model_copy(update={"aliases": aliases})
            self._open(standing.settings)
        self._publish()

    def _open(self, model: ModelSettings) -> None:
        self._rooms.admission.open(model.name, model.queue)
        days = self._settings.usage.retention_days
        self._adjustable.ledger.reprice({model.name: model.price}, days)

    def _names_of_others(self, standing: ModelDeployment | None) -> dict[str, str]:
        """Return the names that clients may send for other models, each with its model."""
        others = (one for one in self._standing.values() if one is not standing)
        return {name: one.name for one in others for name in one.settings.names}

    def _withheld(self, model: ModelSettings) -> str | None:
        """Return what keeps a model from its names, if anything does."""
        others = self._names_of_others(self._standing.get(model.name))
        told = [
            f"{name} is still a name of {others[name]}" for name in model.names if name in others
        ]
        return "; ".join(told) or None

    async def _change(self, change: ModelChange) -> str | None:
        """Change a model's engines; return why it could not be, all being as before again."""
        standing = self._standing[change.new.name]
        ask: Ask = self._prospect
        if standing.settings.load == "on_demand":
            prospects = await self._prospects(change, standing)
            if prospects is None:
                return await self._rebuild(change, standing)

            async def ask(old: Running, new: Slot) -> Prospect:
                decided = prospects.get(old.slot.name)  # for the model as a whole
                # The way back, from an engine that has taken over, was not asked for before.
                return decided or await self._prospect(old, new)

        up = any(one.engine.state not in IDLE for one in standing.engines)
        try:
            await self._fleet.change(
                standing,
                change.plan,
                self._settings.server.drain_timeout_s,
                wanted=up or change.new.load == "eager",
                wake=change.begins,
                ask=ask,
            )
        except NotStarted as error:
            return str(error)
        return None

    async def _prospects(
        self, change: ModelChange, standing: ModelDeployment
    ) -> dict[str, Prospect] | None:
        """Return the prospects of a model on demand that can change while it is loaded.

        None: it has to be unloaded first.
        """
        prospects: dict[str, Prospect] = {}
        for old, new in change.plan.replaced if change.beside else ():
            one = standing.find(old.name)
            assert one is not None
            prospects[old.name] = await self._prospect(one, new)
            if prospects[old.name].obstacle or one.engine.state is not EngineState.READY:
                return None
        return prospects or None

    async def _rebuild(self, change: ModelChange, standing: ModelDeployment) -> str | None:
        """Change the engines of a model that is loaded on demand; one that was loaded is again."""
        keeper, name = self._rooms.keeper, change.new.name
        was_loaded = any(one.engine.state not in IDLE for one in standing.engines)
        await keeper.unload(name)
        if (fault := await self._swap(standing, change.plan, change.new)) is not None:
            return fault
        if not was_loaded or change.new.load == "eager":
            return None
        try:
            await keeper.load(name)
        except GatewayError as error:
            await self._swap(standing, plan(standing.slots, change.old), change.old)
            return error.message
        return None

    async def _swap(
        self, standing: ModelDeployment, plan: Plan, model: ModelSettings
    ) -> str | None:
        """Put other engines in the place of those that are unloaded; return what failed."""
        self._rebuilt.add(standing.name)
        self._publish()
        try:
            drain_s = self._settings.server.drain_timeout_s
            eager = model.load == "eager"
            await self._fleet.change(
                standing, plan, drain_s, wanted=eager, wake=eager, ask=self._prospect
            )
        except NotStarted as error:
            return str(error)
        finally:
            self._rebuilt.discard(standing.name)
            self._publish()
        return None

    async def _add(self, addition: Addition) -> str | None:
        """Add a model and start it; return why it could not be, nothing of it being left."""
        model = addition.model
        if (fault := self._withheld(model)) is not None:
            return fault
        standing = ModelDeployment(model, self._fleet.build(model.name, addition.slots))
        self._open(model)
        self._standing[model.name] = standing
        self._publish()
        if model.load == "eager":
            try:
                await self._fleet.start_all(standing.engines)
            except NotStarted as error:
                del self._standing[model.name]
                self._fleet.let_go(standing)
                self._publish()
                await self._end(standing)
                return str(error)
        return None

    async def _end(self, standing: ModelDeployment) -> None:
        """End a model that takes no new requests, when those that it has are through."""
        drain_s = self._settings.server.drain_timeout_s
        admission = self._rooms.admission
        deadline = asyncio.get_running_loop().time() + drain_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await admission.quiet(standing.name)
        left_s = max(0.0, deadline - asyncio.get_running_loop().time())
        await asyncio.gather(*(self._fleet.retire(one.engine, left_s) for one in standing.engines))
        admission.close(standing.name)

    def _publish(self) -> None:
        standing = self._standing.values()
        self._rooms.catalogue.replace([one.model() for one in standing])
        models = (one.on_demand() for one in standing if one.name not in self._rebuilt)
        self._rooms.keeper.replace([model for model in models if model is not None])

    def _note(self, new: Settings) -> None:
        """Note the settings in force, models in the order of the file."""
        order = {model.name: place for place, model in enumerate(new.models)}
        last = len(order)
        ordered = sorted(self._standing.items(), key=lambda item: order.get(item[0], last))
        self._standing = dict(ordered)
        models = tuple(one.settings for one in self._standing.values())
        self._settings = self._settings.model_copy(update={"models": models})
        self._publish()
