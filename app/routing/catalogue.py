"""What clients may name, and the replicas behind each name."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from app.errors import ModelNotFound
from engines.base import Engine, EngineState


@dataclass(slots=True, eq=False)
class Replica:
    """One engine of a model, and the name the engine knows the model by."""

    engine: Engine
    served_name: str
    in_flight: int = 0  # leases that are held; never below 0

    def lease(self) -> "Lease":
        """Return a context in which this replica counts one more request."""
        return Lease(self)


class Lease:
    """One request's place on a replica; given back exactly once, by leaving the context."""

    __slots__ = ("replica",)

    def __init__(self, replica: Replica) -> None:
        self.replica = replica

    async def __aenter__(self) -> Self:
        self.replica.in_flight += 1
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.replica.in_flight -= 1


@dataclass(frozen=True, slots=True)
class Model:
    """A model as clients see it."""

    name: str
    aliases: tuple[str, ...]
    replicas: tuple[Replica, ...]
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def ready(self) -> int:
        """How many of its engines are READY."""
        return sum(r.engine.state is EngineState.READY for r in self.replicas)

    @property
    def max_model_len(self) -> int | None:
        """The length that every replica which told one can take."""
        lengths = (r.engine.facts.max_model_len for r in self.replicas)
        return min((length for length in lengths if length is not None), default=None)


class Catalogue:
    """Every model by each of its names; fixed once built."""

    def __init__(self, models: Sequence[Model]) -> None:
        self.models = tuple(models)
        self._by_name = {n: model for model in models for n in (model.name, *model.aliases)}

    def find(self, name: str) -> Model:
        """Return the model of a name or alias. Raises ModelNotFound."""
        try:
            return self._by_name[name]
        except KeyError:
            shown = name if len(name) <= 100 else name[:100] + "…"
            raise ModelNotFound(f"the model {shown!r} does not exist; see /v1/models") from None

    def names(self) -> Iterator[tuple[str, Model]]:
        """Return every name that clients may send, with its model."""
        return iter(self._by_name.items())

    @property
    def ready(self) -> bool:
        """Whether any engine is READY."""
        return any(model.ready for model in self.models)

    @property
    def engines(self) -> list[Engine]:
        return [replica.engine for model in self.models for replica in model.replicas]
