"""Chooses the model that serves a session of a split. Pure."""

from collections.abc import Sequence
from hashlib import blake2b
from math import log

from app.settings import SplitTarget


def choose_target(targets: Sequence[SplitTarget], session: bytes) -> str | None:
    """Return the name of a session's model; None if every weight is 0.

    By weighted rendezvous hashing: the highest of -weight / ln(h) wins, h being uniform in (0, 1)
    and independent for each session and model. So each model gets its share, every gateway chooses
    alike, and a weight that changes moves sessions only to its model or away from it (Schindelhauer
    and Schomaker 2005, "Weighted distributed hash tables").
    """
    seed = blake2b(session, digest_size=16).digest()
    weighted = [target for target in targets if target.weight]
    if not weighted:
        return None
    return max(weighted, key=lambda one: -one.weight / log(_uniform(one.model, seed))).model


def _uniform(model: str, seed: bytes) -> float:
    """Return a hash in (0, 1), both ends excluded: 52 bits and a half have an exact float."""
    digest = blake2b(model.encode(), digest_size=8, key=seed).digest()
    return ((int.from_bytes(digest) >> 12) + 0.5) / 2**52
