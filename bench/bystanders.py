"""Measures how long other clients of a gateway wait while one client sends hostile bodies.

    python -m bench.bystanders --url http://127.0.0.1:8000 --key KEY --streams 64
    python -m bench.bystanders --url http://127.0.0.1:8000 --probe --pid PID

The first reads endless streams and records when each chunk arrives. The second probes the event
loop: it sends GET /health on one connection, PROBE_EVERY_S after each response, and a loop that is
blocked responds late. For each probe it records the CPU time that the process PID spent meanwhile,
which tells a loop that computed from one that the kernel did not schedule. Both print `ready` after
the first responses, run until standard input is closed, and then print one JSON object, see `Seen`.
"""

import argparse
import asyncio
import gc
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import cast
from urllib.parse import urlsplit

import httptools
import msgspec
import uvloop

from bench import proc
from bench.hostile_sender import READY
from bench.load import Load, payload

PROBE_EVERY_S = 0.002
# Ten minutes at 20 ms a token: longer than any measurement.
ENDLESS_TOKENS = 30_000
RAMP_S = 0.2
READY_S = 60.0


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """Times of time.perf_counter; the time between two successive ones of a list is a wait."""

    # The chunks of each stream; the request and the response of each probe. A list whose stream or
    # probe was not complete ends with the end of the measurement or of the connection.
    times: list[list[float]]
    cpu_s: list[float]  # of the probed process during each probe; empty without a process
    lost: int  # connections that ended before the measurement did


class _Watcher(asyncio.Protocol):
    """One connection whose waits are recorded."""

    def __init__(self, request: bytes) -> None:
        self.times: list[list[float]] = []
        self.cpu_s: list[float] = []
        self.responded = asyncio.Event()
        self.lost = False
        self._request = request
        self._stopped = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not inherit from asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self.send()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._stopped:
            self.lost = True
            self.responded.set()
            self.end()

    def stop(self) -> None:
        """End the measurement."""
        if not self.lost:
            self._stopped = True
            self.end()
            self._transport.abort()

    def send(self) -> None:
        """Send the request."""
        self._transport.write(self._request)

    def end(self) -> None:
        """Record the end of a wait that is not over."""
        raise NotImplementedError


class _Stream(_Watcher):
    def data_received(self, data: bytes) -> None:
        if not self.responded.is_set():
            if not data.startswith(b"HTTP/1.1 200"):
                self._transport.abort()
                return
            self.times.append([])
            self.responded.set()
        self.times[0].append(time.perf_counter())

    def end(self) -> None:
        if self.times:
            self.times[0].append(time.perf_counter())


class _Probe(_Watcher):
    def __init__(self, request: bytes, pid: int | None) -> None:
        super().__init__(request)
        self._pid = pid
        self._cpu_s = 0.0

    def send(self) -> None:
        if not self._transport.is_closing():
            self._parser = httptools.HttpResponseParser(self)
            self._cpu_s = self._cpu_now()
            self.times.append([time.perf_counter()])
            super().send()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        self.end()
        self.responded.set()
        asyncio.get_running_loop().call_later(PROBE_EVERY_S, self.send)

    def end(self) -> None:
        if len(self.times[-1]) == 1:
            self.times[-1].append(time.perf_counter())
            if self._pid is not None:
                self.cpu_s.append(self._cpu_now() - self._cpu_s)

    def _cpu_now(self) -> float:
        spent = None if self._pid is None else proc.cpu_clock(self._pid)
        return self._cpu_s if spent is None else spent


async def watch(
    url: str,
    stop: Awaitable[object],
    *,
    key: str = "none",
    streams: int = 0,
    pid: int | None = None,
) -> Seen:
    """Read so many streams, or probe if there are none, until `stop` returns.

    Raises ConnectionError and TimeoutError when one of them gets no response.
    """
    parts = urlsplit(url)
    address = parts.hostname or "127.0.0.1", parts.port or 80
    make: Callable[[], _Watcher]
    if streams:
        make = partial(_Stream, payload(Load(url=url, key=key, tokens=ENDLESS_TOKENS)))
    else:
        health = f"GET /health HTTP/1.1\r\nhost: {parts.netloc}\r\n\r\n".encode()
        make = partial(_Probe, health, pid)
    loop = asyncio.get_running_loop()
    watchers = []
    async with asyncio.timeout(READY_S):
        for _ in range(streams or 1):
            _, watcher = await loop.create_connection(make, *address)
            watchers.append(watcher)
            await asyncio.sleep(RAMP_S / (streams or 1))
        for watcher in watchers:
            await watcher.responded.wait()
            if watcher.lost:
                raise ConnectionError("a connection was closed, or the status was not 200")
    print(READY, flush=True)
    await stop
    for watcher in watchers:
        watcher.stop()
    return Seen(
        times=[times for watcher in watchers for times in watcher.times],
        cpu_s=[cpu_s for watcher in watchers for cpu_s in watcher.cpu_s],
        lost=sum(watcher.lost for watcher in watchers),
    )


async def _until_input_ends(options: argparse.Namespace) -> Seen:
    stop = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    return await watch(options.url, stop, key=options.key, streams=options.streams, pid=options.pid)


def main() -> None:
    """Entry point of the command."""
    parser = argparse.ArgumentParser(description="Measures how long clients of a gateway wait.")
    parser.add_argument("--url", required=True)
    parser.add_argument("--key", default="none")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--streams", type=int, default=0)
    what.add_argument("--probe", action="store_true")
    parser.add_argument("--pid", type=int)
    options = parser.parse_args()
    # A pause of the client's own would be counted as a stall of the gateway.
    gc.disable()
    seen = uvloop.run(_until_input_ends(options))
    # Buffered in any case: with PYTHONUNBUFFERED, print loses what a pipe does not take at once.
    with open(sys.stdout.fileno(), "wb", closefd=False) as output:
        output.write(msgspec.json.encode(seen) + b"\n")


if __name__ == "__main__":
    main()
