"""What may stand in `models[].fallbacks`. Pure."""

import difflib
from collections.abc import Mapping, Sequence


def fault_of(fallbacks: Mapping[str, Sequence[str]]) -> str | None:
    """Return what is wrong with the fallbacks of all models, by name; None if nothing is."""
    for model, names in fallbacks.items():
        for place, name in enumerate(names):
            if name == model:
                return f"the model {model!r} is a fallback of itself"
            if name in names[:place]:
                return f"the model {model!r} has the fallback {name!r} twice"
            if name not in fallbacks:
                near = difflib.get_close_matches(name, fallbacks, 1, cutoff=0.5)
                hint = f"; did you mean {near[0]!r}?" if near else "; use a model's own name"
                return f"the model {model!r} has the fallback {name!r}, which is no model{hint}"
    if ring := _ring(fallbacks):
        return f"fallbacks go round in a ring: {' → '.join(map(repr, ring))}"
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
