"""Samples of a run, and the figures that follow from them. Pure."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from bench.figures import Estimate, difference, estimate, median, ratio, ratio_of_added
from bench.load import Result

# A field of Result.
Figure = Literal[
    "cpu_us_per_chunk", "cpu_us_per_request", "e2e_p50", "gap_p50", "gap_p99", "requests_per_s",
    "rss_mib", "stall_free", "tokens_per_s", "ttft_p50", "ttft_p99",
]  # fmt: skip
Rounds = dict[int, float | None]


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of a case on one target."""

    part: str
    size: int  # requests in flight
    round: int
    target: str
    result: Result


class Samples:
    """Every sample of a run."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._by_place = {(s.part, s.size, s.target, s.round): s.result for s in samples}

    def sizes(self, part: str) -> list[int]:
        """Return the sizes that a part was measured at, the smallest first."""
        return sorted({size for one, size, _, _ in self._by_place if one == part})

    def targets(self, part: str, size: int | None = None) -> list[str]:
        """Return the targets, at one size or at any, in the order of the first round."""
        places = ((p, s, t) for p, s, t, _ in self._by_place)
        return list(dict.fromkeys(t for p, s, t in places if p == part and size in (None, s)))

    def failures(self) -> dict[str, int]:
        """Return how many requests failed, by target and reason."""
        counts: dict[str, int] = {}
        for (_, _, target, _), result in self._by_place.items():
            for reason, count in result.failures.items():
                name = f"{target}: {reason}"
                counts[name] = counts.get(name, 0) + count
        return counts

    def rounds(self, part: str, size: int, target: str, figure: Figure) -> Rounds:
        """Return the figure of each round in which a request succeeded."""
        # A round without a success has no figure, not even 0 requests/s.
        return {
            number: getattr(result, figure)
            for (p, s, t, number), result in self._by_place.items()
            if (p, s, t) == (part, size, target) and result.ok
        }

    def estimate(self, part: str, size: int, target: str, figure: Figure) -> Estimate | None:
        """Return the target's own figure; None where nothing was measured."""
        return estimate(self.rounds(part, size, target, figure).values())

    def median(self, part: str, size: int, target: str, figure: Figure) -> float | None:
        """Return the median over the rounds; None where nothing was measured."""
        return median(self.rounds(part, size, target, figure).values())

    def ratio(
        self, part: str, size: int, target: str, other: str, figure: Figure
    ) -> Estimate | None:
        """Return the target's figure over the other's of the same round."""
        return _compare(
            ratio,
            self.rounds(part, size, target, figure),
            self.rounds(part, size, other, figure),
        )

    def added(self, part: str, size: int, target: str, direct: str, figure: Figure) -> float | None:
        """Return the median of the differences to `direct` in the same round."""
        return median(self._added(part, size, target, direct, figure).values())

    def ratio_of_added(
        self, part: str, size: int, target: str, other: str, direct: str, figure: Figure
    ) -> Estimate | None:
        """Return the target's addition over the other's in the same round."""
        return _compare(
            ratio_of_added,
            self._added(part, size, target, direct, figure),
            self._added(part, size, other, direct, figure),
        )

    def _added(self, part: str, size: int, target: str, direct: str, figure: Figure) -> Rounds:
        base = self.rounds(part, size, direct, figure)
        return {
            number: difference(value, base.get(number))
            for number, value in self.rounds(part, size, target, figure).items()
        }


def _compare(
    compared: Callable[[float | None, float | None], float | None],
    a: Mapping[int, float | None],
    b: Mapping[int, float | None],
) -> Estimate | None:
    return estimate(compared(value, b.get(number)) for number, value in a.items())
