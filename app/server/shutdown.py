"""Ends the run of a gateway: hands over what outlives it, and drains its requests.

    without `server.keep_engines`   it accepts connections until it exits, and refuses new requests
    with it                         it serves until the next gateway asks for the ports, for at most
                                    `server.handover_wait_s`; then it accepts no more connections,
                                    and finishes the requests on those that it has
    systemd holds the port          it accepts no more connections, and finishes the requests on
                                    those that it has

In the last two cases no request is refused: a new connection waits in the backlog for the next
gateway, which gets the port from systemd or from this one (`handover`).
"""

import asyncio
import logging
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field

from app.application import Application
from app.server.handover import SocketOffer
from app.server.http_server import HttpServer
from app.server.ports import Ports

log = logging.getLogger(__name__)

POLL_S = 0.05
# Time for a gateway that has connected to start; migrating a large database may take minutes.
SUCCESSOR_START_S = 300.0


@dataclass(eq=False, slots=True)
class Shutdown:
    """The drain of one gateway. `run` returns when the servers may exit."""

    application: Application
    server: HttpServer
    metrics_server: HttpServer | None
    ports: Ports
    lock: ExitStack  # holds the run directory
    # The next gateway may start before the exit. A supervisor that waits for the exit of this
    # process before it starts the next one would wait for a hand-over that cannot come.
    overlaps: bool
    finishing: list[HttpServer] = field(default_factory=list)  # they accept no more connections

    async def run(self) -> None:
        """Hand over the engines and ports that outlive the gateway, and drain."""
        settings, ports = self.application.settings.server, self.ports
        if not settings.keep_engines:
            if ports.held:
                self.finishing = [self.server]
                await stop_accepting(self.application, self.finishing)
            await self._drain()
        elif ports.held:
            await self._hand_over(self.server)  # the metrics port serves until the drain is over
            await self._drain()
        else:
            await self._hand_over_to_successor()

    async def _hand_over_to_successor(self) -> None:
        """Serve until the next gateway asks, then hand over and drain.

        If it does not ask in time, connections wait for it until the drain has ended.
        """
        wait_s = self.application.settings.server.handover_wait_s
        offer = self._offer()
        if offer is None:
            await self._hand_over(self.server, self.metrics_server)
            await self._drain()
            return
        asking = asyncio.create_task(offer.wait_until_asked())
        await self._serve_until(asking, offer, wait_s)
        asked = asking.done()
        await self._hand_over(self.server, self.metrics_server)
        sending = asyncio.create_task(_send(offer, asking))
        until = asyncio.get_running_loop().time() + wait_s
        await self._drain()
        if asked:
            await self._wait(sending, until)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        offer.close()

    async def _serve_until(
        self, asking: asyncio.Task[None], offer: SocketOffer, wait_s: float
    ) -> None:
        """Return when the next gateway has asked for the ports, or none comes in time."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        log.info("serving until the next gateway takes the port, for at most %g s", wait_s)
        while not asking.done() and not self.server.should_exit:
            until = began + (SUCCESSOR_START_S if offer.awaited else wait_s)
            if (left := until - loop.time()) <= 0:
                log.warning("no gateway has taken the port in %g s", loop.time() - began)
                return
            await asyncio.wait({asking}, timeout=min(left, 0.1))

    def _offer(self) -> SocketOffer | None:
        """Offer the ports to the next gateway, if it can start before this one has exited."""
        settings = self.application.settings.server
        if not self.overlaps or not settings.handover_wait_s:
            return None
        try:
            return SocketOffer(settings.run_dir, self.ports.all)
        except OSError as error:
            log.warning("cannot hand over the port, closing it: %s", error)
            return None

    async def _hand_over(self, *servers: HttpServer | None) -> None:
        self.finishing = [server for server in servers if server is not None]
        await hand_over(self.application, self.finishing, self.lock)

    async def _drain(self) -> None:
        """Wait for the requests in flight, up to the drain timeout or a second signal."""
        application = self.application
        application.admission.drain(refuse=not self.finishing)
        application.loader.drain()
        timeout_s = application.settings.server.drain_timeout_s
        idle = asyncio.create_task(self._wait_until_idle())
        await self._wait(idle, asyncio.get_running_loop().time() + timeout_s)
        if not idle.done() and not self.server.should_exit:
            left = application.admission.in_flight
            log.warning("%d requests did not end in %g s", left, timeout_s)
        idle.cancel()

    async def _wait_until_idle(self) -> None:
        """Return when no request is in flight, and none can come on an open connection."""
        await self.application.admission.wait_until_idle()
        # uvicorn has no event for it.
        while not all(server.idle for server in self.finishing):  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)

    async def _wait(self, task: asyncio.Task[None], until: float) -> None:
        """Wait for a task, until a moment in the loop's time or a second signal."""
        loop = asyncio.get_running_loop()
        while not task.done() and not self.server.should_exit and (left := until - loop.time()) > 0:
            await asyncio.wait({task}, timeout=min(left, 0.1))


async def _send(offer: SocketOffer, asking: asyncio.Task[None]) -> None:
    """Send the sockets to the next gateway once it asks; return when it accepts connections."""
    await asking
    await offer.send()


async def hand_over(
    application: Application, servers: Iterable[HttpServer], lock: ExitStack
) -> None:
    """Free engines and run directory for the next gateway; accepted requests are served here."""
    servers = tuple(servers)
    await stop_accepting(application, servers)
    await application.reloader.stop()
    await application.engine_lifecycle.release_engines()
    lock.close()
    log.info("the port and the engines are free for the next gateway")


async def stop_accepting(application: Application, servers: Iterable[HttpServer]) -> None:
    """Accept no more connections; requests on those that are open are served."""
    application.admission.drain(refuse=False)
    for server in servers:
        await server.startup_ended.wait()  # before, it has no port to close, and would bind one
        server.stop_accepting()
    # uvloop reports a connection one turn after it has accepted it.
    await asyncio.sleep(0)
