"""What clients may name, and the replicas behind each name."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import quote

from app.errors import EndpointNotServed, ModelNotFound, RouteNotFound
from app.routing.endpoints import endpoints_of, named
from app.routing.policies import LeastLoaded, SelectionPolicy
from app.routing.replica import Replica
from app.settings import NO_LIMITS, FieldSettings, LimitSettings
from engines.base import Engine, EngineState

# Of the names that there are, in an error for whoever mistyped one.
MOST_NAMED = 20
# What of a name may stand in a header as it is: visible ASCII but the percent sign.
_VISIBLE = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) != "%")


NO_RULES = FieldSettings()


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one request may ask for at most; None: whatever it likes."""

    choices: int | None = None
    output_tokens: int | None = None
    # Prompts times choices of a request for text; inputs of one for embeddings or scores.
    sequences: int | None = None
    inputs: int | None = None


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
    policy: SelectionPolicy = field(default_factory=LeastLoaded)
    # Names of the models that serve its requests, in this order, when none of its engines can.
    fallbacks: tuple[str, ...] = ()
    # What clients may send, and who shares what they sent.
    fields: FieldSettings = NO_RULES
    isolation: Literal["key", "owner", "none"] = "key"
    media_domains: frozenset[str] = frozenset()
    stores_responses: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    # How long a request waits for its engines to start or load, and how many may.
    load_wait_s: float = 300.0
    max_waiting: int = 256
    # The header that tells clients who answered; a name that cannot stand there is quoted.
    header_line: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        line = f"x-gateway-model: {quote(self.name, safe=_VISIBLE)}\r\n"
        object.__setattr__(self, "header_line", line.encode())

    def serves(self, endpoint: str) -> bool:
        """Whether any of its engines may serve an endpoint.

        A remote server may: it can be replaced unseen, and refuses what it does not serve itself.
        """
        for replica in self.replicas:
            tasks = replica.engine.facts.supported_tasks
            if replica.kind == "remote" or tasks is None:
                return True
            served = endpoints_of(tasks)
            if served is None or endpoint in served:
                return True
        return not self.replicas

    def not_served(self, endpoint: str, asked: str | None = None) -> EndpointNotServed:
        """Return the refusal of a request to an endpoint; `asked` is what the client calls it."""
        facts = (replica.engine.facts for replica in self.replicas)
        served = named(task for one in facts for task in one.supported_tasks or ())
        told = f"; it serves {', '.join(served)}" if served else ""
        name = _short(asked or self.name)
        return EndpointNotServed(f"the model {name} does not serve {endpoint}{told}")

    @property
    def ready(self) -> int:
        """How many of its engines are READY."""
        return sum(r.engine.state is EngineState.READY for r in self.replicas)

    @property
    def max_model_len(self) -> int | None:
        """The length that every replica which told one can take."""
        shortest: int | None = None
        for replica in self.replicas:
            length = replica.engine.facts.max_model_len
            if length is not None and (shortest is None or length < shortest):
                shortest = length
        return shortest


class Catalogue:
    """Every model by each of its names; a reload replaces them all at once."""

    def __init__(self, models: Sequence[Model]) -> None:
        self.replace(models)

    def replace(self, models: Sequence[Model]) -> None:
        """Have other models from now on. Requests that found theirs keep it."""
        self.models = tuple(models)
        self._own = {model.name: model for model in models}
        self._by_name = {n: model for model in models for n in (model.name, *model.aliases)}

    def find(self, name: str, allows: Callable[[str], bool]) -> Model:
        """Return the model of a name or alias.

        Raises ModelNotFound, in the same words for one whose canonical name the caller is not
        allowed.
        """
        model = self._by_name.get(name)
        if model is None or not allows(model.name):
            raise ModelNotFound(f"the model {_short(name)} does not exist; see /v1/models")
        return model

    def current(self, model: Model) -> Model:
        """Return a model that was found before as it is now; itself if it is gone."""
        return self._own.get(model.name, model)

    def own(self, name: str) -> Model | None:
        """Return the model whose own name this is, as it is now; None: it is gone."""
        return self._own.get(name)

    def named(self, name: str) -> Model:
        """Return the model of a name or alias, for an operator.

        Raises ModelNotFound, which names the models that there are.
        """
        if (model := self._by_name.get(name)) is None:
            raise ModelNotFound(f"there is no model {_short(name)}; {_known(self.models)}")
        return model

    def replica(self, engine: str) -> tuple[Model, Replica]:
        """Return an engine by its name, and its model.

        Raises RouteNotFound, which names the engines that there are.
        """
        for model in self.models:
            for replica in model.replicas:
                if replica.engine.name == engine:
                    return model, replica
        raise RouteNotFound(f"there is no engine {_short(engine)}; {_known(self.engines)}")

    def names(self) -> Iterator[tuple[str, Model]]:
        """Return every name that clients may send, with its model."""
        return iter(self._by_name.items())

    def ready_engines(self, model: str) -> int:
        """Return how many engines of a model, by its own name, are READY; 0: it is gone."""
        found = self._own.get(model)
        return 0 if found is None else found.ready

    @property
    def ready(self) -> bool:
        """Whether any engine is READY, or may be started by a request."""
        return any(model.on_demand or model.ready for model in self.models)

    @property
    def engines(self) -> list[Engine]:
        return [replica.engine for model in self.models for replica in model.replicas]


def _short(name: str) -> str:
    return repr(name if len(name) <= 100 else name[:100] + "…")


def _known(named: Sequence[Model] | Sequence[Engine]) -> str:
    names = [one.name for one in named]
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"there are {', '.join(names[:MOST_NAMED])}{more}"
