"""The discovered servers of one model: what its sources list, and a member for each server."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from app.discovery import Endpoint, FindSource, Source
from app.fleet.deployment import ModelDeployment
from app.fleet.engine_plan import EngineConfig
from app.fleet.fleet import Fleet
from app.fleet.members.member import Member, MemberTerms
from app.fleet.members.names import engine_name
from app.fleet.report import UnusedServer
from engines.background_tasks import BackgroundTasks
from engines.base import ChangeNotifier, EngineState
from engines.spec import Discovery, RemoteSpec

log = logging.getLogger(__name__)

# Maximum number of servers of one source.
MAX_SERVERS = 256
# Delay before a source is read again, or a server's steps go on, after an unhandled exception.
RETRY_S = 5.0


@dataclass(slots=True, eq=False)
class _Watch:
    """A source and what it lists; None: it has listed nothing so far."""

    task: asyncio.Task[None] | None = None
    source: Source | None = None
    listed: frozenset[Endpoint] | None = None
    left_out: int = 0


class Roster:
    """The discovered servers of one model. `is_taken` returns whether an engine has a name."""

    def __init__(
        self,
        fleet: Fleet,
        deployment: ModelDeployment,
        *,
        changes: ChangeNotifier,
        tasks: BackgroundTasks,
        find_source: FindSource,
        is_taken: Callable[[str], bool],
    ) -> None:
        """`changes` is notified of each change of a server; `tasks` end with the gateway."""
        self._terms = MemberTerms(fleet, deployment, changes, lambda: self.needs_unlisted, tasks)
        self._find_source = find_source
        self._is_taken = is_taken
        # What the watches are for; None: there are none yet.
        self._specs: tuple[RemoteSpec, ...] | None = None
        self._watches: dict[Discovery, _Watch] = {}
        # By URL; those that drain are still among them.
        self._members: dict[str, Member] = {}

    @property
    def names(self) -> set[str]:
        """The names of its engines, joined or not."""
        return {member.name for member in self._members.values()}

    @property
    def settled(self) -> bool:
        """True if all sources have listed servers, and all servers were checked."""
        listed = all(watch.listed is not None for watch in self._watches.values())
        return listed and all(member.settled for member in self._members.values())

    @property
    def listed(self) -> int:
        """Number of servers that its sources list, as far as they are used."""
        return sum(member.wanted is not None for member in self._members.values())

    @property
    def serving(self) -> int:
        """Number of these that are READY."""
        return sum(member.serves for member in self._members.values())

    def unused(self) -> Iterator[UnusedServer]:
        """Yield the servers that are listed and get no requests, by URL."""
        model = self._terms.deployment.name
        for url, member in sorted(self._members.items()):
            if (reason := member.unused_reason) is not None:
                yield UnusedServer.of(member.name, model, url, reason)

    @property
    def failing(self) -> int:
        """Number of its sources that cannot be read."""
        sources = (watch.source for watch in self._watches.values())
        return sum(source.is_failing for source in sources if source is not None)

    @property
    def needs_unlisted(self) -> bool:
        """True while no engine that stays is READY, and one that is being checked may be soon."""
        members = self._members.values()
        if not self._terms.is_current or all(member.settled for member in members):
            return False
        fleet, deployment = self._terms.fleet, self._terms.deployment
        return not any(member.serves for member in members) and not any(
            one.engine.state is EngineState.READY
            for one in deployment.engines
            if not fleet.is_outgoing(deployment, one.config.name)
        )

    def update(self) -> None:
        """Watch the sources of the model's present settings, and no others."""
        terms = self._terms
        specs = terms.fleet.discovering(terms.deployment) if terms.is_current else ()
        if specs == self._specs:
            return
        self._specs = specs
        sources = [spec.discover for spec in specs if spec.discover is not None]
        for source in [one for one in self._watches if one not in sources]:
            watch = self._watches.pop(source)
            if watch.task is not None:
                watch.task.cancel()
        for source in sources:
            if source not in self._watches:
                watch = self._watches[source] = _Watch()
                name = f"discover {terms.deployment.name}"
                watch.task = terms.tasks.start(self._watch(source, watch), name)
        self._apply()

    async def _watch(self, source: Discovery, watch: _Watch) -> None:
        """Apply each list of a source, until canceled."""
        while True:
            try:
                watch.source = self._find_source(source)
                async for listed in watch.source.watch():
                    watch.listed = listed
                    self._apply()
            except Exception:
                log.exception(
                    "unhandled exception while discovering servers of %s", source.describe()
                )
            await asyncio.sleep(RETRY_S)

    def _apply(self) -> None:
        """Have a member for each listed server, and none for others."""
        wanted = self._find_wanted()
        for url, member in self._members.items():
            if url not in wanted:
                member.want(None)
        for url, (endpoint, spec) in sorted(wanted.items()):
            present = self._members.get(url)
            if present is not None:
                present.want(_config(present.name, endpoint, spec))
                continue
            model = self._terms.deployment.name
            name = engine_name(model, url, self._is_taken)
            member = Member(self._terms, name, _config(name, endpoint, spec))
            self._members[url] = member
            self._terms.tasks.start(self._run(url, member), f"server {name}")
        self._terms.changes.notify()

    async def _run(self, url: str, member: Member) -> None:
        while True:
            try:
                await member.run()
            except Exception:
                log.exception("unhandled exception in the steps of server %s", member.name)
                await asyncio.sleep(RETRY_S)
            else:
                del self._members[url]
                return

    def _find_wanted(self) -> dict[str, tuple[Endpoint, RemoteSpec]]:
        """Return the listed servers by URL; the first specification that lists one has it."""
        wanted: dict[str, tuple[Endpoint, RemoteSpec]] = {}
        for spec in self._specs or ():
            watch = None if spec.discover is None else self._watches.get(spec.discover)
            if watch is not None:
                for endpoint in self._chosen(watch, spec):
                    wanted.setdefault(endpoint.url, (endpoint, spec))
        return wanted

    def _chosen(self, watch: _Watch, spec: RemoteSpec) -> list[Endpoint]:
        """Return up to MAX_SERVERS servers of a source; those that are members stay."""
        listed = sorted(watch.listed or (), key=lambda one: (one.url not in self._members, one.url))
        left_out = max(len(listed) - MAX_SERVERS, 0)
        if left_out and not watch.left_out and spec.discover is not None:
            log.error(
                "servers of %s: %d are listed, at most %d are used; left out: %d",
                spec.discover.describe(),
                len(listed),
                MAX_SERVERS,
                left_out,
            )
        watch.left_out = left_out
        return listed[:MAX_SERVERS]


def _config(name: str, endpoint: Endpoint, spec: RemoteSpec) -> EngineConfig:
    """Return the config of a server: its source's specification with its own URL and key."""
    key = endpoint.api_key_env or spec.api_key_env
    update = {"url": endpoint.url, "discover": None, "api_key_env": key}
    return EngineConfig(name, spec.model_copy(update=update), discovered=True)
