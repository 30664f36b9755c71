"""Decides whether one engine can go on with a stream of another. Pure."""

import re

from engines.base import EngineFacts

# The first vLLM on which a replay was measured to be exact; see `replay.py`.
_FIRST_WITH_IDS = (0, 32)
_VERSION = re.compile(r"v?(\d+)\.(\d+)")

# Facts that may change an answer, or whether it fits. Each must be equal where both are known.
_COMPARED = ("model", "max_model_len", "dtype", "quantization")


def compatible(old: EngineFacts, new: EngineFacts) -> bool:
    """Return whether an engine with the facts `new` gives the answers of one with `old`.

    Both must be vLLM of the same, known version: another one may render and sample otherwise.
    """
    if old.version is None or old.version != new.version:
        return False
    return all(
        getattr(old, name) == getattr(new, name)
        for name in _COMPARED
        if getattr(old, name) is not None and getattr(new, name) is not None
    )


def takes_prompt_ids(facts: EngineFacts) -> bool:
    """Return whether an engine takes token IDs in place of a chat's messages.

    An engine that says so by its version and then does not is found out by its first answer
    (`replay.Splice`).
    """
    found = _VERSION.match(facts.version or "")
    return found is not None and (int(found[1]), int(found[2])) >= _FIRST_WITH_IDS
