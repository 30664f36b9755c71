"""The targets of the gateway, and whether a run shows that they are met. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from bench.figures import Estimate, estimate
from bench.peers import CONTINUING, DIRECT, GATEWAY, ROUTER, WITH_REDIS
from bench.samples import Figure, Samples

# Number of streams for the targets on stalls and memory.
MANY = 1024
Measured = tuple[Estimate | None, bool]  # and whether its part ran


@dataclass(frozen=True, slots=True)
class Goal:
    """One figure, its bound and what was measured."""

    figure: str
    measured: Estimate | None
    ran: bool  # whether its part of the benchmarks ran
    bound: float
    aim: float | None = None  # the goal beyond the bound
    at_least: bool = False  # the bound is a floor, not a ceiling
    unit: str = "×"

    @property
    def verdict(self) -> str:
        """`met` or `missed` where the whole interval is on one side of the bound."""
        if not self.ran:
            return "not run"
        if self.measured is None or self.measured.interval is None:
            return "not shown"
        low, high = self.measured.interval
        if self.at_least:
            return "met" if low >= self.bound else "missed" if high < self.bound else "not shown"
        return "met" if high <= self.bound else "missed" if low > self.bound else "not shown"


def goals(samples: Samples) -> Iterator[Goal]:
    """Return every target; those of a part that did not run have no measured value."""

    def ratio(
        figure: Figure, part: str, size: int, target: str = GATEWAY, other: str = ROUTER
    ) -> Measured:
        return samples.ratio(part, size, target, other, figure), size in samples.sizes(part)

    def one(part: str, found: Estimate | None) -> Measured:
        return found, MANY in samples.sizes(part)

    plain = ratio("cpu_us_per_request", "plain", 32)
    yield Goal(f"CPU per plain request, 32 at a time, × {ROUTER}", *plain, 1.8, aim=1.3)
    for size, bound, aim in ((64, 1.0, 0.9), (512, 1.1, 1.0)):
        chunk = ratio("cpu_us_per_chunk", "streams", size)
        yield Goal(f"CPU per streamed chunk, {size} streams, × {ROUTER}", *chunk, bound, aim=aim)
    for size in (64, 512):
        chunk = ratio("cpu_us_per_chunk", "streams", size, CONTINUING, GATEWAY)
        yield Goal(f"CPU per streamed chunk, {size} streams, continuation on × off", *chunk, 1.15)
    added = samples.ratio_of_added("streams", 64, GATEWAY, ROUTER, DIRECT, "ttft_p99")
    first = added, 64 in samples.sizes("streams")
    yield Goal(f"added TTFT p99, 64 streams, × what {ROUTER} adds", *first, 1.3, aim=1.0)
    free = one("stall", stall_free_streams(samples, GATEWAY))
    many = f"stall-free streams of {MANY:,}, where direct has {MANY:,}"
    yield Goal(many, *free, MANY, at_least=True, unit="")
    rss = one("memory", samples.estimate("memory", MANY, GATEWAY, "rss_mib"))
    loads = f"RSS after plain load, 512 and {MANY:,} streams"
    yield Goal(loads, *rss, 115, aim=100, unit="MiB")
    real = ratio("tokens_per_s", "real", 32)
    yield Goal(f"tokens/s on real vLLM, 32 streams, × {ROUTER}", *real, 1.0, at_least=True)
    shared = ratio("cpu_us_per_request", "plain", 32, WITH_REDIS, GATEWAY)
    redis = "CPU per plain request, 32 at a time, limits in Redis × in memory"
    yield Goal(redis, *shared, 1.15)
    rate = ratio("requests_per_s", "plain", 32)
    process = f"plain requests/s of one process, 32 at a time, × {ROUTER}"
    yield Goal(process, *rate, 0.5, at_least=True)


def stall_free_streams(samples: Samples, target: str) -> Estimate | None:
    """Return the number of MANY streams without a stall, in rounds in which direct had none."""
    if target not in samples.targets("stall", MANY):
        return None
    direct = samples.rounds("stall", MANY, DIRECT, "stall_free")
    found = samples.rounds("stall", MANY, target, "stall_free")
    # A round in which every stream failed has no figure, and none of its streams was free.
    return estimate(found.get(number, 0.0) for number, free in direct.items() if free == MANY)
