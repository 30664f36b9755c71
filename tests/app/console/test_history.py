"""The history of the last hour: readings by a fake clock, and the rates between them."""

import asyncio
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.console.history import INTERVAL_S, SPAN_S, History, Load, Sample, last_hour, quantile
from app.telemetry import RequestRecord
from app.telemetry.metrics import Metrics
from app.usage import Usage
from tests.waiting import wait_until


class Machine:
    """Counters, a load and a clock that tests set."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.load = Load(0, 0)
        self.now = 1000.0
        self.history = History(self.metrics, lambda: self.load, lambda: self.now)
        self.history.read()

    def samples(self) -> list[Sample]:
        return last_hour(self.history.readings())

    def read_after(self, seconds: float = INTERVAL_S) -> None:
        """Let time pass, and read."""
        self.now += seconds
        self.history.read()


def completed(tokens: int) -> RequestRecord:
    usage = Usage(5, tokens)
    return RequestRecord("r", "/v1/completions", "POST", 200, 0.1, engine="m-0", usage=usage)


def test_without_two_readings_there_is_no_sample() -> None:
    assert Machine().samples() == []


def test_rates_are_differences_over_the_time_between_readings() -> None:
    machine = Machine()
    machine.metrics.record(completed(100))
    machine.metrics.record_request("m", "/v1/chat/completions", 502, 0.1)
    machine.metrics.record_request("m", "/v1/chat/completions", 429, 0.1)
    machine.metrics.record_request("m", "/v1/chat/completions", 499, 0.1)
    machine.metrics.record_request("m", "/v1/chat/completions", 200, 0.1)
    machine.metrics.queue_depth.add(("m",), 2)
    machine.load = Load(3, 0)
    machine.read_after(20.0)
    (sample,) = machine.samples()
    assert (sample.tokens_per_s, sample.in_flight, sample.waiting) == (5.0, 3, 2)
    assert (sample.errors_per_min, sample.refused_per_min) == (3.0, 3.0)


def test_a_stream_that_broke_is_an_error_and_one_that_went_on_is_none() -> None:
    machine = Machine()
    machine.metrics.continuations.add(("m", "replay", "continued"))
    machine.metrics.continuations.add(("m", "none", "too_long"))
    machine.read_after(60.0)
    assert machine.samples()[0].errors_per_min == 1.0


def test_tokens_of_a_long_answer_count_while_it_is_generated() -> None:
    machine = Machine()
    machine.load = Load(1, 200)
    machine.read_after()
    machine.metrics.record(completed(300))
    machine.load = Load(0, 0)
    machine.read_after()
    machine.load = Load(1, 50)  # more than it turns out to be
    machine.read_after()
    machine.metrics.record(completed(40))
    machine.load = Load(0, 0)
    machine.read_after()
    assert [one.tokens_per_s for one in machine.samples()] == [20.0, 10.0, 5.0, 0.0]


def test_percentiles_are_of_the_last_minute() -> None:
    machine = Machine()
    for _ in range(100):
        machine.metrics.time_to_first_token.observe(("m",), 0.15)
    for _ in range(9):
        machine.read_after()
    times = [one.ttft_p50 for one in machine.samples()]
    assert times[:6] == [times[0]] * 6
    assert times[0] is not None
    assert 0.1 < times[0] <= 0.25
    assert times[6:] == [None] * 3


def test_what_is_older_than_an_hour_is_forgotten() -> None:
    machine = Machine()
    for _ in range(2 * int(SPAN_S / INTERVAL_S)):
        machine.read_after()
    samples = machine.samples()
    assert len(samples) == SPAN_S / INTERVAL_S
    assert samples[-1].at - samples[0].at < SPAN_S


async def test_it_reads_at_once_and_ends_when_canceled() -> None:
    history = History(Metrics(), lambda: Load(0, 0))
    task = asyncio.create_task(history.run())
    await asyncio.sleep(0)
    assert history.readings()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()


async def test_a_reading_that_fails_does_not_end_the_history(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loads: Iterator[Load | Exception] = iter([ValueError("deliberate"), Load(1, 0)])

    def load() -> Load:
        found = next(loads, Load(3, 0))
        if isinstance(found, Exception):
            raise found
        return found

    history = History(Metrics(), load, interval_s=0.001)
    task = asyncio.create_task(history.run())
    await wait_until(lambda: len(history.readings()) > 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert "misses a reading" in caplog.text


BOUNDS = (0.1, 0.5, 1.0)


def test_a_quantile_lies_within_its_bucket() -> None:
    assert quantile(0.5, BOUNDS, [0, 10, 0, 0]) == 0.1 + 0.4 * 0.5
    assert quantile(0.5, BOUNDS, [0, 0, 0, 7]) == 1.0
    assert quantile(0.5, BOUNDS, [0, 0, 0, 0]) is None


@given(st.lists(st.integers(0, 1000), min_size=4, max_size=4), st.floats(0.01, 0.99))
def test_a_quantile_is_within_the_bounds_and_grows_with_its_share(
    counts: list[int], share: float
) -> None:
    low, high = quantile(share / 2, BOUNDS, counts), quantile(share, BOUNDS, counts)
    if not any(counts):
        assert low is high is None
    else:
        assert low is not None
        assert high is not None
        assert 0 <= low <= high <= BOUNDS[-1]
