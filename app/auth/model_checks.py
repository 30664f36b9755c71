"""Checks a key's list of models against the configured models.

A key lists models by their canonical names. An alias or a typo in the list would silently allow
nothing, since a key's permissions must not change with an alias.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Unknown names per list that get a hint: the comparison blocks the event loop.
MAX_HINTS = 10


@dataclass(frozen=True, slots=True)
class CheckedModels:
    """A key's list of models: names of models, and `prefix*`."""

    models: list[str]  # canonical names in place of aliases, without duplicates
    aliases: Mapping[str, str]  # the given aliases and their models
    # Unknown names, and the most similar known name for the first MAX_HINTS of them.
    unknown: Mapping[str, str | None]
    unmatched: Sequence[str]  # prefixes that match no model


def check_models(given: Sequence[str], names: Mapping[str, str]) -> CheckedModels:
    """Check a key's models; `names` maps every name and alias to the canonical name."""
    known = set(names.values())
    unknown = dict.fromkeys(name for name in given if not _is_prefix(name) and name not in names)
    return CheckedModels(
        list(dict.fromkeys(names.get(name, name) for name in given)),
        {name: names[name] for name in given if names.get(name, name) != name},
        {
            name: _nearest(name, names) if number < MAX_HINTS else None
            for number, name in enumerate(unknown)
        },
        [
            name
            for name in given
            if _is_prefix(name) and not any(model.startswith(name[:-1]) for model in known)
        ],
    )


def _is_prefix(name: str) -> bool:
    return name.endswith("*")


def _nearest(name: str, names: Mapping[str, str]) -> str | None:
    near = difflib.get_close_matches(name, names, 1, cutoff=0.5)
    return near[0] if near else None
