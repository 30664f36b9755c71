"""Suggestions for misspelled names."""

import difflib
from collections.abc import Collection

# Words that say nothing about what a setting is for.
_UNITS = frozenset({"s", "max", "min", "url", "id", "of"})


def nearest(name: object, known: Collection[str]) -> str | None:
    """Return the known name most like this one, None if none is like it."""
    close = difflib.get_close_matches(name, known, 1, cutoff=0.55) if isinstance(name, str) else ()
    return next(iter(close), None)


def did_you_mean(name: object, known: Collection[str], otherwise: str = "") -> str:
    """Return "; did you mean NAME?" for the known name most like this one, else `otherwise`."""
    near = nearest(name, known)
    return f"; did you mean {near}?" if near else otherwise


def share_a_word(name: str, known: Collection[str]) -> list[str]:
    """Return the known names that have a word of this one, such as `idle` of `idle_timeout`."""
    words = set(name.lower().replace("-", "_").split("_")) - _UNITS
    return [one for one in known if words & set(one.split("_"))]
