"""Runs the gateway in this process: ports, signals, reload, and its end.

Above `app.main`, which only builds: what checks a configuration or documents the API builds a
gateway without a server.
"""

import asyncio
import gc
import logging
import os
import signal
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from typing import Any

import uvloop

from app.application import Application
from app.certificate import Certificate
from app.errors import Conflict, InvalidConfiguration
from app.fleet import STOP_GRACE_S
from app.main import create_app
from app.server.banner import banner, engine_failures, print_without_waiting, status_line
from app.server.database import other_database, prepare_database
from app.server.handover import Predecessor, find_predecessor
from app.server.http_server import HttpServer, gateway_server, metrics_server
from app.server.listen import lock_run_dir
from app.server.notify import ServiceManager
from app.server.passed_sockets import take_sockets
from app.server.ports import Ports, open_ports
from app.server.shutdown import Shutdown
from app.settings import ConfigError, Settings
from app.telemetry.logs import Output

log = logging.getLogger(__name__)

STDERR = 2
# Seconds between status reports to the service manager, unless it asks for more.
STATUS_S = 10.0
# Time for the rest of a shutdown, after drain and engines: the last records, open connections.
CLOSING_S = 15.0


def serve(
    settings: Settings,
    *,
    banner_key: str | None = None,
    source: Callable[[], Settings] | None = None,
    source_of_text: Callable[[str], Settings] | None = None,
    output: Output | None = None,
    launcher: Sequence[str] | None = None,
) -> None:
    """Run the gateway until a signal stops it.

    `banner_key` is shown in the ready banner, `source` reads the settings again for a reload,
    `source_of_text` with another text of the file, `output` takes the access lines, `launcher` runs
    vLLM's server (default: see `create_app`).
    Raises ConfigError, also when no engine could be started and none may come up later, or when the
    file of the database cannot be opened; and LauncherMissing.
    """
    manager = ServiceManager.take_from(os.environ)
    passed = take_sockets(os.environ)
    settings.keep_secrets()
    run_dir = settings.server.run_dir
    with ExitStack() as stack:
        # First of all: the previous gateway serves while this one starts.
        predecessor = None if passed else stack.enter_context(find_predecessor(run_dir))
        tls = settings.server.tls
        certificate = Certificate(tls) if tls is not None else None
        made = prepare_database(settings)
        # Before the ports: the previous gateway serves on if the configuration is faulty.
        application = create_app(
            settings, launcher=launcher, source=source, source_of_text=source_of_text, output=output
        )
        if made and (other := other_database(settings)):
            log.warning(other)
        ports = open_ports(settings, passed, predecessor, stack)
        lock = stack.enter_context(ExitStack())
        lock.enter_context(lock_run_dir(run_dir))
        # Objects created so far stay: the collector need not scan them again (5 % of the CPU here).
        gc.freeze()
        # Requests leave no cycles: a collection every 700 objects took 3 % of the CPU here. One of
        # 10,000 objects takes 2 ms, during which no token is relayed.
        gc.set_threshold(10_000, 20, 100)
        gc.enable()  # the command `serve` has disabled it for the start
        application.waits_for_engines = ports.inherited
        run = GatewayRun(application, ports, lock, manager, certificate)
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(run.serve(predecessor, banner_key))
        finally:
            application.access.flush()  # whatever ended the loop


@dataclass(eq=False)
class GatewayRun:
    """One run of a gateway in an event loop, from its first connection to the end of its drain."""

    application: Application
    ports: Ports
    lock: ExitStack  # holds the run directory
    manager: ServiceManager | None
    certificate: Certificate | None
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    reload_asked: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._server = gateway_server(self.application, self.certificate)
        self._metrics_server = metrics_server(self.application)

    async def serve(self, predecessor: Predecessor | None, banner_key: str | None) -> None:
        """Serve until a signal or a failed start, then drain.

        Raises ConfigError when no engine could be started and none may come up later.
        """
        application = self.application
        sock, metrics_sock = self.ports.main, self.ports.metrics
        self._handle_signals()
        async with AsyncExitStack() as stack:
            # Released last, so that the drain can be watched.
            if self._metrics_server is not None and metrics_sock is not None:
                scraping = asyncio.create_task(self._metrics_server.serve([metrics_sock]))
                stack.push_async_callback(_exit, self._metrics_server, scraping)
            _start_task(stack, self._reload_when_asked())
            if self.certificate is not None:
                log.info("HTTPS with a certificate %s", self.certificate.describe())
                _start_task(stack, self.certificate.watch())
            serving = asyncio.create_task(self._server.serve([sock]), name="serve")
            if predecessor is not None:
                _start_task(stack, self._confirm(predecessor))
            if self.manager is not None:
                _start_task(stack, self._report_to(self.manager))
            stop = _start_task(stack, self.stopping.wait())
            startup = _start_task(stack, application.startup_done.wait())
            port: int = sock.getsockname()[1]
            host = application.settings.server.host
            message = "listening on %s:%d, starting engines; `vllm-gateway status` shows progress"
            log.info(message, host, port)
            if metrics_sock is not None:
                address = (application.settings.metrics.host, metrics_sock.getsockname()[1])
                log.info("metrics are on %s:%d", *address)
            await asyncio.wait({serving, stop, startup}, return_when=asyncio.FIRST_COMPLETED)
            if startup.done() and not stop.done():
                if application.engine_lifecycle.hopeless:
                    failures = list(engine_failures(application))
                    await _exit(self._server, serving)
                    raise ConfigError(failures)
                print_without_waiting(banner(application, port, banner_key))
                await asyncio.wait({serving, stop}, return_when=asyncio.FIRST_COMPLETED)
            await self._shut_down(serving)

    async def _shut_down(self, serving: asyncio.Task[None]) -> None:
        application = self.application
        settings = application.settings.server
        if self.manager is not None:
            within_s = settings.drain_timeout_s + STOP_GRACE_S + CLOSING_S
            self.manager.stopping(f"draining: {status_line(application)}", within_s)
        # systemd starts the next gateway only when this one has exited, and a container ends with
        # its first process.
        overlaps = self.manager is None and os.getpid() != 1
        servers = self._server, self._metrics_server
        await Shutdown(application, *servers, self.ports, self.lock, overlaps).run()
        await _exit(self._server, serving)
        log.info("stopped")

    async def _confirm(self, predecessor: Predecessor) -> None:
        """Let the previous gateway close its ports once this one accepts connections."""
        await self._server.startup_ended.wait()
        if self._server.started:
            predecessor.confirm()

    # Signals

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        on_terminal = os.isatty(STDERR)

        def on_hangup() -> None:
            # A terminal that closes sends the same signal, and cannot be written to then.
            if on_terminal and not os.isatty(STDERR):
                self._on_stop_signal("SIGHUP")
            else:
                self.reload_asked.set()

        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._on_stop_signal, signal.Signals(signum).name)
        loop.add_signal_handler(signal.SIGHUP, on_hangup)

    def _on_stop_signal(self, name: str) -> None:
        if self.stopping.is_set():
            log.warning("%s again: stopping without waiting", name)
            self._server.should_exit = True
            return
        in_flight = self.application.admission.in_flight
        log.info("%s: draining, %d requests in flight", name, in_flight)
        self.stopping.set()

    async def _reload_when_asked(self) -> None:
        """Reload at each SIGHUP; signals during a reload cause one more."""
        application, manager = self.application, self.manager
        while True:
            await self.reload_asked.wait()
            self.reload_asked.clear()
            log.info("SIGHUP: reloading the configuration")
            if manager is not None:
                manager.reloading()
            try:
                report = await application.reloader.reload(wait=True)
            except (InvalidConfiguration, Conflict) as error:
                for line in error.message.splitlines():
                    log.error("reload: %s", line)
                log.error("reload: nothing was changed")
            except Exception:
                log.exception("reload: unhandled exception")
            else:
                log.info("reload: %s", report.summary)
            if manager is not None:
                manager.ready(status_line(application))

    async def _report_to(self, manager: ServiceManager) -> None:
        """Report to the service manager: readiness once, then status and watchdog pings.

        The gateway is ready when it listens: models may load for an hour, or at the first request,
        and meanwhile the others are served; /ready and the status say how far they are.
        """
        await self._server.startup_ended.wait()
        # Half of its watchdog timeout, as sd_watchdog_enabled(3) advises.
        pause_s = min(STATUS_S, manager.watchdog_s / 2) if manager.watchdog_s else STATUS_S
        ready = False
        while self._server.started:
            if ready:
                manager.alive(status_line(self.application))
            else:
                ready = manager.ready(status_line(self.application))
            await asyncio.sleep(pause_s)


async def _exit(server: HttpServer, serving: asyncio.Task[None]) -> None:
    server.should_exit = True
    await serving


def _start_task(stack: AsyncExitStack, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Return a task that the stack cancels."""
    task = asyncio.create_task(coroutine)
    stack.callback(task.cancel)
    return task
