"""What was measured, and the figures that follow from it. Pure."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from bench.figures import difference, median, ratio
from bench.load import Result

Figure = Callable[[Result], float | None]


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of a case on one target."""

    part: str
    size: int  # requests in flight
    round: int
    target: str
    result: Result


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two targets on one figure."""

    of_medians: float | None
    by_round: float | None  # the median of the rounds' own ratios


class Samples:
    """Every sample of a run."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._by_place = {(s.part, s.size, s.target, s.round): s.result for s in samples}

    def sizes(self, part: str) -> list[int]:
        """Return the sizes that a part was measured at, the smallest first."""
        return sorted({size for one, size, _, _ in self._by_place if one == part})

    def targets(self, part: str, size: int | None = None) -> list[str]:
        """Return who took part, at one size or at any, in the order of the rounds."""
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

    def median(self, part: str, size: int, target: str, figure: Figure) -> float | None:
        """Return the median over the rounds; None where nothing was measured."""
        return median(self._rounds(part, size, target, figure).values())

    def added(self, part: str, size: int, target: str, direct: str, figure: Figure) -> float | None:
        """Return the median of what each round has more than `direct` had in the same round."""
        return median(self._added(part, size, target, direct, figure).values())

    def compare(self, part: str, size: int, target: str, other: str, figure: Figure) -> Comparison:
        """Return the target's figure over the other's."""
        return _comparison(
            self._rounds(part, size, target, figure), self._rounds(part, size, other, figure)
        )

    def compare_added(
        self, part: str, size: int, target: str, other: str, direct: str, figure: Figure
    ) -> Comparison:
        """Return what the target adds over what the other adds."""
        return _comparison(
            self._added(part, size, target, direct, figure),
            self._added(part, size, other, direct, figure),
        )

    def _rounds(self, part: str, size: int, target: str, figure: Figure) -> dict[int, float | None]:
        # Of a round in which nothing succeeded there is no figure, not even 0 requests/s.
        return {
            number: figure(result)
            for (p, s, t, number), result in self._by_place.items()
            if (p, s, t) == (part, size, target) and result.ok
        }

    def _added(
        self, part: str, size: int, target: str, direct: str, figure: Figure
    ) -> dict[int, float | None]:
        base = self._rounds(part, size, direct, figure)
        return {
            number: difference(value, base.get(number))
            for number, value in self._rounds(part, size, target, figure).items()
        }


def _comparison(a: dict[int, float | None], b: dict[int, float | None]) -> Comparison:
    return Comparison(
        of_medians=ratio(median(a.values()), median(b.values())),
        by_round=median(ratio(value, b.get(number)) for number, value in a.items()),
    )
