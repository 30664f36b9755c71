"""The servers of a model in Kubernetes: EndpointSlices, listed once and then watched.

    list ──▶ watch ──▶ end, or a lost connection ──▶ watch from the last version
      ▲        │
      └────────┴── 410, or a response that cannot be read

The list in memory changes only by what the API server says: a complete list replaces it, an event
changes one slice of it. So a connection may be lost at any byte, and an outage changes nothing. One
task writes the list; `watch` reads it.
"""

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Awaitable, Callable

from app.discovery.endpoint_slices import (
    MAX_SLICES,
    ApiError,
    EndpointSlice,
    SliceCache,
    VersionExpired,
    decode_change,
)
from app.discovery.endpoints import Endpoint
from app.discovery.kubernetes_api import (
    WATCH_STALL_S,
    EndpointSliceApi,
    ServiceAccount,
    connect,
)
from app.discovery.outage import Outage
from engines.spec import EndpointSlices

log = logging.getLogger(__name__)

# The rollout of a Service changes several slices within milliseconds.
SETTLE_S = 0.1
# The API server is asked to end a watch after 5 to 10 minutes, as Kubernetes' own clients ask, so
# that watches spread over its instances again.
WATCH_S = 300
# A watch that lasted so long worked, even if nothing happened.
PROVEN_S = 10.0
LIST_S = 60.0
MAX_PAGES = 100

FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 30.0
MAX_RETRY_AFTER_S = 60.0

Sleep = Callable[[float], Awaitable[None]]


def pause_s(failures: int, retry_after_s: float | None, chance: float) -> float:
    """Return the seconds before the next attempt, after so many failures in a row.

    Half of it is chance, from 0 to 1, so that gateways do not return together after an outage.
    """
    pause = min(FIRST_PAUSE_S * 2.0 ** min(failures, 64), MAX_PAUSE_S) * (0.5 + chance / 2)
    return max(pause, min(retry_after_s or 0.0, MAX_RETRY_AFTER_S))


class KubernetesSource:
    """Lists the servers in EndpointSlices; a `Source`.

    `pause` waits between attempts, `settle` for more changes after one.
    """

    def __init__(
        self,
        spec: EndpointSlices,
        *,
        account: ServiceAccount | None = None,
        pause: Sleep = asyncio.sleep,
        settle: Sleep = asyncio.sleep,
        chance: Callable[[], float] = random.random,
        stall_s: float = WATCH_STALL_S,
    ) -> None:
        self._spec = spec
        self._account = account or ServiceAccount()
        self._pause = pause
        self._settle = settle
        self._chance = chance
        self._stall_s = stall_s
        self._outage = Outage(_describe(spec))

    def __repr__(self) -> str:
        """Return what is watched."""
        return f"<KubernetesSource {_describe(self._spec)}>"

    @property
    def is_failing(self) -> bool:
        """True while the servers cannot be read."""
        return self._outage.under_way

    async def watch(self) -> AsyncGenerator[frozenset[Endpoint], None]:
        """Yield the complete list as soon as it is known, and after each change."""
        follower = _Follower(
            self._spec, self._account, self._pause, self._chance, self._stall_s, self._outage
        )
        task = asyncio.create_task(follower.run(), name="follow EndpointSlices")
        known: frozenset[Endpoint] | None = None
        try:
            while True:
                await follower.changed.wait()
                await self._settle(SETTLE_S)
                follower.changed.clear()
                servers = follower.cache.servers()
                if servers != known:
                    known = servers
                    yield servers
        finally:
            task.cancel()
            await asyncio.wait((task,))


class _Follower:
    """Keeps a cache of EndpointSlices like the API server's, in `run`."""

    def __init__(
        self,
        spec: EndpointSlices,
        account: ServiceAccount,
        pause: Sleep,
        chance: Callable[[], float],
        stall_s: float,
        outage: Outage,
    ) -> None:
        self._spec = spec
        self._account = account
        self._pause = pause
        self._chance = chance
        self._stall_s = stall_s
        self._outage = outage
        self.cache = SliceCache(spec.port)
        self.changed = asyncio.Event()
        self._version: str | None = None  # None: a list is needed
        self._failures = 0  # attempts in a row that brought nothing
        # Attempts that ended the version, since a watch has last proven itself: events alone do
        # not, where each is followed by an error.
        self._faults = 0
        self._accepted = False  # the API server accepted the watch of this attempt

    async def run(self) -> None:
        """List and watch until it is canceled."""
        while True:
            retry_after_s = None
            self._accepted = False
            try:
                await self._attempt()
            except VersionExpired as error:
                self._note_fault()
                log.debug("%s: %s; listing again", _describe(self._spec), error)
            except ApiError as error:
                retry_after_s = error.retry_after_s
                if not error.resumable:
                    self._note_fault()
                self._note_failure(error)
            except Exception:
                self._note_fault()
                log.exception("unhandled exception in discovery by %s", _describe(self._spec))
            seconds = pause_s(self._failures, retry_after_s, self._chance())
            self._failures += 1
            await self._pause(seconds)

    async def _attempt(self) -> None:
        """List if that is needed, and watch to the end of the watch. Raises ApiError."""
        async with connect(
            self._account, self._spec.namespace, self._spec.selector, self._stall_s
        ) as api:
            if self._version is None:
                self._version = await self._list(api)
            await self._watch(api, self._version)

    async def _list(self, api: EndpointSliceApi) -> str:
        """Replace the cache by a complete list; return its version."""
        try:
            async with asyncio.timeout(LIST_S):
                slices, version = await _read_pages(api)
        except TimeoutError:
            raise ApiError(f"the list took over {LIST_S:g} s") from None
        self.cache.replace(slices)
        self.changed.set()
        return version

    async def _watch(self, api: EndpointSliceApi, version: str) -> None:
        loop = asyncio.get_running_loop()
        timeout_s = WATCH_S + int(WATCH_S * self._chance())
        async with api.watch(version, timeout_s) as lines:
            began = loop.time()
            self._note_accepted()
            try:
                async for line in lines:
                    change = decode_change(line)
                    self.cache.apply(change)
                    self._version = change.version
                    self._failures = 0
                    self.changed.set()
            finally:
                if loop.time() - began > PROVEN_S:
                    self._failures = self._faults = 0

    def _note_accepted(self) -> None:
        self._accepted = True
        self._outage.end(len(self.cache.servers()))

    def _note_fault(self) -> None:
        """Have the next attempt list, after a pause that grows with each fault."""
        self._version = None
        self._failures = max(self._failures, self._faults)
        self._faults += 1

    def _note_failure(self, error: ApiError) -> None:
        """Begin an outage, but not for a watch that breaks off after it was accepted."""
        if self._accepted and error.resumable:
            log.debug("%s: %s; watching again", _describe(self._spec), error)
        else:
            self._outage.begin(str(error), len(self.cache.servers()))


async def _read_pages(api: EndpointSliceApi) -> tuple[list[EndpointSlice], str]:
    """Return the slices of all pages, and their version. Raises ApiError."""
    slices: list[EndpointSlice] = []
    next_page = ""
    for _ in range(MAX_PAGES):
        page = await api.list_page(next_page)
        slices += page.slices
        if len(slices) > MAX_SLICES:
            raise ApiError(f"the selector matches over {MAX_SLICES} EndpointSlices")
        next_page = page.next_page
        if not next_page:
            return slices, page.version
    raise ApiError(f"the list has over {MAX_PAGES} pages")


def _describe(spec: EndpointSlices) -> str:
    within = "" if spec.namespace is None else f" in namespace {spec.namespace}"
    return f"EndpointSlices {spec.selector}{within}"
