"""Cost of telemetry: a scrape of a busy gateway, and the metrics, line and times of a request.

In process and alone: no sockets, no engine. What is called are the public faces, as the relay and
the server call them.
"""

import asyncio
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from app.api import ENDPOINTS
from app.application import Application
from app.main import create_app
from app.server import gateway_server
from app.settings import Settings
from app.telemetry import MAX_KEPT, NO_RECORDER, RecentRequests, RequestRecord, RequestRecorder
from app.telemetry.logs import AccessLog, Output, Writer, new_id
from app.telemetry.metrics import Metrics
from app.usage import Usage
from bench.costs import PER_ROUND, ROUNDS, Cost, cost_table, cpu_us
from bench.report import Table

MODELS = 20
ENGINES = 2  # of each model
REQUESTS = 1_000
STATUSES = (200, 200, 200, 400, 401, 404, 408, 413, 429, 499, 500, 502, 503, 504)
CHUNKS = 16  # of a stream
SCRAPES = 200
SCRAPE_BUDGET_MS = 5.0
REQUEST_BUDGET_US = 15.0
TIMES_BUDGET_US = 1.0
TITLE = "Metrics and access log"


def measure(*, quick: bool) -> list[Cost]:
    """Return every figure. Access lines take the way of all, and end in /dev/null."""
    return asyncio.run(_measure(4 if quick else 1))


async def _measure(part: int) -> list[Cost]:
    with (
        TemporaryDirectory() as directory,
        open(os.devnull, "wb") as null,  # noqa: ASYNC230
        # The process' CPU time has the writer's thread in it.
        Writer(null.fileno(), None, lambda _, text: text) as output,
    ):
        state = _gateway(Path(directory), output)
        _fill(state.metrics)
        page = [_timed_ms(state.metrics.exposition) for _ in range(SCRAPES // part)]
        lines = state.metrics.exposition()[0].count(b"\n")
        rounds = range(ROUNDS // part)
        both, alone, written = (
            [cpu_us(act) for _ in rounds]
            for act in (
                _all(state),
                _metrics(state.metrics),
                _access(AccessLog(output, as_json=True)),
            )
        )
        times = _times_us(ROUNDS // part)
        await asyncio.sleep(0)
        state.access.flush()
    scrape = f"GET /metrics, {MODELS} models, {REQUESTS:,} requests, {lines:,} lines"
    return [
        Cost(scrape, "ms", page, SCRAPE_BUDGET_MS),
        Cost("metrics and access line of a request", "µs", both, REQUEST_BUDGET_US),
        Cost("the metrics alone", "µs", alone),
        Cost("the access line alone, with its writing", "µs", written),
        Cost("the times of a plain request, kept for the console", "µs", times, TIMES_BUDGET_US),
    ]


def table(costs: Sequence[Cost]) -> Table:
    """Return the section of the report."""
    return cost_table(
        TITLE,
        costs,
        "In process, CPU time. Every second request is a stream, whose gaps are counted for "
        f"{CHUNKS} chunks and are part of the figure. The times are the difference between "
        "rounds with the console and rounds without, in turn. The median is compared with the "
        "budget; on a busy machine caches are cold, and the minimum is more meaningful.",
    )


def _gateway(directory: Path, output: Output) -> Application:
    """Return a gateway that is not started, with everything that is read at a scrape."""
    models = [
        {
            "name": f"org/model-{number}",
            "engines": [
                {"kind": "remote", "url": f"http://127.0.0.1:{1 + n}"} for n in range(ENGINES)
            ],
        }
        for number in range(MODELS)
    ]
    logs = {"format": "json"}
    settings = Settings(models=models, server={"run_dir": directory}, logs=logs)
    state = create_app(settings, output=output)
    gateway_server(state)
    return state


def _fill(metrics: Metrics) -> None:
    """Have so many requests behind it, of all endpoints and endings, with full histograms."""
    dice = random.Random(1)
    endpoints = list(ENDPOINTS)
    for count in range(REQUESTS):
        model = f"org/model-{count % MODELS}"
        endpoint = endpoints[count // MODELS % len(endpoints)]
        metrics.record_request(model, endpoint, dice.choice(STATUSES), dice.expovariate(0.2))
        metrics.overhead.observe((model,), dice.expovariate(5_000))
        metrics.queue_wait.observe((model,), dice.expovariate(1))
        metrics.time_to_first_token.observe((model,), dice.expovariate(4))
        metrics.inter_token_latency.buckets((model,)).observe(dice.expovariate(30))
        metrics.record_usage(model, "completed", Usage(dice.randrange(4_000), dice.randrange(400)))
        metrics.engine_load.observe((model,), dice.expovariate(0.02))
        metrics.model_evictions.add((model, "room"))
        metrics.continuations.add((model, "replay", "continued"))
        metrics.continuation_gap.observe((model,), dice.expovariate(0.5))


def _all(state: Application) -> Iterator[Callable[[], None]]:
    metrics, access = _metrics(state.metrics), _access(state.access)
    while True:
        count, write = next(metrics), next(access)

        def act(count: Callable[[], None] = count, write: Callable[[], None] = write) -> None:
            count()
            write()

        yield act


def _metrics(metrics: Metrics) -> Iterator[Callable[[], None]]:
    """Return the metrics updates of a request, plain and streamed."""

    def plain() -> None:
        model = "org/model-7"
        metrics.overhead.observe((model,), 0.00012)
        metrics.record_request(model, "/v1/chat/completions", 200, 0.85)
        metrics.record_usage(model, "completed", used)

    def stream() -> None:
        observe = metrics.inter_token_latency.buckets(("org/model-7",)).observe
        for _ in range(CHUNKS):
            observe(0.021)
        metrics.time_to_first_token.observe(("org/model-7",), 0.11)
        plain()

    used = Usage(812, 164)
    while True:
        yield plain
        yield stream


def _access(access: AccessLog) -> Iterator[Callable[[], None]]:
    """Return a function that logs one line; the buffer is flushed as often as in a busy gateway."""
    record = RequestRecord(
        "0f1e2d3c4b5a69788796a5b4c3d2e1f0",
        "/v1/chat/completions",
        "POST",
        200,
        0.85,
        key_id="key-0123abcd",
        model="org/model-7",
        engine="model-7-0",
        queued_s=0.012,
        ttft_s=0.11,
        bytes_in=1_900,
        bytes_out=21_000,
        usage=Usage(812, 164),
    )
    number = 0

    def write() -> None:
        nonlocal number
        number += 1
        access.write(record)
        if number % 100 == 0:  # 1,000 requests a second, a flush every 0.1 s
            access.flush()

    while True:
        yield write


def _times_us(rounds: int) -> list[float]:
    """Return what the timeline of a plain request and its place in the full ring cost."""
    kept = RecentRequests()
    without, with_times = _timed(NO_RECORDER), _timed(kept)
    for _ in range(MAX_KEPT // PER_ROUND + 1):  # from now on each request pushes one out
        cpu_us(with_times)
    return [-cpu_us(without) + cpu_us(with_times) for _ in range(rounds)]


def _timed(recorder: RequestRecorder) -> Iterator[Callable[[], None]]:
    """Return a function that takes a plain request's way through a recorder, as the relay does."""

    def act() -> None:
        now = time.perf_counter()
        timeline = recorder.begin("POST", [], now)
        timeline.begin_limits(now)
        timeline.begin_attempt("model-7-0", None, now)
        timeline.trace_headers()
        timeline.answered(200)
        record = RequestRecord(
            new_id(),
            "/v1/chat/completions",
            "POST",
            200,
            time.perf_counter() - now,
            key_id="key-0123abcd",
            model="org/model-7",
            engine="model-7-0",
            bytes_in=1_900,
            bytes_out=21_000,
            usage=Usage(812, 164),
        )
        recorder.end(record, timeline)

    while True:
        yield act


def _timed_ms(act: Callable[[], object]) -> float:
    """Return the CPU time of a call, unaffected by other load on the machine."""
    began = time.thread_time_ns()
    act()
    return (time.thread_time_ns() - began) / 1e6
