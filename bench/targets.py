"""What we hold ourselves to, and whether a run met it. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile

from bench.disturbances import Disturbances
from bench.load import Result
from bench.peers import DIRECT, GATEWAY, LITELLM, ROUTER, WITH_REDIS
from bench.samples import Comparison, Samples

# One token interval of a fast engine: a shorter stop delays no stream by a token.
LONGEST_STOP_MS = 20


@dataclass(frozen=True, slots=True)
class Goal:
    """One figure, its bound and what was measured."""

    figure: str
    bound: float
    measured: float | None
    at_least: bool = False  # the bound is a floor, not a ceiling
    by_round: float | None = None
    unit: str = ""
    aim: float | None = None  # what we would like, beyond the bound

    @property
    def met(self) -> bool | None:
        """Whether the bound holds; None where nothing was measured."""
        if self.measured is None:
            return None
        return self.measured >= self.bound if self.at_least else self.measured <= self.bound


def goals(samples: Samples, disturbances: Disturbances | None = None) -> Iterator[Goal]:
    """Return every goal; those of a part that did not run have no measured value."""
    for size in (64, 512):
        against = samples.compare("streams", size, GATEWAY, ROUTER, cpu_per_chunk)
        yield _ratio(f"CPU per streamed chunk, {size} streams, × {ROUTER}", 1.0, against)
    plain = samples.compare("plain", 32, GATEWAY, ROUTER, cpu_per_request)
    yield _ratio(f"CPU per plain request, 32 at a time, × {ROUTER}", 2.0, plain, aim=1.3)
    shared = samples.compare("plain", 32, WITH_REDIS, GATEWAY, cpu_per_request)
    yield _ratio("CPU per plain request, 32 at a time, limits in Redis × in memory", 1.5, shared)
    chunk = samples.compare("streams", 64, GATEWAY, LITELLM, cpu_per_chunk)
    yield _ratio(f"CPU per streamed chunk, 64 streams, × {LITELLM}", 1 / 10, chunk)
    slow = samples.compare("plain", 32, GATEWAY, LITELLM, cpu_per_request)
    yield _ratio(f"CPU per plain request, 32 at a time, × {LITELLM}", 1 / 40, slow)
    first = samples.compare_added("streams", 64, GATEWAY, ROUTER, DIRECT, ttft_p99)
    yield _ratio(f"added TTFT p99, 64 streams, × what {ROUTER} adds", 1.5, first)
    yield Goal("stall-free streams", 1024, stall_free_streams(samples, GATEWAY), at_least=True)
    rss = samples.median("stall", 1024, GATEWAY, rss_mib)
    yield Goal("RSS at 1,024 streams", 120, rss, unit="MiB")
    real = samples.compare("real", 32, GATEWAY, DIRECT, tokens_per_s)
    yield _ratio("tokens per second on real vLLM, 32 streams, × direct", 0.98, real, floor=True)
    stop = (disturbances or Disturbances()).longest_stop_ms(GATEWAY)
    yield Goal(
        "longest stop of the event loop under a hostile body", LONGEST_STOP_MS, stop, unit="ms"
    )


def stall_free_streams(samples: Samples, target: str) -> int | None:
    """Return the largest size up to which no stream stalled in the median round, 0 if none is.

    None where the part did not run.
    """
    sizes = samples.sizes("stall")
    if not sizes or target not in samples.targets("stall"):
        return None
    whole = takewhile(lambda s: samples.median("stall", s, target, stall_free) == s, sizes)
    return max(whole, default=0)


def _ratio(
    figure: str,
    bound: float,
    measured: Comparison,
    *,
    floor: bool = False,
    aim: float | None = None,
) -> Goal:
    return Goal(
        figure, bound, measured.of_medians, floor, by_round=measured.by_round, unit="×", aim=aim
    )


def cpu_per_chunk(result: Result) -> float | None:
    """µs of the processes in between for each streamed event."""
    return result.cpu_us_per_chunk


def cpu_per_request(result: Result) -> float | None:
    """µs of the processes in between for each request."""
    return result.cpu_us_per_request


def ttft_p50(result: Result) -> float | None:
    """ms to the first bytes of the body."""
    return result.ttft_p50


def ttft_p99(result: Result) -> float | None:
    """ms to the first bytes of the body."""
    return result.ttft_p99


def gap_p50(result: Result) -> float | None:
    """ms between two reads of a stream."""
    return result.gap_p50


def gap_p99(result: Result) -> float | None:
    """ms between two reads of a stream."""
    return result.gap_p99


def latency_p50(result: Result) -> float | None:
    """ms to the last byte."""
    return result.e2e_p50


def stall_free(result: Result) -> float | None:
    """How many streams never kept their reader waiting for more than three paces."""
    return result.stall_free


def rss_mib(result: Result) -> float | None:
    """MiB resident, at its highest."""
    return result.rss_mib


def tokens_per_s(result: Result) -> float | None:
    """Tokens that the engine counted, per second of the run."""
    return result.tokens_per_s


def requests_per_s(result: Result) -> float | None:
    """Whole answers per second of the run."""
    return result.requests_per_s
