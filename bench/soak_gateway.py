"""The gateway's application in a separate process, which reports open resources at its end.

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
from app.server import gateway_server
from app.server.listen import listen
from app.settings import Settings, load_settings
from app.telemetry.logs import Output, configured_log
from engines.remote import RemoteEngine

# Time for ending resources before they count as leaked.
SETTLE_S = 5.0
SETTLE_TRIES = 100


class Leftovers(msgspec.Struct, frozen=True, kw_only=True):
    """Resources still open after the load has ended. Only `engine_idle` may be above 0."""

    permits: int
    slots: int  # of keys and models with a limit of concurrent requests
    leases: int
    exchanges: int  # engine connections that carry a request
    engine_idle: int  # engine connections that wait in the pool
    engine_lost: int  # engine connections that are open and neither of the two
    client_connections: int
    server_tasks: int
    tasks: list[str]  # names of the tasks that were started since the load began

    @property
    def clean(self) -> bool:
        """True if nothing leaked."""
        counts = (self.permits, self.slots, self.leases, self.exchanges, self.engine_lost)
        return not any((*counts, self.client_connections, self.server_tasks, self.tasks))


def leftovers(
    state: Application, server: uvicorn.Server, before: set[asyncio.Task[object]]
) -> Leftovers:
    """Return the open resources; `before` are the tasks that may exist."""
    # The pool reports its exchanges, not its connections, which are internal.
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
    """Return the open resources once there are none, or after the time for ending ones."""
    for _ in range(SETTLE_TRIES):
        if leftovers(state, server, before).clean:
            break
        await asyncio.sleep(SETTLE_S / SETTLE_TRIES)
    return leftovers(state, server, before)


async def serve(settings: Settings, output: Output) -> Leftovers:
    """Serve until SIGTERM; return the resources that stayed open."""
    state = create_app(settings, output=output)
    server = gateway_server(state)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    sock = listen(settings.server.host, settings.server.port)
    serving = asyncio.create_task(server.serve([sock]), name="serve")
    await state.startup_done.wait()
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
