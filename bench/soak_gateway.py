"""The gateway's real application in a process of its own, which tells in the end what is left open.

    GATEWAY_API_KEYS=… python -m bench.soak_gateway CONFIG

It serves until SIGTERM, prints one JSON object (see `Leftovers`) and ends. It measures nothing
while it serves.
"""

import asyncio
import signal
import sys
from pathlib import Path

import msgspec
import uvicorn
import uvloop

from app.application import Application
from app.main import create_app
from app.server.http_server import gateway_server
from app.server.listen import listen
from app.settings import Settings, load_settings
from app.telemetry.logs import Output, configured_log
from engines.remote import RemoteEngine

# What is only on its way out is given this long before it counts as left.
SETTLE_S = 5.0
SETTLE_TRIES = 100


class Leftovers(msgspec.Struct, frozen=True, kw_only=True):
    """What is still open after the load has ended. Only `engine_idle` may be more than 0."""

    permits: int
    slots: int  # of keys and models with a limit of concurrent requests
    leases: int
    exchanges: int  # engine connections that carry a request
    engine_idle: int  # engine connections that wait in the pool
    engine_lost: int  # engine connections that are open and neither of the two
    client_connections: int
    server_tasks: int
    tasks: list[str]  # names of those that were not there when the load began

    @property
    def clean(self) -> bool:
        """Whether nothing leaked."""
        counts = (self.permits, self.slots, self.leases, self.exchanges, self.engine_lost)
        return not any((*counts, self.client_connections, self.server_tasks, self.tasks))


def leftovers(
    state: Application, server: uvicorn.Server, before: set[asyncio.Task[object]]
) -> Leftovers:
    """Return what is open now; `before` are the tasks that may be there."""
    # The pool tells how many exchanges it has, not how many connections: that is its own affair.
    clients = [e._client for e in state.catalogue.engines if isinstance(e, RemoteEngine)]
    opened = sum(len(client._open) for client in clients)
    idle = sum(len(client._idle) for client in clients)
    exchanges = sum(client.in_flight for client in clients)
    current = asyncio.current_task()
    return Leftovers(
        permits=state.admission.in_flight,
        slots=sum(state.limiter._memory._busy.values()),
        leases=sum(r.in_flight for m in state.catalogue.models for r in m.replicas),
        exchanges=exchanges,
        engine_idle=idle,
        engine_lost=opened - idle - exchanges,
        client_connections=len(server.server_state.connections),
        server_tasks=len(server.server_state.tasks),
        tasks=sorted(t.get_name() for t in asyncio.all_tasks() - before if t is not current),
    )


async def settled(
    state: Application, server: uvicorn.Server, before: set[asyncio.Task[object]]
) -> Leftovers:
    """Return what is open once nothing is, or when what is on its way out had its time."""
    for _ in range(SETTLE_TRIES):
        if leftovers(state, server, before).clean:
            break
        await asyncio.sleep(SETTLE_S / SETTLE_TRIES)
    return leftovers(state, server, before)


async def serve(settings: Settings, output: Output) -> Leftovers:
    """Serve until SIGTERM; return what was open then."""
    state = create_app(settings, output=output)
    server = gateway_server(state)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    sock = listen(settings.server.host, settings.server.port)
    serving = asyncio.create_task(server.serve([sock]), name="serve")
    await state.settled.wait()
    before = asyncio.all_tasks()
    await stop.wait()
    found = await settled(state, server, before)
    server.should_exit = True
    await serving
    sock.close()
    return found


def main() -> None:
    """Entry point of the command."""
    settings = load_settings(Path(sys.argv[1]))
    with (
        configured_log(settings.logs) as output,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        found = runner.run(serve(settings, output))
    print(msgspec.json.encode(found).decode(), flush=True)


if __name__ == "__main__":
    main()
