"""Suggestions for misspelled names."""

import difflib
from collections.abc import Collection


def nearest(name: object, known: Collection[str]) -> str | None:
    """Return the known name most like this one, None if none is like it."""
    close = difflib.get_close_matches(name, known, 1, cutoff=0.5) if isinstance(name, str) else ()
    return next(iter(close), None)


def did_you_mean(name: object, known: Collection[str], otherwise: str = "") -> str:
    """Return "; did you mean NAME?" for the known name most like this one, else `otherwise`."""
    near = nearest(name, known)
    return f"; did you mean {near}?" if near else otherwise
