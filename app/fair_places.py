"""Decides who gives up a place in a full queue for a request of another key. Pure.

The newest request of the key with the most places leaves, unless the other key would then have as
many. So one key may fill a queue, but keeps no other out of it.
"""

from collections import Counter
from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


def find_largest(places: Mapping[str, int], key: str) -> str | None:
    """Return the key that gives up a place for `key`; None: there is none."""
    largest = max(places, key=places.__getitem__, default=key)
    return largest if places.get(largest, 0) >= places.get(key, 0) + 2 else None


def find_displaced(waiting: dict[T, str | None], key: str) -> T | None:
    """Return who leaves a queue for a request of `key`; None: nobody, it is refused.

    `waiting` has the key of each, in order of arrival; None: it keeps its place.
    """
    largest = find_largest(Counter(one for one in waiting.values() if one is not None), key)
    if largest is None:
        return None
    return next(item for item in reversed(waiting) if waiting[item] == largest)
