"""Check of `models[].fallbacks`. Pure."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from app.settings.suggest import did_you_mean


class FallbackFault(NamedTuple):
    """A fault in the fallbacks of a model; `place` is the number of the fallback, if one is."""

    message: str
    model: int
    place: tuple[int, ...] = ()


def find_fallback_fault(fallbacks: Mapping[str, Sequence[str]]) -> FallbackFault | None:
    """Return the first fault in the fallbacks of all models, by name; None if there is none."""
    for number, (model, names) in enumerate(fallbacks.items()):
        for place, name in enumerate(names):
            if name == model:
                return FallbackFault("the model is a fallback of itself", number, (place,))
            if name in names[:place]:
                return FallbackFault(f"{name!r} is given twice", number, (place,))
            if name not in fallbacks:
                hint = did_you_mean(name, fallbacks, "; use a model's name, not an alias")
                return FallbackFault(f"{name!r} is not a model{hint}", number, (place,))
    if cycle := _find_cycle(fallbacks):
        message = f"fallbacks form a cycle: {' → '.join(map(repr, cycle))}"
        return FallbackFault(message, list(fallbacks).index(cycle[0]))
    return None


def _find_cycle(fallbacks: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a path along fallbacks that ends where it began; empty if there is none."""
    acyclic: set[str] = set()  # models from which no path leads into a cycle
    for start in fallbacks:
        path: list[str] = []
        remaining = [iter((start,))]
        while remaining:
            name = next(remaining[-1], None)
            if name is None:
                remaining.pop()
                if path:
                    acyclic.add(path.pop())
            elif name in path:
                return [*path[path.index(name) :], name]
            elif name not in acyclic:
                path.append(name)
                remaining.append(iter(fallbacks[name]))
    return []
