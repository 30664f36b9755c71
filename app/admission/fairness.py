"""How evenly keys that waited were served of late. Pure."""

# Requests of the present and the last window count: one to two minutes.
WINDOW_S = 60.0
# Keys of a window; what others were served does not count.
MAX_KEYS = 256


class FairnessIndex:
    """Jain's index of what keys were served while they went on waiting.

    That is 1 where all were served the same, and 1/n where one of n keys was served everything
    (Jain, Chiu and Hawe, "A Quantitative Measure of Fairness", DEC-TR-301, 1984). A key that gets
    all that it asks for does not count: its share is small because it asks for little.
    """

    __slots__ = ("_began", "_last", "_present")

    def __init__(self) -> None:
        # By key: tokens per unit of weight.
        self._present: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._began = 0.0

    def record(self, key: str, served: float, now: float) -> None:
        """Note what a key was served, in tokens per unit of weight; `now` in seconds."""
        self._turn(now)
        if key in self._present or len(self._present) < MAX_KEYS:
            self._present[key] = self._present.get(key, 0.0) + served

    def value(self, now: float) -> float | None:
        """Return the index; None: there are no two keys to compare."""
        self._turn(now)
        names = self._present.keys() | self._last.keys()
        served = [self._present.get(name, 0.0) + self._last.get(name, 0.0) for name in names]
        if len(served) < 2:
            return None
        return sum(served) ** 2 / (len(served) * sum(each * each for each in served))

    def _turn(self, now: float) -> None:
        """Begin a window when the present one is over."""
        if now - self._began < WINDOW_S:
            return
        self._last = self._present if now - self._began < 2 * WINDOW_S else {}
        self._present, self._began = {}, now
