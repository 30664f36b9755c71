"""A pod's view of a cluster for tests: its service account, and what a source yields there."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from app.discovery.kubernetes import KubernetesSource
from app.discovery.kubernetes_api import ServiceAccount
from engines.spec import EndpointSlices
from tests.fakes.kubernetes import NAMESPACE, SELECTOR, TOKEN, ApiServer, Authority, make_slice
from tests.waiting import wait_until


def make_account(
    directory: Path, authority: Authority, port: int, host: str = "127.0.0.1"
) -> ServiceAccount:
    """Write the files that the kubelet puts into a pod; return the account."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "ca.crt").write_bytes(authority.ca.read_bytes())
    (directory / "namespace").write_text(NAMESPACE)
    (directory / "token").write_text(TOKEN)
    environ = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": str(port)}
    return ServiceAccount(directory, environ)


@dataclass
class Cluster:
    """An API server, a pod's service account, and a source in that pod."""

    api: ApiServer
    files: Path
    account: ServiceAccount
    lists: list[set[str]] = field(default_factory=list)  # yielded so far, as URLs
    pauses: list[float] = field(default_factory=list)  # in seconds, between attempts
    settling: asyncio.Event = field(default_factory=asyncio.Event)
    ending: bool = False
    idle: bool = False  # in a pause, and no attempt follows

    def source(self, port: int | str = 8000, stall_s: float = 60) -> KubernetesSource:
        """Return a source whose pauses take no time."""
        spec = EndpointSlices(namespace=None, selector=SELECTOR, port=port)
        return KubernetesSource(
            spec,
            account=self.account,
            pause=self.pause,
            settle=self.settle,
            chance=lambda: 1.0,
            stall_s=stall_s,
        )

    @asynccontextmanager
    async def watching(self, source: KubernetesSource | None = None) -> AsyncIterator[None]:
        """Collect what a source yields, until it pauses after the body.

        httpcore leaves the socket of a canceled TLS handshake to the garbage collector.
        """
        self.ending = self.idle = False
        task = asyncio.create_task(self._collect(source or self.source()))
        try:
            yield
            self.ending = True
            await wait_until(self._is_idle)
        finally:
            task.cancel()
            await asyncio.wait((task,))

    async def until(self, *addresses: str) -> None:
        """Return when these are the addresses of the last list."""
        expected = {f"http://{address}:8000" for address in addresses}
        await wait_until(lambda: self.lists and self.lists[-1] == expected)

    async def until_watched(self) -> None:
        """Return when a watch is open."""
        await wait_until(lambda: self.api.watching)

    @property
    def asked(self) -> list[str]:
        """What was asked of the API server: "list", or "watch" and a version."""
        return [
            f"watch {one.query['resourceVersion']}" if one.watches else "list"
            for one in self.api.requests
        ]

    async def pause(self, seconds: float) -> None:
        """Note a pause, which takes no time unless it is the last one."""
        self.pauses.append(seconds)
        self.idle = self.ending
        while self.ending:
            await asyncio.sleep(60)
        await asyncio.sleep(0)

    async def settle(self, seconds: float) -> None:
        """Wait until `settling` is set."""
        await self.settling.wait()

    def _is_idle(self) -> bool:
        self.api.end_watches()
        return self.idle

    async def _collect(self, source: KubernetesSource) -> None:
        async for servers in source.watch():
            assert all(server.api_key_env is None for server in servers)
            self.lists.append({server.url for server in servers})


@asynccontextmanager
async def running(directory: Path, authority: Authority, *addresses: str) -> AsyncIterator[Cluster]:
    """Run an API server with one slice of these addresses."""
    async with ApiServer(authority) as api:
        if addresses:
            api.put(make_slice("first", *addresses))
        cluster = Cluster(api, directory, make_account(directory, authority, api.port))
        cluster.settling.set()
        yield cluster


async def first_list(cluster: Cluster) -> set[str]:
    """Return the list of a new source, as URLs."""
    other = Cluster(cluster.api, cluster.files, cluster.account)
    other.settling.set()
    async with other.watching():
        await wait_until(lambda: other.lists)
    return other.lists[-1]


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the messages of discovery that an operator sees."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("app.discovery") and record.levelno >= logging.INFO
    ]
