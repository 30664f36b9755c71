"""Load on an OpenAI-compatible endpoint, and its cost in the processes between.

    python -m bench.load --url http://127.0.0.1:8000 --streams 64 --requests 256 --pid PID

Prints one JSON object, see `Result`. Only addresses on this machine are meant.
"""

import argparse
import asyncio
import gc
import json
import math
import re
import ssl
import sys
import time
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools
import msgspec
import uvloop

from bench import proc
from bench.figures import gaps, percentile, stall_free

COMPLETION_TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')
# Time after the last response in which its ledger row and access line are written. It counts as
# part of the load.
TAIL_S = 0.3


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """The requests to send, their number, and the processes to measure."""

    url: str
    path: str = "/v1/chat/completions"
    model: str = "stub"
    key: str = "none"
    streams: int = 32  # requests in flight
    requests: int = 256
    seconds: float | None = None  # send for so long instead of a number of requests
    tokens: int = 64
    stream: bool = True
    ignore_eos: bool = False
    prompt: str = "hello " * 50
    pace_ms: float = 20.0  # between two tokens of the engine; three of them are a stall
    ramp_s: float = 0.2  # over which the streams start
    timeout_s: float = 60.0  # of one request
    deadline_s: float = 120.0  # of everything
    pid: int | None = None  # measure this process and its children


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Results. Times in milliseconds as measured by the client, None without a measurement."""

    ok: int
    failed: int
    failures: dict[str, int]
    wall_s: float
    requests_per_s: float
    tokens_per_s: float
    chunks: int
    ttft_p50: float | None
    ttft_p99: float | None
    gap_p50: float | None
    gap_p99: float | None
    e2e_p50: float | None
    e2e_p99: float | None
    stall_free: int
    cpu_s: float | None
    cpu_us_per_request: float | None
    cpu_us_per_chunk: float | None
    rss_mib: float | None  # the peak during the run


class Failed(Exception):
    """An unexpected response; the text is its name in the result."""


@dataclass(slots=True)
class Answer:
    """One answer: the times of the reads that brought some of its body, and the body."""

    started: float
    reads: list[float]
    body: bytes

    @property
    def ttft(self) -> float:
        return self.reads[0] - self.started

    @property
    def duration(self) -> float:
        return self.reads[-1] - self.started


class _Connection(asyncio.Protocol):
    """One keep-alive connection, one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[Answer] | None = None

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, payload: bytes) -> asyncio.Future[Answer]:
        """Send a request; the future has its answer, or raises Failed or ConnectionError."""
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._reads: list[float] = []
        self._body: list[bytes] = []
        self._done = asyncio.get_running_loop().create_future()
        self._started = self._now = time.perf_counter()
        self._transport.write(payload)
        return self._done

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not inherit from asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._fail(ConnectionError("closed before the answer was complete"))

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(Failed(f"not HTTP: {error}"))
            self.abort()

    def on_body(self, body: bytes) -> None:
        if not self._reads or self._reads[-1] != self._now:
            self._reads.append(self._now)
        self._body.append(body)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status != 200 or not self._reads:
            self._fail(Failed(f"HTTP {status}"))
        elif self._done is not None and not self._done.done():
            self._done.set_result(Answer(self._started, self._reads, b"".join(self._body)))
        if not self._parser.should_keep_alive():
            self.abort()

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)


class _Run:
    """One run: its workers share the remaining requests and the results."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.left = load.requests
        self.answers: list[Answer] = []
        self.failures: dict[str, int] = {}
        self._until = math.inf
        self._payload = payload(load)
        url = urlsplit(load.url)
        self._address = (url.hostname or "127.0.0.1", url.port or 80)
        self._tls = None if url.scheme == "http" else _any_certificate()

    async def all(self) -> None:
        """Send everything, or as much as the deadline allows."""
        load = self.load
        if load.seconds is not None:
            self.left, self._until = sys.maxsize, time.perf_counter() + load.seconds
        spread = load.ramp_s / max(1, load.streams)
        workers = [asyncio.create_task(self._worker(i * spread)) for i in range(load.streams)]
        _, late = await asyncio.wait(workers, timeout=load.deadline_s)
        for worker in late:
            worker.cancel()
            self._failed("not done before the deadline")
        await asyncio.gather(*workers, return_exceptions=True)

    async def _worker(self, delay: float) -> None:
        await asyncio.sleep(delay)
        connection: _Connection | None = None
        try:
            while self.left > 0 and time.perf_counter() < self._until:
                self.left -= 1
                try:
                    if connection is None or not connection.usable:
                        connection = await self._connect()
                    async with asyncio.timeout(self.load.timeout_s):
                        answer = await connection.send(self._payload)
                    self._take(answer)
                except (Failed, OSError, TimeoutError) as error:
                    self._failed(f"{type(error).__name__}: {error}")
                    if connection is not None:
                        connection.abort()
                        connection = None
        finally:
            if connection is not None:
                connection.abort()

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        host, port = self._address
        _, connection = await loop.create_connection(_Connection, host, port, ssl=self._tls)
        return connection

    def _take(self, answer: Answer) -> None:
        if self.load.stream and b"data: [DONE]" not in answer.body[-64:]:
            self._failed("truncated stream")
        else:
            self.answers.append(answer)

    def _failed(self, name: str) -> None:
        self.failures[name] = self.failures.get(name, 0) + 1


def _any_certificate() -> ssl.SSLContext:
    """Return TLS to a gateway whose certificate has been made for this run."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def payload(load: Load) -> bytes:
    """Return the request that a load sends."""
    body: dict[str, object] = {
        "model": load.model,
        "messages": [{"role": "user", "content": load.prompt}],
        "max_tokens": load.tokens,
        "temperature": 0,
    }
    if load.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if load.ignore_eos:
        body["ignore_eos"] = True
    raw = json.dumps(body).encode()
    head = (
        f"POST {load.path} HTTP/1.1\r\nhost: {urlsplit(load.url).netloc}\r\n"
        f"content-type: application/json\r\nauthorization: Bearer {load.key}\r\n"
        f"content-length: {len(raw)}\r\n\r\n"
    )
    return head.encode() + raw


async def run(load: Load) -> Result:
    """Send the load; return the results."""
    work = _Run(load)
    pids = _family(load)
    proc.reset_peak_rss(pids)
    before, started = proc.cpu_clocks(pids), time.perf_counter()
    await work.all()
    wall = time.perf_counter() - started
    if load.pid is None:
        return _result(work, wall, None, None)
    await asyncio.sleep(TAIL_S)
    # Including children started meanwhile.
    pids = _family(load)
    cpu = proc.cpu_spent(before, proc.cpu_clocks(pids))
    return _result(work, wall, cpu, round(proc.peak_rss_kib(pids) / 1024, 1))


def _family(load: Load) -> list[int]:
    return [] if load.pid is None else proc.family(load.pid)


def _result(work: _Run, wall: float, cpu: float | None, rss_mib: float | None) -> Result:
    load, answers = work.load, work.answers
    ttft = [answer.ttft for answer in answers]
    e2e = [answer.duration for answer in answers]
    between = [gap for answer in answers for gap in gaps(answer.reads)] if load.stream else []
    chunks = sum(a.body.count(b"\n\n") for a in answers) if load.stream else 0
    tokens = sum(_tokens(answer.body) for answer in answers)
    pace_s = load.pace_ms / 1000
    return Result(
        ok=len(answers),
        failed=sum(work.failures.values()),
        failures=work.failures,
        wall_s=round(wall, 3),
        requests_per_s=round(len(answers) / wall, 1),
        tokens_per_s=round(tokens / wall, 1),
        chunks=chunks,
        ttft_p50=_ms(percentile(ttft, 0.5)),
        ttft_p99=_ms(percentile(ttft, 0.99)),
        gap_p50=_ms(percentile(between, 0.5)),
        gap_p99=_ms(percentile(between, 0.99)),
        e2e_p50=_ms(percentile(e2e, 0.5)),
        e2e_p99=_ms(percentile(e2e, 0.99)),
        stall_free=sum(stall_free(a.reads, pace_s) for a in answers) if load.stream else 0,
        cpu_s=cpu,
        cpu_us_per_request=_us_per(cpu, len(answers)),
        cpu_us_per_chunk=_us_per(cpu, chunks),
        rss_mib=rss_mib,
    )


def _tokens(body: bytes) -> int:
    found = COMPLETION_TOKENS.findall(body[-2048:])
    return int(found[-1]) if found else 0


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)


def _us_per(seconds: float | None, count: int) -> float | None:
    return None if seconds is None or not count else round(seconds / count * 1e6, 2)


def arguments(load: Load) -> list[str]:
    """Return the command line that `main` reads as this load."""
    argv: list[str] = []
    for name, value in msgspec.structs.asdict(load).items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            argv.append(flag if value else f"--no-{flag[2:]}")
        elif value is not None:
            argv.append(f"{flag}={value}")
    return argv


def main() -> None:
    """Entry point of the command."""
    parser = argparse.ArgumentParser(description="Load on an OpenAI-compatible endpoint.")
    for field in msgspec.structs.fields(Load):
        flag = f"--{field.name.replace('_', '-')}"
        if isinstance(field.default, bool):
            action = argparse.BooleanOptionalAction
            parser.add_argument(flag, action=action, default=field.default)
        elif field.required:
            parser.add_argument(flag, required=True)
        else:
            parser.add_argument(flag, default=field.default)
    load = msgspec.convert(vars(parser.parse_args()), Load, strict=False)
    # A pause of the client itself would count as a stall of the measured target.
    gc.disable()
    print(msgspec.json.encode(uvloop.run(run(load))).decode())


if __name__ == "__main__":
    main()
