"""Chooses the engine at which an interrupted stream goes on. Pure.

By load alone: the streams of an engine that died are as many prefills, and spreading them matters
more than a cached prefix.
"""

from collections.abc import Sequence

import msgspec

from app.routing import Replica
from engines.base import EngineFacts, EngineState

# States in which an engine comes up by itself, or may be started again.
_GONE = (EngineState.FAILED, EngineState.STOPPED)
# Facts that may change an answer, or whether it fits. Each must be equal where both are known.
_COMPARED = ("model", "max_model_len", "dtype", "quantization")


class Origin(msgspec.Struct, frozen=True):
    """The engine at which a stream was interrupted, as it was then."""

    engine: str
    served_name: str
    # When its state had last changed: a later change is another life of the engine. None: its
    # present life will do.
    since: float | None
    facts: EngineFacts

    @classmethod
    def of(cls, replica: Replica) -> "Origin":
        engine = replica.engine
        return cls(engine.name, replica.served_name, engine.since, engine.facts)

    def released(self) -> "Origin":
        """Return the origin of a stream that may also go on where it was."""
        return msgspec.structs.replace(self, since=None)


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


def choose_target(replicas: Sequence[Replica], origin: Origin) -> Replica | None:
    """Return the READY engine with the fewest requests that can go on; None: there is none now."""
    able = [
        replica
        for replica in replicas
        if replica.engine.state is EngineState.READY
        and not _is_same_life(replica, origin)
        and replica.served_name == origin.served_name
        and compatible(origin.facts, replica.engine.facts)
    ]
    return min(able, key=lambda r: (r.is_out, r.in_flight * r.weight + r.offset), default=None)


def may_come(replicas: Sequence[Replica], origin: Origin) -> bool:
    """Return whether any engine may still become one that `choose_target` returns."""
    return any(_may_come(replica, origin) for replica in replicas)


def _may_come(replica: Replica, origin: Origin) -> bool:
    engine = replica.engine
    if engine.state is EngineState.READY:
        # Its supervisor is about to find it dead, or it cannot go on and never will.
        return _is_same_life(replica, origin) and engine.capabilities.managed
    if engine.state in _GONE and (engine.given_up or engine.blocked_by is not None):
        return False
    return replica.served_name == origin.served_name


def _is_same_life(replica: Replica, origin: Origin) -> bool:
    return replica.engine.name == origin.engine and replica.engine.since == origin.since
