"""A running gateway whose servers are discovered, and servers that come and go."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.discovery import Endpoint, FindSource, Source, find_source
from engines.base import ChangeNotifier, Engine
from engines.spec import Discovery
from tests.app.reload.gateways import ConfigFile, ReloadableGateway
from tests.fakes.vllm import Fake
from tests.gateway import ROOT, running
from tests.waiting import wait_until

# Between a client's requests, which would otherwise be all that the processor does.
PAUSE_S = 0.01


class Listing:
    """A source whose list a test decides; by the name that a specification gives as `dns`."""

    def __init__(self) -> None:
        self._lists: dict[str, frozenset[Endpoint]] = {}
        self._changes = ChangeNotifier()
        self.watches = 0
        self.failing: set[str] = set()

    def set(self, *urls: str, name: str = "vllm.test") -> None:
        """List servers."""
        self._lists[name] = frozenset(map(Endpoint, urls))
        self._changes.notify()

    def __call__(self, spec: Discovery) -> Source:
        assert spec.dns is not None
        return _Listed(self, spec.dns)

    async def watch(self, name: str) -> AsyncIterator[frozenset[Endpoint]]:
        self.watches += 1
        known: frozenset[Endpoint] | None = None
        try:
            while True:
                found = self._lists.get(name)
                if found is not None and found != known:
                    known = found
                    yield found
                await self._changes.next()
        finally:
            self.watches -= 1


@dataclass
class _Listed:
    listing: Listing
    name: str

    @property
    def is_failing(self) -> bool:
        return self.name in self.listing.failing

    def watch(self) -> AsyncIterator[frozenset[Endpoint]]:
        return self.listing.watch(self.name)


def discovered(name: str = "vllm.test", **fields: Any) -> dict[str, Any]:
    """Return the engines of a name."""
    return {"kind": "remote", "discover": {"dns": name, "port": 8000}, **fields}


def listed_in(file: Path, **fields: Any) -> dict[str, Any]:
    """Return the engines of a file."""
    return {"kind": "remote", "discover": {"file": str(file)}, **fields}


def model(name: str = "demo", *engines: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"name": name, "engines": list(engines) or [discovered()], **fields}


@dataclass(kw_only=True)
class DiscoveringGateway(ReloadableGateway):
    """A running gateway, and what it has discovered."""

    @property
    def names(self) -> list[str]:
        """The engines that requests see."""
        return [engine.name for engine in self.state.catalogue.engines]

    def find(self, name: str) -> Engine:
        [found] = [engine for engine in self.state.catalogue.engines if engine.name == name]
        return found

    async def unused(self) -> dict[str, str]:
        """Return the servers that get no requests, with the reasons."""
        shown = (await self.client.get("/admin/engines", headers=ROOT)).json()
        return {one["name"]: one["reason"] for one in shown["unused"]}

    async def until(self, *fakes: Fake) -> None:
        """Return when requests see these servers and no others."""
        names = sorted(map(name_of, fakes))
        await wait_until(lambda: sorted(self.names) == names)


@asynccontextmanager
async def run(
    run_dir: Path,
    *models: dict[str, Any],
    find_source: FindSource = find_source,
    settle: bool = True,
    **fields: Any,
) -> AsyncIterator[DiscoveringGateway]:
    """Run a gateway with these models; default: demo, discovered by vllm.test."""
    file = ConfigFile(run_dir, *(models or [model()]), **fields)
    async with running(
        file.settings, source=file.read, settle=settle, find_source=find_source
    ) as gateway:
        yield DiscoveringGateway(**vars(gateway), file=file)


def name_of(fake: Fake, of: str = "demo") -> str:
    """Return the name of the engine for a server."""
    return f"{of}-127.0.0.1-{fake.port}"


@asynccontextmanager
async def servers(count: int, **fields: Any) -> AsyncIterator[list[Fake]]:
    """Run fake servers on ports of their own."""
    fakes = [await Fake(**fields).start() for _ in range(count)]
    try:
        yield fakes
    finally:
        await asyncio.gather(*(fake.stop() for fake in fakes if not fake.killed))


@dataclass
class Load:
    """Clients that send one request after the other, plain and streamed, and how they end."""

    gateway: DiscoveringGateway
    clients: int = 4
    answers: int = 0
    faults: list[str] = field(default_factory=list)

    @asynccontextmanager
    async def run(self) -> AsyncIterator["Load"]:
        """Send requests while the body runs; those under way at its end are completed."""
        self._ending = False
        tasks = [asyncio.create_task(self._client(n % 2 == 0)) for n in range(self.clients)]
        try:
            yield self
        finally:
            self._ending = True
            await asyncio.gather(*tasks)

    async def more(self, answers: int = 20) -> None:
        """Return when so many more requests were answered."""
        goal = self.answers + answers
        await wait_until(lambda: self.answers >= goal or self.faults)

    async def _client(self, streams: bool) -> None:
        while not self._ending:
            fields: dict[str, Any] = {"stream": True, "fake": "tokens:20:5"} if streams else {}
            response = await self.gateway.chat(**fields)
            complete = response.content.endswith(b"data: [DONE]\n\n") or not streams
            if response.status_code != 200 or not complete:
                self.faults.append(f"{response.status_code} {response.text[-300:]}")
            self.answers += 1
            await asyncio.sleep(PAUSE_S)


def write_list(file: Path, urls: Iterable[str]) -> None:
    """Replace a file of servers in one step."""
    new = file.with_suffix(".new")
    new.write_text(json.dumps(list(urls)))
    new.replace(file)
