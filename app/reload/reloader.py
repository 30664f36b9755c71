"""Reloads the configuration of a running gateway: read, compare, plan, apply, report.

Everything is read and checked first, so that an invalid file changes nothing (`planner`). Then the
difference is applied model by model (`applier`). Reloads run one at a time.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial

from app.audit import Action, Actor, AuditRecord, AuditTrail
from app.errors import SHUTTING_DOWN, Conflict, InvalidConfiguration
from app.fleet import DiscoveredServers, Fleet
from app.reload.applier import Adjustable, Applier
from app.reload.difference import difference
from app.reload.effects import request_effects
from app.reload.planner import ReloadPlanner
from app.reload.report import ReloadReport
from app.settings import ConfigError, Settings
from engines.background_tasks import BackgroundTasks

log = logging.getLogger(__name__)

_SIGNAL = Actor("SIGHUP")


class Reloader:
    """Applies the configuration file again, whenever it is asked to."""

    def __init__(
        self,
        fleet: Fleet,
        servers: DiscoveredServers,
        adjustable: Adjustable,
        audit: AuditTrail,
        *,
        source: Callable[[], Settings],
        engines_tried: asyncio.Event,
    ) -> None:
        """`source` reads the configuration again; it may block, and raises ConfigError.

        `engines_tried` is set once every engine that starts with the gateway has been READY or
        FAILED.
        """
        self._fleet = fleet
        self._services = adjustable.services
        self._audit = audit
        self._source = source
        self._engines_tried = engines_tried
        self._planner = ReloadPlanner(fleet)
        self._applier = Applier(fleet, servers, adjustable)
        self._tasks = BackgroundTasks()
        # Ends the threads of these tasks, for which the exit of the process waits.
        self._closed = threading.Event()

    async def reload(
        self,
        by: Actor | None = None,
        *,
        dry_run: bool = False,
        wait: bool = False,
        source: Callable[[], Settings] | None = None,
    ) -> ReloadReport:
        """Read the configuration and apply the difference; return the report.

        `source` reads another configuration in its place, for a dry run.

        The audit gets what `by` is about to change, and nothing changes if it does not. None: a
        signal, which is obeyed while the database is away, too. Raises DatabaseError.

        Canceling the caller does not stop it. Raises Conflict while another reload is under way or
        the gateway is still starting, unless `wait`; Conflict when the gateway is shutting down;
        and InvalidConfiguration. Nothing has changed if it raises.
        """
        if self._services.admission.draining:
            raise Conflict(SHUTTING_DOWN)
        if not wait and self._tasks:
            raise Conflict("a reload is under way; try again when it has ended")
        if not wait and not self._engines_tried.is_set():
            raise Conflict("the gateway is still starting its engines; try again later")
        task = self._tasks.start(self._reload(by, dry_run, source or self._source), "reload")
        task.add_done_callback(partial(self._finished, dry_run))
        return await asyncio.shield(task)

    async def stop(self) -> None:
        """Cancel what is under way; engines that have left finish their requests."""
        self._closed.set()
        await self._tasks.cancel()

    def _finished(self, dry_run: bool, task: asyncio.Task[ReloadReport]) -> None:
        if not task.cancelled():
            fault = task.exception()  # retrieved here, since the caller may have been canceled
            if not dry_run:
                self._services.metrics.reloads.add((_outcome(task, fault),))

    async def _reload(
        self, by: Actor | None, dry_run: bool, source: Callable[[], Settings]
    ) -> ReloadReport:
        fleet = self._fleet
        async with fleet.turn:
            await self._engines_tried.wait()
            try:
                new = await asyncio.to_thread(source)
            except ConfigError as error:
                raise InvalidConfiguration("\n".join(error.faults)) from None
            running = {name: one.configs for name, one in fleet.deployments.items()}
            old = fleet.in_force.settings
            found = await asyncio.to_thread(difference, old, new, running)
            found, placed = await asyncio.to_thread(self._planner.plan, found, self._closed)
            lines = await asyncio.to_thread(lambda: tuple(found.lines()))
            effects = tuple(request_effects(found))
            if dry_run or not found:
                return ReloadReport(dry_run, lines, effects=effects)
            await self._record(by, lines)
            for line in lines:
                log.info("reload: %s", line)
                await asyncio.sleep(0)  # there may be a thousand
            fleet.builder.use(placed)
            fleet.builder.withhold(new.key_variables)
            new.keep_secrets()
            reports = await self._applier.apply(found)
            for report in reports:
                log.log(logging.INFO if report.done else logging.ERROR, "reload: %s", report)
                await asyncio.sleep(0)
            return ReloadReport(False, lines, reports, effects)

    async def _record(self, by: Actor | None, lines: Sequence[str]) -> None:
        record = AuditRecord(
            actor=by or _SIGNAL,
            action=Action.CONFIGURATION_RELOAD,
            target="configuration",
            after={"changes": list(lines)},
        )
        await self._audit.record(record)


def _outcome(task: asyncio.Task[ReloadReport], fault: BaseException | None) -> str:
    """Return the outcome of a reload as a label of gateway_reloads_total."""
    if fault is None:
        return "done" if task.result().ok else "partial"
    return "invalid" if isinstance(fault, InvalidConfiguration) else "failed"
