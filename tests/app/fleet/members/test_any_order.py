"""Lists, checks, reloads and drains in any order end in the servers of the latest list."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from app.fleet import DiscoveredServers, EngineConfig
from app.fleet.deployment import DeployedEngine
from app.routing import Replica
from app.settings import ModelSettings
from engines.base import EngineNotReady, EngineState
from engines.spec import RemoteSpec
from tests.app.fleet.fleets import make_fleet
from tests.app.fleet.members.gateways import Listing
from tests.app.routing.fakes import FakeEngine
from tests.waiting import run_pending_tasks, wait_until

SERVERS = tuple(f"http://10.0.0.{n}:8000" for n in range(1, 5))
OUT = (EngineState.STOPPED,)


class Server(FakeEngine):
    """An engine that is checked when the test says so, and drains when it may."""

    def __init__(self, config: EngineConfig, world: "World") -> None:
        super().__init__(config.name, EngineState.STOPPED)
        self.world = world
        self.config = config
        self.begun = False

    async def ensure_ready(self, deadline: float) -> None:
        self.state = EngineState.STARTING
        self.begun = True
        self.world.check(self)
        raise EngineNotReady("not checked yet")

    async def drain(self) -> None:
        self.state = EngineState.DRAINING

    async def stop(self, grace: float) -> None:
        await asyncio.sleep(0)
        self.state = EngineState.STOPPED


class World:
    """A fleet with one model, whose servers a listing has."""

    def __init__(self) -> None:
        self.listing = Listing()
        self.built: list[Server] = []
        self.up: set[str] = set(SERVERS)
        self.fleet = make_fleet(self.build)
        self.fleet.follow(self.check_published)
        self.discovery = DiscoveredServers(self.fleet, self.listing)

    def build(self, model: str, config: EngineConfig) -> Replica:
        server = Server(config, self)
        self.built.append(server)
        return Replica(server, model)

    def check_published(self) -> None:
        """Check what requests see: each name once, and nothing that has stopped."""
        for deployment in self.fleet.deployments.values():
            names = [one.config.name for one in deployment.members]
            assert len(names) == len(set(names))
            assert all(one.engine.state not in OUT for one in deployment.members)

    def check(self, server: Server) -> None:
        """Let a server answer or not, as it is up or not."""
        if server.state in (EngineState.STARTING, EngineState.READY, EngineState.FAILED):
            up = isinstance(server.config.spec, RemoteSpec) and server.config.spec.url in self.up
            server.state = EngineState.READY if up else EngineState.FAILED

    def reload(self, stall_s: float | None) -> None:
        """Give the model these settings, or remove it."""
        before = self.fleet.deployments.get("demo")
        if stall_s is None:
            if before is not None:
                self.fleet.withdraw(["demo"])
                self.fleet.publish()
                self.retiring.extend(
                    asyncio.ensure_future(self.fleet.detached.retire(one.engine, 5.0))
                    for one in before.all_engines
                )
            return
        spec = {
            "kind": "remote",
            "discover": {"dns": "vllm.test", "port": 1},
            "timeouts": {"stall_s": stall_s},
        }
        model = ModelSettings.model_validate({"name": "demo", "engines": [spec]})
        if before is None:
            self.fleet.insert(model, ())
        else:
            self.fleet.configure(before, model)
            self.fleet.publish()

    def occupy(self, busy: bool) -> None:
        """Have every server a request in flight, or none."""
        for deployment in self.fleet.deployments.values():
            for one in deployment.members:
                one.replica.in_flight = int(busy)
                self.replicas.append(one.replica)

    async def play_and_close(self, steps: Sequence[tuple[str, Any, int]]) -> None:
        """Take steps, and stop the gateway right after the last."""
        await self.take(steps)
        await self.discovery.close()
        assert self.listing.watches == 0
        before = {one.engine for one in self.listed}
        await asyncio.gather(*self.retiring)
        await self.fleet.close()
        assert {one.engine for one in self.listed} == before
        alive = {server for server in self.built if server.state not in OUT and server.begun}
        assert alive <= before, "an engine that nobody stops"
        assert len(asyncio.all_tasks()) == 1

    @property
    def listed(self) -> list[DeployedEngine]:
        return [one for deployment in self.fleet.deployments.values() for one in deployment.members]

    async def play(self, steps: Sequence[tuple[str, Any, int]]) -> None:
        """Take steps; all is well in the end."""
        listed, stall_s = await self.take(steps)
        for replica in self.replicas:
            replica.in_flight = 0
        self.up = set(SERVERS)
        for server in self.built:
            self.check(server)
        if stall_s is None:
            stall_s = 1.0
            self.reload(stall_s)
        self.listing.set(*(SERVERS[n] for n in listed))
        wanted = sorted(SERVERS[n] for n in listed)
        deployment = self.fleet.deployments["demo"]

        def done() -> bool:
            configs = [one.config for one in deployment.members]
            alive = [server for server in self.built if server.state is not EngineState.STOPPED]
            return (
                sorted(str(config.spec.url) for config in configs if config.spec.kind == "remote")
                == wanted
                and all(config.spec.timeouts.stall_s == stall_s for config in configs)
                and {one.engine for one in deployment.members} == set(alive)
                and not self.fleet.detached
            )

        await wait_until(done)
        await asyncio.gather(*self.retiring)
        await self.discovery.close()
        assert self.listing.watches == 0

    async def take(
        self, steps: Sequence[tuple[str, Any, int]]
    ) -> tuple[frozenset[int], float | None]:
        """Take steps, each followed by so many turns of the event loop.

        Return what is listed, and the settings of the model.
        """
        self.retiring: list[asyncio.Future[None]] = []
        self.replicas: list[Replica] = []
        listed: frozenset[int] = frozenset()
        stall_s: float | None = 1.0
        self.discovery.start()
        self.reload(stall_s)
        for step, value, turns in steps:
            if step == "list":
                listed = value
                self.listing.set(*(SERVERS[n] for n in value))
            elif step == "up":
                self.up = {SERVERS[n] for n in value}
                for server in self.built:
                    self.check(server)
            elif step == "reload":
                stall_s = value
                self.reload(value)
            else:
                self.occupy(value)
            await run_pending_tasks(turns)
        return listed, stall_s


servers = st.frozensets(st.integers(0, len(SERVERS) - 1))
turns = st.sampled_from([0, 1, 2, 5, 50, 50])
steps = st.one_of(
    st.tuples(st.just("list"), servers, turns),
    st.tuples(st.just("up"), servers, turns),
    st.tuples(st.just("reload"), st.sampled_from([1.0, 2.0, None]), turns),
    st.tuples(st.just("busy"), st.booleans(), turns),
)


@settings(max_examples=200)
@example(
    [("up", frozenset(), 0), ("list", frozenset([0]), 50), ("reload", 2.0, 0), ("reload", 1.0, 50)]
)
@given(st.lists(steps, max_size=25))
def test_fleet_ends_with_the_servers_of_the_latest_list(taken: list[tuple[str, Any, int]]) -> None:
    async def play() -> None:
        await World().play(taken)

    faults = Faults()
    logging.getLogger("app").addHandler(faults)
    try:
        asyncio.run(play())
    finally:
        logging.getLogger("app").removeHandler(faults)
    assert faults.lines == []


@settings(max_examples=200)
@given(st.lists(steps, max_size=12))
def test_gateway_that_stops_at_any_moment_leaves_no_engine_and_no_task(
    taken: list[tuple[str, Any, int]],
) -> None:
    async def play() -> None:
        await World().play_and_close(taken)

    asyncio.run(play())


class Faults(logging.Handler):
    """The log lines of unhandled exceptions."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.lines.append(record.getMessage())
