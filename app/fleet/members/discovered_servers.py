"""The discovered servers of all models, which follow every reload."""

import asyncio
import contextlib
import logging
from collections.abc import Collection, Iterator

from app.discovery import FindSource
from app.fleet.deployment import ModelDeployment
from app.fleet.fleet import Fleet
from app.fleet.members.roster import Roster
from app.fleet.report import UnusedServer
from engines.background_tasks import BackgroundTasks
from engines.base import ChangeNotifier

log = logging.getLogger(__name__)

# Time for sources to be read and for their servers to be checked for the first time, in seconds.
SETTLE_S = 5.0


class DiscoveredServers:
    """Discovers servers of the fleet's models, and follows what it publishes.

    Each of its steps is synchronous up to the next `await`, and a server is added to a deployment
    only while that is the model's present one. So a reload and servers that come and go meanwhile
    do not undo each other's changes.
    """

    def __init__(self, fleet: Fleet, find_source: FindSource) -> None:
        self._fleet = fleet
        fleet.follow(self.update)
        self._find_source = find_source
        self._rosters: dict[ModelDeployment, Roster] = {}
        self._tasks = BackgroundTasks(log)
        self._running = False
        self._changes = ChangeNotifier()

    def start(self) -> None:
        """Begin to discover servers."""
        self._running = True
        self.update()

    async def close(self) -> None:
        """End all watches and all steps under way; engines are left to their owners."""
        self._running = False
        await self._tasks.cancel()

    def update(self) -> None:
        """Follow the present deployments and their settings."""
        if not self._running:
            return
        for deployment in self._fleet.deployments.values():
            if self._fleet.discovering(deployment) and deployment not in self._rosters:
                self._rosters[deployment] = self._make_roster(deployment)
        for deployment, roster in list(self._rosters.items()):
            roster.update()
            if not self._fleet.is_current(deployment):
                del self._rosters[deployment]

    def counts(self) -> Iterator[tuple[str, int, int, int]]:
        """Yield each model with its servers listed and serving, and its sources that fail."""
        for deployment, roster in self._rosters.items():
            if self._fleet.discovering(deployment):
                yield deployment.name, roster.listed, roster.serving, roster.failing

    def unused(self) -> list[UnusedServer]:
        """Return the servers that are listed and get no requests, in the models' order."""
        current = map(self._rosters.get, self._fleet.deployments.values())
        return [one for roster in current if roster is not None for one in roster.unused()]

    async def wait_until_settled(self, among: Collection[ModelDeployment] | None = None) -> None:
        """Return when all servers were checked once, or SETTLE_S later.

        `among` are the models that count; default: all.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                await self._changes.wait_for(
                    lambda: all(
                        roster.settled
                        for deployment, roster in self._rosters.items()
                        if among is None or deployment in among
                    )
                )

    def _make_roster(self, deployment: ModelDeployment) -> Roster:
        return Roster(
            self._fleet,
            deployment,
            changes=self._changes,
            tasks=self._tasks,
            find_source=self._find_source,
            is_taken=self._is_taken,
        )

    def _is_taken(self, name: str) -> bool:
        """Return whether an engine has a name, or a server that has not joined yet."""
        return any(name in roster.names for roster in self._rosters.values()) or any(
            one.config.name == name
            for each in self._fleet.deployments.values()
            for one in each.engines
        )
