"""The models that a key is given, compared with those that there are.

A key names models by their own names. An alias would silently allow nothing, since what a key may
use must not change with an alias, and so would a typo.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Unknown names of one list that are compared with all models: while they are, no token is relayed.
MOST_HINTS = 10


@dataclass(frozen=True, slots=True)
class CheckedModels:
    """A key's list of models: names of models, and `prefix*`."""

    models: list[str]  # with models in place of aliases, each once
    aliases: Mapping[str, str]  # those that were given, and the model of each
    # Names that nothing has, and the nearest that something has, of the first MOST_HINTS of them.
    unknown: Mapping[str, str | None]
    unmatched: Sequence[str]  # prefixes that no model begins with


def check_models(given: Sequence[str], names: Mapping[str, str]) -> CheckedModels:
    """Compare a key's models with those of `names`: of each name or alias, the model's own name."""
    known = set(names.values())
    unknown = dict.fromkeys(name for name in given if not _prefix(name) and name not in names)
    return CheckedModels(
        list(dict.fromkeys(names.get(name, name) for name in given)),
        {name: names[name] for name in given if names.get(name, name) != name},
        {
            name: _nearest(name, names) if number < MOST_HINTS else None
            for number, name in enumerate(unknown)
        },
        [
            name
            for name in given
            if _prefix(name) and not any(model.startswith(name[:-1]) for model in known)
        ],
    )


def _prefix(name: str) -> bool:
    return name.endswith("*")


def _nearest(name: str, names: Mapping[str, str]) -> str | None:
    near = difflib.get_close_matches(name, names, 1, cutoff=0.5)
    return near[0] if near else None
