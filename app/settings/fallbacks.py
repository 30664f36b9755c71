"""What may stand in `models[].fallbacks`. Pure."""

import difflib
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class FallbackFault(NamedTuple):
    """What is wrong with the fallbacks of one model: its number, and which fallback, if one is."""

    message: str
    model: int
    place: tuple[int, ...] = ()


def fault_of(fallbacks: Mapping[str, Sequence[str]]) -> FallbackFault | None:
    """Return what is wrong with the fallbacks of all models, by name; None if nothing is."""
    for number, (model, names) in enumerate(fallbacks.items()):
        for place, name in enumerate(names):
            if name == model:
                return FallbackFault("the model is a fallback of itself", number, (place,))
            if name in names[:place]:
                return FallbackFault(f"{name!r} is given twice", number, (place,))
            if name not in fallbacks:
                near = difflib.get_close_matches(name, fallbacks, 1, cutoff=0.5)
                hint = f"; did you mean {near[0]!r}?" if near else "; use a model's own name"
                return FallbackFault(f"{name!r} is not a model{hint}", number, (place,))
    if ring := _ring(fallbacks):
        message = f"fallbacks form a cycle: {' → '.join(map(repr, ring))}"
        return FallbackFault(message, list(fallbacks).index(ring[0]))
    return None


def _ring(fallbacks: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a way along fallbacks that ends where it began; empty if there is none."""
    clear: set[str] = set()  # those from which no way leads into a ring
    for start in fallbacks:
        way: list[str] = []
        rest = [iter((start,))]
        while rest:
            name = next(rest[-1], None)
            if name is None:
                rest.pop()
                if way:
                    clear.add(way.pop())
            elif name in way:
                return [*way[way.index(name) :], name]
            elif name not in clear:
                way.append(name)
                rest.append(iter(fallbacks[name]))
    return []
