"""Running the gateway under uvicorn: the socket, the signals, the drain, and what is said of it."""

import asyncio
import contextlib
import fcntl
import gc
import ipaddress
import json
import logging
import os
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal

import uvicorn
import uvloop
from fastapi import FastAPI
from starlette.types import ASGIApp

from app.database import Database, DatabaseUnavailable, NewerDatabase
from app.database.migration_process import migrate_in_child
from app.errors import Conflict, GatewayError, InvalidConfiguration
from app.fleet import STOP_GRACE_S
from app.main import State, create_app, hopeless, release_engines
from app.server.connection import ClientConnection, ConnectionBounds, PeerConnections
from app.server.notify import ServiceManager
from app.settings import LOOPBACK, ConfigError, ServerSettings, Settings
from app.telemetry.logs import Output
from app.telemetry.logs.access import new_id
from app.telemetry.metrics import NO_ENDPOINT
from app.telemetry.request_record import RequestRecord
from engines.guard import directories

log = logging.getLogger(__name__)

BACKLOG = 2048
STDERR = 2
# How often the service manager is told how we fare, where it does not ask for more.
STATUS_S = 10.0
# What an end takes beside drain and engines: the last records, open connections.
CLOSING_S = 15.0
# Connections of the metrics' own port: a Prometheus has one, people look in.
MAX_SCRAPERS = 64


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: ours drain first."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        # Set once connections are accepted, or the start has failed.
        self.begun = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        finally:
            self.begun.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(
    settings: Settings,
    *,
    banner_key: str | None = None,
    source: Callable[[], Settings] | None = None,
    output: Output | None = None,
) -> None:
    """Run the gateway until it is told to stop.

    `banner_key` is shown in the ready banner, `source` reads the settings again for a reload,
    `output` takes the access lines.
    Raises ConfigError, also when no engine could be started and none may come up later or the file
    of the database cannot be had, and LauncherMissing.
    """
    manager = ServiceManager.take_from(os.environ)
    check_database(settings)
    with contextlib.ExitStack() as ours:
        sock = ours.enter_context(listen(settings.server.host, settings.server.port))
        metrics = settings.metrics
        metrics_sock = (
            None
            if metrics.port is None
            else ours.enter_context(
                listen(metrics.host, metrics.port, "GATEWAY_METRICS__PORT=8002")
            )
        )
        ours.enter_context(locked(settings.server.run_dir))
        app = create_app(settings, source=source, output=output)
        state: State = app.state.gateway
        # What is there now stays: the collector need not walk it again (5 % of the CPU here).
        gc.freeze()
        # Requests leave no cycles: to look for some every 700 objects took 3 % of the CPU here. A
        # look at 10,000 takes 2 ms, during which no token is relayed.
        gc.set_threshold(10_000, 20, 100)
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(_serve(app, sock, metrics_sock, banner_key, ours, manager))
        finally:
            state.access.flush()  # whatever the loop ended of


def check_database(settings: Settings) -> None:
    """Bring the database's tables to this version.

    Raises ConfigError when the file of the database cannot be made or is none, or is too new.
    A database server may only be down for now; but that its tables are too new is known at once.
    """
    url = settings.state.database_url.get_secret_value()
    database = Database(url)

    async def is_current() -> bool:
        try:
            return await database.is_current()
        finally:
            await database.close()

    try:
        if not asyncio.run(is_current()):
            migrate_in_child(url)
    except DatabaseUnavailable as error:
        if database.dialect == "sqlite" or isinstance(error, NewerDatabase):
            raise ConfigError([f"state.database_url {database!r}: {error}"]) from None


def listen(host: str, port: int, example: str = "GATEWAY_SERVER__PORT=8001") -> socket.socket:
    """Return a bound socket. Raises ConfigError when the address cannot be had.

    `example` is a variable that sets another port.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        # Bound is not enough: two sockets may be bound with SO_REUSEADDR until one listens.
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise ConfigError(
            [f"cannot listen on {host}:{port}: {reason}; choose another: {example}"]
        ) from None
    return sock


@contextlib.contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Hold a run directory for this process.

    Raises ConfigError when another gateway has it, or another user controls it.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        directories.make_private(run_dir)
        file = os.open(run_dir / "gateway.lock", flags, 0o600)
    except directories.ForeignDirectory as error:
        raise ConfigError([f"server.run_dir: {error}; choose another directory"]) from None
    except OSError as error:
        raise ConfigError([f"server.run_dir {run_dir}: {error.strerror}"]) from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise ConfigError(
            [f"server.run_dir {run_dir} is in use by another gateway; give each its own"]
        ) from None
    try:
        yield
    finally:
        os.close(file)


def uvicorn_server(app: FastAPI) -> _Server:
    """Return the server that carries the application, its signals left to the caller."""
    state: State = app.state.gateway
    server = state.settings.server

    class Connection(ClientConnection):
        bounds = _bounds(server, server.max_connections, server.max_connections_per_peer)
        peers = PeerConnections()
        dispatcher = state.dispatcher

        def on_refusal(self, error: GatewayError) -> None:
            state.metrics.record_refusal(error.status)
            status, fault = error.status, error.message
            state.access.write(RequestRecord(new_id(), NO_ENDPOINT, "-", status, 0.0, fault=fault))

    running = _Server(_config(state.door, Connection, server, lifespan="on"))
    opened = running.server_state.connections
    state.metrics.watch_connections(lambda: len(opened), server.max_connections)
    return running


def metrics_server(app: FastAPI) -> uvicorn.Server | None:
    """Return the server of the metrics' own port, None where they have none."""
    state: State = app.state.gateway
    if state.metrics_door is None:
        return None
    server = state.settings.server

    class Connection(ClientConnection):
        bounds = _bounds(server, MAX_SCRAPERS, MAX_SCRAPERS)
        peers = PeerConnections()

        def on_refusal(self, error: GatewayError) -> None:
            """Nobody counts those who scrape."""

    return _Server(_config(state.metrics_door, Connection, server, lifespan="off"))


def _bounds(server: ServerSettings, connections: int, per_peer: int) -> ConnectionBounds:
    return ConnectionBounds(
        connections=connections,
        connections_per_peer=per_peer,
        header_timeout_s=server.header_timeout_s,
        body_timeout_s=server.body_timeout_s,
        stall_s=server.client_stall_s,
    )


def _config(
    door: ASGIApp,
    connection: type[ClientConnection],
    server: ServerSettings,
    *,
    lifespan: Literal["on", "off"],
) -> uvicorn.Config:
    return uvicorn.Config(
        door,
        loop="uvloop",
        interface="asgi3",
        http=connection,
        timeout_keep_alive=server.keep_alive_s,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # nothing here asks who the client says it is
        lifespan=lifespan,
        backlog=BACKLOG,
        # Its own wait for open connections; by then the drain has ended all that may go on.
        timeout_graceful_shutdown=1,
    )


async def _serve(
    app: FastAPI,
    sock: socket.socket,
    metrics_sock: socket.socket | None,
    banner_key: str | None,
    ours: contextlib.ExitStack,
    manager: ServiceManager | None,
) -> None:
    """Serve until told to stop. `ours` holds what only one gateway has: ports and directory."""
    state: State = app.state.gateway
    server = uvicorn_server(app)
    scraped = metrics_server(app)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(name: str) -> None:
        if stopping.is_set():
            log.warning("%s again: stopping without waiting", name)
            server.should_exit = True
            return
        log.info("%s: draining, %d requests in flight", name, state.admission.in_flight)
        stopping.set()

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, on_signal, signal.Signals(signum).name)

    asked = asyncio.Event()
    on_terminal = os.isatty(STDERR)

    def on_hangup() -> None:
        # A terminal that closes sends the same signal; nothing can be read or written there then.
        if on_terminal and not os.isatty(STDERR):
            on_signal("SIGHUP")
        else:
            asked.set()

    loop.add_signal_handler(signal.SIGHUP, on_hangup)
    reloading = asyncio.create_task(_reload_when(asked, state, manager), name="reload on SIGHUP")
    serving = asyncio.create_task(server.serve([sock]), name="serve")
    telling = asyncio.create_task(_tell(manager, state, server)) if manager else None
    stop = asyncio.create_task(stopping.wait())
    settled = asyncio.create_task(state.settled.wait())
    port: int = sock.getsockname()[1]
    log.info(
        "listening on %s:%d, starting engines; `vllm-gateway status` shows how far they are",
        state.settings.server.host,
        port,
    )
    scraping: asyncio.Task[None] | None = None
    if scraped is not None and metrics_sock is not None:
        scraping = asyncio.create_task(scraped.serve([metrics_sock]), name="serve metrics")
        host = state.settings.metrics.host
        log.info("metrics are on %s:%d", host, metrics_sock.getsockname()[1])
    try:
        await asyncio.wait({serving, stop, settled}, return_when=asyncio.FIRST_COMPLETED)
        if settled.done() and not stop.done():
            if hopeless(state):
                failures = list(_failures(state))
                server.should_exit = True
                await serving
                raise ConfigError(failures)
            _say(banner(state, port, banner_key))
            await asyncio.wait({serving, stop}, return_when=asyncio.FIRST_COMPLETED)
        if manager:
            within = state.settings.server.drain_timeout_s + STOP_GRACE_S + CLOSING_S
            manager.stopping(f"draining: {status(state)}", within)
        if state.settings.server.keep_engines:
            await _hand_over(state, [one for one in (server, scraped) if one is not None], ours)
        await _drain(state, server)
        await serving
        log.info("stopped")
    finally:
        for task in filter(None, (stop, settled, reloading, telling)):
            task.cancel()
        if scraped is not None and scraping is not None:
            scraped.should_exit = True
            await scraping


async def _hand_over(
    state: State, servers: Iterable[uvicorn.Server], ours: contextlib.ExitStack
) -> None:
    """Let the next gateway begin at once: what is in flight here goes on beside it."""
    state.admission.drain()
    await state.reloader.stop()
    await release_engines(state)
    for server in servers:
        for listening in server.servers:
            listening.close()
    ours.close()
    log.info("the port and the engines are free for the next gateway")


async def _tell(manager: ServiceManager, state: State, server: _Server) -> None:
    """Tell the service manager that we serve, and from then on that we live and how we fare.

    We serve when we listen: models may load for an hour, or at the first request, and meanwhile
    the others answer, and /ready says how far it is.
    """
    await server.begun.wait()
    # Half of its patience, as sd_watchdog_enabled(3) advises.
    pause = min(STATUS_S, manager.watchdog_s / 2) if manager.watchdog_s else STATUS_S
    told = False
    while server.started:
        if told:
            manager.alive(status(state))
        else:
            told = manager.ready(status(state))
        await asyncio.sleep(pause)


def status(state: State) -> str:
    """Return in one line how the gateway fares."""
    engines = state.catalogue.engines
    ready = sum(engine.state == "ready" for engine in engines)
    return (
        f"{ready} of {len(engines)} engines ready, {state.admission.in_flight} requests in flight"
    )


async def _reload_when(asked: asyncio.Event, state: State, manager: ServiceManager | None) -> None:
    """Reload each time it is asked for; signals that come meanwhile are one more reload."""
    while True:
        await asked.wait()
        asked.clear()
        log.info("SIGHUP: reloading the configuration")
        if manager:
            manager.reloading()
        try:
            report = await state.reloader.reload(wait=True)
        except (InvalidConfiguration, Conflict) as error:
            for line in error.message.splitlines():
                log.error("reload: %s", line)
            log.error("reload: nothing was changed")
        except Exception:
            log.exception("reload: a fault of the gateway's own")
        else:
            log.info("reload: %s", report.summary)
        if manager:
            manager.ready(status(state))


async def _drain(state: State, server: uvicorn.Server) -> None:
    """Let the requests in flight end, up to the bound, then make the server exit."""
    state.admission.drain()
    state.keeper.drain()
    patience = state.settings.server.drain_timeout_s
    idle = asyncio.create_task(state.admission.idle())
    deadline = asyncio.get_running_loop().time() + patience
    while not idle.done() and not server.should_exit:
        left = deadline - asyncio.get_running_loop().time()
        if left <= 0:
            log.warning("%d requests did not end in %g s", state.admission.in_flight, patience)
            break
        await asyncio.wait({idle}, timeout=min(left, 0.1))
    idle.cancel()
    server.should_exit = True


def _say(text: str) -> None:
    """Print to standard output without waiting for whoever reads it."""
    if sys.stdout is None:
        return
    data = f"{text}\n".encode()
    sys.stdout.flush()

    def write() -> None:
        with contextlib.suppress(OSError):
            os.write(sys.stdout.fileno(), data)

    # A daemon: where nobody reads, it must not keep the process from its end.
    threading.Thread(target=write, name="print the banner", daemon=True).start()


def _failures(state: State) -> Iterator[str]:
    for engine in state.catalogue.engines:
        if engine.state == "failed":
            yield f"engine {engine.name}: {engine.last_error}"


def _where_keys_are(settings: Settings) -> str:
    if settings.api_keys:
        return "one of GATEWAY_API_KEYS"
    return "one that `vllm-gateway keys create --name NAME` makes"


def _exposure(host: str) -> Iterator[str]:
    """Yield a warning where other machines can connect."""
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_loopback:
            return
    if host != "localhost":
        where = "all interfaces" if host in LOOPBACK else host
        yield (
            f"listens on {where} over plain HTTP: put a TLS proxy in front, or set "
            "server.host: 127.0.0.1"
        )


def banner(state: State, port: int, key: str | None) -> str:
    """Return what a person reads once the gateway serves: where, what, and a line to paste."""
    server = state.settings.server
    url = f"http://{server.local_host}:{port}"
    lines = ["", f"vllm-gateway serves on {url}", *_exposure(server.host), ""]
    for model in state.catalogue.models:
        also = f", also as {', '.join(model.aliases)}" if model.aliases else ""
        ready = f"{model.ready} of {len(model.replicas)} engines ready"
        if model.on_demand and not model.ready:
            ready = "loads at the first request"
        lines.append(f"  model  {model.name}{also} ({ready})")
    lines += [f"         {failure}" for failure in _failures(state)]
    header = ""
    if state.settings.auth.enabled:
        lines.append(f"  key    {key or _where_keys_are(state.settings)}")
        header = f' -H "Authorization: Bearer {key or "$KEY"}"'
    first = next((m for m in state.catalogue.models if m.ready), state.catalogue.models[0])
    question = {"model": first.name, "messages": [{"role": "user", "content": "Hello!"}]}
    lines += [
        "",
        f"  curl {url}/v1/chat/completions{header} -H 'Content-Type: application/json' "
        f"-d {shlex.quote(json.dumps(question))}",
        "",
    ]
    return "\n".join(lines)
