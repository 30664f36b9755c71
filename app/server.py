"""Running the gateway under uvicorn: the socket, the signals, the drain, and what is said of it."""

import asyncio
import contextlib
import fcntl
import gc
import json
import logging
import os
import shlex
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn
import uvloop
from fastapi import FastAPI

from app.connection import ClientConnection, ConnectionBounds
from app.database.database import Database, DatabaseUnavailable
from app.errors import Conflict, InvalidConfiguration
from app.main import State, create_app, hopeless, release_engines
from app.settings import ConfigError, Settings

log = logging.getLogger(__name__)

BACKLOG = 2048
STDERR = 2


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: ours drain first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(
    settings: Settings,
    *,
    banner_key: str | None = None,
    source: Callable[[], Settings] | None = None,
) -> None:
    """Run the gateway until it is told to stop.

    `banner_key` is shown in the ready banner, `source` reads the settings again for a reload.
    Raises ConfigError, also when no engine could be started and none may come up later or the file
    of the database cannot be had, and LauncherMissing.
    """
    check_database(settings)
    sock = listen(settings.server.host, settings.server.port)
    with contextlib.ExitStack() as ours:
        ours.callback(sock.close)
        ours.enter_context(locked(settings.server.run_dir))
        app = create_app(settings, source=source)
        # What is there now stays: the collector need not walk it again (5 % of the CPU here).
        gc.freeze()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(app, sock, banner_key, ours))


def check_database(settings: Settings) -> None:
    """Raise ConfigError when the file of the database cannot be made or is none.

    A database server is not asked: it may only be down for now.
    """

    async def check() -> None:
        database = Database(settings.state.database_url.get_secret_value())
        try:
            if database.dialect == "sqlite":
                await database.migrate()
        except DatabaseUnavailable as error:
            raise ConfigError([f"state.database_url {database!r}: {error}"]) from None
        finally:
            await database.close()

    asyncio.run(check())


def listen(host: str, port: int) -> socket.socket:
    """Return a bound socket. Raises ConfigError when the address cannot be had."""
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
            [f"cannot listen on {host}:{port}: {reason}; choose another: GATEWAY_SERVER__PORT=8001"]
        ) from None
    return sock


@contextlib.contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Hold a run directory for this process. Raises ConfigError when another gateway has it."""
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(run_dir / "gateway.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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


def uvicorn_server(app: FastAPI) -> uvicorn.Server:
    """Return the server that carries the application, its signals left to the caller."""
    state: State = app.state.gateway
    server = state.settings.server

    class Connection(ClientConnection):
        bounds = ConnectionBounds(
            server.max_connections,
            server.header_timeout_s,
            server.body_timeout_s,
            server.client_stall_s,
        )

        def on_refusal(self, status: int) -> None:
            state.metrics.refusal(status)

    config = uvicorn.Config(
        state.door,
        loop="uvloop",
        interface="asgi3",
        http=Connection,
        timeout_keep_alive=server.keep_alive_s,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # nothing here asks who the client says it is
        lifespan="on",
        backlog=BACKLOG,
        # Its own wait for open connections; by then the drain has ended all that may go on.
        timeout_graceful_shutdown=1,
    )
    return _Server(config)


async def _serve(
    app: FastAPI, sock: socket.socket, banner_key: str | None, ours: contextlib.ExitStack
) -> None:
    """Serve until told to stop. `ours` holds what only one gateway can have: port and directory."""
    state: State = app.state.gateway
    server = uvicorn_server(app)
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
    reloading = asyncio.create_task(_reload_when(asked, state), name="reload on SIGHUP")
    serving = asyncio.create_task(server.serve([sock]), name="serve")
    stop = asyncio.create_task(stopping.wait())
    settled = asyncio.create_task(state.settled.wait())
    port: int = sock.getsockname()[1]
    log.info("listening on %s:%d, starting engines", state.settings.server.host, port)
    try:
        await asyncio.wait({serving, stop, settled}, return_when=asyncio.FIRST_COMPLETED)
        if settled.done() and not stop.done():
            if hopeless(state):
                failures = list(_failures(state))
                server.should_exit = True
                await serving
                raise ConfigError(failures)
            print(banner(state, port, banner_key), flush=True)
            await asyncio.wait({serving, stop}, return_when=asyncio.FIRST_COMPLETED)
        if state.settings.server.keep_engines:
            await _hand_over(state, server, ours)
        await _drain(state, server)
        await serving
        log.info("stopped")
    finally:
        for task in (stop, settled, reloading):
            task.cancel()


async def _hand_over(state: State, server: uvicorn.Server, ours: contextlib.ExitStack) -> None:
    """Let the next gateway begin at once: what is in flight here goes on beside it."""
    state.admission.drain()
    await state.reloader.close()
    await release_engines(state)
    for listening in server.servers:
        listening.close()
    ours.close()
    log.info("the port and the engines are free for the next gateway")


async def _reload_when(asked: asyncio.Event, state: State) -> None:
    """Reload each time it is asked for; signals that come meanwhile are one more reload."""
    while True:
        await asked.wait()
        asked.clear()
        log.info("SIGHUP: reloading the configuration")
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


def _failures(state: State) -> Iterator[str]:
    for engine in state.catalogue.engines:
        if engine.state == "failed":
            yield f"engine {engine.name}: {engine.last_error}"


def _where_keys_are(settings: Settings) -> str:
    if settings.api_keys:
        return "one of GATEWAY_API_KEYS"
    return "one that `vllm-gateway keys create --name NAME` makes"


def banner(state: State, port: int, key: str | None) -> str:
    """Return what a person reads once the gateway serves: where, what, and a line to paste."""
    host = state.settings.server.host
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104
    url = f"http://{shown}:{port}"
    lines = ["", f"vllm-gateway serves on {url}", ""]
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
