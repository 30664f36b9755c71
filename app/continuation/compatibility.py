"""Decides whether one engine can go on with a stream of another. Pure."""

from engines.base import EngineFacts

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
