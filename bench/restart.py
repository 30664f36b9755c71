"""Restarts of a gateway under clients that open a connection for every request.

    python -m bench.restart [--restarts 3] [--clients 32]

Real vLLM with the demo model, kept over the restarts (`server.keep_engines`), in two ways: with the
listening socket held by a parent, as systemd's .socket unit does; and with the hand-over from one
gateway to the next. Takes about five minutes, at most ten, and writes its section of
bench/RESULTS.md. Exit code 1 when a request was refused, reset or failed, or a stream in flight did
not end whole.
"""

import argparse
import asyncio
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import yaml

from bench.children import (
    ROOT,
    Child,
    StartError,
    child,
    environment,
    free_port,
    terminated_like_interrupted,
)
from bench.peers import KEY, MODEL, RUN, configuration
from bench.real import DEMO, make_model
from bench.report import Table, replace_section
from bench.restart_load import Clients, Fates, fault_of, request
from bench.terminal import show

Engine: TypeAlias = Mapping[str, object]

RESULTS = Path(__file__).with_name("RESULTS.md")
TITLE = "Restart"
BOUND_S = 600.0
START_S = 300.0
POLL_S = 0.02
BETWEEN = 200  # requests between two restarts
STREAM_TOKENS = 400
SOCKET_UNIT, HAND_OVER = "socket unit", "hand-over"
WAYS = (SOCKET_UNIT, HAND_OVER)
COMMAND = (sys.executable, *RUN, "serve", "--config")
SOCKET_ACTIVATION = Path(__file__).with_name("socket_activation.py")


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of a run: fields of the plain ones and of the stream that each restart meets."""

    clients: int
    between: int  # plain requests that are answered between two restarts
    plain: Mapping[str, object]
    stream: Mapping[str, object] | None  # None: no stream


@dataclass(frozen=True, slots=True)
class Result:
    """The restarts of one way."""

    way: str
    restarts: int
    fates: Fates
    streams: int
    streams_lost: int
    # From SIGTERM until the answer to a request that was sent right after it, the longest.
    gap_s: float

    @property
    def clean(self) -> bool:
        return not self.fates.faults and not self.streams_lost

    @property
    def row(self) -> list[str]:
        """The row of the table."""
        fates, whole = self.fates, self.streams - self.streams_lost
        refused, reset = fates.faults["refused"], fates.faults["reset"]
        failed = fates.faults.total() - refused - reset
        return [
            f"{self.way}, {'a stream' if self.streams else 'no stream'} in flight",
            *(str(count) for count in (self.restarts, fates.whole, refused, reset, failed)),
            f"{whole} of {self.streams}" if self.streams else "–",
            f"{fates.longest_s:.2f}",
            f"{self.gap_s:.2f}",
        ]


def table(results: Sequence[Result], clients: int) -> Table:
    """Return the section of the results."""
    columns = ["", "restarts", "answered", "refused", "reset", "failed", "streams ended whole"]
    return Table(
        TITLE,
        [*columns, "longest wait, s", "longest gap, s"],
        [result.row for result in results],
        f"{clients} clients that open a connection for every request to the demo model on real "
        "vLLM, while the gateway is restarted with `server.keep_engines`. The wait is from "
        "`connect` to the last byte of an answer; the gap from SIGTERM to the answer of a request "
        "sent right after it, which with the hand-over is the old gateway's. With the socket unit "
        "the next gateway starts when the old one has exited, so both contain the rest of the "
        "stream and the start of a gateway.",
    )


class Gateways:
    """The gateways of one run, one after the other on the same port and run directory."""

    def __init__(self, directory: Path, way: str, command: Sequence[str], engine: Engine) -> None:
        self.port = free_port()
        self._way = way
        self._directory = directory
        self._engine = engine
        self._config = directory / "gateway.yaml"
        self._command = [*command, str(self._config)]
        self._stack = ExitStack()
        self._starts = 0
        self._current: Child | None = None
        self._held: socket.socket | None = None
        if way == SOCKET_UNIT:
            self._held = self._stack.enter_context(socket.create_server(("127.0.0.1", self.port)))

    async def start(self, *, keep_engines: bool = True) -> None:
        """Start a gateway; return at once. Raises StartError."""
        models: list[dict[str, object]] = [{"name": MODEL, "engines": [self._engine]}]
        settings = configuration(self._directory, self.port, models)
        server = settings["server"]
        assert isinstance(server, dict)
        server["keep_engines"] = keep_engines
        # A machine busy with other work starts the next gateway late.
        server["handover_wait_s"] = START_S
        self._config.write_text(yaml.safe_dump(settings))
        self._starts += 1
        argv: list[str | Path] = [*self._command]
        fds = []
        if self._held is not None:
            fds = [self._held.fileno()]
            argv = [sys.executable, SOCKET_ACTIVATION, str(fds[0]), *argv]
        self._current = self._stack.enter_context(
            child(
                f"restart-{self._way.replace(' ', '-')}-{self._starts}",
                argv,
                env=environment(GATEWAY_API_KEYS=KEY),
                pass_fds=fds,
            )
        )

    async def until_ready(self) -> None:
        """Return when the gateway has printed its banner. Raises StartError."""
        running = self._current
        assert running is not None
        deadline = time.monotonic() + START_S
        while "serves on" not in running.log.read_text():
            if running.ended or time.monotonic() > deadline:
                raise StartError(f"{running.name} does not serve; see {running.log}")
            await asyncio.sleep(POLL_S)

    async def restart(self, *, keep_engines: bool = True) -> None:
        """Restart it as the supervisor of this way does."""
        old = self._current
        assert old is not None
        if not old.ended:
            os.kill(old.pid, signal.SIGTERM)
        while self._way == SOCKET_UNIT and not old.ended:  # noqa: ASYNC110 - a child has no event
            await asyncio.sleep(POLL_S)
        await self.start(keep_engines=keep_engines)

    async def end(self) -> None:
        """End the gateways and the engines."""
        with self._stack:
            if self._current is not None:
                await self.restart(keep_engines=False)
                await self.until_ready()


async def measure(
    way: str, command: Sequence[str], engine: Engine, load: Load, restarts: int
) -> Result:
    """Return what became of the requests while gateways were restarted. Raises StartError.

    `command` runs a gateway with the configuration file that follows.
    """
    with tempfile.TemporaryDirectory() as directory:
        gateways = Gateways(Path(directory), way, command, engine)
        try:
            await gateways.start()
            await gateways.until_ready()
            payload = request(MODEL, KEY, **load.plain)
            clients = Clients(gateways.port, payload, load.clients)
            streams, lost, gap_s = 0, 0, 0.0
            for _ in range(restarts):
                await clients.until_whole(load.between)
                streaming = None
                if load.stream is not None:
                    stream = request(MODEL, KEY, stream=True, **load.stream)
                    streaming = asyncio.create_task(fault_of(gateways.port, stream))
                await clients.until_whole(load.clients)
                began = time.monotonic()
                await gateways.restart()
                clients.fates.add(await fault_of(gateways.port, payload), 0.0)
                gap_s = max(gap_s, time.monotonic() - began)
                if streaming is not None:
                    streams += 1
                    lost += await streaming is not None
                await gateways.until_ready()
            await clients.until_whole(load.between)
            return Result(way, restarts, await clients.end(), streams, lost, gap_s)
        finally:
            await gateways.end()


def main() -> int:
    """Entry point of the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.restart", description=__doc__)
    parser.add_argument("--restarts", type=int, default=3, help="restarts in each way")
    parser.add_argument("--clients", type=int, default=32, help="clients at once")
    options = parser.parse_args()
    make_model()
    demo = yaml.safe_load((ROOT / "deploy" / "demo.yaml").read_text())
    engine = {**demo["models"][0]["engines"][0], "model": str(DEMO)}
    stream = {"max_tokens": STREAM_TOKENS, "ignore_eos": True}
    load = Load(clients=options.clients, between=BETWEEN, plain={"max_tokens": 2}, stream=stream)
    runs = [(SOCKET_UNIT, replace(load, stream=None)), *((way, load) for way in WAYS)]

    async def measure_all() -> list[Result]:
        async with asyncio.timeout(BOUND_S):
            return [await measure(way, COMMAND, engine, one, options.restarts) for way, one in runs]

    with terminated_like_interrupted():
        try:
            results = asyncio.run(measure_all())
        except StartError as error:
            sys.exit(f"bench.restart: {error}")
        except TimeoutError:
            sys.exit(f"bench.restart: not done in {BOUND_S:g} s")
    made = table(results, options.clients)
    RESULTS.write_text(replace_section(RESULTS.read_text(), made.markdown()))
    show(made)
    return 0 if all(result.clean for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
