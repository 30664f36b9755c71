"""What clients may name, and the replicas behind each name."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from app.errors import ModelNotFound
from app.settings import NO_LIMITS, LimitSettings
from engines.base import Engine, EngineResponse, EngineState


@dataclass(slots=True, eq=False)
class Replica:
    """One engine of a model, and the name the engine knows the model by."""

    engine: Engine
    served_name: str
    in_flight: int = 0  # leases that are held; never below 0
    # What the engine last called itself in a stream's usage chunk (`system_fingerprint`).
    fingerprint: str | None = None

    def lease(self) -> "Lease":
        """Return one more request's place on this replica, counted from now until its release."""
        return Lease(self)


class Lease:
    """One request's place on a replica, with the answer given there; a context that ends both."""

    __slots__ = ("answer", "replica")

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.answer: EngineResponse | None = None
        replica.in_flight += 1

    def release(self) -> None:
        """Give the place back, once. An answer that is not whole is broken off."""
        if self.answer is not None:
            self.answer.close()
        self.replica.in_flight -= 1

    def __enter__(self) -> EngineResponse:
        assert self.answer is not None
        return self.answer

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one request may ask for at most; None: whatever it likes."""

    choices: int | None = None
    output_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Model:
    """A model as clients see it."""

    name: str
    aliases: tuple[str, ...]
    replicas: tuple[Replica, ...]
    bounds: Bounds = Bounds()
    # For all keys together.
    limits: LimitSettings = NO_LIMITS
    # Its engines start at the first request, not with the gateway.
    on_demand: bool = False
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

    def find(self, name: str, allows: Callable[[str], bool]) -> Model:
        """Return the model of a name or alias.

        Raises ModelNotFound, in the same words for one whose canonical name the caller is not
        allowed.
        """
        model = self._by_name.get(name)
        if model is None or not allows(model.name):
            shown = name if len(name) <= 100 else name[:100] + "…"
            raise ModelNotFound(f"the model {shown!r} does not exist; see /v1/models")
        return model

    def names(self) -> Iterator[tuple[str, Model]]:
        """Return every name that clients may send, with its model."""
        return iter(self._by_name.items())

    def ready_engines(self, model: str) -> int:
        """Return how many engines of a model, by its own name, are READY."""
        return self._by_name[model].ready

    @property
    def ready(self) -> bool:
        """Whether any engine is READY, or may be started by a request."""
        return any(model.on_demand or model.ready for model in self.models)

    @property
    def engines(self) -> list[Engine]:
        return [replica.engine for model in self.models for replica in model.replicas]
